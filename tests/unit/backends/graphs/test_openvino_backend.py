"""The backend ``openvino``: completing, loading, running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

from conch.backends.base.arrays import DTYPES, Strings
from conch.backends.graphs.openvino import CompileSettings, OpenVinoBackend
from conch.core.errors import Code, ConchError
from tests import onnx_graphs
from tests.unit.backends.tensor_backends import initialise, parameters, start, sums_at_once, tensor

ALL = frozenset(("sum", "difference", "y"))
TYPES = {
    "BOOL": openvino.Type.boolean, "UINT8": openvino.Type.u8, "UINT16": openvino.Type.u16, "UINT32": openvino.Type.u32,
    "UINT64": openvino.Type.u64, "INT8": openvino.Type.i8, "INT16": openvino.Type.i16, "INT32": openvino.Type.i32,
    "INT64": openvino.Type.i64, "FP16": openvino.Type.f16, "BF16": openvino.Type.bf16, "FP32": openvino.Type.f32,
    "FP64": openvino.Type.f64, "BYTES": openvino.Type.string,
}  # fmt: skip


def _convert(source: Path, target: Path) -> None:
    openvino.save_model(openvino.Core().read_model(source), target, compress_to_fp16=False)


def _identity(path: Path, datatype: str) -> None:
    x: Any = ops.parameter([-1, -1], TYPES[datatype], name="x")
    x.output(0).set_names({"x"})
    y = x if datatype == "BYTES" else ops.reshape(x, ops.shape_of(x), special_zero=False)
    if datatype != "BYTES":
        y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "identity"), path, compress_to_fp16=False)


@pytest.fixture
def add_sub(tmp_path: Path) -> Path:
    """A version directory with ``model.xml``."""
    _convert(onnx_graphs.add_sub(tmp_path / "source" / "model.onnx"), tmp_path / "1" / "model.xml")
    return tmp_path / "1"


def test_an_empty_configuration_is_completed_from_the_graph(add_sub: Path) -> None:
    completed = json.loads(initialise(OpenVinoBackend, add_sub).complete())
    assert completed["max_batch_size"] == 4
    assert completed["dynamic_batching"] == {}
    assert completed["input"] == [tensor("a", "TYPE_FP32", 4), tensor("b", "TYPE_FP32", 4)]
    assert completed["output"] == [tensor("sum", "TYPE_FP32", 4), tensor("difference", "TYPE_FP32", 4)]


def test_an_input_keeps_its_name_if_the_operation_after_it_is_removed(tmp_path: Path) -> None:
    x: Any = ops.parameter([-1, 4], TYPES["FP32"], name="x")
    x.output(0).set_names({"x", "/network/Cast_output_0", "0"})
    model = openvino.Model([ops.result(ops.relu(x))], [x], "cast")
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    assert json.loads(initialise(OpenVinoBackend, tmp_path).complete())["input"] == [tensor("x", "TYPE_FP32", 4)]


def test_a_configuration_with_inputs_and_outputs_is_left_alone(tmp_path: Path) -> None:
    given = {"input": [tensor("a", "TYPE_FP32", 4)], "output": [tensor("sum", "TYPE_FP32", 4)]}
    backend = initialise(OpenVinoBackend, tmp_path, given)
    assert json.loads(backend.complete()) == backend.config


def test_only_the_outputs_asked_for_are_given(add_sub: Path) -> None:
    backend = start(initialise(OpenVinoBackend, add_sub))
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    outputs = backend.infer({"a": a, "b": a[::-1]}, frozenset(("difference",)))
    assert list(outputs) == ["difference"]
    np.testing.assert_array_equal(outputs["difference"], a - a[::-1])


def test_answers_outlive_the_next_run(add_sub: Path) -> None:
    backend = start(initialise(OpenVinoBackend, add_sub))
    first, second = (backend.infer({name: np.full((1, 4), n, np.float32) for name in "ab"}, ALL) for n in (1, 2))
    assert (first["sum"] == 2).all()
    assert (second["sum"] == 4).all()


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BOOL"])
def test_numbers_of_every_type_pass(tmp_path: Path, datatype: str) -> None:
    _identity(tmp_path / "model.xml", datatype)
    backend = start(initialise(OpenVinoBackend, tmp_path))
    assert backend.config["input"][0]["data_type"] == f"TYPE_{datatype}"
    x = np.array([[0, 1], [2, 127]], DTYPES[datatype]) + (0x3F80 if datatype == "BF16" else 0)
    x = x.astype(DTYPES[datatype])
    x.flags.writeable = False
    y = backend.infer({"x": x}, ALL)["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_arrays_pass_however_they_lie_in_memory(tmp_path: Path) -> None:
    _identity(tmp_path / "model.xml", "INT64")
    backend = start(initialise(OpenVinoBackend, tmp_path))
    for x in (np.arange(12).reshape(3, 4).T, np.arange(12).reshape(3, 4)[:, ::2], np.zeros((0, 3), np.int64)):
        np.testing.assert_array_equal(backend.infer({"x": x}, ALL)["y"], x)


def test_truth_values_pass(tmp_path: Path) -> None:
    _identity(tmp_path / "model.xml", "BOOL")
    backend = start(initialise(OpenVinoBackend, tmp_path))
    x = np.array([[True, False]])
    np.testing.assert_array_equal(backend.infer({"x": x}, ALL)["y"], x)


def test_strings_pass(tmp_path: Path) -> None:
    _identity(tmp_path / "model.xml", "BYTES")
    backend = start(initialise(OpenVinoBackend, tmp_path))
    (output,) = backend.infer({"x": Strings((1, 3), [b"a", "ü€".encode(), b""])}, frozenset(("x", "y"))).values()
    assert (output.shape, output.elements) == ((1, 3), [b"a", "ü€".encode(), b""])


def test_an_onnx_file_that_the_configuration_names_is_read(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    backend = start(initialise(OpenVinoBackend, tmp_path, filename="model.onnx"))
    assert backend.infer({name: np.ones((1, 4), np.float32) for name in "ab"}, ALL)["sum"][0, 0] == 2


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path) -> None:
    backend = initialise(OpenVinoBackend, tmp_path)
    with pytest.raises(ConchError) as error:
        backend.complete()
    assert error.value.status == f"Unavailable: unable to find '{tmp_path}/model.xml' for model 'm'"
    (tmp_path / "model.xml").write_bytes(b"not a graph")
    with pytest.raises(ConchError, match=r"OpenVINO: Unable to read the model: .*model.xml") as error:
        backend.complete()
    assert error.value.code is Code.INTERNAL
    assert "\n" not in error.value.message


def test_a_configuration_that_disagrees_does_not_load(add_sub: Path) -> None:
    given = {"input": [tensor("a", "TYPE_FP32", -1, 4)], "output": [tensor("sum", "TYPE_FP32", -1, 4)]}
    with pytest.raises(ConchError, match="configuration expects 1 inputs, model provides 2"):
        start(initialise(OpenVinoBackend, add_sub, given))


def test_what_the_graph_refuses_fails_the_request_and_no_other(tmp_path: Path) -> None:
    _convert(onnx_graphs.add_sub(tmp_path / "s.onnx", shape=("batch", "width")), tmp_path / "model.xml")
    backend = start(initialise(OpenVinoBackend, tmp_path))
    with pytest.raises(ConchError, match="OpenVINO: ") as error:
        backend.infer({"a": np.ones((1, 3), np.float32), "b": np.ones((1, 2), np.float32)}, ALL)
    assert error.value.code is Code.INTERNAL
    assert backend.infer({name: np.ones((1, 3), np.float32) for name in "ab"}, ALL)["sum"][0, 0] == 2


def test_instances_run_at_once_over_one_graph(add_sub: Path) -> None:
    backend = start(initialise(OpenVinoBackend, add_sub), count=4)
    assert all(sums_at_once(backend, 4))


def test_a_gpu_is_refused(add_sub: Path) -> None:
    with pytest.raises(ConchError, match="set instance_group kind KIND_CPU") as error:
        start(initialise(OpenVinoBackend, add_sub), kind="GPU")
    assert error.value.code is Code.UNSUPPORTED


def test_parameters_are_properties_of_openvino(add_sub: Path) -> None:
    given = {"parameters": parameters(INFERENCE_PRECISION_HINT="f32", NUM_STREAMS="1", unknown="x")}
    assert start(initialise(OpenVinoBackend, add_sub, given))
    wrong = {"parameters": parameters(INFERENCE_PRECISION_HINT="f3")}
    with pytest.raises(ConchError, match=r"OpenVINO: .*f3"):
        start(initialise(OpenVinoBackend, add_sub, wrong))


def test_streams_and_threads_follow_the_instances() -> None:
    compiled = CompileSettings(threads=4, instances=8, precision="bf16", properties={"NUM_STREAMS": "2"}).compiled()
    assert compiled["INFERENCE_NUM_THREADS"] == "4"
    assert compiled["NUM_STREAMS"] == "2"
    assert compiled["INFERENCE_PRECISION_HINT"] == "bf16"
    assert CompileSettings(threads=4, instances=8).compiled()["NUM_STREAMS"] == "4"
    assert CompileSettings(precision="int8").compiled()["INFERENCE_PRECISION_HINT"] == "f32"
    assert "INFERENCE_PRECISION_HINT" not in CompileSettings(precision="").compiled()
