"""Token ids in place of texts, the tokens of texts, and their number, for every task that reads texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.tasks.task import ExecutionWork, Task
from conch.backends.tasks.tokens import TextPreparation, TokenizedRequest
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError, unsupported
from tests import text_checkpoints
from tests.text_checkpoints import request, strings

TEXTS = ["how can you be sure", "the bus"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    return text_checkpoints.write(folder, "AutoModelForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def task(ranker: Path) -> Task:
    return text_checkpoints.open_task(ranker, "text-ranking")


@pytest.fixture
def texts(ranker: Path, task: Task) -> TextPreparation:
    return TextPreparation(Checkpoint.open(ranker, Options.from_values({"task": "text-ranking"})), task)


def run(texts: TextPreparation, task: Task, asked: Request) -> Result:
    prepared = texts.prepare(asked)
    if isinstance(prepared, TokenizedRequest):
        return prepared.result
    [result] = task.execute([prepared], ExecutionWork())
    assert isinstance(result, Result)
    texts.count(prepared, result)
    return result


def documents(result: Result) -> list[dict[str, Any]]:
    tokens = result.outputs["tokens"]
    assert isinstance(tokens, Strings)
    return [json.loads(row) for (row,) in strings(tokens)]


def ids_of(texts: TextPreparation, task: Task, rows: list[str]) -> list[list[int]]:
    asked = request("tokens", text_input=[[text] for text in rows])
    return [row["ids"] for row in documents(run(texts, task, asked))]


def test_tokens_of_both_texts_of_a_pair_are_counted(texts: TextPreparation, task: Task) -> None:
    asked = request("score", "num_input_tokens", text_input=[[text] for text in TEXTS], text_pair=[["it"], ["it"]])
    result = run(texts, task, asked)
    second = len(ids_of(texts, task, ["it"])[0]) - 1  # a pair has one [CLS]
    counts = [[len(ids) + second] for ids in ids_of(texts, task, TEXTS)]
    assert np.array(result.outputs["num_input_tokens"]).tolist() == counts
    assert "num_input_tokens" not in run(texts, task, request("score", text_input=[["a"]], text_pair=[["b"]])).outputs


def test_ids_are_scored_as_their_text(texts: TextPreparation, task: Task) -> None:
    rows = ids_of(texts, task, TEXTS)
    ids = np.full((2, max(map(len, rows))), -1, np.int32)
    for row, own in zip(ids, rows, strict=True):
        row[: len(own)] = own
    pairs = {"text_pair": [["it"], ["it"]]}
    given = run(texts, task, request("score", text_input=[[""], [""]], token_ids=ids, **pairs))
    expected = run(texts, task, request("score", text_input=[[text] for text in TEXTS], **pairs))
    assert np.array_equal(given.outputs["score"], expected.outputs["score"])
    asked = request("tokens", text_input=[[""], [""]], token_ids=ids)
    assert [row["decoded"] for row in documents(run(texts, task, asked))] == TEXTS


def test_tokens_are_not_requested_together_with_outputs_of_the_network(texts: TextPreparation, task: Task) -> None:
    asked = request("tokens", "score", text_input=[["it"]], text_pair=[["is"]])
    with pytest.raises(ConchError, match="'tokens' cannot be requested together with 'score'"):
        texts.prepare(asked)
    result = run(texts, task, request("tokens", "num_input_tokens", text_input=[["it"]]))
    assert result.outputs.keys() == {"tokens", "num_input_tokens"}


@pytest.mark.parametrize("ids", [[[10**6]], [[-1]], [[-5]]])
def test_ids_that_the_vocabulary_does_not_have_are_refused(texts: TextPreparation, ids: list[list[int]]) -> None:
    with pytest.raises(ConchError, match="token_ids"):
        texts.prepare(request("score", text_input=[[""]], text_pair=[["a"]], token_ids=np.array(ids, np.int32)))


def test_ids_of_another_tokenizer_are_decoded_by_it_or_refused(ranker: Path, task: Task, tmp_path: Path) -> None:
    foreign = text_checkpoints.byte_level(tmp_path)
    ids = np.array([foreign("the bus", add_special_tokens=False)["input_ids"]], np.int32)

    def prepared(value: str, rows: Any) -> Any:
        options = Options.from_values({"task": "text-ranking", "token_ids": value})
        texts = TextPreparation(Checkpoint.open(ranker, options), task)
        return texts.prepare(request("score", text_input=[[""]], text_pair=[["it"]], token_ids=rows))

    expected: Any = task.prepare(request("score", text_input=[["the bus"]], text_pair=[["it"]]))
    read = prepared(str(tmp_path / "tokenizer.json"), ids)
    assert [list(row.ids) for row in read.sequences] == [list(row.ids) for row in expected.sequences]
    with pytest.raises(ConchError, match="must come from the tokenizer of parameter 'token_ids'"):
        prepared(str(tmp_path / "tokenizer.json"), np.array([[10**6]], np.int32))
    with pytest.raises(ConchError, match="parameter 'token_ids' of the model is 'refuse'"):
        prepared("refuse", ids)
    with pytest.raises(ConchError, match="token_ids"):
        prepared(str(tmp_path / "absent.json"), ids)


def test_refused_id_is_named(texts: TextPreparation) -> None:
    ids = np.array([[2, 10**6], [-5, 2]], np.int32)
    for row, name in ((0, "1000000"), (1, "-5")):
        with pytest.raises(ConchError, match=f"has the id {name} in row 0"):
            texts.prepare(request("score", text_input=[[""]], text_pair=[["a"]], token_ids=ids[row : row + 1]))


def test_long_pair_is_truncated_or_refused_as_the_request_says(texts: TextPreparation, task: Task) -> None:
    def scored(text: str, **parameters: Any) -> Result:
        asked = request("score", "num_input_tokens", text_input=[[text]], text_pair=[["it"]])
        asked.parameters = parameters
        return run(texts, task, asked)

    long = f"{'the bus ' * 500} open"
    assert scored(long).parameters["truncated"] == 1
    with pytest.raises(ConchError, match="tokens in row 0; the model takes at most"):
        scored(long, truncation="refuse")
    left, right = (scored(long, truncation=side, max_length=9).outputs for side in ("left", "right"))
    assert np.array(left["num_input_tokens"]).tolist() == np.array(right["num_input_tokens"]).tolist() == [[9]]
    assert not np.allclose(np.array(left["score"]), np.array(right["score"]), atol=1e-6)
    assert scored(long, truncation="right", max_pair_tokens=4096).parameters["truncated"] == 1


def test_second_text_of_a_pair_has_its_own_limit(texts: TextPreparation, task: Task) -> None:
    def scored(pairs: list[str], **parameters: Any) -> Any:
        asked = request("score", text_input=[["is it open"]] * 2, text_pair=[[pair] for pair in pairs])
        asked.parameters = parameters
        return np.array(run(texts, task, asked).outputs["score"])

    pairs = ["the bus " * 500, "open"]
    assert np.allclose(scored(pairs, max_pair_tokens=4, truncation="refuse"), scored(["the bus", "open"]), atol=1e-6)
    assert not np.allclose(scored(pairs, max_pair_tokens=4), scored(pairs), atol=1e-6)
    for value in (0, -3, "4"):
        with pytest.raises(ConchError, match=f"parameter 'max_pair_tokens' is '{value}'; it must be a whole number"):
            scored(pairs, max_pair_tokens=value)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = text_checkpoints.write(tmp_path_factory.mktemp("embedder"), "AutoModel")
    return text_checkpoints.open_task(folder, "feature-extraction")


def embedded(task: Task, text: str, **parameters: Any) -> Any:
    asked = request("embedding", text_input=[[text]])
    asked.parameters = parameters
    [result] = task.execute([task.prepare(asked)], ExecutionWork())
    assert isinstance(result, Result)
    return result.outputs["embedding"]


def test_model_that_refuses_long_texts_reports_it(tmp_path: Path, embedder: Task) -> None:
    folder = text_checkpoints.write(tmp_path, "AutoModel")
    assert (
        text_checkpoints.open_task(folder, "feature-extraction", truncation="refuse").limits["truncation"] == "refuse"
    )
    assert "truncation" not in embedder.limits


WORDS = ["how", "can", "you", "be", "sure", "that", "it", "is", "open"]


@pytest.mark.parametrize(("side", "kept"), [("left", WORDS[-3:]), ("right", WORDS[:3])])
def test_text_is_truncated_on_the_side_and_to_the_length_of_the_request(
    embedder: Task, side: str, kept: list[str]
) -> None:
    tokenizer: Any = embedder.pipelines[0].encoder.tokenizer  # type: ignore[attr-defined]
    length = len(tokenizer.encode(" ".join(kept)))
    given = embedded(embedder, " ".join(WORDS), truncation=side, max_length=length)
    assert np.allclose(given, embedded(embedder, " ".join(kept)), atol=1e-6)


def test_prompt_of_the_request_is_put_before_the_text(embedder: Task) -> None:
    assert np.array_equal(embedded(embedder, "it is", prompt="how can "), embedded(embedder, "how can it is"))


@pytest.mark.parametrize(
    "parameters", [{"truncation": "up"}, {"max_length": 0}, {"max_length": "3"}, {"max_length": 2}]
)
def test_bad_parameter_is_refused(embedder: Task, parameters: dict[str, Any]) -> None:
    with pytest.raises(ConchError, match=r"truncation|max_length"):
        embedded(embedder, "it is", **parameters)


class WithoutTokenizer:
    """A task that reads no texts, such as one of images."""

    limits: Mapping[str, int] = {}

    @property
    def tokenizer(self) -> Any:
        raise unsupported("this task has no tokenizer")

    def prepare(self, asked: Request) -> Request:
        return asked


def test_request_to_a_task_without_a_tokenizer_is_prepared(ranker: Path) -> None:
    texts = TextPreparation(Checkpoint.open(ranker), WithoutTokenizer())  # type: ignore[arg-type]
    asked = request("score", image=["abc"])
    assert texts.prepare(asked) is asked  # type: ignore[comparison-overlap]
    with pytest.raises(ConchError, match="this task has no tokenizer"):
        texts.prepare(request("tokens", image=["abc"]))
