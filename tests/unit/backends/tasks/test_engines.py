"""The engines, and which one runs a checkpoint."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import openvino
import pytest
import torch
from onnx import helper
from transformers import BertConfig, BertForSequenceClassification, BertModel

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines import (
    WORTH_COMPILING,
    EnginesByShape,
    NetworkEngine,
    OnnxRuntimeEngine,
    OpenVinoEngine,
    TorchEngine,
    choose,
    open_engine,
)
from conch.backends.tasks.huggingface_backend import make_task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests import onnx_graphs, text_checkpoints

Open = Callable[..., NetworkEngine]


def _onnxruntime(path: Path, **settings: Any) -> NetworkEngine:
    return OnnxRuntimeEngine(path, **settings)


def _openvino(path: Path, **settings: Any) -> NetworkEngine:
    target = path.with_suffix(".xml")
    openvino.save_model(openvino.Core().read_model(path), target, compress_to_fp16=False)
    return OpenVinoEngine(target, **settings)


GRAPHS = pytest.mark.parametrize("open_graph", [_onnxruntime, _openvino])


def _tokens(rows: int, length: int) -> dict[str, Array]:
    ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length) % 29 + 1
    mask = np.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.full_like(ids, 2)}


def _states(arrays: dict[str, Array]) -> Array:
    """What the graph of ``onnx_graphs.encoder`` computes."""
    ids = arrays["input_ids"]
    return np.stack([ids, ids + arrays["token_type_ids"], ids * arrays["attention_mask"]], axis=2)


@GRAPHS
@pytest.mark.parametrize(("rows", "length"), [(1, 16), (1, 5), (3, 8), (9, 33), (1, 1)])
def test_a_graph_gives_its_outputs_in_fp32(tmp_path: Path, open_graph: Open, rows: int, length: int) -> None:
    engine = open_graph(onnx_graphs.encoder(tmp_path / "model.onnx"))
    assert engine.inputs == {"input_ids", "attention_mask", "token_type_ids"}
    assert engine.outputs == ("last_hidden_state",)
    arrays = _tokens(rows, length)
    for _ in range(2):
        found = engine.run({**arrays, "not_taken": arrays["input_ids"]})
        assert list(found) == ["last_hidden_state"]
        assert found["last_hidden_state"].dtype == np.float32
        np.testing.assert_array_equal(found["last_hidden_state"], _states(arrays))


@GRAPHS
def test_outputs_that_are_not_read_are_left_out_unless_one_is_missing(tmp_path: Path, open_graph: Open) -> None:
    nodes = [helper.make_node("Identity", ["input_ids"], [name]) for name in ("embedding", "tokens")]
    outputs = [(name, "INT64", ("batch", "tokens")) for name in ("embedding", "tokens")]
    engine = open_graph(
        onnx_graphs.write(tmp_path / "model.onnx", nodes, [("input_ids", "INT64", ("batch", "tokens"))], outputs)
    )
    found = engine.run(_tokens(2, 3), ("embedding",))
    assert {name: array.tolist() for name, array in found.items()} == {"embedding": _tokens(2, 3)["input_ids"].tolist()}
    assert engine.run(_tokens(2, 3), ("embedding", "weights")).keys() == {"embedding", "tokens"}


@GRAPHS
@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP64"])
def test_outputs_of_other_types_are_widened(tmp_path: Path, open_graph: Open, datatype: str) -> None:
    engine = open_graph(onnx_graphs.encoder(tmp_path / "model.onnx", datatype=datatype))
    arrays = _tokens(2, 3)
    found = engine.run(arrays)["last_hidden_state"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, _states(arrays))


@GRAPHS
def test_token_types_may_be_left_out_and_nothing_else(tmp_path: Path, open_graph: Open) -> None:
    engine = open_graph(onnx_graphs.encoder(tmp_path / "model.onnx"))
    arrays = _tokens(2, 4)
    del arrays["token_type_ids"]
    found = engine.run(arrays)["last_hidden_state"]
    np.testing.assert_array_equal(found, _states({**arrays, "token_type_ids": np.zeros((2, 4), np.int64)}))
    del arrays["attention_mask"]
    with pytest.raises(ConchError, match="the graph has the input 'attention_mask', which the task does not provide"):
        engine.run(arrays)


@GRAPHS
def test_inputs_become_what_the_graph_takes(tmp_path: Path, open_graph: Open) -> None:
    nodes = [helper.make_node("Identity", ["input_ids"], ["logits"])]
    tensors = [[(name, "INT32", ("batch", "tokens"))] for name in ("input_ids", "logits")]
    engine = open_graph(onnx_graphs.write(tmp_path / "model.onnx", nodes, *tensors))
    assert engine.inputs == {"input_ids"}
    assert engine.run(_tokens(1, 3))["logits"].tolist() == [[1, 2, 3]]


def test_a_graph_that_takes_strings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="the graph's input 'x' is BYTES, which tasks do not make"):
        OnnxRuntimeEngine(onnx_graphs.identity(tmp_path / "model.onnx", "BYTES"))


def test_a_graph_for_texts_alone_does_not_serve_texts_and_images(tmp_path: Path) -> None:
    text_checkpoints.write(tmp_path, "AutoModel")
    onnx_graphs.encoder(tmp_path / "model.onnx")
    checkpoint = Checkpoint.open(tmp_path, Options(task="feature-extraction", engine="onnxruntime"))
    with pytest.raises(
        ConchError, match=r"'model\.onnx' reads no images: convert the checkpoint, or choose engine torch"
    ):
        open_engine(checkpoint, head="AutoModel", methods=("get_text_features", "get_image_features"))


@GRAPHS
def test_instances_run_at_once(tmp_path: Path, open_graph: Open) -> None:
    engine = open_graph(onnx_graphs.encoder(tmp_path / "model.onnx"), instances=3)
    together = threading.Barrier(3)

    def run(number: int) -> bool:
        together.wait(timeout=60)
        arrays = _tokens(1 + number, 5 + number)
        return all((engine.run(arrays)["last_hidden_state"] == _states(arrays)).all() for _ in range(30))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))


def test_neither_torch_nor_transformers_is_imported_for_a_graph(tmp_path: Path) -> None:
    path = onnx_graphs.encoder(tmp_path / "model.onnx")
    program = (
        "import sys; from pathlib import Path\n"
        "import conch.backends.tasks.engines\n"
        "from conch.backends.tasks.engines import OnnxRuntimeEngine\n"
        f"OnnxRuntimeEngine(Path({str(path)!r}))\n"
        "print({'torch', 'transformers', 'openvino', 'onnx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


SIZES = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny BERT with random weights."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("bert")
    BertModel(BertConfig(**SIZES)).eval().save_pretrained(folder)
    return folder


def test_torch_gives_what_transformers_gives(bert: Path) -> None:
    engine = TorchEngine(bert, "AutoModel", instances=2)
    assert (engine.precision, engine.outputs) == ("fp32", ("last_hidden_state",))
    assert engine.inputs >= {"input_ids", "attention_mask", "token_type_ids"}
    arrays = _tokens(2, 5)
    arrays["token_type_ids"][:] = 1
    arrays["input_ids"].flags.writeable = False
    found = engine.run(arrays)["last_hidden_state"]
    with torch.no_grad():
        wanted = BertModel.from_pretrained(bert).eval()(**{name: torch.tensor(array) for name, array in arrays.items()})
    np.testing.assert_allclose(found, wanted.last_hidden_state.numpy(), atol=1e-5)


def test_torch_computes_in_the_type_asked_for_and_answers_in_fp32(bert: Path) -> None:
    engine = TorchEngine(bert, "AutoModel", dtype="bfloat16")
    assert engine.precision == "bf16"
    assert (
        engine.run(_tokens(1, 4) | {"token_type_ids": np.zeros((1, 4), np.int64)})["last_hidden_state"].dtype
        == np.float32
    )


@pytest.mark.parametrize("threads", [4, 0], ids=["threads", "OMP_NUM_THREADS"])
def test_each_thread_that_calls_torch_has_its_share_of_the_cores(
    bert: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3" if threads else "2")
    engine = TorchEngine(bert, "AutoModel", threads=threads, instances=2)
    arrays = _tokens(1, 4)
    del arrays["token_type_ids"]

    def run() -> int:
        engine.run(arrays)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(2) as pool:
            assert [future.result() for future in [pool.submit(run) for _ in range(4)]] == [2, 2, 2, 2]
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_without_the_tasks_head_is_refused(bert: Path) -> None:
    engine = TorchEngine(bert, "AutoModelForSequenceClassification")
    with pytest.raises(ConchError, match=r"depend on: classifier\.bias, classifier\.weight;") as error:
        engine.require_tensors({"input_ids": _tokens(1, 4)["input_ids"]})
    assert error.value.code is Code.INVALID_ARG


def test_weights_of_other_sizes_than_the_configuration_says_are_refused_by_name(bert: Path, tmp_path: Path) -> None:
    BertConfig(**{**SIZES, "vocab_size": SIZES["vocab_size"] + 1}).save_pretrained(tmp_path)
    shutil.copy(bert / "model.safetensors", tmp_path)
    engine = TorchEngine(tmp_path, "AutoModel")
    with pytest.raises(ConchError, match=r"word_embeddings\.weight, which they have as \[30, 16\] and .+ makes \[31"):
        engine.require_tensors({"input_ids": _tokens(1, 4)["input_ids"]})


def test_a_head_that_is_there_gives_logits(tmp_path: Path) -> None:
    BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, "AutoModelForSequenceClassification")
    arrays = _tokens(2, 4)
    arrays["token_type_ids"][:] = 0
    assert {name: one.shape for name, one in engine.run(arrays).items()} == {"logits": (2, 3)}


def _checkpoint(
    folder: Path, engine: str = "torch", *, variant: Any = None, graph: Path | None = None, weights: bool = True
) -> Any:
    if weights:
        (folder / "model.safetensors").touch()
    return SimpleNamespace(
        directory=folder, variant=variant, engine=engine, graph_file=lambda engine: graph, companion=None,
        manifest=None, options=Options(),
    )  # fmt: skip


def test_the_variant_chosen_runs(tmp_path: Path) -> None:
    variant = SimpleNamespace(name="v", engine="openvino", precision="int8", path="v.xml")
    assert choose(_checkpoint(tmp_path, variant=variant)) == ("openvino", "int8", tmp_path / "v.xml")
    itself = SimpleNamespace(name="t", engine="torch", precision="bf16", path="")
    assert choose(_checkpoint(tmp_path, variant=itself)) == ("torch", "bf16", None)


def test_on_a_gpu_the_checkpoint_itself_runs_unless_a_variant_is_named(tmp_path: Path) -> None:
    variant = SimpleNamespace(name="v", engine="onnxruntime", precision="fp16", path="v.onnx")
    checkpoint = _checkpoint(tmp_path, variant=variant)
    assert choose(checkpoint, "cuda") == ("torch", "", None)
    checkpoint.options = Options(dtype="bfloat16")
    assert choose(checkpoint, "cuda") == ("torch", "bf16", None)
    for checkpoint.options in (Options(variant="v"), Options(engine="onnxruntime")):
        assert choose(checkpoint, "cuda") == ("onnxruntime", "fp16", tmp_path / "v.onnx")
    (tmp_path / "model.safetensors").unlink()
    assert choose(_checkpoint(tmp_path, variant=variant, weights=False), "cuda")[0] == "onnxruntime"


def test_without_variants_what_the_folder_holds_runs(tmp_path: Path) -> None:
    graph = onnx_graphs.encoder(tmp_path / "model.onnx")
    engine = open_engine(_checkpoint(tmp_path, "onnxruntime", graph=graph), head="AutoModel")
    assert (engine.name, engine.precision) == ("onnxruntime", "fp32")


def test_torch_runs_a_checkpoint(bert: Path) -> None:
    checkpoint = _checkpoint(bert, weights=False)
    checkpoint.options = Options(dtype="bfloat16")
    engine = open_engine(checkpoint, head="AutoModel")
    assert (engine.name, engine.precision) == ("torch", "bf16")


def test_openvino_is_refused_on_a_gpu(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, "openvino", graph=tmp_path / "model.xml")
    checkpoint.options = Options(engine="openvino")
    with pytest.raises(ConchError, match="engine 'openvino' runs only on CPUs"):
        open_engine(checkpoint, head="AutoModel", device="cuda")


def test_a_graph_without_the_outputs_of_the_task_is_refused_when_the_model_loads(tmp_path: Path) -> None:
    text_checkpoints.write(tmp_path, "AutoModelForSequenceClassification", num_labels=2)
    onnx_graphs.encoder(tmp_path / "model.onnx", output="scores")
    checkpoint = Checkpoint.open(tmp_path, Options(engine="onnxruntime"))
    with pytest.raises(ConchError, match="returns scores; the task needs logits: export it with the head") as error:
        make_task(checkpoint, lambda head: open_engine(checkpoint, head=head))
    assert error.value.code is Code.UNSUPPORTED


def test_an_engine_without_a_graph_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="has no graph for engine 'onnxruntime': convert it, or use torch") as error:
        open_engine(_checkpoint(tmp_path, "onnxruntime"), head="AutoModel")
    assert error.value.code is Code.INVALID_ARG


def test_a_shape_that_is_asked_for_again_and_again_is_no_longer_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.backends.tasks.engines.CompiledGraph", MagicMock())
    engine = OpenVinoEngine(Path("model.xml"))
    first = [engine.padded_shape(17, 16) for _ in range(WORTH_COMPILING)]
    assert set(first) == {(20, 16)}
    assert engine.padded_shape(17, 16) == (17, 16)
    assert engine.padded_shape(18, 16) == (20, 16)


class Named(NetworkEngine):
    """Answers with its number, and pads by as much."""

    def __init__(self, number: int, outputs: tuple[str, ...] = ("logits",)) -> None:
        self.name, self.precision, self.variant = f"engine{number}", "fp32", f"variant{number}"
        self.inputs, self.outputs = frozenset({"input_ids", f"only_{number}"}), outputs
        self.number = number

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        return rows, length + self.number

    def run(self, arrays: Any, names: Any = ()) -> dict[str, Array]:
        return {"logits": np.full((len(arrays["input_ids"]), 1), self.number, np.float32)}


def test_each_run_takes_the_engine_for_its_shape() -> None:
    engine = EnginesByShape(Named(1), Named(2), lambda rows, tokens: rows * tokens < 20)

    def answer(rows: int, tokens: int) -> int:
        return int(engine.run({"input_ids": np.ones((rows, tokens), np.int64)})["logits"][0, 0])

    assert [answer(1, 16), answer(2, 16), answer(1, 16)] == [2, 1, 2]
    assert (engine.padded_shape(1, 16), engine.padded_shape(2, 16)) == ((1, 18), (2, 17))
    assert (engine.name, engine.variant, engine.inputs) == ("engine1", "variant1", {"input_ids", "only_1", "only_2"})
    assert [part.variant for part in engine.parts] == ["variant1", "variant2"]


def test_all_engines_of_a_task_have_its_outputs() -> None:
    engine = EnginesByShape(Named(1), Named(2, ("scores",)), lambda rows, tokens: True)
    with pytest.raises(ConchError, match="'m' returns scores; the task needs logits"):
        engine.require_outputs(("logits",), "m")
