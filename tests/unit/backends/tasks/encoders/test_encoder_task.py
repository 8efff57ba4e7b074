"""How requests become runs of the engine, and how what is wrong with one of them stays its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import UNFINISHED, Request, Result
from conch.backends.tasks.encoders.encoder_task import EncoderTask, PaddedBatch
from conch.backends.tasks.huggingface_backend import make_task
from conch.backends.tasks.task import ExecutionWork, PreparedRequest
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.core.errors import Code, ConchError
from conch.core.tensors import WireTensor, pack_bytes
from tests.text_checkpoints import TEXTS, TorchEngine, answer, open_task, request, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("classifier"), "AutoModelForSequenceClassification", num_labels=3)


def opened(folder: Path, **options: Any) -> tuple[EncoderTask, TorchEngine]:
    task = open_task(folder, "text-classification", **options)
    assert isinstance(task, EncoderTask) and isinstance(task.engine, TorchEngine)
    return task, task.engine


def logits(result: Result | ConchError) -> Any:
    assert isinstance(result, Result)
    return result.outputs["logits"]


def test_requests_of_a_batch_answer_as_they_do_alone(folder: Path) -> None:
    task, engine = opened(folder)
    requests = [request("logits", text_input=list(texts)) for texts in (TEXTS, TEXTS[:1], TEXTS[1:3], TEXTS[3:])]
    alone = [logits(answer(task, one)) for one in requests]
    engine.shapes.clear()
    usage = ExecutionWork()
    results = task.execute([task.prepare(one) for one in requests], usage)
    for result, expected in zip(results, alone, strict=True):
        np.testing.assert_allclose(logits(result), expected, rtol=1e-4, atol=1e-5)
    assert (usage.runs, usage.sequences) == (len(engine.shapes), 10)
    assert usage.padded == sum(count * length for count, length in engine.shapes) and usage.tokens <= usage.padded


def test_no_run_pads_past_its_bucket_or_exceeds_the_budget(folder: Path) -> None:
    task, engine = opened(folder, max_batch_tokens=100)
    texts = [" ".join(["a"] * (1 + 7 * index % 30)) for index in range(60)]
    prepared = task.prepare(request(text_input=texts))
    assert (prepared.length, prepared.sequence_count) == (32, 60)
    usage = ExecutionWork()
    task.execute([prepared], usage)
    assert max(count * length for count, length in engine.shapes) <= 100
    assert usage.padded - usage.tokens < 8 * usage.sequences


def test_a_hundred_thousand_texts_run_in_parts(folder: Path) -> None:
    class Counting(TorchEngine):
        def run(self, arrays: Any, names: Any = ()) -> Any:
            self.shapes.append(arrays["input_ids"].shape)
            return {"logits": arrays["input_ids"][:, :3].astype(np.float32)}

    checkpoint = Checkpoint.open(folder, Options.from_values({"task": "text-classification"}))
    engine = Counting(folder, "AutoModelForSequenceClassification")
    task = make_task(checkpoint, lambda head: engine)
    engine.shapes.clear()
    texts = ["the station", "a market in the morning"] * 50_000
    result = answer(task, request("logits", text_input=texts))
    assert max(count * length for count, length in engine.shapes) <= 4096
    first = logits(result)
    assert first.shape == (100_000, 3) and (first[::2] == first[0]).all() and (first[1::2] == first[1]).all()


def test_what_is_wrong_with_one_request_is_its_own(folder: Path) -> None:
    task, _ = opened(folder)
    good, bad = task.prepare(request(text_input=[TEXTS[0]])), task.prepare(request(text_input=[TEXTS[1]]))
    bad.state = ("not a number", None)
    one, two = task.execute([bad, good], ExecutionWork())
    assert isinstance(one, ConchError) and one.code is Code.INTERNAL
    assert isinstance(two, Result)


def test_cancelled_requests_are_not_computed(folder: Path) -> None:
    task, engine = opened(folder)
    first, second = (task.prepare(request(text_input=[text])) for text in (TEXTS[3], TEXTS[2]))
    first.request.cancelled = True
    one, two = task.execute([first, second], ExecutionWork())
    assert isinstance(one, ConchError) and one.code is Code.CANCELLED
    assert isinstance(two, Result) and len(engine.shapes) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": ["a"], "top_k": np.array([[0]], np.int32)}, "top_k is '0'; it must be at least 1"),
        ({"text_input": ["a"], "function_to_apply": ["tanh"]}, "function_to_apply is 'tanh'"),
        ({"text_input": ["a", "b"], "text_pair": [["c"]]}, "input 'text_pair' has 1 texts for 2 rows"),
        ({"text_pair": ["c"]}, "input 'text_input' is missing"),
        (
            {"text_input": ["a", "b"], "top_k": np.array([[1], [2]], np.int32)},
            "input 'top_k' must be the same in all rows",
        ),
    ],
)
def test_wrong_requests_are_refused(folder: Path, inputs: dict[str, Any], message: str) -> None:
    task, _ = opened(folder)
    with pytest.raises(ConchError, match=message) as error:
        task.prepare(request(**inputs))
    assert error.value.code is Code.INVALID_ARG


def test_invalid_utf8_is_refused_with_its_place(folder: Path) -> None:
    task, _ = opened(folder)
    tensor = WireTensor("text_input", "BYTES", (2, 1), pack_bytes([b"fine", b"not \xff fine"]))
    with pytest.raises(ConchError, match="input 'text_input' is not valid UTF-8: element 1, byte 4"):
        task.prepare(Request({"text_input": tensor}, frozenset()))


def test_empty_text_is_answered(folder: Path) -> None:
    task, _ = opened(folder)
    assert logits(answer(task, request("logits", text_input=[""]))).shape == (1, 3)


def test_defaults_of_options_come_from_the_configuration(folder: Path) -> None:
    task, _ = opened(folder, top_k="1", function_to_apply="none")
    result = answer(task, request("logits", text_input=[TEXTS[0]]))
    assert result.outputs["score"][0, 0] == logits(result).max()  # type: ignore[index]


def test_labels_that_disagree_with_the_network_are_named(folder: Path, tmp_path: Path) -> None:
    task, _ = opened(folder)
    task.labels = [b"one", b"two"]  # type: ignore[attr-defined]
    with pytest.raises(ConchError, match="returns 3 scores, but the checkpoint has 2 labels"):
        answer(task, request(text_input=[TEXTS[0]]))


def test_a_batch_without_rows_gives_results_without_rows(folder: Path) -> None:
    task, _ = opened(folder)
    prepared: PreparedRequest = task.prepare(request("logits", text_input=[TEXTS[0]]))
    assert task.execute([], ExecutionWork()) == []
    assert isinstance(task.execute([prepared], ExecutionWork())[0], Result)


def sequences(*lengths: int) -> list[Tokens]:
    return [Tokens(np.arange(1, length + 1)) for length in lengths]


def test_an_engine_that_wants_larger_shapes_gets_padding_and_its_outputs_are_cut_back() -> None:
    batch = PaddedBatch(sequences(3, 2, 3), [], 9, (4, 8))
    assert batch.ids.tolist()[1] == [1, 2, 9, 9, 9, 9, 9, 9]
    assert batch.mask.sum(axis=1).tolist() == [3, 2, 3, 1]
    outputs = batch.without_padding_rows({"logits": np.ones((4, 8, 5))})
    assert outputs["logits"].shape == (3, 8, 5)
    assert batch.mask.shape == (3, 8)
    assert [len(row) for row in batch.rows(outputs["logits"])] == [3, 2, 3]


def test_sequences_that_fill_their_shape_are_not_padded() -> None:
    batch = PaddedBatch(sequences(4, 4), [], 9, (2, 4))
    assert not batch.padded
    assert batch.mask.all()


def test_a_large_request_ends_its_batch_after_a_run_if_others_wait_and_continues(folder: Path) -> None:
    task, engine = opened(folder, max_batch_tokens=100)
    large = task.prepare(request("logits", text_input=[*TEXTS] * 4))
    [whole] = task.execute([task.prepare(request("logits", text_input=[*TEXTS] * 4))], ExecutionWork())
    total = len(engine.shapes)
    engine.shapes.clear()
    results, counts = [], []
    while not results or results[-1] is UNFINISHED:
        work = ExecutionWork(others_wait=lambda: True)
        results += task.execute([large], work)
        counts.append(work.runs)
        assert work.padded <= 100
    assert len(counts) > 3 and sum(counts) == total == len(engine.shapes)
    np.testing.assert_allclose(logits(results[-1]), logits(whole), rtol=1e-5, atol=1e-6)


def test_a_request_that_is_cancelled_between_its_batches_ends(folder: Path) -> None:
    task, _ = opened(folder, max_batch_tokens=100)
    large = task.prepare(request("logits", text_input=[*TEXTS] * 4))
    assert task.execute([large], ExecutionWork(others_wait=lambda: True)) == [UNFINISHED]
    large.request.cancelled = True
    [result] = task.execute([large], ExecutionWork(others_wait=lambda: True))
    assert isinstance(result, ConchError) and result.code is Code.CANCELLED


def test_counts_of_work_are_numbers() -> None:
    work = ExecutionWork(others_wait=lambda: True)
    work.add(5, 8, 2)
    assert all(type(value) is int for value in work.counts.values())
    assert (work.counts["tokens"], work.counts["padded"], work.counts["runs"]) == (5, 8, 1)
