"""A simulated kernel: the descriptors and processes that conch creates when it starts workers and templates.

Replaces ``os``, ``signal``, ``socket`` and ``subprocess`` in the modules that start processes. Other names of these
modules are the real ones.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from conch.workers.child.worker import TEMPLATE
from tests.simulation.loop import SimulatedLoop
from tests.simulation.sockets import SimulatedSocket
from tests.simulation.substitutes import InjectedError
from tests.simulation.workers import SimulatedWorkers


class SimulatedKernel:
    """The descriptors and children of the server process. ``broken`` is called if the server misuses one of them."""

    def __init__(self, loop: SimulatedLoop, workers: SimulatedWorkers, broken: Callable[[str], None]) -> None:
        self.loop = loop
        self.workers = workers
        #: Faults of the templates that receive the next messages: ``die`` or ``stall``.
        self.template_faults: list[str] = []
        self._broken = broken
        self._open: dict[int, Any] = {}
        self._children: dict[int, Any] = {}
        self._before_failing = self._failing = 0

    def fail(self, after: int, times: int) -> None:
        """Refuse ``times`` descriptors after the next ``after`` ones."""
        self._before_failing, self._failing = after, times

    def heal(self) -> None:
        """End all faults: give out descriptors, and let templates work."""
        self._failing = 0
        self.template_faults.clear()

    def left(self) -> list[str]:
        """Describe the open descriptors and the children that were not waited for."""
        processes = [f"the process {pid}, which was not waited for" for pid in self._children]
        return processes + [f"the open descriptor of a {type(of).__name__}" for of in self._open.values()]

    # Descriptors

    def install(self, descriptor: Any, fd: int | None = None) -> int:
        """Give a descriptor a number. Raises OSError if the process has too many."""
        if self._failing and self._before_failing:
            self._before_failing -= 1
        elif self._failing:
            self._failing -= 1
            raise InjectedError(errno.EMFILE, "Too many open files")
        fd = self.loop.open(descriptor) if fd is None else fd
        self._open[fd] = descriptor
        return fd

    def close(self, fd: int) -> None:
        if fd not in self._open:
            self._broken(f"the descriptor {fd} is closed, which is not open")
            return
        descriptor = self._open.pop(fd)
        if isinstance(descriptor, _PipeEnd):
            descriptor.close()

    def pipe(self) -> tuple[int, int]:
        writing = _PipeEnd()
        reading = _PipeEnd(writing)
        fd = self.install(reading)
        try:
            return fd, self.install(writing)
        except OSError:
            self.close(fd)
            raise

    def read(self, fd: int, size: int) -> bytes:
        if not self._open[fd].readable:
            raise BlockingIOError
        return b""  # workers print nothing

    def socketpair(self, family: int, kind: int) -> tuple[SimulatedSocket, _PeerEnd]:
        ours = _KernelSocket(self)
        self.install(ours, ours.fileno())
        try:
            return ours, _PeerEnd(self, ours)
        except OSError:
            ours.close()
            raise

    def send_fds(self, control: _KernelSocket, parts: Sequence[bytes], fds: Sequence[int]) -> None:
        control.passed.append([self._open[fd] for fd in fds])
        control.sendmsg(parts)

    # Processes

    def start_process(self, command: Sequence[str], stdout: int | None, fds: Sequence[int]) -> int:
        """Start a worker or a template, according to ``command``, with the peer of a socket and an end of a pipe."""
        (channel,) = (self._open[fd].socket for fd in fds)
        return self.start(TEMPLATE in command, channel, self._open[stdout] if stdout is not None else _PipeEnd())

    def start(self, is_template: bool, channel: _KernelSocket, output: _PipeEnd) -> int:
        """Start a process; returns its id."""
        output.users += 1
        if is_template:
            child: Any = _Template(self, self.workers.new_pid(), channel, output.close)
        else:
            child = self.workers.start(output.close, channel)
        self._children[child.pid] = child
        return child.pid

    def add_child(self, child: Any) -> None:
        self._children[child.pid] = child

    def pidfd_open(self, pid: int, flags: int = 0) -> int:
        return self.install(_PidFd(self._children[pid]))

    def pidfd_send_signal(self, fd: int, number: int) -> None:
        self._open[fd].process.kill()

    def kill(self, pid: int, number: int) -> None:
        if pid not in self._children:
            self._broken(f"the process {pid} is killed, which has been waited for")
            return
        self._children[pid].kill()

    def wait(self, pid: int) -> int:
        """Return the exit status of a child that has ended or was killed; negative for a signal."""
        status = self._children.pop(pid).status
        if status is None:
            self._broken(f"the event loop waits for the process {pid}, which runs")
        return status or 0

    # Replacements of modules

    @property
    def os(self) -> Any:
        def waitpid(pid: int, options: int) -> tuple[int, int]:
            status = self.wait(pid)
            return pid, -status if status < 0 else status << 8

        names = ("close", "pipe", "read", "pidfd_open", "kill")
        replaced = {name: getattr(self, name) for name in names}
        return _Replaced(os, **replaced, waitpid=waitpid, killpg=_nothing, set_blocking=_nothing)

    @property
    def signal(self) -> Any:
        return _Replaced(signal, pidfd_send_signal=self.pidfd_send_signal)

    @property
    def socket(self) -> Any:
        return _Replaced(socket, socketpair=self.socketpair, send_fds=self.send_fds)

    @property
    def subprocess(self) -> Any:
        return _Replaced(subprocess, Popen=partial(_Popen, self))


class _Replaced:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _nothing(*ignored: object) -> None:
    """Do nothing."""


class _PipeEnd:
    """The writing end of a pipe, which several processes may hold, or the reading end of ``writing``."""

    writable = False

    def __init__(self, writing: _PipeEnd | None = None) -> None:
        self._writing = writing
        self.users = 1

    @property
    def readable(self) -> bool:
        return self._writing is not None and not self._writing.users

    def close(self) -> None:
        self.users -= 1


class _KernelSocket(SimulatedSocket):
    """The server's end of a socket pair; ``passed`` are the descriptors sent with each message."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        super().__init__(kernel.loop, _nothing, _nothing)
        self.passed: deque[list[Any]] = deque()
        self._kernel = kernel

    def close(self) -> None:
        if not self._closed:
            self._kernel.close(self.fileno())
        super().close()


