"""A real worker process that runs a model written in the test, driven over its channel."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.core.tensors import WireTensor, pack_bytes
from conch.workers.child import worker as program
from conch.workers.child.channel import Endpoint, Frame, Header, write
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.child.template import MAX_MESSAGE
from conch.workers.host.templates import adopting

PREAMBLE = """\
import triton_python_backend_utils as pb_utils, numpy as np, asyncio, os, sys, threading, time
def text(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0].decode()
def answer(*texts):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(texts, dtype=np.object_))])
"""


#: What a worker of a Python model imports, which takes most of its start.
MODULES: Final = ["numpy", "asyncio", "conch.backends.python.python_backend", "conch.workers.child.packing"]


class ForkedProcess:
    """A process that a template has forked, with the interface of ``Popen``; both streams go to one pipe."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._output = os.fdopen(output, "rb")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if not select.select([descriptor], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            finally:
                os.close(descriptor)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        self.wait(timeout)
        if self._output.closed:
            return b"", b""
        with self._output:
            return self._output.read(), b""


class Template:
    """The server's worker template, which forks workers of Python models under this interpreter."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, program.__file__, str(theirs.fileno()), program.TEMPLATE]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        self._send({"op": "import", "modules": MODULES})
        assert self._reply() == {"problem": ""}

    def fork(self, channel: int) -> ForkedProcess:
        """Fork a worker at a channel."""
        readable, writable = os.pipe()
        with adopting() as children:
            self._send({"op": "fork", "as": "worker", "environment": {}}, channel, writable)
            os.close(writable)
            pid = self._reply()["pid"]
            children.add(pid)
        return ForkedProcess(pid, readable)

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def _reply(self) -> Any:
        return json.loads(self._control.recv(MAX_MESSAGE))


class Worker:
    """The server's side of one worker of the model ``m``, which ``template`` forks, or else ``python`` runs."""

    def __init__(
        self, directory: Path, source: str | None, config: dict[str, Any], python: str, template: Template | None
    ) -> None:
        self.directory = directory
        self.filename = config.get("default_model_filename") or "model.py"
        version = directory / "1"
        version.mkdir(parents=True)
        if source is not None:
            (version / self.filename).write_text(PREAMBLE + textwrap.dedent(source))
        self.config = {"name": "m", "max_batch_size": 0, "input": [], "output": [], **config}
        self.endpoint = Endpoint()
        self.frames: list[Frame] = []
        self.logged: list[Header] = []
        self.serial = 0
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(30)
        with theirs:
            self.process = (
                template.fork(theirs.fileno())
                if template is not None
                else subprocess.Popen(
                    [python, program.__file__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        self.send(
            {
                "op": "init",
                "backend": "conch.backends.python.python_backend:PythonBackend",
                "model": {
                    "name": "m",
                    "version": "1",
                    "directory": str(directory),
                    "version_directory": str(version),
                    "filename": self.filename,
                },
                "config": json.dumps(self.config),
                "log": {"info": True, "warning": True, "error": True, "verbose": 0},
            }
        )

    @property
    def path(self) -> str:
        return str(self.directory / "1" / self.filename)

    def send(self, header: Header, packer: Packer | None = None) -> None:
        rest = write(self.socket, self.endpoint.encode(header, packer))
        if rest:  # after a stop nobody may be there to take even nothing
            self.socket.sendall(rest)

    def receive(self) -> Frame:
        """The next frame that is neither of the log nor about the heartbeat."""
        while True:
            while not self.frames:
                self.frames += self.endpoint.receive(self.socket)
            frame = self.frames.pop(0)
            if frame[0]["op"] == "log":
                self.logged.append(frame[0])
            elif frame[0]["op"] != "heartbeat":
                return frame

    def ask(self, header: Header) -> Header:
        self.send(header)
        return self.receive()[0]

    def start(self, **instance: Any) -> Header:
        instance = {"name": "m_0_0", "kind": "CPU", "device_id": 0, **instance}
        return self.ask({"op": "start", "instance": instance, "config": json.dumps(self.config)})

    def submit(self, *requests: Any, outputs: tuple[str, ...] = ("OUT",), **fields: Any) -> list[int]:
        """Send one batch; a request is a text or a list of tensors. Returns the serial numbers."""
        packer = Packer()
        described = []
        for request in requests:
            tensors = [string(request)] if isinstance(request, str) else request
            self.serial += 1
            described.append(
                {
                    "serial": self.serial,
                    "id": "",
                    "correlation_id": 0,
                    "flags": 0,
                    "timeout": 0,
                    "parameters": {},
                    "outputs": outputs,
                    **fields,
                    "inputs": packer.pack(tensors),
                }
            )
        self.send({"op": "execute", "batch": self.serial, "requests": described}, packer)
        return [request["serial"] for request in described]

    def read(self) -> Header:
        """The next frame, with its ``outputs`` unpacked into tensors by name."""
        header, payload = self.receive()
        unpacker = Unpacker(payload, self.endpoint.buffers)
        for response in [header, *(header.get("responses") or ())]:
            if response is not None and "outputs" in response:
                response["outputs"] = {tensor.name: tensor for tensor in unpacker.unpack(response["outputs"])}
        return header

    def infer(self, *requests: Any, **fields: Any) -> Header:
        """Run one batch; its ``done`` frame."""
        self.submit(*requests, **fields)
        done = self.read()
        assert done["op"] == "done"
        return done

    def text(self, *requests: Any, **fields: Any) -> str:
        """Run one batch; the first element of the first response's output ``OUT``."""
        done = self.infer(*requests, **fields)
        assert "responses" in done, done
        assert "error" not in done["responses"][0], done
        return first(done["responses"][0])

    def stop(self) -> tuple[str, str]:
        """End the worker properly; what it wrote to its standard streams, all of it first if it was forked."""
        assert self.ask({"op": "stop"}) == {"op": "stopped"}
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return out.decode(), err.decode()


def string(text: str, name: str = "IN") -> WireTensor:
    return WireTensor(name, "BYTES", (1,), pack_bytes([text.encode()]))


def first(response: Header) -> str:
    """The first element of a response's output ``OUT``."""
    return bytes(response["outputs"]["OUT"].data)[4:].decode()


def array(name: str, datatype: str, values: np.ndarray[Any, Any]) -> WireTensor:
    return WireTensor(name, datatype, values.shape, values.tobytes())


#: The fixture ``launch``: a model's source, then ``start``, ``fork``, ``decoupled`` and fields of the configuration.
LaunchWorker = Callable[..., Worker]
