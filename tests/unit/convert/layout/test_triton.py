"""The three models for NVIDIA's server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from conch.backends.tasks.encoders.encoder_task import PaddedBatch
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.config import pbtxt
from conch.config.schema import ModelConfig
from conch.convert.layout import TEMPLATE, EnsembleModels
from conch.core.errors import ConchError
from conch.repository.checks.repository import check
from tests.text_checkpoints import TEXTS
from tests.unit.convert.layout.onnx_encoders import graph


def configs(folder: Path) -> dict[str, ModelConfig]:
    found = {}
    for path in sorted(folder.glob("*/config.pbtxt")):
        found[path.parent.name] = pbtxt.parse(path.read_text(), str(path))
    return found


@pytest.mark.parametrize(
    ("task", "output", "texts", "inputs", "names"),
    [
        ("feature-extraction", "sentence_embedding", ["TEXT"], ["input_ids", "attention_mask"], ["output"]),
        ("text-classification", "logits", ["TEXT"], ["input_ids", "attention_mask"], ["output"]),
        (
            "text-ranking",
            "logits",
            ["TEXT", "TEXT_PAIR"],
            ["input_ids", "attention_mask", "token_type_ids"],
            ["output"],
        ),
    ],
)
def test_trio_is_three_models_that_fit(
    checkpoint: Checkpoint,
    tmp_path: Path,
    task: str,
    output: str,
    texts: list[str],
    inputs: list[str],
    names: list[str],
) -> None:
    source = graph(tmp_path / "source.onnx", output)
    (tmp_path / "source.onnx.data").write_text("weights")
    checkpoint.task = task

    ensemble = EnsembleModels("m", task)
    ensemble.write(tmp_path / "out", checkpoint, [source, tmp_path / "source.onnx.data"], 0)

    found = configs(tmp_path / "out")
    assert sorted(found) == sorted(ensemble.names)
    assert check([tmp_path / "out"]) == []
    inference, model, tokenize = (found[f"m_onnx_{name}"] for name in ("inference", "model", "tokenize"))
    assert [one.name for one in inference.input] == [one.name for one in tokenize.input] == texts
    assert [one.name for one in model.input] == [one.name for one in tokenize.output] == inputs
    assert [one.name for one in inference.output] == names
    # Whole shapes: perf_analyzer's --shape input_ids:8,384 and TEXT:1.
    assert {config.max_batch_size for config in found.values()} == {0}
    assert list(model.input[0].dims) == [-1, -1] and list(inference.input[0].dims) == [-1]
    version = tmp_path / "out" / "m_onnx_model" / "1"
    assert sorted(path.name for path in version.iterdir()) == ["model.onnx", "source.onnx.data"]
    assert (tmp_path / "out" / "m_onnx_inference" / "1").is_dir()


def test_network_of_images_has_no_trio(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pixels = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["n", 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])
    node = helper.make_node("Identity", ["pixel_values"], ["logits"])
    model = helper.make_model(helper.make_graph([node], "tiny", [pixels], [logits]))
    onnx.save(model, tmp_path / "source.onnx")

    with pytest.raises(ConchError, match="text networks; this one takes pixel_values"):
        EnsembleModels("m", "image-classification").write(tmp_path, checkpoint, [tmp_path / "source.onnx"], 0)


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What the tokenizer's model needs of Triton's module."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor = lambda name, array: (name, array)  # type: ignore[attr-defined]
    module.TritonError = str  # type: ignore[attr-defined]
    module.InferenceResponse = lambda tensors=None, error=None: SimpleNamespace(  # type: ignore[attr-defined]
        outputs=dict(tensors or []), error=error
    )
    module.get_input_tensor_by_name = lambda request, name: SimpleNamespace(  # type: ignore[attr-defined]
        as_numpy=lambda: np.array(request[name], np.object_)
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    yield module


def tokenizer_model(checkpoint: Checkpoint, *texts: str, **parameters: str) -> Any:
    """The model of the trio's first step, initialised."""
    space: dict[str, Any] = {}
    exec(compile(TEMPLATE.read_text(), str(TEMPLATE), "exec"), space)
    values = {"max_length": "8", "pad_id": "0", **parameters}
    model = space["TritonPythonModel"]()
    model.initialize({
        "model_config": json.dumps({
            "parameters": {name: {"string_value": value} for name, value in values.items()},
            "input": [{"name": name} for name in texts],
            "output": [{"name": name} for name in ("input_ids", "attention_mask", "token_type_ids")],
        }),
        "model_repository": str(checkpoint.directory.parent),
        "model_version": checkpoint.directory.name,
    })  # fmt: skip
    return model


@pytest.mark.usefixtures("pb_utils")
@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_tokenizer_of_the_trio_gives_what_the_backends_gives(checkpoint: Checkpoint, file: str) -> None:
    if file == "vocab.txt":
        tokenizer = (checkpoint.directory / "tokenizer.json").rename(checkpoint.directory / "aside")
        words = sorted(json.loads(tokenizer.read_text())["model"]["vocab"].items(), key=lambda one: one[1])
        (checkpoint.directory / "vocab.txt").write_text("\n".join(word for word, _ in words))
        (checkpoint.directory / "config.json").write_text('{"model_type": "bert"}')
    texts = [text.encode() for text in TEXTS]
    (answer,) = tokenizer_model(checkpoint, "TEXT").execute([{"TEXT": texts}])
    if file == "vocab.txt":
        tokenizer.rename(checkpoint.directory / "tokenizer.json")

    encoder = open_encoder(checkpoint)
    sequences = encoder.encode(TEXTS)[0]
    shape = len(TEXTS), max(len(tokens.ids) for tokens in sequences)
    expected = PaddedBatch(sequences, (), encoder.pad_id, shape).arrays(answer.outputs, types=True)
    for name, array in answer.outputs.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.usefixtures("pb_utils")
def test_tokenizer_of_the_trio_takes_pairs(checkpoint: Checkpoint) -> None:
    model = tokenizer_model(checkpoint, "TEXT", "TEXT_PAIR")

    good, uneven = model.execute([{"TEXT": [b"a", b"b"], "TEXT_PAIR": [b"c", b"d"]}, {"TEXT": [b"a"], "TEXT_PAIR": []}])

    assert set(good.outputs["token_type_ids"][0].tolist()) == {0, 1}
    prompted = tokenizer_model(checkpoint, "TEXT", "TEXT_PAIR", prompt="a ")
    (answer,), (expected,) = (
        tokenizer.execute([{"TEXT": [text], "TEXT_PAIR": [b"a"]}])
        for tokenizer, text in ((prompted, b"b"), (model, b"a b"))
    )
    np.testing.assert_array_equal(answer.outputs["input_ids"], expected.outputs["input_ids"])
    assert uneven.error == "input 'TEXT_PAIR' has no text"


@pytest.mark.usefixtures("pb_utils")
def test_bad_text_fails_its_request_alone(checkpoint: Checkpoint) -> None:
    bad, good = tokenizer_model(checkpoint, "TEXT").execute([{"TEXT": [b"a", b"b\xff"]}, {"TEXT": [b"a"]}])

    assert bad.error == "input 'TEXT' is not valid UTF-8: element 1, byte 1"
    assert good.error is None