class _PeerEnd:
    """The other end of a socket pair, which is passed to another process."""

    readable = writable = False

    def __init__(self, kernel: SimulatedKernel, socket: _KernelSocket) -> None:
        self.socket = socket
        self._kernel = kernel
        self._fd = kernel.install(self)

    def __enter__(self) -> _PeerEnd:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            self._kernel.close(self._fd)
            self._fd = -1


class _PidFd:
    writable = False

    def __init__(self, process: Any) -> None:
        self.process = process

    @property
    def readable(self) -> bool:
        return self.process.exit_status is not None


class _Popen:
    """``subprocess.Popen`` for a worker, a template, or the guard, the only process with a pipe."""

    def __init__(
        self,
        kernel: SimulatedKernel,
        command: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._kernel = kernel
        kernel.close(kernel.install(_PipeEnd()))  # the pipe that reports a program that cannot start
        self.stdin: Any = None
        if stdin == subprocess.PIPE:
            fd = kernel.install(_PipeEnd())
            self.stdin = SimpleNamespace(write=_nothing, fileno=lambda: fd, close=partial(kernel.close, fd))
            self.pid = kernel.workers.new_pid()
            kernel.add_child(SimpleNamespace(pid=self.pid, status=0, kill=_nothing))
        else:
            self.pid = kernel.start_process(command, stdout, pass_fds)

    def kill(self) -> None:
        self._kernel.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        return self._kernel.wait(self.pid)


class _Template:
    """A process that forks workers and other templates; see ``conch.workers.child.template``."""

    def __init__(self, kernel: SimulatedKernel, pid: int, control: _KernelSocket, on_end: Callable[[], None]) -> None:
        self.pid = pid
        self.status: int | None = None
        self.exit_status: int | None = None
        self._kernel = kernel
        self._control = control
        self._on_end = on_end
        self._busy_until = 0
        control.attach(self._received, partial(self._end, 0))

    def kill(self) -> None:
        self._end(-9)

    def _end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self._control.hang_up()
            self._on_end()
            loop = self._kernel.loop
            loop.later(loop.latency(0.001), lambda: setattr(self, "exit_status", status))

    def _received(self, data: bytes) -> None:
        message, descriptors = json.loads(data), self._control.passed.popleft()
        loop, faults = self._kernel.loop, self._kernel.template_faults
        fault = faults.pop(0) if faults else ""
        seconds = loop.latency(0.01)
        if fault == "die":
            loop.later(seconds, partial(self._end, -11))
        elif fault != "stall":
            loop.later(seconds, partial(self._obey, message, descriptors))

    def _obey(self, message: Mapping[str, Any], descriptors: list[Any]) -> None:
        if self.status is not None:
            return
        if message["op"] == "import":
            answer: dict[str, Any] = {"problem": ""}
        else:
            peer, output = descriptors
            answer = {"pid": self._kernel.start(message["as"] == "template", peer.socket, output)}
        self._control.deliver_packet(json.dumps(answer).encode())
