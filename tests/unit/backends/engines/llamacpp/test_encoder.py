"""Embeddings and scores of GGUF files with a stand-in for llama.cpp; ``make test-llamacpp`` has the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from conch.backends.engines.llamacpp.encoder import LlamaEncoder, require_alike, require_close
from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import GgufFile, read_gguf
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.fakes import llama_cpp
from tests.task_requests import array, open_model
from tests.text_checkpoints import answer, request
from tests.unit.backends.engines.llamacpp.test_engine import spec
from tests.unit.checkpoints.gguf_encoders import wordpieces
from tests.unit.checkpoints.gguf_files import CLS, MEAN, RANK, write

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "##s", "blue")


def bert(folder: Path, pooling: int, **metadata: Any) -> Path:
    """A folder with a GGUF file of a BERT without weights; its vectors have two numbers."""
    values = {
        "general.architecture": "bert", "bert.context_length": 16, "bert.embedding_length": 2, "bert.block_count": 1,
        "bert.pooling_type": pooling, **metadata,
        **{f"tokenizer.ggml.{name}": value for name, value in wordpieces(VOCABULARY).items()},
    }  # fmt: skip
    write(folder / "m.gguf", values, tensors=[("token_embd.weight", (2, len(VOCABULARY)), 0, 0)], data=8 * 8)
    return folder


def test_vectors_of_tokens_come_one_text_after_another(tmp_path: Path) -> None:
    encoder = LlamaEncoder(spec(tmp_path), ranks=False)
    assert (encoder.size, encoder.precision) == (llama_cpp.EMBEDDING, "F32")
    wanted = [[5, 0], [11, 1], [7, 0]]  # the sum of the tokens so far, and the position
    for _ in range(2):  # without the texts before
        assert encoder.run([[5, 6], [7]]).tolist() == wanted
    texts = [[index % 40] for index in range(llama_cpp.SEQUENCES + 3)]
    assert encoder.run(texts)[:, 0].tolist() == [ids[0] for ids in texts]


def test_scores_are_one_row_for_each_text(tmp_path: Path) -> None:
    assert LlamaEncoder(spec(tmp_path), ranks=True).run([[5, 6], [7]]).tolist() == [[11], [7]]


def test_context_is_replaced_by_a_larger_one_when_a_batch_needs_it(tmp_path: Path) -> None:
    encoder = LlamaEncoder(spec(tmp_path), ranks=False)
    small = llama_cpp.contexts[-1]
    encoder.run([[1] * 512])
    assert not small.freed
    assert encoder.run([[1] * 500, [2] * 100])[-1].tolist() == [200, 99]
    large = llama_cpp.contexts[-1]
    assert small.freed and not large.freed
    parameters = large.parameters
    assert (parameters.n_ctx, parameters.n_batch, parameters.n_ubatch) == (1024, 1024, 1024)
    assert (parameters.n_threads, parameters.n_threads_batch) == (3, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("refused", "engine 'llamacpp' cannot load {file}: tensor 'a' not found"),
        ("nan", "engine 'llamacpp' cannot serve {file}: its outputs are not finite numbers"),
    ],
)
def test_file_that_gives_no_vectors_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConchError) as refused:
        LlamaEncoder(spec(tmp_path, content), ranks=False)
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == message.format(file=tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("pooling", "options", "vectors"),
    [
        # "reds" is 2 4 6 3, with sums 2 6 12 15; "blue" is 2 7 3.
        (MEAN, {}, [[35 / 4, 6 / 4], [23 / 3, 1]]),
        (CLS, {}, [[2, 0], [2, 0]]),
        (MEAN, {"pooling": "last"}, [[15, 3], [12, 2]]),
    ],
)
def test_texts_are_embedded_by_the_pooling_of_the_file_and_normalised(
    tmp_path: Path, pooling: int, options: dict[str, str], vectors: list[list[float]]
) -> None:
    folder = bert(tmp_path, pooling)
    task = open_model(folder, **options)
    result = answer(task, request("embedding", "last_hidden_state", "num_input_tokens", text_input=["Reds", "blue"]))
    expected = np.array(vectors) / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(array(result, "embedding"), expected, rtol=1e-6)
    assert array(result, "num_input_tokens").tolist() == [[4], [3]]
    assert array(result, "last_hidden_state")[1].tolist() == [[2, 0], [9, 1], [12, 2], [0, 0]]
    raw = answer(open_model(folder, normalize="false", **options), request(text_input=["Reds", "blue"]))
    np.testing.assert_allclose(array(raw, "embedding"), vectors, rtol=1e-6)


def test_pairs_are_scored_by_the_classifier_of_the_file(tmp_path: Path) -> None:
    task = open_model(bert(tmp_path, RANK))
    result = answer(task, request("score", "logits", text_input=["red", "red"], text_pair=["blue", "greens"]))
    assert array(result, "logits").tolist() == [[2 + 4 + 3 + 7 + 3], [2 + 4 + 3 + 5 + 6 + 3]]
    np.testing.assert_allclose(array(result, "score"), 1 / (1 + np.exp(-array(result, "logits"))), rtol=1e-6)


def file_with(folder: Path, kind: int, architecture: str = "bert") -> GgufFile:
    """A file with a matrix of a type."""
    metadata = {"general.architecture": architecture}
    return read_gguf(write(folder / "m.gguf", metadata, tensors=[("a", (32, 2), kind, 0)], data=256))


F32, Q8_0 = 0, 8


@pytest.mark.parametrize(("kind", "turned"), [(F32, 0.08), (Q8_0, 0.18)])
def test_vectors_may_differ_from_the_weights_by_the_rounding_of_their_type(
    tmp_path: Path, kind: int, turned: float
) -> None:
    file = file_with(tmp_path, kind)
    expected = np.array([[3, 0], [0, 2]], np.float32)
    assert "agree, with a cosine of at least 0.9" in require_alike(file, expected + [[0, 3 * turned], [0, 0]], expected)
    with pytest.raises(ConchError, match=r"does not reproduce the outputs of .*: the cosine of a token's vector"):
        require_alike(file, expected + [[0, 0], [3 * turned, 0]], expected)
    with pytest.raises(ConchError, match="vectors of another size"):
        require_alike(file, expected[:, :1], expected)


@pytest.mark.parametrize(("kind", "off"), [(F32, 0.1), (Q8_0, 0.5)])
def test_outputs_of_a_classifier_may_differ_from_the_weights_by_the_rounding_of_their_type(
    tmp_path: Path, kind: int, off: float
) -> None:
    file, expected = file_with(tmp_path, kind), np.array([-4, 0.5], np.float32)
    assert require_close(file, expected + off, expected).startswith(
        "the outputs of its classifier differ by at most 0."
    )
    for wrong in (expected + 2 * off, expected * np.nan):
        with pytest.raises(
            ConchError, match=r"does not reproduce the outputs of .*: an output of its classifier differs by"
        ):
            require_close(file, wrong, expected)
    with pytest.raises(ConchError, match="returns 1 outputs of the classifier"):
        require_close(file, expected[:1], expected)


def test_answers_yes_and_no_are_compared_as_logarithms_of_probabilities(tmp_path: Path) -> None:
    file, chances = file_with(tmp_path, F32, "qwen3"), np.array([1e-6, 1], np.float32)
    require_close(file, chances, np.log(chances))
    require_close(file, np.array([0, 1], np.float32), np.array([-120, 0], np.float32))
    with pytest.raises(ConchError, match="an output of its classifier differs by 2"):
        require_close(file, chances * [10, 1], np.log(chances))


def test_tensors_of_a_file_are_those_of_its_task(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(bert(tmp_path, MEAN), Options())
    assert (checkpoint.task, checkpoint.engine, checkpoint.max_length) == ("feature-extraction", "llamacpp", 16)
    outputs = {spec.name: spec.dims for spec in describe_task(checkpoint).outputs}
    assert outputs["embedding"] == (2,)
    bert(tmp_path, RANK)
    checkpoint = Checkpoint.open(tmp_path, Options())
    assert checkpoint.task == "text-ranking"
    assert [spec.name for spec in describe_task(checkpoint).inputs][:2] == ["text_input", "text_pair"]
