"""The library's servers load models when a call asks for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import conch
from conch.core.errors import Code, ConchError
from tests.e2e.library.conftest import HangingLoads
from tests.events import eventually
from tests.models import write

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(0.3)

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one + np.float32(1))]) for one in inputs]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        write(root, name, CONFIG, {"1/model.py": MODEL})
    return root


def options(repository: Path) -> dict[str, object]:
    return {"model_repository": repository, "model_control_mode": "on-demand", "max_loaded_models": 1}


def loaded(server: conch.Server) -> list[str]:
    return [entry["name"] for entry in server.models() if entry.get("state") == "READY"]


def test_calls_of_threads_wait_for_their_models(repository: Path) -> None:
    with conch.Server(**options(repository)) as server:
        assert server.ready() and server.ready("a") and not server.ready("nobody")
        assert server.infer("a", {"x": [1]})["y"] == [2]
        assert server.infer("b", {"x": [2]})["y"] == [3]
        assert [result["y"].tolist() for result in server.infer_stream("a", {"x": [3]})] == [[4]]
        assert server.config("b")["name"] == "b" and server.metadata("b")["name"] == "b"
        assert {entry["name"]: entry.get("state") for entry in server.models()} == {"a": "UNAVAILABLE", "b": "READY"}
        with pytest.raises(ConchError, match=r"model 'a' was not loaded within 0\.01 s"):
            server.infer("a", {"x": [1]}, timeout=0.01)
        assert server.infer("b", {"x": [1]}, timeout=60)["y"] == [2]
        server.unload("b")
        server.load("b")
        assert loaded(server) == ["b"]
        with pytest.raises(ConchError) as caught:
            server.infer("nobody", {"x": [1]})
        assert caught.value.code is Code.NOT_FOUND


def test_calls_of_threads_get_answers_although_each_needs_the_room_of_the_other(repository: Path) -> None:
    with conch.Server(**options(repository)) as server, ThreadPoolExecutor(2) as threads:

        def ask(name: str) -> list[float]:
            infers = [server.infer(name, {"x": [value]})["y"].item() for value in range(3)]
            (streamed,) = server.infer_stream(name, {"x": [3]})
            return [*infers, streamed["y"].item(), server.generate(name, {"x": [4]})["y"].item()]

        assert list(threads.map(ask, ("a", "b"))) == [[1, 2, 3, 4, 5]] * 2


def test_model_is_free_to_leave_after_a_call_whose_inputs_do_not_fit(repository: Path) -> None:
    with conch.Server(**options(repository)) as server:
        with pytest.raises(ConchError, match="'z'"):
            server.infer("a", {"z": [1]})
        assert server.in_flight() == 0
        assert server.infer("b", {"x": [1]}, timeout=60)["y"] == [2]


def test_unload_continues_after_the_timeout_of_its_call(repository: Path, hanging_loads: HangingLoads) -> None:
    with conch.Server(**options(repository)) as server, ThreadPoolExecutor(1) as threads:
        server.load("a")
        write(repository, "a", CONFIG, {"1/model.py": f"{MODEL}# changed"})
        hanging_loads.hang = True
        reload = threads.submit(server.load, "a")
        assert hanging_loads.begun.wait(60)
        with pytest.raises(ConchError, match=r"no response from the server within 0\.1 s"):
            server.unload("a", timeout=0.1)
        assert loaded(server) == ["a"]
        hanging_loads.hang = False
        hanging_loads.may_end.set()
        with pytest.raises(ConchError, match="the model was unloaded during the load"):
            reload.result()
        eventually(lambda: not loaded(server), "the unload")
        assert server.infer("b", {"x": [1]}, timeout=60)["y"] == [2]


async def test_calls_of_coroutines_wait_for_their_models(repository: Path) -> None:
    async with conch.AsyncServer(**options(repository)) as server:
        with pytest.raises(ConchError, match=r"model 'a' was not loaded within 0\.01 s"):
            await server.infer("a", {"x": [1]}, timeout=0.01)
        stream = server.infer_stream("b", {"x": [1]}, timeout=0.01)
        with pytest.raises(ConchError, match=r"the model was not loaded within 0\.01 s"):
            await anext(stream)
        assert np.array_equal((await server.infer("a", {"x": [1]}))["y"], [2])
        assert [result["y"].tolist() async for result in server.infer_stream("b", {"x": [1]})] == [[2]]
        with pytest.raises(ConchError, match="unknown model: 'nobody'"):
            await anext(server.infer_stream("nobody", {"x": [1]}))


async def test_stream_that_is_closed_before_its_model_is_loaded_sends_nothing(repository: Path) -> None:
    async with conch.AsyncServer(**options(repository)) as server:
        stream = server.infer_stream("a", {"x": [1]})
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert (await server.infer("a", {"x": [1]}))["y"] == [2]
        (statistics,) = await server.statistics("a")
        assert statistics["inference_count"] == 1
