"""Tasks of text give what transformers.pipeline gives, for tiny networks with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import pipeline

from conch.backends.base.arrays import Array, Strings
from conch.backends.tasks.task import Task
from conch.core.errors import ConchError
from tests.text_checkpoints import TEXTS, answer, open_task, request, strings, write

LONG = " ".join(TEXTS)
ALL = [*TEXTS, LONG]
ENTITIES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}

Reference = Any


def served(folder: Path, head: str, task: str, **settings: Any) -> tuple[Task, Reference]:
    """A new checkpoint as a task, and as transformers' pipeline."""
    write(folder, head, **settings)
    return open_task(folder, task), pipeline(task, str(folder), device="cpu")


def entailing(folder: Path, *labels: str) -> tuple[Task, Reference]:
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    return served(folder, "AutoModelForSequenceClassification", "zero-shot-classification", **names)


def close(value: Array | Strings, expected: Any) -> None:
    assert isinstance(value, np.ndarray) and value.dtype == np.float32
    np.testing.assert_allclose(value, np.array(expected, np.float32), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 3},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"num_labels": 1},
        {"num_labels": 2, "problem_type": "regression", "family": "roberta"},
    ],
)
def test_text_classification(tmp_path: Path, settings: dict[str, Any]) -> None:
    task, reference = served(tmp_path, "AutoModelForSequenceClassification", "text-classification", **settings)
    expected = reference(ALL, top_k=None, truncation=True)
    result = answer(task, request("label", "score", text_input=ALL))
    assert strings(result.outputs["label"]) == [[one["label"] for one in row] for row in expected]
    close(result.outputs["score"], [[one["score"] for one in row] for row in expected])
    assert "logits" not in result.outputs and result.parameters == {"truncated": 1}


def test_text_classification_of_pairs_with_options(tmp_path: Path) -> None:
    task, reference = served(tmp_path, "AutoModelForSequenceClassification", "text-classification", num_labels=3)
    pairs = [{"text": text, "text_pair": TEXTS[0]} for text in TEXTS]
    expected = reference(pairs, top_k=2, function_to_apply="sigmoid", truncation=True)
    options = {"top_k": np.array([[2]] * 5, np.int32), "function_to_apply": ["sigmoid"] * 5}
    asked = request("label", "score", "logits", text_input=TEXTS, text_pair=[TEXTS[0]] * 5, **options)
    result = answer(task, asked)
    assert strings(result.outputs["label"]) == [[one["label"] for one in row] for row in expected]
    close(result.outputs["score"], [[one["score"] for one in row] for row in expected])
    logits = result.outputs["logits"]
    assert isinstance(logits, np.ndarray) and logits.shape == (5, 3)


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("labels", [["bus", "market", "library"], ["bus"]])
def test_zero_shot_classification(tmp_path: Path, multiple: bool, labels: list[str]) -> None:
    task, reference = entailing(tmp_path, "contradiction", "neutral", "ENTAILMENT")
    template = "It is about a {}, is it?"
    expected = reference(ALL, candidate_labels=labels, hypothesis_template=template, multi_label=multiple)
    asked = request(
        text_input=ALL,
        candidate_labels=[labels] * len(ALL),
        hypothesis_template=[template] * len(ALL),
        multi_label=np.array([[multiple]] * len(ALL)),
    )
    result = answer(task, asked)
    assert strings(result.outputs["label"]) == [row["labels"] for row in expected]
    close(result.outputs["score"], [row["scores"] for row in expected])


def test_zero_shot_rows_may_have_labels_of_their_own(tmp_path: Path) -> None:
    task, reference = entailing(tmp_path, "entailment", "not_entailment")
    rows = [["bus", "taxi"], ["open", "closed"]]
    result = answer(task, request(text_input=TEXTS[:2], candidate_labels=rows))
    for row, labels in enumerate(rows):
        expected = reference(TEXTS[row], candidate_labels=labels)
        assert strings(result.outputs["label"])[row] == expected["labels"]


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_token_classification(tmp_path: Path, family: str, strategy: str) -> None:
    task, reference = served(
        tmp_path, "AutoModelForTokenClassification", "token-classification", family=family, id2label=ENTITIES
    )
    texts = [*ALL, "", "北京 is Ünïque 🙂 in Berlin"]
    result = answer(task, request(text_input=texts, aggregation_strategy=[strategy] * len(texts)))
    found = 0
    for text, [document] in zip(texts, strings(result.outputs["entities"]), strict=True):
        entities = json.loads(document)
        expected = reference(text, aggregation_strategy=strategy)
        assert [{**entity, "score": 0} for entity in entities] == [{**one, "score": 0} for one in expected]
        np.testing.assert_allclose(
            [entity["score"] for entity in entities], [one["score"] for one in expected], rtol=2e-5
        )
        found += len(entities)
    assert found > 5


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_fill_mask(tmp_path: Path, family: str) -> None:
    task, reference = served(tmp_path, "AutoModelForMaskedLM", "fill-mask", family=family)
    mask = reference.tokenizer.mask_token
    texts = [f"I walk to the {mask}.", f"{mask} is open, doesn't it?", f"the nearest {mask}"]
    result = answer(task, request(text_input=texts))
    expected = reference(texts)
    assert strings(result.outputs["label"]) == [[one["token_str"] for one in row] for row in expected]
    close(result.outputs["score"], [[one["score"] for one in row] for row in expected])
    assert strings(result.outputs["text_output"]) == [[row[0]["sequence"]] for row in expected]


def test_fill_mask_of_two_places(tmp_path: Path) -> None:
    task, reference = served(tmp_path, "AutoModelForMaskedLM", "fill-mask")
    text = "I [MASK] to the [MASK]."
    result = answer(task, request(text_input=[text], top_k=np.array([[3]], np.int32)))
    places = reference(text, top_k=3)
    assert strings(result.outputs["label"]) == [[one["token_str"] for place in places for one in place]]
    close(result.outputs["score"], [[one["score"] for place in places for one in place]])
    asked = request(text_input=["no mask at all"])
    with pytest.raises(ConchError, match=r"has no \[MASK\] in row 0"):
        task.prepare(asked)


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"num_labels": 3}, "none"),
    ],
)
def test_rerank(tmp_path: Path, settings: dict[str, Any], function: str) -> None:
    write(tmp_path, "AutoModelForSequenceClassification", **settings)
    task = open_task(tmp_path, "text-ranking")
    reference: Reference = pipeline("text-classification", str(tmp_path), device="cpu")
    pairs = [{"text": TEXTS[0], "text_pair": text} for text in ALL]
    expected = reference(pairs, top_k=None, function_to_apply=function, truncation=True)
    result = answer(task, request(text_input=[TEXTS[0]] * len(ALL), text_pair=ALL))
    in_order = [[one["score"] for one in sorted(row, key=lambda one: str(one["label"]))] for row in expected]
    close(result.outputs["score"], in_order)
    raw = answer(task, request("logits", text_input=TEXTS[:1], text_pair=TEXTS[:1], function_to_apply=["none"]))
    close(raw.outputs["score"], raw.outputs["logits"])
