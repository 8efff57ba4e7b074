"""What is left of a worker in a process that its model forks, by ``multiprocessing`` or ``os.fork``.

The channel stays the worker's alone.  Runs in such processes, in any environment (standard library only).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any, Callable

from conch.workers.child.channel import Channel
from conch.workers.child.frames import Header
from conch.workers.child.packing import Packer

#: What only the loop of a worker sends, which a process is in that returned from the model.
_WORKER_ONLY = frozenset(("done", "failed", "completed", "ready", "stopped"))


class ForkedChannel(Channel):
    """A worker's channel in a process forked from it: log lines go to standard error, all else is refused."""

    def send(self, header: Header, packer: Packer | None = None) -> None:
        if header["op"] == "log":
            _say(header["message"])
        elif header["op"] in _WORKER_ONLY:
            _say(f"process {os.getpid()}, which a model has forked, returned from the model: it is ended")
            os._exit(1)
        else:
            raise self.refusal()

    def post(self, header: Header, packer: Packer | None = None) -> None:
        """Leave it to the worker, which has the same objects."""

    def release_region(self, region: int) -> None:
        """Leave it to the worker."""

    def close(self) -> None:
        """Close this process's copy of the socket; memory stays, which arrays may look into."""
        self._connection.close()

    def wait(self, done: Callable[[], bool]) -> None:
        raise self.refusal()

    def poll(self) -> None:
        raise self.refusal()

    @staticmethod
    def refusal() -> RuntimeError:
        """Why nothing can be said to the server here, and what to do."""
        return RuntimeError(
            f"process {os.getpid()} was forked by a model, and only the model's own process can talk to the server: "
            "hand what is to be sent to that, for example through a multiprocessing.Queue"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def keep_from_children(channel: Channel) -> None:
    """From now on, processes that this one forks have no part in ``channel``, and signals end them as any other."""
    masks: list[Any] = []

    def before() -> None:
        # A child that is ended at once is not to take the signal for one to its worker, which ignores it.
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT)))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        channel.__class__ = ForkedChannel
        channel.close()
        with suppress(ValueError):  # Python takes this thread for another than the main one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
