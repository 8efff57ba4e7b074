"""Frames to requests and results to frames, without a process."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import Array, Request, Result, Strings, array_of
from conch.backends.base.backend_base import BatchBackend, TensorBackend
from conch.backends.base.openmp import ComputeThreads
from conch.core.errors import ConchError, invalid
from conch.core.tensors import WireTensor, pack_bytes, split_bytes
from conch.workers.child.buffers import BufferMap
from conch.workers.child.packing import Packer, Unpacker

CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "output": [{"name": "y", "data_type": "TYPE_FP32"}, {"name": "s", "data_type": "TYPE_STRING"}],
}


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[tuple[dict[str, Any], Packer | None]] = []
        self.buffers = BufferMap()

    def send(self, header: dict[str, Any], packer: Packer | None = None) -> None:
        self.frames.append((header, packer))

    def done(self) -> list[dict[str, Any]]:
        """The responses of the last ``done`` frame, their tensors unpacked by name."""
        header, packer = next(frame for frame in reversed(self.frames) if frame[0]["op"] == "done")
        assert packer is not None
        unpacker = Unpacker(b"".join(bytes(part) for part in packer.payload), BufferMap())
        return [
            {**response, "outputs": {tensor.name: tensor for tensor in unpacker.unpack(response["outputs"])}}
            for response in header["responses"]
        ]


def start(kind: type[BatchBackend], config: Mapping[str, Any] = CONFIG, count: int = 1) -> tuple[Any, Sent]:
    channel = Sent()
    model = {"name": "m", "version": "1", "directory": "", "version_directory": "", "filename": ""}
    init = {"model": model, "config": json.dumps(config), "log": {"error": True, "warning": True}}
    backend = kind(channel, init)  # type: ignore[arg-type]
    backend.start({"name": "m_0", "kind": "CPU", "device_id": 0, "count": count}, json.dumps(config))
    return backend, channel


def execute(backend: BatchBackend, *requests: Sequence[WireTensor], outputs: Sequence[str] = ("y", "s")) -> None:
    packer = Packer()
    described = [
        {"serial": serial, "id": "", "parameters": {}, "outputs": outputs, "inputs": packer.pack(tensors)}
        for serial, tensors in enumerate(requests, 1)
    ]
    payload = bytearray(b"".join(bytes(part) for part in packer.payload))
    backend.execute({"op": "execute", "batch": 1, "requests": described}, payload)


def numbers(*values: float) -> list[WireTensor]:
    return [WireTensor("x", "FP32", (len(values), 1), np.array(values, np.float32).tobytes())]


class Doubling(TensorBackend):
    """``y`` is twice ``x``, ``s`` is ``x`` as text; notes how many rows each call had."""

    def complete(self) -> str:
        return json.dumps(self.config)

    def load(self, instance: Mapping[str, Any]) -> None:
        self.calls: list[int] = []

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        x = arrays["x"]
        if isinstance(x, Strings):
            return {"y": np.zeros(x.shape, np.float32), "s": x}
        self.calls.append(len(x))
        return {"y": x * 2, "s": Strings(x.shape, [f"{value:g}" for value in x.ravel()])}


def test_requests_are_joined_and_their_results_split() -> None:
    backend, channel = start(Doubling)
    execute(backend, numbers(1, 2), numbers(3))
    first, second = channel.done()
    assert backend.calls == [3]
    assert array_of(first["outputs"]["y"]).tolist() == [[2], [4]]
    assert split_bytes(second["outputs"]["s"].data) == [b"3"]


def test_strings_are_joined_and_split_as_well() -> None:
    backend, channel = start(Doubling)
    texts = [WireTensor("x", "BYTES", (rows, 1), pack_bytes([b"t"] * rows)) for rows in (2, 1)]
    execute(backend, [texts[0]], [texts[1]])
    assert [response["outputs"]["s"].shape for response in channel.done()] == [(2, 1), (1, 1)]


def test_only_the_outputs_asked_for_are_sent() -> None:
    backend, channel = start(Doubling)
    execute(backend, numbers(1), outputs=("y",))
    assert list(channel.done()[0]["outputs"]) == ["y"]


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}]},
         "in the shape [1, 1], but its configuration declares it as [-1, 2]; it is sent unchanged"),
        ({"max_batch_size": 0, "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1, 2]}]},
         "in the shape [1, 1], but its configuration declares it as [1, 2]; it is sent unchanged"),
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}, ""),
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]}, ""),
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2], "reshape": {"shape": [1]}}]}, ""),
    ],
)  # fmt: skip
def test_an_output_of_another_shape_than_the_declared_one_is_reported_once(
    config: dict[str, Any], warning: str
) -> None:
    backend, channel = start(Doubling, {**CONFIG, **config})
    for _ in range(2):
        execute(backend, numbers(1), outputs=("y",))
        assert channel.done()[0]["outputs"]["y"].shape == (1, 1)
    logged = [(frame["message"], frame["once"]) for frame, _ in channel.frames if frame["op"] == "log"]
    assert logged == ([(f"model 'm' returned the output 'y' {warning}", True)] if warning else [])


@pytest.mark.parametrize(("decoupled", "warned"), [(False, True), (True, False)])
def test_rows_that_are_not_those_of_the_request_are_reported(decoupled: bool, warned: bool) -> None:
    config = {**CONFIG, "model_transaction_policy": {"decoupled": decoupled}}
    backend, channel = start(Halving, config)
    execute(backend, numbers(1, 2), outputs=("y",))
    logged = [frame["message"] for frame, _ in channel.frames if frame["op"] == "log"]
    assert ["with the batch size 2" in message for message in logged] == [True] * warned


class Halving(Doubling):
    """Answers with half of the rows."""

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        x = arrays["x"]
        assert not isinstance(x, Strings)
        return {"y": x[: len(x) // 2]}


def test_a_backend_runs_one_thread_more_than_it_has_instances() -> None:
    assert start(Doubling, count=3)[0].threads == 4


class Threads(Doubling):
    """Notes which threads run the model."""

    def load(self, instance: Mapping[str, Any]) -> None:
        self.compute_threads = ComputeThreads(1, 1)
        self.computed_in: list[int] = []

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        self.computed_in.append(threading.get_ident())
        return super().infer(arrays, outputs)


def test_one_thread_computes_for_all_that_receive() -> None:
    backend, _ = start(Threads)
    for batch in ([numbers(1)], [numbers(1), numbers(2)]):
        receiver = threading.Thread(target=execute, args=(backend, *batch))
        receiver.start()
        receiver.join()
    assert backend.computed_in == backend.computed_in[:1] * 2
    assert threading.get_ident() not in backend.computed_in


class Choosy(BatchBackend):
    """Responds to each request separately; refuses negative numbers, breaks on 99."""

    def complete(self) -> str:
        return json.dumps(self.config)

    def load(self, instance: Mapping[str, Any]) -> None: ...

    def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
        results: list[Result | ConchError] = []
        for request in requests:
            x = request.array("x")
            if (x == 99).any():
                raise RuntimeError("99 is too much")
            results.append(invalid("negative") if (x < 0).any() else Result({"y": x}, {"note": "fine"}))
        return results, {"tokens": 7}


def test_what_is_wrong_with_one_request_leaves_the_others_alone() -> None:
    backend, channel = start(Choosy)
    execute(backend, numbers(1), numbers(-1), numbers(2))
    responses = channel.done()
    assert [response.get("error") for response in responses] == [None, ["INVALID_ARG", "negative", None, None], None]
    assert responses[0]["parameters"] == {"note": "fine"}
    assert channel.frames[-1][0]["work"] == {"tokens": 7}


def test_an_exception_fails_the_batch_and_is_logged() -> None:
    backend, channel = start(Choosy)
    execute(backend, numbers(1), numbers(99))
    assert {response["error"][1] for response in channel.done()} == {"RuntimeError: 99 is too much"}
    (logged,) = [frame["message"] for frame, _ in channel.frames if frame["op"] == "log"]
    heading, *lines = logged.splitlines()
    assert (heading, lines[0]) == (
        "model 'm' failed: RuntimeError: 99 is too much",
        "Traceback (most recent call last):",
    )
    assert any(f'File "{__file__}", line' in line for line in lines)


def test_stop_waits_for_what_runs() -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(Doubling):
        def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
            entered.set()
            release.wait(60)
            return super().infer(arrays, outputs)

    backend, channel = start(Slow)
    running = threading.Thread(target=execute, args=(backend, numbers(1)))
    running.start()
    assert entered.wait(60)
    stopping = threading.Thread(target=backend.stop)
    stopping.start()
    assert stopping.is_alive()
    release.set()
    stopping.join(60)
    running.join(60)
    assert [frame["op"] for frame, _ in channel.frames] == ["done"]


def test_invalid_utf8_is_refused_with_its_position() -> None:
    request = Request(
        {"text_input": WireTensor("text_input", "BYTES", (2, 1), pack_bytes([b"fine", b"a\xff"]))}, frozenset()
    )
    with pytest.raises(ConchError, match="input 'text_input' is not valid UTF-8: element 1, byte 1"):
        request.texts("text_input")


def test_an_option_must_be_the_same_in_all_rows() -> None:
    request = Request(
        {"top_k": WireTensor("top_k", "INT32", (2, 1), np.array([1, 2], np.int32).tobytes())}, frozenset()
    )
    with pytest.raises(ConchError, match="'top_k' must be the same in all rows"):
        request.option("top_k")
    assert request.option("other", 5) == 5


def test_an_option_that_is_not_a_number_agrees_with_itself() -> None:
    request = Request(
        {"top_p": WireTensor("top_p", "FP32", (1, 1), np.array([np.nan], np.float32).tobytes())}, frozenset()
    )
    assert np.isnan(request.option("top_p"))


def test_a_running_request_learns_that_it_was_cancelled() -> None:
    seen: list[bool] = []

    class Told(Choosy):
        def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
            self.control({"op": "cancel", "serial": 2})
            seen.extend(request.cancelled for request in requests)
            return super().run(requests)

    backend, channel = start(Told)
    execute(backend, numbers(1), numbers(2))
    assert seen == [False, True]
    assert backend.control({"op": "cancel", "serial": 2})  # too late, which is no matter
    assert len(channel.done()) == 2


def test_what_is_no_ordinary_exception_fails_the_batch_as_well() -> None:
    class Exiting(Choosy):
        def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
            raise SystemExit("enough")

    backend, channel = start(Exiting)
    execute(backend, numbers(1), numbers(2))
    assert [response["error"][1] for response in channel.done()] == ["SystemExit: enough"] * 2


class Reader(BatchBackend):
    """Reads texts of at most 10 bytes, and gives their lengths."""

    def complete(self) -> str:
        return "{}"

    def load(self, instance: Mapping[str, Any]) -> None:
        self.text_limit = 10

    def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
        results: list[Result | ConchError] = []
        for request in requests:
            try:
                lengths = np.array([len(text) for text in request.texts("x")], np.float32)
                results.append(Result({"y": lengths}))
            except ConchError as error:
                results.append(error)
        return results, {}


def test_texts_that_would_take_long_to_read_are_refused_one_by_one() -> None:
    backend, channel = start(Reader)

    def texts(*values: bytes) -> list[WireTensor]:
        return [WireTensor("x", "BYTES", (len(values), 1), pack_bytes(values))]

    execute(backend, texts(b"a" * 10), texts(b"a", b"a" * 11), texts(*[b"a" * 6] * 17))
    fits, longer, more = channel.done()
    assert array_of(fits["outputs"]["y"]).tolist() == [10.0]
    assert longer["error"][0] == "INVALID_ARG"
    assert "input 'x' has a text of 11 bytes; at most 10 are read" in longer["error"][1]
    assert "input 'x' has 170 bytes of texts; at most 160 are read at a time" in more["error"][1]
