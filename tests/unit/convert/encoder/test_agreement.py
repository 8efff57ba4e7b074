"""How far answers are from the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from conch.convert.encoder.agreement import SampleOutputs, accuracy, compare, compare_task
from conch.convert.sentences import TextSample

RANDOM = np.random.default_rng(1)


def logits(*rows: list[float]) -> list[SampleOutputs]:
    return [{"logits": np.array([row], np.float32)} for row in rows]


def embeddings(vectors: np.ndarray) -> list[SampleOutputs]:
    return [{"embedding": vector[None]} for vector in vectors]


def test_equal_outputs_agree_completely() -> None:
    outputs = logits([1, 2, 3], [3, 1, 0], [0, 0, 0])

    one = compare(outputs, outputs)["logits"]

    assert (one.cosine_min, one.cosine_mean, one.max_difference, one.argmax) == (1, 1, 0, 1)


def test_figures_tell_the_worst_vector_and_the_mean() -> None:
    one = compare(logits([1, 0], [0, 2]), logits([1, 0], [2, 0]))["logits"]

    assert one.cosine_min == 0
    assert one.cosine_mean == 0.5
    assert one.max_difference == 2
    assert one.argmax == 0.5


def test_single_numbers_have_no_cosine() -> None:
    one = compare(logits([1.0], [-1.0]), logits([1.5], [-1.0]))["logits"]

    assert (one.cosine_min, one.argmax) == (None, None)
    assert one.max_difference == 0.5


def test_values_that_are_not_finite_are_no_agreement() -> None:
    one = compare(logits([1, 2]), logits([1, float("nan")]))["logits"]

    assert one.max_difference == float("inf")
    assert one.argmax == 0


def test_hidden_states_have_no_argmax() -> None:
    hidden = [{"last_hidden_state": RANDOM.standard_normal((5, 8))}]

    assert compare(hidden, hidden)["last_hidden_state"].argmax is None


def test_labels_that_all_agree_are_not_called_certain() -> None:
    outputs = logits(*([[0.0, 1.0]] * 50))

    task = compare_task("text-classification", [], outputs, outputs)

    assert (task.value, task.delta, task.samples) == (1, 0, 50)
    assert -0.1 < task.low < -0.05 and task.high == 0


def test_label_agreement_counts_labels() -> None:
    task = compare_task("text-classification", [], logits([0, 1], [0, 1], [1, 0], [1, 0]), logits(*[[0, 1]] * 4))

    assert task.value == 0.5
    assert task.low < -0.5 < task.high


def test_accuracy_is_compared_with_the_references() -> None:
    reference = logits([0, 1], [0, 1], [1, 0], [1, 0])
    variant = logits([0, 1], [0, 1], [0, 1], [1, 0])

    task = accuracy([1, 1, 0, 1], reference, variant)

    assert (task.name, task.value, task.delta) == ("accuracy", 0.5, -0.25)
    assert task.low <= -0.25 <= task.high


def test_passages_are_ranked_within_their_query() -> None:
    samples = [TextSample("q", str(n), group=n // 3) for n in range(6)]
    reference = logits([1], [2], [3], [30], [20], [10])

    assert compare_task("text-ranking", samples, reference, logits([4], [5], [6], [3], [2], [1])).value == 1
    turned = compare_task("text-ranking", samples, reference, logits([4], [5], [6], [1], [2], [3]))
    # The second query has the opposite order: gains of 0, 1 and 2 instead of 2, 1 and 0.
    opposite = (1 / np.log2(3) + 2 / 2) / (2 + 1 / np.log2(3))
    assert turned.value == pytest.approx((1 + opposite) / 2)
    assert turned.name == "nDCG@10"


def test_pairs_of_several_classes_are_labelled_and_not_ranked() -> None:
    samples = [TextSample("q", str(n)) for n in range(2)]
    compared = compare_task("text-ranking", samples, logits([1, 5, 2], [4, 1, 2]), logits([2, 9, 2], [4, 5, 2]))
    assert (compared.name, compared.value) == ("same label", 0.5)


def test_queries_with_one_passage_each_are_ranked_together() -> None:
    samples = [TextSample(str(n), "p", group=n) for n in range(4)]
    scores = logits([1], [2], [3], [4])

    assert compare_task("text-ranking", samples, scores, scores).name == "order of scores"


def test_answer_is_the_best_span_that_does_not_end_before_it_starts() -> None:
    def span(start: list[float], end: list[float]) -> SampleOutputs:
        return {"start_logits": np.array([start]), "end_logits": np.array([end])}

    reference = [span([0, 9, 0], [8, 0, 5])]
    assert compare_task("question-answering", [], reference, [span([0, 9, 0], [99, 0, 5])]).value == 0
    assert compare_task("question-answering", [], reference, [span([0, 8, 0], [7, 0, 5])]).value == 1


def test_words_for_the_mask_are_compared_by_the_top_five() -> None:
    reference = logits([float(n) for n in range(10)])
    other = logits([9, 8, 7, 6, 0, 5, 11, 12, 13, 14])

    assert compare_task("fill-mask", [], reference, other).value == pytest.approx(0.8)


def test_token_labels_are_averaged_over_texts() -> None:
    reference = [{"logits": np.array([[1, 0], [0, 1]])}, {"logits": np.array([[1, 0]])}]
    variant = [{"logits": np.array([[1, 0], [1, 0]])}, {"logits": np.array([[1, 0]])}]

    assert compare_task("token-classification", [], reference, variant).value == 0.75
