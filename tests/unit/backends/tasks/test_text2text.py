"""Text to text: what ``generate`` writes, alone and in batches, with the parameters of requests and checkpoints."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers

from conch.backends.base.arrays import Result
from conch.backends.tasks.task import ExecutionWork, Task
from conch.core.errors import Code, ConchError
from tests import task_checkpoints
from tests.task_requests import answers, ask, open_task, texts

SHORT, LONG = "Where is the library?", "You can walk there, or take a bus. The nearest one is near the station."
T5_TASKS = {
    "summarization": {"prefix": "sum: ", "max_length": 12, "num_beams": 2},
    "translation_en_to_de": {"prefix": "to German: ", "max_length": 14},
    "translation_en_to_fr": {"prefix": "to French: ", "max_length": 10},
}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.t5(tmp_path_factory.mktemp("t5"), task_specific_params=T5_TASKS)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def task(t5: Path) -> Task:
    return open_task(t5, task="text2text-generation")


def generate(folder: Path, text: str, **parameters: Any) -> str:
    """What transformers writes for one text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
    written = model.generate(encoded["input_ids"], attention_mask=encoded["attention_mask"], **parameters)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def test_text_is_what_transformers_generates(task: Task, t5: Path) -> None:
    request = ask({"text_input": [SHORT]}, max_new_tokens=12)
    assert texts(task, request) == [[generate(t5, SHORT, max_new_tokens=12)]]


def test_requests_of_different_lengths_run_together_and_keep_their_answers(task: Task, t5: Path) -> None:
    first = ask({"text_input": [SHORT, LONG]}, max_new_tokens=9)
    second = ask({"text_input": [LONG[:30]]}, max_new_tokens=9)
    usage = ExecutionWork()
    results = task.execute([task.prepare(first), task.prepare(second)], usage)
    found = [list(result.outputs["text_output"].elements) for result in results if isinstance(result, Result)]
    wanted = [generate(t5, text, max_new_tokens=9) for text in (SHORT, LONG, LONG[:30])]
    assert found == [wanted[:2], wanted[2:]]
    assert (usage.runs, usage.sequences) == (1, 3)
    assert usage.tokens < usage.padded


def test_requests_with_different_parameters_run_apart(task: Task, t5: Path) -> None:
    greedy = ask({"text_input": [SHORT]}, max_new_tokens=8)
    beams = ask({"text_input": [SHORT]}, max_new_tokens=8, num_beams=3)
    usage = ExecutionWork()
    task.execute([task.prepare(greedy), task.prepare(beams)], usage)
    assert usage.runs == 2
    assert texts(task, greedy, beams) == [
        [generate(t5, SHORT, max_new_tokens=8)],
        [generate(t5, SHORT, max_new_tokens=8, num_beams=3)],
    ]


def test_batch_stays_within_the_token_budget(t5: Path) -> None:
    task = open_task(t5, task="text2text-generation", max_batch_tokens=40)
    usage = ExecutionWork()
    task.execute([task.prepare(ask({"text_input": [LONG, SHORT, LONG]}, max_new_tokens=2))], usage)
    assert usage.runs >= 2


def test_summarization_uses_the_parameters_and_the_prefix_of_its_task(t5: Path) -> None:
    wanted = generate(t5, "sum: " + LONG, max_length=12, num_beams=2)
    assert texts(open_task(t5, task="summarization"), ask({"text_input": [LONG]})) == [[wanted]]


def test_limit_of_a_request_replaces_that_of_its_task(t5: Path) -> None:
    wanted = generate(t5, "sum: " + LONG, max_new_tokens=5, num_beams=2)
    task = open_task(t5, task="summarization")
    assert texts(task, ask({"text_input": [LONG]}, max_new_tokens=5)) == [[wanted]]


def test_languages_choose_the_prefix(t5: Path) -> None:
    task = open_task(t5, task="translation")
    german = ask({"text_input": [SHORT]}, src_lang="en", tgt_lang="de")
    french = ask({"text_input": [SHORT]}, tgt_lang="fr")
    assert texts(task, german, french) == [
        [generate(t5, "to German: " + SHORT, max_length=14)],
        [generate(t5, "to French: " + SHORT, max_length=10)],
    ]


def test_unknown_language_is_refused_with_those_that_are_known(t5: Path) -> None:
    with pytest.raises(ConchError, match="en to de, en to fr"):
        open_task(t5, task="translation").prepare(ask({"text_input": [SHORT]}, tgt_lang="xx"))


