"""The counts of a worker in memory that the server maps."""

from __future__ import annotations

import socket

from conch.workers.child.channel import Channel, Endpoint
from conch.workers.child.heartbeat import SIZE, Heartbeat, HeartbeatSample, read_heartbeat
from tests.events import eventually


def test_server_sees_the_beats_and_the_steps_without_a_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel, server = Channel(theirs), Endpoint()
        heartbeat = Heartbeat()
        heartbeat.step(stepping=True)  # before anybody looks
        heartbeat.start(channel)
        [(header, _)] = server.receive(ours)
        assert header["op"] == "heartbeat"
        memory = memoryview(server.buffers.get(header["buffer"]))[:SIZE]
        eventually(lambda: read_heartbeat(memory).beats >= 2, "two beats")
        assert read_heartbeat(memory)[1:] == (0, False)
        heartbeat.step(stepping=True)
        assert read_heartbeat(memory)[1:] == (2, True)
        heartbeat.step(stepping=False)
        assert read_heartbeat(memory)[1:] == (3, False)
        assert read_heartbeat(memoryview(bytearray(SIZE))) == HeartbeatSample()
