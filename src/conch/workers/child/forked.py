"""Ties worker processes to the server, and disables the channel in processes that a model forks.

A worker is killed when the server ends. Only the worker itself may use its channel, not a process that its model starts
with ``multiprocessing`` or ``os.fork``. Runs in workers, worker templates and forked processes, in any environment
(standard library only).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, Callable

from conch.workers.child.channel import Channel
from conch.workers.child.frames import Header
from conch.workers.child.packing import Packer

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def take_name(name: str) -> None:
    """On Linux, set the name shown by ``ps`` and ``top``, up to 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def become_child_of(server: int, parent: int) -> None:
    """Wait until ``parent``, which is ending, has ended and ``server`` has adopted this process; exit if it has not."""
    while os.getppid() == parent:
        time.sleep(0.0005)
    end_with_parent()
    if os.getppid() != server:  # the server has ended, or another process adopts its orphans
        os._exit(1)


#: Frames that only the worker's loop sends; a forked process sends them only if it has returned from the model's code.
_WORKER_ONLY = frozenset(("done", "failed", "completed", "ready", "stopped"))


class ForkedChannel(Channel):
    """A worker's channel in a forked process: writes log messages to standard error and refuses everything else."""

    def send(self, header: Header, packer: Packer | None = None) -> None:
        if header["op"] == "log":
            _say(header["message"])
        elif header["op"] in _WORKER_ONLY:
            _say(f"process {os.getpid()}, which a model forked, is terminated because it returned from the model")
            os._exit(1)
        else:
            raise self.refusal()

    def post(self, header: Header, packer: Packer | None = None) -> None:
        """Do nothing: the worker has the same objects and sends the frame."""

    def release_buffer(self, buffer: int) -> None:
        """Do nothing: the worker releases the buffer."""

    def close(self) -> None:
        """Close this process's copy of the socket; memory stays mapped, because arrays may use it."""
        self._connection.close()

    def wait(self, done: Callable[[], bool]) -> None:
        raise self.refusal()

    def poll(self) -> None:
        raise self.refusal()

    @staticmethod
    def refusal() -> RuntimeError:
        """Return the error for use of the channel in a forked process, with advice."""
        return RuntimeError(
            f"process {os.getpid()} was forked by a model, and only the model's process can send responses: "
            f"pass them to it, for example through a multiprocessing.Queue"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def keep_from_children(channel: Channel) -> None:
    """Disable ``channel`` in processes that this one forks, and restore their default signal handlers."""
    masks: list[Any] = []

    def before() -> None:
        # Until the child restores its handlers it would ignore these signals, as the worker does.
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT)))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        channel.__class__ = ForkedChannel
        channel.close()
        with suppress(ValueError):  # not Python's main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
