"""The heartbeat of a worker: counts in memory that the server maps too, by which it sees that the worker runs.

A thread counts on several times a second.  It cannot while the process is stopped, or while other code holds the
interpreter; which of both it is, the server sees by the processor time (``workers/host/liveness.py``).  The loop of an
engine counts its steps here.  Nothing is sent.  Runs in workers, in any environment (standard library only).
"""

from __future__ import annotations

import _thread
from struct import Struct
from time import sleep
from typing import NamedTuple

from conch.workers.child.channel import Channel

#: Time between two beats (s).
BEAT_SECONDS = 0.25

_BEATS = Struct("=Q")
_STEPS = Struct("=QQ")
_ALL = Struct("=QQQ")

#: Bytes that a heartbeat takes.
SIZE = _ALL.size


class HeartbeatSample(NamedTuple):
    """What a worker has counted: its beats, and the steps of its engine; ``stepping`` says that one is under way."""

    beats: int = 0
    steps: int = 0
    stepping: bool = False


def read_heartbeat(memory: memoryview | bytearray) -> HeartbeatSample:
    """The counts in a worker's memory, as the server reads them."""
    beats, steps, stepping = _ALL.unpack_from(memory)
    return HeartbeatSample(beats, steps, bool(stepping))


class Heartbeat:
    """The counts of this process; they are shared from ``start`` on."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(SIZE))
        self._steps = 0

    def start(self, channel: Channel) -> None:
        """Share the counts with the server and start the thread."""
        self._memory = channel.share({"op": "heartbeat"}, SIZE)
        # Not a thread of ``threading``: debuggers and profilers of the model would stop and count it.
        _thread.start_new_thread(self._beat, ())

    def step(self, stepping: bool) -> None:
        """Count a step of the engine: it begins one, or (False) it has nothing to do."""
        self._steps += 1
        _STEPS.pack_into(self._memory, _BEATS.size, self._steps, stepping)

    def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            _BEATS.pack_into(self._memory, 0, beats)
            sleep(BEAT_SECONDS)


#: A process is one worker.
HEARTBEAT = Heartbeat()
