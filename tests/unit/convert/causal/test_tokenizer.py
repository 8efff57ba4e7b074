"""The tokenizer in OpenVINO's form: structured output with it, and what happens where there is none that fits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino_genai")

import openvino
from openvino import opset13
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from conch.backends.engines.openvino import pipelines
from conch.backends.engines.openvino.pipelines import TOKENIZER, misfit
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine
from conch.backends.generation.sampling import Defaults, SamplingOverrides, read_document
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.convert.causal.conversion import write_tokenizer, write_weights
from conch.convert.causal.export import export, load
from conch.convert.report.table import short_report
from conch.convert.run import convert
from conch.core.sampling.parameters import STRUCTURED_OUTPUTS
from conch.measure.reports.text import markdown
from tests.convert_checkpoints import quick_plan
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.tokenizers.tokenizers_made import metaspace

VOCABULARY = 384


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> TextTokenizer:
    return open_tokenizer(bare(llama))


@pytest.fixture(scope="module")
def exported(llama: Path, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with the tokenizer beside it, and nothing of the checkpoint."""
    checkpoint = Checkpoint.open(llama)
    network = load(checkpoint)
    folder = tmp_path_factory.mktemp("exported") / "openvino-int8"
    write_weights(export(network), folder, "int8", [])
    made = folder.with_name("tokenizer")
    assert write_tokenizer(checkpoint, tokenizer, texts(tokenizer), network.vocabulary, made) == ""
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def texts(tokenizer: TextTokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in ("The ferry leaves at seven.", "Grüße aus Zürich, 日本!")]


@pytest.fixture
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, where transformers is not installed."""

    def write(*_: Any, **__: Any) -> None:
        raise ImportError("transformers")

    monkeypatch.setattr(pipelines, "write_tokenizer", write)


def opened(folder: Path, llama: Path, *, eos_ids: tuple[int, ...] = (1,), **changes: Any) -> GenerationEngine:
    config = {**json.loads((llama / "config.json").read_text()), **changes}
    return open_engine("openvino", EngineSpec(folder, config, eos_ids, threads=1, cache_tokens=1024))


def answered(engine: GenerationEngine, tokenizer: TextTokenizer, structure: dict[str, Any]) -> str:
    asked = SamplingOverrides()
    read_document(asked, json.dumps({"structured_outputs": structure}), "sampling_parameters")
    engine.add(EngineRequest(0, tokenizer.encode("a ferry"), Defaults().sampling(asked, 20)))
    ids: list[int] = []
    while engine.busy:
        for progress in engine.step():
            assert not progress.error
            ids += progress.tokens
    return tokenizer.decode(ids)


@pytest.mark.usefixtures("unconverted")
def test_structured_output_needs_only_the_files_beside_the_graph(
    exported: Path, llama: Path, tokenizer: TextTokenizer
) -> None:
    engine = opened(exported, llama)

    assert engine.features >= STRUCTURED_OUTPUTS
    assert answered(engine, tokenizer, {"choice": ["yes", "no"]}) in ("yes", "no")


@pytest.mark.usefixtures("unconverted")
def test_a_tokenizer_with_more_tokens_than_the_network_is_not_used(
    exported: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With it the mask would be written beyond the logits."""
    engine = opened(exported, llama, vocab_size=VOCABULARY - 1)

    assert not STRUCTURED_OUTPUTS & engine.features
    assert "the tokenizer has 384 tokens and the network only 383" in caplog.text
    assert misfit(exported, VOCABULARY) == misfit(exported, VOCABULARY + 8) == ""


@pytest.mark.usefixtures("unconverted")
def test_a_tokenizer_with_tokens_of_other_texts_is_not_used(
    exported: Path, llama: Path, tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((llama / "config.json").read_text())
    spec = EngineSpec(exported, config, (1,), threads=1, cache_tokens=1024, tokenizer=tokenizer)
    assert open_engine("openvino", spec).features >= STRUCTURED_OUTPUTS

    other = open_tokenizer(bare(llama))
    other.fast.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("f", "F")])
    engine = open_engine("openvino", replace(spec, tokenizer=other))

    assert not STRUCTURED_OUTPUTS & engine.features
    assert f"no structured output for {exported}: in OpenVINO's tokenizer token" in caplog.text


def test_a_tokenizer_that_does_not_tell_its_tokens_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / TOKENIZER[1]
    file.write_text("no graph")
    assert misfit(tmp_path, VOCABULARY) == "OpenVINO's tokenizer cannot be read"

    ids = opset13.parameter([-1, -1], openvino.Type.i64, name="ids")
    openvino.save_model(openvino.Model([opset13.result(ids)], [ids], "none"), file)
    assert misfit(tmp_path, VOCABULARY) == "OpenVINO's tokenizer has no list of tokens"


def test_spaces_and_bytes_of_sentencepiece_are_spelt_as_in_texts(exported: Path, llama: Path, tmp_path: Path) -> None:
    fast = metaspace()
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, str(tmp_path), "", {}, Options(), task="text-generation")
    tokenizer, size = open_tokenizer(bare(tmp_path)), fast.get_vocab_size()

    problem = write_tokenizer(checkpoint, tokenizer, texts(tokenizer), size, tmp_path / "made")

    assert problem == ""
    for file in exported.glob("openvino_model.*"):
        shutil.copy(file, tmp_path / "made")
    engine = opened(tmp_path / "made", llama, eos_ids=(2,))
    assert answered(engine, tokenizer, {"regex": "é a日本"}) == "é a日本"


def test_a_tokenizer_that_means_other_texts_is_not_written(
    llama: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, ids = Checkpoint.open(llama), texts(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", lambda ids: "something else")

    problem = write_tokenizer(checkpoint, tokenizer, ids, VOCABULARY, tmp_path / "made")

    assert problem == "OpenVINO's tokenizer reads tokens as another text"
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.usefixtures("unconverted")
def test_the_report_says_that_there_is_no_structured_output(llama: Path, tmp_path: Path) -> None:
    plan = quick_plan(llama, tmp_path, quantize=("none",), batch_sizes=(1,), sequence_lengths=(16,))
    steps: list[str] = []

    converted = convert(plan, steps.append)

    assert "structured output will not be available: ImportError: transformers" in steps
    assert "- structured output: not available on OpenVINO: ImportError: transformers" in markdown(
        short_report(converted.manifest)
    )
    assert not list(tmp_path.glob("m/1/*/openvino_tokenizer.xml"))
