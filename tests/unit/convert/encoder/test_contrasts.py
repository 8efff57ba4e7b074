"""What answers say in words, and which texts differ most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.conversion import MOST_DIFFERENCES, sampled, shortened
from conch.convert.encoder.agreement import SampleOutputs
from conch.convert.encoder.contrasts import EncoderAnswers
from conch.convert.sentences import TextSample

TEXTS = ("a bus", "a tram", "a cake")


def answers(task: str, names: Sequence[str] = (), pair: str | None = None) -> EncoderAnswers:
    tokens = [Tokens(np.arange(3) + index) for index in range(3)]
    samples = [TextSample(text, pair) for text in TEXTS]
    return EncoderAnswers(task, samples, tokens, names, lambda ids: " ".join(f"w{id}" for id in ids))


def outputs(name: str, *values: Any) -> list[SampleOutputs]:
    return [{name: np.array(value, np.float32)} for value in values]


def test_labels_have_their_probability() -> None:
    before = outputs("logits", [[2, 0]], [[0, 1]], [[0, 1]])
    after = outputs("logits", [[-2, 0]], [[0, 1]], [[0, 1.5]])

    found = answers("text-classification", ["good", "bad"]).contrasts(before, after)

    assert [one.text for one in found.worst] == ["a bus", "a cake"]
    assert (found.worst[0].reference, found.worst[0].variant) == ("good 0.881", "bad 0.881")


def test_only_tokens_whose_labels_differ_are_shown() -> None:
    before = outputs("logits", *[[[1, 0], [1, 0], [0, 1]]] * 3)
    after = outputs("logits", [[1, 0], [0, 1], [0, 1]], *[[[1, 0], [1, 0], [0, 2]]] * 2)

    found = answers("token-classification", ["O", "PER"]).contrasts(before, after)

    assert (found.worst[0].reference, found.worst[0].variant) == ("w1: O", "w1: PER")
    assert found.worst[1].reference == "the same labels"


def test_spans_words_and_scores_are_reported() -> None:
    spans = [{"start_logits": np.eye(3)[[index]], "end_logits": np.eye(3)[[2]]} for index in (0, 1, 1)]
    others = [{"start_logits": np.eye(3)[[1]], "end_logits": np.eye(3)[[2]]} for _ in range(3)]
    found = answers("question-answering", pair="context").contrasts(spans, others)
    assert (found.worst[0].text, found.worst[0].reference, found.worst[0].variant) == (
        "a bus | context", "w0 w1 w2", "w1 w2",
    )  # fmt: skip

    before, after = outputs("logits", *[[[3, 1, 0]]] * 3), outputs("logits", [[1, 3, 0]], *[[[3, 1, 0]]] * 2)
    found = answers("fill-mask").contrasts(before, after)
    assert found.worst[0].reference.startswith("w0 0.84, w1 0.11")
    assert found.worst[0].variant.startswith("w1 0.84, w0 0.11")

    found = answers("text-ranking").contrasts(outputs("logits", [[1.5]], [[0]], [[0]]), outputs("logits", *[[[0]]] * 3))
    assert (found.worst[0].reference, found.worst[0].variant) == ("score 1.500", "score 0.000")
    assert found.worst[0].cosine is None


def test_sample_of_many_differences_keeps_both_ends() -> None:
    values = sampled(np.arange(10_000) / 10_000)

    assert len(values) == MOST_DIFFERENCES
    assert (values[0], values[-1]) == (0, 0.9999)
    assert sampled(np.array([2.0, np.inf, 1.0])) == (1, 2)


def test_long_texts_are_cut_after_a_word() -> None:
    assert shortened("one  two\nthree", 40) == "one two three"
    assert shortened("one two three", 10) == "one two …"
    assert shortened("x" * 50, 10) == "x" * 9 + " …"


def test_answer_that_is_no_number_differs_most() -> None:
    nan = float("nan")
    spans = [{"start_logits": np.eye(3)[[0]], "end_logits": np.eye(3)[[2]]} for _ in range(3)]
    broken = [*spans[:2], {"start_logits": np.eye(3)[[1]], "end_logits": np.array([[nan, 0, 0]])}]
    assert answers("question-answering").contrasts(spans, broken).worst[0].text == "a cake"
