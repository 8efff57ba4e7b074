"""A template: a process that has imported what the workers of one kind import, and forks them.

The program is the worker's (``worker.py``), started by ``workers/host/templates.py`` at the other end of the control
socket, which carries one JSON message a packet: ``import`` modules, then ``fork`` as often as the server likes.  A
template has no thread but the one that forks, no model and no device.  Linux only; standard library only.

What it forks becomes a child of the server itself, so that the server waits for it as for any other child and its end
ends it, while the template may end at any time: the process in between ends at once, and the server adopts its child.
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

from conch.workers.child.parentage import become_child_of, take_name

#: The greatest message, and how many descriptors come with one at most: a socket, and where to write output.
MAX_MESSAGE = 64 << 10
_DESCRIPTORS = 2


class TemplateProgram:
    """Obeys the server at the other end of ``control``; ``work`` is what a forked worker does with its channel's fd."""

    def __init__(self, control: socket.socket, work: Callable[[int], None]) -> None:
        self._control = control
        self._work = work
        self._server = os.getppid()

    def serve(self) -> None:
        """Answer messages until the server closes the socket; returns in no process."""
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

    def _answer(self, **answer: Any) -> None:
        self._control.send(json.dumps(answer).encode())

    def _import(self, modules: list[str]) -> None:
        """Import what is there of ``modules``, and tell what forbids a fork now, if anything does."""
        # What is imported stays: looking for garbage takes a quarter of the time, for a few megabytes.
        gc.disable()
        for module in modules:
            with suppress(Exception):  # a worker that needs it says what is wrong
                importlib.import_module(module)
        gc.freeze()  # no collection of a worker writes to what it shares
        gc.enable()
        self._answer(hindrance=_hindrance())

    def _fork(self, message: dict[str, Any], fd: int, output: int) -> None:
        pid = os.fork()
        if pid:
            os.close(fd)
            os.close(output)
            os.waitpid(pid, 0)
            return
        between = os.getpid()
        if os.fork():
            os._exit(0)
        try:
            become_child_of(self._server, between)
            self._go_on(message, fd, output)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _go_on(self, message: dict[str, Any], fd: int, output: int) -> None:
        """Be the worker, or the template, that the server asked for; does not return."""
        self._answer(pid=os.getpid())
        self._control.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        os.environ.update(message["environment"])
        _reseed()
        if message["as"] == "template":
            TemplateProgram(socket.socket(fileno=fd), self._work).serve()
        self._work(fd)


def _hindrance() -> str:
    """Why this process must not be forked: what it imported has started threads; empty if it may."""
    # A trial: pools of threads that can be stopped before a fork, such as OpenBLAS's, are from here on.
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"what it has imported runs {threads - 1} threads"


def _reseed() -> None:
    """Give this process random numbers of its own in numpy, too; Python sees to its own, and PyTorch's begin alike."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