def test_task_named_for_a_pair_of_languages_needs_no_options(t5: Path) -> None:
    wanted = generate(t5, "to German: " + SHORT, max_length=14)
    assert texts(open_task(t5, task="translation_en_to_de"), ask({"text_input": [SHORT]})) == [[wanted]]


def test_languages_are_tokens_where_the_tokenizer_has_them(tmp_path: Path) -> None:
    folder = task_checkpoints.nllb(tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)

    def translate(source: str, target: str) -> str:
        tokenizer.src_lang = source
        written = model.generate(
            **tokenizer(SHORT, return_tensors="pt"),
            forced_bos_token_id=tokenizer.convert_tokens_to_ids(target),
            max_new_tokens=8,
        )
        return str(tokenizer.decode(written[0], skip_special_tokens=True))

    task = open_task(folder, task="translation")
    pairs = [("eng_Latn", "deu_Latn"), ("fra_Latn", "eng_Latn"), ("eng_Latn", "fra_Latn")]
    requests = [ask({"text_input": [SHORT]}, src_lang=one, tgt_lang=other, max_new_tokens=8) for one, other in pairs]
    assert texts(task, *requests) == [[translate(*pair)] for pair in pairs]
    with pytest.raises(ConchError, match="input 'tgt_lang' is 'Klingon', which this model does not support"):
        task.prepare(ask({"text_input": [SHORT]}, tgt_lang="Klingon"))


def test_text_beyond_the_maximum_length_is_cut_and_reported(task: Task, t5: Path) -> None:
    long = LONG * 5
    (result,) = answers(task, ask({"text_input": [SHORT, long]}, max_new_tokens=6))
    assert isinstance(result, Result)
    assert result.parameters == {"truncated": 1}
    assert list(result.outputs["text_output"].elements) == [
        generate(t5, text, max_new_tokens=6) for text in (SHORT, long)
    ]  # type: ignore[union-attr]


def test_text_beyond_the_maximum_length_is_refused_by_configuration(t5: Path) -> None:
    task = open_task(t5, task="text2text-generation", truncation="refuse")
    with pytest.raises(ConchError, match=r"tokens in row 1; the model takes at most 64"):
        task.prepare(ask({"text_input": [SHORT, LONG * 5]}))


def test_writing_ends_where_the_positions_of_the_model_end(bart: Path) -> None:
    task = open_task(bart)
    (((written,)),) = texts(task, ask({"text_input": [SHORT]}, min_length=40))
    assert written == generate(bart, SHORT, min_length=40, max_new_tokens=47)
    with pytest.raises(ConchError, match="'max_new_tokens' is 500; it must be between 1 and 48") as caught:
        task.prepare(ask({"text_input": [SHORT]}, max_new_tokens=500))
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 0), ("num_beams", 1000), ("temperature", float("inf")), ("min_length", -1)]
)
def test_parameter_out_of_range_is_refused_by_name(task: Task, name: str, value: Any) -> None:
    with pytest.raises(ConchError, match=f"input '{name}' is"):
        task.prepare(ask({"text_input": [SHORT]}, **{name: value}))


def test_empty_text_is_served(task: Task, t5: Path) -> None:
    assert texts(task, ask({"text_input": [""]}, max_new_tokens=4)) == [[generate(t5, "", max_new_tokens=4)]]


def test_cancelled_request_stops_its_row(task: Task) -> None:
    cancelled = ask({"text_input": [SHORT]}, max_new_tokens=30)
    cancelled.cancelled = True
    going = ask({"text_input": [SHORT]}, max_new_tokens=30)
    (stopped,), (written,) = texts(task, cancelled, going)
    assert len(stopped) < len(written)


def test_threads_share_one_task(task: Task, t5: Path) -> None:
    wanted = {text: generate(t5, text, max_new_tokens=6) for text in (SHORT, LONG)}
    wrong: list[Any] = []

    def serve(text: str) -> None:
        for _ in range(4):
            found = texts(task, ask({"text_input": [text]}, max_new_tokens=6))
            if found != [[wanted[text]]]:
                wrong.append(found)

    threads = [Thread(target=serve, args=(text,)) for text in (SHORT, LONG)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_maximum_without_room_for_text_is_refused_at_load(t5: Path) -> None:
    with pytest.raises(
        ConchError, match=r"max_length is 1 tokens, .*: the tokenizer puts 1 special tokens around a text"
    ):
        open_task(t5, task="text2text-generation", max_length=1)
