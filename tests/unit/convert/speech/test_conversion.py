"""Whole conversions of a tiny Whisper, whose transcripts in PyTorch are the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino")

import transformers

from conch.convert.report.table import short_report
from conch.convert.run import ConvertedModel, convert
from conch.convert.speech import export
from conch.convert.speech.conversion import BUILT_IN, MIN_WORDS, load_recordings
from conch.core.errors import Code, ConchError
from conch.measure.reports.text import markdown
from tests import task_checkpoints
from tests.convert_checkpoints import no_progress, quick_plan, spoken


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def converted(whisper: Path, tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    # As many words as a precision below fp32 needs; what the random network writes has nothing to do with them.
    data = spoken(tmp_path_factory.mktemp("data"), ["word " * (MIN_WORDS // 3)] * 3)
    plan = quick_plan(whisper, tmp_path_factory.mktemp("models"), data=data, batch_sizes=(1, 2), quantize=("bf16",))
    return convert(plan, no_progress)


def test_exports_transcribe_like_the_checkpoint(converted: ConvertedModel) -> None:
    variants = {variant.name: variant for variant in converted.manifest.variants}
    assert list(variants) == ["torch-fp32", "openvino-fp32", "openvino-bf16"]
    exported = variants["openvino-fp32"]
    assert exported.passed
    assert exported.agreement["transcripts"]["identical"] == 1
    assert exported.agreement["word_error_rate"]["delta"] == 0
    assert [(latency.batch, latency.tokens) for latency in exported.latency] == [(1, 20), (2, 20)]
    assert exported.disk_bytes > 0
    assert variants["openvino-bf16"].path == exported.path


def test_report_has_the_word_error_rates(converted: ConvertedModel) -> None:
    text = markdown(short_report(converted.manifest))
    rate = converted.manifest.variants[0].agreement["word_error_rate"]["value"]
    assert f"word error rate {100 * rate:.2f} %" in text
    assert "changed 0.00 %" in text


def test_checkpoint_at_chance_is_warned_of(converted: ConvertedModel) -> None:
    assert any("own word error rate" in warning for warning in converted.manifest.warnings)


def test_variant_that_writes_other_words_is_refused(
    whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, other = export.write, transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    for parameter in other.model.encoder.parameters():
        parameter.data.neg_()

    def of_another(graphs: dict[str, Any], folder: Path, precision: str) -> Path:
        return write(export.export(other) if precision == "int8" else graphs, folder, precision)

    monkeypatch.setattr(export, "write", of_another)
    plan = quick_plan(whisper, tmp_path / "models", data=spoken(tmp_path, ["one", "two", "three"]), batch_sizes=(1,))
    refused = {variant.name: variant for variant in convert(plan, no_progress).manifest.variants}["openvino-int8"]
    assert not refused.passed
    assert any("of the words differ from the reference's transcripts" in reason for reason in refused.reasons)
    assert refused.reasons[-1] == f"3 words are too few to judge int8: at least {MIN_WORDS} are needed"


def test_graph_with_other_logits_is_not_written(whisper: Path, tmp_path: Path) -> None:
    network = transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    export.write(export.export(network), tmp_path, "fp32")
    export.verify(tmp_path, network)
    network.proj_out.weight.data.mul_(1.01)
    with pytest.raises(ConchError, match="differ from torch's by"):
        export.verify(tmp_path, network)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backends": ("onnx",)}, "--backend onnx does not run a converted Whisper"),
        ({"backends": ("torch",)}, "add openvino to --backend"),
        ({"quantize": ("int4",)}, "--quantize int4 is not supported for Whisper: choose from int8, bf16, none"),
        ({"sequence_lengths": (400,)}, "at most 20 tokens"),
        ({"expect": "1x20:1"}, "leave it out for speech recognition"),
        ({"data": "text"}, "needs the column 'audio', which row 1 lacks"),
        ({"data": "lost"}, "lost.wav cannot be read"),
    ],
)
def test_options_for_other_models_are_refused(
    whisper: Path, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    if "data" in given:
        file = tmp_path / "data.jsonl"
        file.write_text('{"text": "words"}' if given["data"] == "text" else '{"audio": "lost.wav"}')
        given = {"data": file}
    with pytest.raises(ConchError, match=message) as refused:
        convert(quick_plan(whisper, tmp_path / "models", **given), no_progress)
    assert refused.value.code is Code.INVALID_ARG


def test_other_models_that_transcribe_are_refused(tmp_path: Path) -> None:
    model = task_checkpoints.ctc(tmp_path / "ctc")
    with pytest.raises(ConchError, match=r"only Whisper can be converted; .* is 'wav2vec2'") as refused:
        convert(quick_plan(model, tmp_path / "models"), no_progress)
    assert refused.value.code is Code.UNSUPPORTED


def test_built_in_recordings_have_enough_words() -> None:
    every, english = (load_recordings(BUILT_IN, 16_000, english=english) for english in (False, True))
    assert len(every.samples) == len(every.texts) > len(english.texts)
    assert all(5 < len(samples) / 16_000 < 30 for samples in every.samples)
    assert sum(len(text.split()) for text in english.texts) >= MIN_WORDS
