"""The heartbeat of a worker: counters in memory shared with the server, which show that the worker runs.

A thread increments the beat counter several times a second. It cannot while the process is stopped or other code holds
the interpreter lock; the server distinguishes the two by CPU time (``workers/host/liveness.py``). The loop of an engine
counts its steps here. No frames are sent. Runs in workers, in any environment (standard library only).
"""

from __future__ import annotations

import _thread
from struct import Struct
from time import sleep
from typing import NamedTuple

from conch.workers.child.channel import Channel

#: Interval between beats (s).
BEAT_SECONDS = 0.25

_BEATS = Struct("=Q")
_STEPS = Struct("=QQ")
_ALL = Struct("=QQQ")

#: Size of the counters (bytes).
SIZE = _ALL.size


class HeartbeatSample(NamedTuple):
    """The counters of a worker: beats and engine steps; ``stepping`` is True while a step runs."""

    beats: int = 0
    steps: int = 0
    stepping: bool = False


def read_heartbeat(memory: memoryview | bytearray) -> HeartbeatSample:
    """Read the counters from a worker's shared memory, in the server."""
    beats, steps, stepping = _ALL.unpack_from(memory)
    return HeartbeatSample(beats, steps, bool(stepping))


class Heartbeat:
    """The counters of this process; shared with the server after ``start``."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(SIZE))
        self._steps = 0

    def start(self, channel: Channel) -> None:
        """Share the counters with the server and start the thread."""
        self._memory = channel.share({"op": "heartbeat"}, SIZE)
        # Not a ``threading`` thread, which debuggers and profilers of the model would stop and count.
        _thread.start_new_thread(self._beat, ())

    def step(self, stepping: bool) -> None:
        """Count an engine step: True when a step begins, False when the engine becomes idle."""
        self._steps += 1
        _STEPS.pack_into(self._memory, _BEATS.size, self._steps, stepping)

    def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            _BEATS.pack_into(self._memory, 0, beats)
            sleep(BEAT_SECONDS)


#: The heartbeat of this process, which is one worker.
HEARTBEAT = Heartbeat()
