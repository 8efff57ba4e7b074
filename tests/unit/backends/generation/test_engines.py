"""The engine that a model gets: one that computes the weights of a GGUF file, and supports the model's parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.generation_backend import choose_engine, open_engine
from conch.backends.generation.options import engine_spec, library_arguments
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import openvino_problem, other_engines, read_gguf
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.fakes import llama_cpp
from tests.unit.backends.generation.fake_engine import FakeEngine
from tests.unit.checkpoints.gguf_files import write_model

MATRIX = "blk.0.ffn_up.weight"


@pytest.fixture(autouse=True)
def without_llamacpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


def file_with(folder: Path, name: str, kind: int, architecture: str = "llama") -> Path:
    """A file with a tensor of this type."""
    dimensions = (256, 64) if name.endswith("weight") else (256,)
    return write_model(folder / "m.gguf", tensors={name: (dimensions, kind)}, architecture=architecture, width=256)


@pytest.mark.parametrize("kind", [1, 2, 3, 8, 12, 14])
def test_types_that_openvino_computes_are_served_by_it(tmp_path: Path, kind: int) -> None:
    checkpoint = Checkpoint.open(file_with(tmp_path, MATRIX, kind).parent, Options())
    assert choose_engine(checkpoint, on_gpu=False) == checkpoint.engine == "openvino"
    assert choose_engine(checkpoint, on_gpu=True) == "transformers"


@pytest.mark.parametrize("text", ["", "{}"])
def test_files_without_adapters_are_served_by_openvino(tmp_path: Path, text: str) -> None:
    options = Options.from_values({"lora_modules": text})
    checkpoint = Checkpoint.open(file_with(tmp_path, MATRIX, 8).parent, options)
    assert choose_engine(checkpoint, on_gpu=False) == checkpoint.engine == "openvino"


def test_files_with_adapters_are_served_by_transformers_and_refused_by_openvino(tmp_path: Path) -> None:
    options = Options.from_values({"lora_modules": {"pirate": "adapters/pirate"}})
    checkpoint = Checkpoint.open(file_with(tmp_path, MATRIX, 8).parent, options)
    assert choose_engine(checkpoint, on_gpu=False) == checkpoint.engine == "transformers"
    assert checkpoint.openvino_problem == "OpenVINO GenAI ignores LoRA adapters of a GGUF file"
    adapters = {"pirate": tmp_path}
    with pytest.raises(ConchError, match=f"cannot serve .*: {checkpoint.openvino_problem}") as refused:
        open_engine("openvino", EngineSpec(tmp_path, checkpoint.config, (), gguf=checkpoint.gguf, adapters=adapters))
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear"),
        ({"scaling.factor": 4.0}, "linear"),
        ({"scale_linear": 4.0}, "linear"),
        ({"scaling.type": "yarn", "scaling.factor": 1.0}, "yarn"),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, ""),
        ({"scaling.type": "none", "scaling.factor": 4.0}, ""),
        ({"scaling.factor": 0.0}, ""),
    ],
)
def test_files_that_scale_rotary_frequencies_are_not_served_by_openvino(
    tmp_path: Path, metadata: dict[str, object], scaling: str
) -> None:
    metadata = {f"llama.rope.{key}": value for key, value in metadata.items()}
    write_model(tmp_path / "m.gguf", metadata)
    checkpoint = Checkpoint.open(tmp_path, Options())
    assert choose_engine(checkpoint, on_gpu=False) == ("transformers" if scaling else "openvino")
    problem = f"OpenVINO GenAI ignores its scaling of rotary frequencies, '{scaling}'"
    assert checkpoint.openvino_problem == (problem if scaling else "")


@pytest.mark.parametrize(
    "key", ["general.file_type", "llama.attention.layer_norm_rms_epsilon", "llama.attention.head_count"]
)
def test_file_without_metadata_that_openvino_needs_is_not_served_by_it(tmp_path: Path, key: str) -> None:
    file = read_gguf(write_model(tmp_path / "m.gguf", {key: None}))
    assert openvino_problem(file, "llama", adapters=False) == f"OpenVINO GenAI needs {key}, which is missing"


def test_a_factor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", {"llama.rope.scaling.factor": "4"})
    with pytest.raises(ConchError, match=f"{path}: llama.rope.scaling.factor must be a finite number") as refused:
        choose_engine(Checkpoint.open(tmp_path, Options()), on_gpu=False)
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("name", "kind", "architecture", "problem"),
    [
        (MATRIX, 0, "llama", "OpenVINO GenAI does not read matrices of type F32, such as 'blk.0.ffn_up.weight'"),
        (MATRIX, 30, "llama", "does not read tensors of type BF16"),
        (MATRIX, 6, "llama", "does not read tensors of type Q5_0"),
        (MATRIX, 13, "qwen2", "does not read tensors of type Q5_K"),
        (MATRIX, 39, "qwen3", "does not read tensors of type MXFP4"),
        (MATRIX, 8, "gemma2", "OpenVINO GenAI supports GGUF files of llama, qwen2, qwen3, not of 'gemma2'"),
        ("blk.0.attn_sinks", 0, "llama", "OpenVINO GenAI ignores tensor 'blk.0.attn_sinks'"),
    ],
)
def test_other_files_are_served_by_transformers_and_refused_by_openvino(
    tmp_path: Path, name: str, kind: int, architecture: str, problem: str
) -> None:
    path = file_with(tmp_path, name, kind, architecture)
    checkpoint = Checkpoint.open(tmp_path, Options())
    assert choose_engine(checkpoint, on_gpu=False) == checkpoint.engine == "transformers"
    assert problem in checkpoint.openvino_problem
    others = "; set parameter 'engine' to 'llamacpp' or 'transformers'"
    with pytest.raises(ConchError, match=f"engine 'openvino' cannot serve {path}: .*{problem}.*{others}") as refused:
        open_engine("openvino", EngineSpec(tmp_path, checkpoint.config, (), gguf=checkpoint.gguf))
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("kind", "architecture", "adapter", "expected"),
    [
        (8, "llama", "", "llamacpp"),
        (13, "gemma2", "", "llamacpp"),
        (8, "llama", "red.gguf", "llamacpp"),
        (8, "llama", "red", "llamacpp"),
        (8, "mamba", "red", "transformers"),
        (26, "llama", "", "transformers"),
    ],
)
def test_files_are_served_by_llamacpp_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, architecture: str, adapter: str, expected: str
) -> None:
    file_with(tmp_path, MATRIX, kind, architecture)
    options = Options.from_values({"lora_modules": {"red": adapter}} if adapter else {})
    checkpoint = Checkpoint.open(tmp_path, options)
    assert choose_engine(checkpoint, on_gpu=False) != "llamacpp"
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)
    assert choose_engine(checkpoint, on_gpu=False) == checkpoint.engine == expected
    assert choose_engine(checkpoint, on_gpu=True) == "transformers"


def test_folder_is_not_served_by_llamacpp(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    message = f"engine 'llamacpp' needs a GGUF file: {tmp_path} has none"
    with pytest.raises(ConchError, match=message) as refused:
        Checkpoint.open(tmp_path, Options(engine="llamacpp"))
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("kind", "architecture", "adapters", "others"),
    [
        (8, "llama", [], "'llamacpp' or 'transformers'"),
        (8, "llama", ["a.gguf"], "'llamacpp'"),
        (8, "llama", ["a"], "'llamacpp' or 'transformers'"),
        (8, "mamba", ["a"], "'transformers'"),
        (26, "llama", ["a.gguf"], "another engine"),
    ],
)
def test_refusals_name_the_engines_that_may_serve_the_file(
    tmp_path: Path, kind: int, architecture: str, adapters: list[str], others: str
) -> None:
    file = read_gguf(file_with(tmp_path, MATRIX, kind, architecture))
    assert other_engines(file, adapters, without="openvino") == others


def test_arguments_of_llamacpp_are_parameters_of_the_model() -> None:
    options = Options.from_values({"n_gpu_layers": 8, "type_k": "q8_0"})
    assert library_arguments("llamacpp", options) == {"n_gpu_layers": "8", "type_k": "q8_0"}
    assert library_arguments("openvino", Options()) == {}
    message = "parameter 'n_gpu_layers' is for engine 'llamacpp', but the model runs on engine 'openvino'"
    with pytest.raises(ConchError, match=message) as refused:
        library_arguments("openvino", options)
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("supported", [True, False])
def test_engine_whose_results_depend_on_the_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    engine = FakeEngine()
    engine.batch_invariant = supported
    monkeypatch.setitem(sys.modules, "conch.backends.engines.fake", SimpleNamespace(open=lambda spec: engine))
    assert open_engine("fake", EngineSpec(tmp_path, {}, ())) is engine
    spec = EngineSpec(tmp_path, {}, (), batch_invariant=True)
    if supported:
        assert open_engine("fake", spec) is engine
        return
    with pytest.raises(ConchError, match="parameter 'batch_invariant' is not supported by engine 'fake'") as refused:
        open_engine("fake", spec)
    assert refused.value.code is Code.INVALID_ARG
    assert engine.closed


@pytest.mark.parametrize(("values", "expected"), [({}, False), ({"batch_invariant": True}, True)])
def test_batch_invariance_is_a_parameter_of_the_model(
    tmp_path: Path, values: dict[str, object], expected: bool
) -> None:
    checkpoint = Checkpoint.open(file_with(tmp_path, MATRIX, 8).parent, Options.from_values(values))
    spec = engine_spec(checkpoint, {"kind": "CPU", "device_id": 0}, None)
    assert spec.batch_invariant == expected
