"""Answers in contexts: the spans that transformers 4's pipeline chooses, computed here by going through all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from conch.backends.tasks.task import ExecutionWork
from conch.core.errors import ConchError
from tests.text_checkpoints import TEXTS, answer, open_task, request, strings, write

QUESTION = "Where is it?"
LONG = " ".join(TEXTS)


def by_hand(folder: Path, context: str, *, stride: int, longest: int, k: int) -> list[tuple[str, float, int, int]]:
    """All spans of all windows, each widened to whole words, the same text counted once with the sum of its scores."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForQuestionAnswering.from_pretrained(folder)
    encoded = tokenizer(
        QUESTION, context, truncation="only_second", max_length=64, stride=stride, return_overflowing_tokens=True
    )
    whole = tokenizer(QUESTION, context).encodings[0]
    found: dict[str, list[Any]] = {}
    for window, ids in enumerate(encoded["input_ids"]):
        inputs = {name: torch.tensor([encoded[name][window]]) for name in tokenizer.model_input_names}
        with torch.inference_mode():
            logits = model(**inputs)
        encoding = encoded.encodings[window]
        allowed = torch.tensor(
            [
                sequence_id_ == 1 or id == tokenizer.cls_token_id
                for sequence_id_, id in zip(encoding.sequence_ids, ids, strict=True)
            ]
        )
        start, end = (
            torch.where(allowed, scores[0], torch.tensor(-10000.0)).softmax(0)
            for scores in (logits.start_logits, logits.end_logits)
        )
        spans = [
            (float(start[one] * end[two]), one, two)
            for one in range(1, len(ids))
            for two in range(one, min(one + longest, len(ids)))
            if allowed[one] and allowed[two]
        ]
        for score, one, two in sorted(spans, reverse=True)[: 2 * k + 10]:
            # Transformers knows only the part of a word that is in the window.
            first = whole.word_to_chars(whole.char_to_word(encoding.offsets[one][0], 1), 1)[0]
            last = whole.word_to_chars(whole.char_to_word(encoding.offsets[two][0], 1), 1)[1]
            entry = found.setdefault(context[first:last].lower(), [context[first:last], 0.0, first, last])
            entry[1] += score
    best = sorted(found.values(), key=lambda entry: -entry[1])[:k]
    return [(text, score, first, last) for text, score, first, last in best]


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("context", [TEXTS[0], LONG])
def test_the_best_spans_of_all_windows(tmp_path: Path, family: str, context: str) -> None:
    write(tmp_path, "AutoModelForQuestionAnswering", family=family)
    usage = ExecutionWork()
    task = open_task(tmp_path, "question-answering")
    options = {"top_k": np.array([[4]], np.int32), "doc_stride": np.array([[10]], np.int32)}
    result = answer(task, request(question=[QUESTION], context=[context], **options), usage)
    expected = by_hand(tmp_path, context, stride=10, longest=15, k=4)
    assert strings(result.outputs["answer"]) == [[text for text, *_ in expected]]
    assert [[*row] for row in np.array(result.outputs["start"])] == [[first for *_, first, _ in expected]]
    assert [[*row] for row in np.array(result.outputs["end"])] == [[last for *_, last in expected]]
    np.testing.assert_allclose(np.array(result.outputs["score"])[0], [one[1] for one in expected], rtol=1e-4)
    assert (usage.sequences > 1) == (context is LONG)


def test_rows_of_different_length_answer_as_they_do_alone(tmp_path: Path) -> None:
    task = open_task(write(tmp_path, "AutoModelForQuestionAnswering"), "question-answering")
    contexts = [*TEXTS, LONG]
    result = answer(task, request(question=[QUESTION] * len(contexts), context=contexts))
    for row, context in enumerate(contexts):
        alone = answer(task, request(question=[QUESTION], context=[context]))
        assert strings(result.outputs["answer"])[row] == strings(alone.outputs["answer"])[0]
        [text], start, end = strings(alone.outputs["answer"])[0], alone.outputs["start"], alone.outputs["end"]
        assert isinstance(start, np.ndarray) and isinstance(end, np.ndarray)
        assert context[start[0, 0] : end[0, 0]] == text


def test_no_answer_may_be_an_answer(tmp_path: Path) -> None:
    task = open_task(write(tmp_path, "AutoModelForQuestionAnswering"), "question-answering")
    options = {"top_k": np.array([[30]], np.int32), "handle_impossible_answer": np.array([[True]])}
    texts = strings(answer(task, request(question=[QUESTION], context=[TEXTS[3]], **options)).outputs["answer"])
    assert "" in texts[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"question": [QUESTION], "context": [" "]}, "input 'context' is empty in row 0"),
        ({"question": [""], "context": [LONG]}, "input 'question' is empty in row 0"),
        ({"question": [LONG], "context": [LONG]}, "input 'question' leaves 0 of 64 tokens for the context in row 0"),
        ({"question": [QUESTION], "context": [LONG], "top_k": np.array([[0]], np.int32)}, "top_k is '0'"),
        (
            {"question": [QUESTION], "context": [LONG], "doc_stride": np.array([[60]], np.int32)},
            "windows that overlap by doc_stride=60 need more",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(tmp_path: Path, inputs: dict[str, Any], message: str) -> None:
    task = open_task(write(tmp_path, "AutoModelForQuestionAnswering"), "question-answering")
    with pytest.raises(ConchError, match=message.replace("(", r"\(")):
        task.prepare(request(**inputs))
