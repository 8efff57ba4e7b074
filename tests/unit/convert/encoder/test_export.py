"""Networks to ONNX: names, dynamic sizes, agreement with torch, and the second exporter where the first fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    BertConfig,
    DistilBertConfig,
    LongformerConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from conch.convert.encoder import export, network
from conch.convert.encoder.network import ReferenceNetwork, compare, is_large, open_session, run, verify_graph
from conch.core.errors import Code, ConchError
from tests.convert_checkpoints import encoder

TEXT = ("input_ids", "attention_mask")
CASES: dict[str, tuple[type[PreTrainedConfig], str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "bert": (BertConfig, "feature-extraction", {}, (*TEXT, "token_type_ids"), ("last_hidden_state",)),
    "roberta": (RobertaConfig, "text-ranking", {"pad_token_id": 1, "type_vocab_size": 1}, TEXT, ("logits",)),
    "distilbert": (DistilBertConfig, "token-classification", {"num_labels": 5}, TEXT, ("logits",)),
    "mpnet": (MPNetConfig, "question-answering", {"pad_token_id": 1}, TEXT, ("start_logits", "end_logits")),
}


@pytest.mark.parametrize("name", CASES)
def test_network_is_exported_with_dynamic_sizes(name: str, tmp_path: Path) -> None:
    architecture, task, settings, inputs, outputs = CASES[name]
    loaded = network.load(encoder(tmp_path / "checkpoint", architecture, task, **settings))
    path = tmp_path / "model.onnx"

    exporter = export.export(loaded, path)

    assert exporter == "torchscript"
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint", "model.onnx"}
    session = open_session(path)
    assert tuple(tensor.name for tensor in session.get_inputs()) == inputs == loaded.inputs
    assert tuple(output.name for output in session.get_outputs()) == outputs
    arrays = loaded.example(4, 29, seed=5)
    compare(run(session, arrays), loaded.run(arrays), arrays)


def test_second_exporter_is_taken_when_tracing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such operator\nin a long text")

    monkeypatch.setattr(export, "by_tracing", fails)
    loaded = network.load(encoder(tmp_path / "checkpoint", BertConfig, "text-classification"))

    assert export.export(loaded, tmp_path / "model.onnx") == "dynamo"

    verify_graph(tmp_path / "model.onnx", loaded)


def test_network_that_no_exporter_gets_right_is_refused_with_both_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such operator\nin a long text")

    monkeypatch.setattr(export, "by_dynamo", fails)
    # Its windows follow the length that was traced.
    settings = {"attention_window": [8], "num_hidden_layers": 1, "pad_token_id": 1}
    loaded = network.load(encoder(tmp_path / "checkpoint", LongformerConfig, "feature-extraction", **settings))

    with pytest.raises(ConchError) as refused:
        export.export(loaded, tmp_path / "model.onnx")

    assert "torchscript: last_hidden_state differs from torch by" in refused.value.message
    assert refused.value.message.endswith("; dynamo: RuntimeError: no such operator)")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = encoder(tmp_path / "checkpoint", BertConfig, "fill-mask")
    capfd.readouterr()

    export.export(network.load(checkpoint), tmp_path / "model.onnx")

    assert capfd.readouterr() == ("", "")


def test_large_weights_go_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAX_BYTES", 10_000)
    loaded = network.load(encoder(tmp_path / "checkpoint", BertConfig, "feature-extraction"))

    export.export(loaded, tmp_path / "model.onnx")

    assert (tmp_path / "model.onnx.data").stat().st_size > 10_000
    assert is_large(tmp_path / "model.onnx")
    verify_graph(tmp_path / "model.onnx", loaded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value + 0.5, "logits differs from torch by 0.5 for input 2x9; 0.001 is allowed"),
        (lambda value: value * np.nan, "logits differs from torch by nan"),
        (lambda value: value[:1], "logits has shape [1, 2] instead of [2, 2] for input 2x9"),
    ],
)
def test_disagreement_is_named(change: Callable[[Any], Any], message: str) -> None:
    wanted = {"logits": np.zeros((2, 2), np.float32)}

    with pytest.raises(ConchError) as refused:
        compare({"logits": change(wanted["logits"])}, wanted, {"input_ids": np.zeros((2, 9), np.int64)})

    assert message in refused.value.message


def test_padding_does_not_count() -> None:
    mask = np.array([[1, 1, 0]])
    wanted = np.zeros((1, 3, 4), np.float32)
    got = wanted.copy()
    got[0, 2] = 9

    compare({"last_hidden_state": got}, {"last_hidden_state": wanted}, {"attention_mask": mask})


def test_checkpoint_that_does_not_load_is_refused(tmp_path: Path) -> None:
    checkpoint = encoder(tmp_path, BertConfig, "feature-extraction")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")

    with pytest.raises(ConchError) as refused:
        network.load(checkpoint)

    assert refused.value.code is Code.INVALID_ARG
    assert "cannot be loaded as AutoModel" in refused.value.message


def test_examples_are_padded_and_free_of_padding_inside(tmp_path: Path) -> None:
    settings = {"pad_token_id": 1, "type_vocab_size": 1}
    loaded: ReferenceNetwork = network.load(encoder(tmp_path, RobertaConfig, "feature-extraction", **settings))

    arrays = loaded.example(3, 9)

    assert arrays["attention_mask"].sum(1).tolist() == [9, 7, 5]
    assert ((arrays["input_ids"] == 1) == (arrays["attention_mask"] == 0)).all()
