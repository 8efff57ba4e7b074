"""Whole conversions of tiny language models, with the time for measuring set to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino")

import torch
from transformers import LlamaConfig, Qwen2Config

from conch.backends.engines.openvino.decoder import Precision
from conch.backends.generation.engine import EngineRequest
from conch.backends.generation.generation_backend import choose_engine, open_engine
from conch.backends.generation.options import engine_spec
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Latency, Manifest
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.convert.causal import conversion
from conch.convert.causal.agreement import ServedGraph, spec_of
from conch.convert.causal.conversion import Texts, run_of, shapes
from conch.convert.causal.export import export, load
from conch.convert.measure import measure
from conch.convert.plan import Plan
from conch.convert.report.page import report
from conch.convert.report.table import short_report
from conch.convert.run import ConvertedModel, convert
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import STRUCTURED_OUTPUTS, SamplingParams
from conch.core.sampling.structures import Structure
from conch.machine.processes import Interference
from conch.measure.reports.text import markdown
from conch.measure.texts.shapes import Shape
from tests.convert_checkpoints import causal, no_progress, quick_plan
from tests.unit.backends.engines.driving import finished


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal(tmp_path_factory.mktemp("qwen2"), Qwen2Config, num_key_value_heads=2)


def plan(model: Path, repository: Path, **given: Any) -> Plan:
    return quick_plan(model, repository, **{"batch_sizes": (1, 2), "sequence_lengths": (16,), **given})


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    return convert(plan(llama, tmp_path_factory.mktemp("models")), no_progress)


def test_usual_variants_pass_and_are_measured(converted: ConvertedModel) -> None:
    names = ["torch-fp32", "openvino-fp32", "openvino-int8", "openvino-int4"]
    found = {variant.name: variant for variant in converted.manifest.variants}

    assert list(found) == names
    assert [found[name].passed for name in names] == [False, True, True, True], found
    for one in found.values():
        assert [(run.batch, run.tokens) for run in one.latency] == [(1, 1), (2, 1), (1, 16)]
        assert set(one.agreement) == {"perplexity", "top_1", "greedy"}
    assert found["openvino-fp32"].agreement["greedy"]["prefix"] >= 0.9
    assert found["openvino-int8"].agreement["top_1"]["value"] > 0.95
    assert converted.manifest.auto.startswith("openvino-")
    assert 0 < found["openvino-int8"].disk_bytes < 700_000
    assert found["torch-fp32"].disk_bytes > 300_000


def test_a_converted_model_is_a_checkpoint_with_variants(converted: ConvertedModel) -> None:
    (folder,) = converted.folders

    checkpoint = Checkpoint.open(folder / "1", Options(variant="openvino-int4"))

    assert checkpoint.task == "text-generation"
    graph = checkpoint.graph_file("openvino")
    assert graph == folder / "1" / "openvino-int4" / "openvino_model.xml"
    assert graph.with_suffix(".bin").is_file()
    assert checkpoint.has("tokenizer.json", "generation_config.json", "config.json")
    assert not checkpoint.has("model.safetensors")
    assert (folder / "config.pbtxt").read_text().count("parameters") == 1  # threads
    assert Manifest.read(folder / "1") == converted.manifest


@pytest.mark.parametrize("capabilities", [("FP32",), ("FP32", "BF16")])
def test_the_server_computes_as_the_verdict_did(converted: ConvertedModel, capabilities: tuple[str, ...]) -> None:
    (folder,) = converted.folders
    parameters = {"threads": {"string_value": "1"}}
    assert 'key: "threads" value { string_value: "1" }' in (folder / "config.pbtxt").read_text()
    judged = {}
    for variant in converted.manifest.variants[1:]:
        chosen = {**parameters, "variant": {"string_value": variant.name}}
        checkpoint = Checkpoint.open(folder / "1", Options.from_config({"parameters": chosen}))
        assert choose_engine(checkpoint, on_gpu=False) == variant.engine
        serves = engine_spec(checkpoint, {"kind": "CPU", "device_id": 0}, None)
        judges = spec_of(folder / "1" / variant.path, variant.precision, checkpoint.config, 1)

        judged[variant.precision] = Precision.of(judges, capabilities)
        assert Precision.of(serves, capabilities) == judged[variant.precision]
        assert serves.directory == judges.directory and serves.threads == judges.threads

    quantised = Precision("f32", "f16")
    assert judged == {"fp32": Precision("f32", "f32", exact=True), "int8": quantised, "int4": quantised}


def test_a_converted_model_has_structured_output_from_the_tokenizer_of_the_checkpoint(
    converted: ConvertedModel,
) -> None:
    pytest.importorskip("llguidance")
    (folder,) = converted.folders
    checkpoint = Checkpoint.open(folder / "1", Options(variant="openvino-int8"))
    tokenizer = open_tokenizer(checkpoint)
    engine = open_engine("openvino", engine_spec(checkpoint, {"kind": "CPU", "device_id": 0}, tokenizer))
    assert engine.features >= STRUCTURED_OUTPUTS

    sampling = SamplingParams(max_tokens=20, structured_outputs=Structure("choice", '["yes", "no, größer"]'))
    done = finished(engine, *(EngineRequest(number, tokenizer.encode("a ferry"), sampling) for number in range(4)))

    for number in range(4):
        made = [token for progress in done if progress.id == number for token in progress.tokens]
        assert tokenizer.decode(made, skip_special_tokens=True) in ("yes", "no, größer")
    assert {progress.finish for progress in done} == {"", "stop"}


def test_the_report_is_in_tokens_a_second(converted: ConvertedModel) -> None:
    text = markdown(short_report(converted.manifest))

    assert "| write x1 tok/s | read 16 tok/s | write x2 tok/s |" in text
    assert "perplexity" in text and "next token 1.0000" in text and " MB |" in text
    assert "cosine" not in text
    titles = [section.title for section in report(converted.manifest).sections]
    assert titles[:3] == ["Choice of the variant", "Speed by shape", "Differences of outputs"]


def test_torch_serves_where_it_is_asked_for(qwen2: Path, tmp_path: Path) -> None:
    made = convert(plan(qwen2, tmp_path, backends=("pytorch", "openvino"), quantize=("int8",)), no_progress)

    assert [variant.passed for variant in made.manifest.variants] == [True, True, True], made.manifest.variants
    assert (made.folders[0] / "1" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def spoilt(llama: Path) -> Any:
    """The export of the model with noise in its weights."""
    network = load(Checkpoint.open(llama))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += noise * parameter.std() if parameter.dim() > 1 else 0
    return export(network)


def spoil(monkeypatch: pytest.MonkeyPatch, model: Any, wanted: str) -> None:
    """Have the files of one precision made from ``model``."""
    real = conversion.write_weights

    def write(right: Any, folder: Path, precision: str, texts: Any) -> Path:
        return real(model.clone() if precision == wanted else right, folder, precision, texts)

    monkeypatch.setattr(conversion, "write_weights", write)


def test_a_variant_whose_weights_are_wrong_is_refused(
    llama: Path, spoilt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, spoilt, "int8")
    steps: list[str] = []

    made = convert(plan(llama, tmp_path, quantize=("int8",)), steps.append)

    found = {variant.name: variant for variant in made.manifest.variants}
    assert not found["openvino-int8"].passed and made.manifest.auto == "openvino-fp32"
    assert any(step.startswith("openvino-int8 refused: perplexity") for step in steps), steps
    assert not (made.folders[0] / "1" / "openvino-int8").exists()


def test_a_variant_that_cannot_be_measured_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ServedGraph.__init__

    def decode(prompts: Any, count: int) -> list[float]:
        raise RuntimeError("the cache is full")

    def init(served: ServedGraph, graph: Path, precision: str, *arguments: Any, **options: Any) -> None:
        real(served, graph, precision, *arguments, **options)
        if precision == "int8":
            monkeypatch.setattr(served, "decode", decode)

    monkeypatch.setattr(ServedGraph, "__init__", init)
    steps: list[str] = []

    made = convert(plan(llama, tmp_path, quantize=("int8",)), steps.append)

    assert "openvino-int8: it does not run: RuntimeError: the cache is full" in steps
    assert [variant.passed for variant in made.manifest.variants] == [False, True, False]


def test_nothing_is_written_when_the_export_is_wrong(
    llama: Path, spoilt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, spoilt, "fp32")

    with pytest.raises(ConchError, match=r"serve the checkpoint directly \(engine transformers\)") as caught:
        convert(plan(llama, tmp_path, quantize=("int8",)), no_progress)

    assert caught.value.code is Code.INVALID_ARG
    assert "openvino-int8: openvino-fp32, from which it was made, was refused" in caught.value.message
    assert not list(tmp_path.glob("m"))


def test_a_model_that_no_export_fits_is_refused_in_a_sentence(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = causal(tmp_path / "llama", LlamaConfig, num_key_value_heads=2, rope_parameters=rope)

    with pytest.raises(ConchError, match=r"its positions \('dynamic'\).*: serve the checkpoint directly"):
        convert(plan(folder, tmp_path / "models"), no_progress)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backends": ("onnx",)}, "--backend onnx does not run converted language models"),
        ({"backends": ("torch",)}, "add openvino to --backend"),
        ({"quantize": ("int8-static",)}, "--quantize int8-static is not supported for language models"),
        ({"layout": "triton"}, "--layout triton is for encoders"),
        ({"sequence_lengths": (256,)}, "--seq-len 256 is more than the model accepts: at most 255"),
    ],
)
def test_what_is_not_for_language_models_is_refused(
    given: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConchError, match=said):
        convert(plan(llama, tmp_path, **given), no_progress)


class Counting:
    """Takes a millisecond for each token that is there, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def prefill(self, prompt: Any) -> float:
        self.now += len(prompt) / 1000
        return len(prompt) / 1000

    def decode(self, prompts: Any, count: int) -> list[float]:
        self.now += count * len(prompts) / 1000
        return [1.0] + [len(prompts) / 1000] * (count - 1)


def test_measuring_leaves_out_first_runs_and_ends_with_its_budget(tmp_path: Path) -> None:
    runs, texts = Counting(), Texts([list(range(50))], [], [])

    def measured(shape: Shape, seconds: float) -> Latency:
        network: Any = runs
        rounds = {shape: {"m": run_of(network, shape, texts, 256)}}
        return measure(rounds, seconds, others=Interference, clock=runs.clock)["m"][0]

    reading = measured(Shape(1, 100), 1)
    writing = measured(Shape(4, 1), 0)

    assert (reading.batch, reading.tokens, reading.median_ms) == (1, 100, 100)
    assert (writing.batch, writing.tokens, writing.max_ms) == (4, 1, 4)
    assert shapes(Plan("m", tmp_path), 200) == [Shape(1, 1), Shape(8, 1), Shape(1, 128), Shape(1, 199)]
