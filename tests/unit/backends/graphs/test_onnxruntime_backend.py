"""The backend ``onnxruntime``: completing, loading, running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from conch.backends.base.arrays import DTYPES, Strings
from conch.backends.graphs.onnxruntime import OnnxRuntimeBackend
from conch.core.errors import Code, ConchError
from tests import onnx_graphs
from tests.unit.backends.tensor_backends import initialise, parameters, start, sums_at_once, tensor

ALL = frozenset(("sum", "difference", "y"))


def test_an_empty_configuration_is_completed_from_the_graph(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    backend = initialise(OnnxRuntimeBackend, tmp_path)
    completed = json.loads(backend.complete())
    assert completed["max_batch_size"] == 4
    assert completed["dynamic_batching"] == {}
    assert completed["input"] == [tensor("a", "TYPE_FP32", 4), tensor("b", "TYPE_FP32", 4)]
    assert completed["output"] == [tensor("sum", "TYPE_FP32", 4), tensor("difference", "TYPE_FP32", 4)]
    assert [level for level, _ in backend.channel.lines] == ["WARNING"]


def test_the_backends_setting_says_how_large_a_batch_is_by_default(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    backend = initialise(OnnxRuntimeBackend, tmp_path, backend_config={"default-max-batch-size": "32"})
    assert json.loads(backend.complete())["max_batch_size"] == 32
    wrong = initialise(OnnxRuntimeBackend, tmp_path, backend_config={"default-max-batch-size": "many"})
    with pytest.raises(ConchError, match="failed to convert default-max-batch-size 'many' to integral number"):
        wrong.complete()


def test_a_configuration_with_inputs_and_outputs_is_left_alone(tmp_path: Path) -> None:
    given = {"input": [tensor("a", "TYPE_FP32", 4)], "output": [tensor("sum", "TYPE_FP32", 4)]}
    backend = initialise(OnnxRuntimeBackend, tmp_path, given)
    assert json.loads(backend.complete()) == backend.config
    assert backend.channel.lines[0][1].startswith("skipping model configuration auto-complete for 'm'")


def test_only_the_outputs_asked_for_are_given(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    outputs = backend.infer({"a": a, "b": a[::-1]}, frozenset(("difference",)))
    assert list(outputs) == ["difference"]
    np.testing.assert_array_equal(outputs["difference"], a - a[::-1])


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("BF16", "BOOL")])
def test_numbers_of_every_type_pass(tmp_path: Path, datatype: str) -> None:
    onnx_graphs.identity(tmp_path / "model.onnx", datatype)
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    assert backend.config["input"][0]["data_type"] == f"TYPE_{datatype}"
    x = np.array([[0, 1], [2, 127]], DTYPES[datatype])
    x.flags.writeable = False
    y = backend.infer({"x": x}, ALL)["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_truth_values_pass(tmp_path: Path) -> None:
    onnx_graphs.identity(tmp_path / "model.onnx", "BOOL")
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    x = np.array([[True, False]])
    np.testing.assert_array_equal(backend.infer({"x": x}, ALL)["y"], x)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_bfloat16_passes_as_its_bits(tmp_path: Path, shape: tuple[int, int]) -> None:
    onnx_graphs.identity(tmp_path / "model.onnx", "BF16")
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    x = np.arange(shape[0] * shape[1], dtype=np.uint16).reshape(shape) + 0x3F80
    y = backend.infer({"x": x}, ALL)["y"]
    assert y.dtype == np.uint16
    np.testing.assert_array_equal(y, x)


def test_strings_pass_and_must_be_utf8(tmp_path: Path) -> None:
    onnx_graphs.identity(tmp_path / "model.onnx", "BYTES")
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    y = backend.infer({"x": Strings((1, 3), [b"a", "ü€".encode(), b""])}, ALL)["y"]
    assert (y.shape, y.elements) == ((1, 3), ["a", "ü€", ""])
    with pytest.raises(ConchError) as error:
        backend.infer({"x": Strings((1, 2), [b"fine", b"not\xff"])}, ALL)
    assert error.value.status == "Invalid argument: input 'x' is not valid UTF-8: element 1, byte 3"


def test_bfloat16_outputs_beside_strings_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["s"], ["t"])]
    tensors = [("BF16", ("batch", 1)), ("BYTES", ("batch", 1))]
    named = [[(name, *tensor) for name, tensor in zip(names, tensors, strict=True)] for names in ("xs", "yt")]
    onnx_graphs.write(tmp_path / "model.onnx", nodes, *named)
    with pytest.raises(ConchError, match=r"'model.onnx' has BF16 outputs and strings") as error:
        start(initialise(OnnxRuntimeBackend, tmp_path))
    assert error.value.code is Code.UNSUPPORTED


def test_bfloat16_is_cast_beside_other_types(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=onnx_graphs.TYPES["FP32"]),
        helper.make_node("Cast", ["n"], ["z"], to=onnx_graphs.TYPES["BF16"]),
    ]
    inputs = [("x", "BF16", ("batch", 1)), ("n", "INT32", ("batch", 1))]
    outputs = [("y", "FP32", ("batch", 1)), ("z", "BF16", ("batch", 1))]
    onnx_graphs.write(tmp_path / "model.onnx", nodes, inputs, outputs)
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    arrays = {"x": np.array([[0x4000]], np.uint16), "n": np.array([[2]], np.int32)}
    found = backend.infer(arrays, frozenset(("y", "z")))
    assert (found["y"].tolist(), found["z"].tolist()) == ([[2.0]], [[0x4000]])


def test_one_number_for_each_row_is_reshaped(tmp_path: Path) -> None:
    onnx_graphs.identity(tmp_path / "model.onnx", "FP32", ("batch",))
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    assert backend.config["input"] == [{**tensor("x", "TYPE_FP32", 1), "reshape": {"shape": []}}]
    assert backend.infer({"x": np.array([2, 3], np.float32)}, ALL)["y"].tolist() == [2, 3]


def test_a_folder_holds_the_graph_with_its_weights_beside_it(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.arange(400, dtype=np.float32), "w")
    onnx_graphs.write(
        tmp_path / "model.onnx" / "model.onnx",
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [("x", "FP32", ("batch", 400))],
        [("y", "FP32", ("batch", 400))],
        [weights],
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    assert (tmp_path / "model.onnx" / "weights.bin").stat().st_size == 1600
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    assert backend.infer({"x": np.ones((1, 400), np.float32)}, ALL)["y"][0, -1] == 400


def test_the_configuration_may_name_the_file(tmp_path: Path) -> None:
    onnx_graphs.identity(tmp_path / "mine.onnx", "FP32")
    assert start(initialise(OnnxRuntimeBackend, tmp_path, filename="mine.onnx"))


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path) -> None:
    backend = initialise(OnnxRuntimeBackend, tmp_path)
    with pytest.raises(ConchError) as error:
        backend.complete()
    assert error.value.status == f"Unavailable: unable to find '{tmp_path}/model.onnx' for model 'm'"
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ConchError, match=r"onnx runtime error 7: Load model from .*model.onnx failed") as error:
        backend.complete()
    assert error.value.code is Code.INTERNAL


def test_errors_name_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    file = tmp_path / "mine.onnx"
    file.write_bytes(b"not a graph")
    version = tmp_path / "repository" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").symlink_to(file)

    backend = initialise(OnnxRuntimeBackend, version)
    for action in (backend.complete, lambda: backend.load({"kind": "CPU", "device_id": 0, "count": 1})):
        with pytest.raises(ConchError, match=f"Load model from {file} failed"):
            action()


def test_a_configuration_that_disagrees_does_not_load(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    given = {"input": [tensor("a", "TYPE_FP32", -1, 4)], "output": [tensor("sum", "TYPE_FP32", -1, 4)]}
    backend = initialise(OnnxRuntimeBackend, tmp_path, given)
    with pytest.raises(ConchError, match="configuration expects 1 inputs, model provides 2"):
        start(backend)


def test_what_the_graph_refuses_fails_the_request_with_its_words(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx", shape=("batch", "width"))
    backend = start(initialise(OnnxRuntimeBackend, tmp_path))
    with pytest.raises(ConchError, match="onnx runtime error 1: Non-zero status code returned while running") as error:
        backend.infer({"a": np.ones((1, 3), np.float32), "b": np.ones((1, 2), np.float32)}, ALL)
    assert error.value.code is Code.INTERNAL
    assert backend.infer({name: np.ones((1, 3), np.float32) for name in "ab"}, ALL)["sum"][0, 0] == 2


def test_instances_run_at_once_over_one_session(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    backend = start(initialise(OnnxRuntimeBackend, tmp_path), count=4)
    assert all(sums_at_once(backend, 4))


def test_an_output_that_is_no_tensor_cannot_be_completed(tmp_path: Path) -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["y"])]
    path = onnx_graphs.write(tmp_path / "model.onnx", nodes, [("x", "FP32", ("batch", 1))], [])
    _add_sequence_output(path)
    with pytest.raises(ConchError, match=r"tensor 'y' is a seq\(tensor\(float\)\), which no client can send"):
        initialise(OnnxRuntimeBackend, tmp_path).complete()


def _add_sequence_output(path: Path) -> None:
    import onnx

    model: Any = onnx.load(path)
    model.graph.output.append(helper.make_tensor_sequence_value_info("y", onnx.TensorProto.FLOAT, ["batch", 1]))
    onnx.save_model(model, path)


def test_a_gpu_needs_an_onnxruntime_that_knows_gpus(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime knows GPUs")
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    with pytest.raises(ConchError, match=r"CUDAExecutionProvider, .* install onnxruntime-gpu, or") as error:
        start(initialise(OnnxRuntimeBackend, tmp_path), kind="GPU")
    assert error.value.code is Code.UNSUPPORTED


def test_parameters_reach_the_session(tmp_path: Path) -> None:
    onnx_graphs.add_sub(tmp_path / "model.onnx")
    given = parameters(
        **{
            "intra_op_thread_count": "1",
            "execution_mode": "1",
            "inter_op_thread_count": "1",
            "session.set_denormal_as_zero": "1",
            "memory.enable_memory_arena_shrinkage": "cpu:0",
        }
    )
    backend = start(initialise(OnnxRuntimeBackend, tmp_path, {"parameters": given}))
    assert backend.infer({name: np.ones((1, 4), np.float32) for name in "ab"}, ALL)["sum"][0, 0] == 2
    given["intra_op_thread_count"] = {"string_value": "one"}
    with pytest.raises(ConchError, match="failed to convert intra_op_thread_count 'one'"):
        start(initialise(OnnxRuntimeBackend, tmp_path, {"parameters": given}))


def test_constants_of_a_graph_are_optional_inputs(tmp_path: Path) -> None:
    bias = numpy_helper.from_array(np.array([10], np.float32), "bias")
    inputs = [("x", "FP32", (1,)), ("bias", "FP32", (1,))]
    nodes = [helper.make_node("Add", ["x", "bias"], ["y"])]
    onnx_graphs.write(tmp_path / "model.onnx", nodes, inputs, [("y", "FP32", (1,))], [bias])
    given = {
        "input": [tensor("x", "TYPE_FP32", 1), tensor("bias", "TYPE_FP32", 1) | {"optional": True}],
        "output": [tensor("y", "TYPE_FP32", 1)],
    }
    backend = start(initialise(OnnxRuntimeBackend, tmp_path, given))
    one = np.array([1], np.float32)
    assert backend.infer({"x": one}, ALL)["y"] == 11
    assert backend.infer({"x": one, "bias": one}, ALL)["y"] == 2
