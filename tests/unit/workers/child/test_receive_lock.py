"""Which thread of a worker receives: waiting threads are woken only by a frame."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from conch.workers.child.channel import Channel, Endpoint, write
from conch.workers.child.frames import FrameReader
from conch.workers.child.receive_lock import ReceiveLock

PATIENCE = 20


class Waiting:
    """A thread that takes the turn, receives a frame, and keeps the turn."""

    def __init__(self, turns: ReceiveLock, channel: Channel) -> None:
        self.taken = threading.Event()
        self.op = ""
        self._turns, self._channel = turns, channel
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._turns.take()
        self.taken.set()
        self.op = self._channel.receive()[0]["op"]

    def received(self) -> str:
        self._thread.join(PATIENCE)
        return self.op


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel, ReceiveLock]]:
    """The server's end of a channel, the worker's, and its turns."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        yield ours, channel, ReceiveLock(channel)


def test_turn_that_is_passed_on_wakes_no_thread_until_there_is_a_frame(
    ends: tuple[socket.socket, Channel, ReceiveLock],
) -> None:
    server, channel, turns = ends
    turns.take()
    turns.pass_on()
    turns.pass_on()

    assert select.select([turns], [], [], 0)[0] == []
    waiting = Waiting(turns, channel)
    write(server, Endpoint().encode({"op": "prepare"}))

    assert waiting.received() == "prepare"


def test_thread_that_has_the_turn_is_the_only_one_that_a_frame_reaches(
    ends: tuple[socket.socket, Channel, ReceiveLock],
) -> None:
    server, channel, turns = ends
    waiting = Waiting(turns, channel)
    write(server, Endpoint().encode({"op": "first"}))

    turns.take()

    assert channel.receive()[0]["op"] == "first"
    assert not waiting.taken.is_set()
    write(server, Endpoint().encode({"op": "second"}))
    turns.pass_on()
    assert waiting.received() == "second"


def test_frame_that_was_read_with_the_one_before_wakes_the_next_thread_at_once(
    ends: tuple[socket.socket, Channel, ReceiveLock],
) -> None:
    server, channel, turns = ends
    endpoint = Endpoint()
    buffers = [*endpoint.encode({"op": "execute"})[0], *endpoint.encode({"op": "cancel"})[0]]
    server.sendall(b"".join(buffers))
    waiting = Waiting(turns, channel)
    turns.take()

    assert channel.receive()[0]["op"] == "execute"
    assert channel.buffered
    turns.pass_on()

    assert waiting.received() == "cancel"


def test_thread_that_waits_has_given_back_memory_and_gives_back_what_is_let_go_later(
    ends: tuple[socket.socket, Channel, ReceiveLock],
) -> None:
    server, channel, turns = ends
    server.settimeout(PATIENCE)
    reader = FrameReader()
    channel.release_buffer(7)
    Waiting(turns, channel)

    assert [header for header, _ in reader.receive(server)] == [{"op": "release", "buffers": [7]}]
    channel.release_buffer(8)
    assert [header for header, _ in reader.receive(server)] == [{"op": "release", "buffers": [8]}]
