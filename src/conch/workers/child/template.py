"""Worker template: a process that has imported the modules of one kind of workers, and forks them.

The program is the worker's (``worker.py``), started by ``workers/host/templates.py``, which holds the other end of the
control socket. Each packet on the socket is a JSON message: first ``import`` with modules, then ``fork`` for each
process. A template has a single thread, no model and no device. Linux only; standard library only.

A forked process becomes a child of the server, so that the server can wait for it and it is killed when the server
ends, while the template may end at any time. For this, an intermediate process forks it and ends at once, and the
server adopts it. Then the template replies: the server waits neither for a process that could not be forked, nor until
a forked one gets the processor.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
from array import array
from contextlib import suppress
from typing import Any, Callable

from conch.workers.child.forked import become_child_of, take_name

#: Maximum size of a message (bytes), and the maximum number of descriptors: a socket and a pipe for output.
MAX_MESSAGE = 64 << 10
_DESCRIPTORS = 2


class TemplateProgram:
    """Serves the control socket ``control``; ``work`` runs a forked worker with the descriptor of its channel."""

    def __init__(self, control: socket.socket, work: Callable[[int], None]) -> None:
        self._control = control
        self._work = work
        self._server = os.getppid()

    def serve(self) -> None:
        """Handle messages until the server closes the socket, then exit; does not return in any process."""
        take_name("conch-template")
        while True:
            message, fds = self._receive()
            if message["op"] == "import":
                self._import(message["modules"])
            else:
                self._fork(message, *fds)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        fds = array("i")
        data, ancillary, _, _ = self._control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(_DESCRIPTORS * fds.itemsize))
        if not data:
            os._exit(0)
        for _, _, value in ancillary:
            fds.frombytes(value)
        return json.loads(data), list(fds)

    def _reply(self, **reply: Any) -> None:
        self._control.send(json.dumps(reply).encode())

    def _import(self, modules: list[str]) -> None:
        """Import ``modules``, skipping those that fail, and reply with the reason why forking is unsafe, if any."""
        # Imported objects stay: collection would take a quarter of the import time to free a few megabytes.
        gc.disable()
        for module in modules:
            with suppress(Exception):  # a worker that needs the module reports the error
                importlib.import_module(module)
        gc.freeze()  # keeps collections in workers from writing to shared pages
        gc.enable()
        self._reply(problem=_fork_problem())

    def _fork(self, message: dict[str, Any], fd: int, output: int) -> None:
        """Fork a process, and reply with its id when it is a child of the server; exit if it cannot be forked."""
        readable, writable = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(readable)
            self._fork_again(message, fd, output, writable)
        for descriptor in (fd, output, writable):
            os.close(descriptor)
        forked = os.read(readable, 32)
        os.close(readable)
        os.waitpid(pid, 0)
        if not forked:
            os._exit(1)
        self._reply(pid=int(forked))

    def _fork_again(self, message: dict[str, Any], fd: int, output: int, result: int) -> None:
        """In the intermediate process: fork, write the process id to ``result`` and exit; in the forked process: run.

        Does not return in any process.
        """
        between = os.getpid()
        try:
            pid = os.fork()
            if pid:
                os.write(result, b"%d" % pid)
                os._exit(0)
            os.close(result)
            become_child_of(self._server, between)
            self._go_on(message, fd, output)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _go_on(self, message: dict[str, Any], fd: int, output: int) -> None:
        """Run as the worker or template that the server requested; does not return."""
        self._control.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        os.environ.update(message["environment"])
        _reseed()
        if message["as"] == "template":
            TemplateProgram(socket.socket(fileno=fd), self._work).serve()
        self._work(fd)


def _fork_problem() -> str:
    """Return the reason why this process must not fork (imported modules run threads); empty if it may."""
    # A trial fork, which permanently stops thread pools that end before a fork, such as OpenBLAS's.
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"its imports run {threads - 1} threads"


def _reseed() -> None:
    """Reseed numpy's global generator after a fork; Python reseeds its own, and PyTorch starts with a fixed seed."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
