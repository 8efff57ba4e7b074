"""Frames to a worker that does not read, and from one that writes anything."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

from conch.core.errors import ConchError
from conch.core.tensors import WireTensor
from conch.workers.child.buffers import IDLE_LIMIT
from conch.workers.child.channel import Endpoint, Frame, write
from conch.workers.child.packing import Packer
from conch.workers.host.link import FLUSH_SECONDS, IDLE_SECONDS, Link
from tests.unit.fake_clock import fake_clock, settle


class Wire:
    """A link and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.theirs.setblocking(False)
        self.frames: list[Frame] = []
        self.broken: list[ConchError | None] = []
        self.link = Link(ours, self.frames.extend, self.broken.append)
        self.endpoint = Endpoint()

    async def read(self, count: int) -> list[dict[str, Any]]:
        headers: list[dict[str, Any]] = []
        while len(headers) < count:
            try:
                headers += [header for header, _ in self.endpoint.receive(self.theirs)]
            except BlockingIOError:
                await asyncio.sleep(0)
        return headers


@fake_clock
async def test_frames_that_the_socket_does_not_take_are_kept_in_order() -> None:
    wire = Wire()
    for number in range(200):
        wire.link.send({"op": "x", "number": number, "padding": "p" * 1000})
    sent = [header for header, _ in wire.endpoint.receive(wire.theirs)]
    assert 0 < len(sent) < 200
    headers = sent + await wire.read(200 - len(sent))
    assert [header["number"] for header in headers] == list(range(200))
    wire.link.close()


@fake_clock
async def test_large_tensor_behind_a_full_socket_arrives_with_its_memory() -> None:
    wire = Wire()
    for _ in range(20):
        wire.link.send({"op": "x", "padding": "p" * 1000})
    packer = Packer()
    data = bytes(range(256)) * 1000
    wire.link.send({"op": "y", "tensors": packer.pack([WireTensor("T", "UINT8", (len(data),), data)])}, packer)
    header = (await wire.read(21))[-1]
    _, _, _, size, buffer, offset = header["tensors"][0]
    assert wire.endpoint.buffers.get(buffer)[offset : offset + size] == data
    wire.link.close()


@fake_clock
async def test_end_of_the_other_side_is_reported_without_a_reason() -> None:
    wire = Wire()
    wire.theirs.close()
    await settle()
    assert wire.broken[:1] == [None]
    wire.link.send({"op": "x"})  # the other end is gone, which does not affect the sender
    wire.link.close()


@fake_clock
async def test_bytes_that_are_no_frame_are_reported_with_a_reason() -> None:
    wire = Wire()
    wire.theirs.send(b"\3\0\0\0\0\0\0\0{x}")
    await settle()
    (reason,) = wire.broken
    assert reason is not None and "not JSON" in reason.message
    wire.link.close()


@fake_clock
async def test_frames_sent_before_the_end_can_be_drained() -> None:
    wire = Wire()
    wire.link.stop_reading()
    for buffer in wire.endpoint.encode({"op": "last"})[0]:
        wire.theirs.send(buffer)
    wire.theirs.close()
    wire.link.drain()
    assert [header["op"] for header, _ in wire.frames] == ["last"]
    wire.link.close()


@fake_clock
async def test_a_large_buffer_that_is_dropped_at_once_is_forgotten_soon() -> None:
    wire = Wire()
    data = bytes(IDLE_LIMIT + 1)
    sent = Packer()
    wire.link.send({"op": "x", "tensors": sent.pack([WireTensor("T", "UINT8", (len(data),), data)])}, sent)
    header = (await wire.read(1))[0]
    wire.endpoint.buffers.returned.append(header["tensors"][0][4])
    assert not write(wire.theirs, wire.endpoint.encode({"op": "y"}))
    await settle()
    wire.link.flush_soon()
    await asyncio.sleep(2 * FLUSH_SECONDS)
    assert wire.endpoint.receive(wire.theirs) == []
    assert (wire.link.shared_bytes, wire.endpoint.buffers.size) == (0, 0)
    wire.link.close()


@fake_clock
async def test_memory_of_both_ends_is_given_back_when_it_has_not_been_needed_for_a_while() -> None:
    wire = Wire()
    data = bytes(1 << 20)
    sent, answered = Packer(), Packer()
    wire.link.send({"op": "x", "tensors": sent.pack([WireTensor("T", "UINT8", (len(data),), data)])}, sent)
    header = (await wire.read(1))[0]
    wire.endpoint.buffers.returned.append(header["tensors"][0][4])
    answer = {"op": "y", "tensors": answered.pack([WireTensor("T", "UINT8", (len(data),), data)])}
    assert not write(wire.theirs, wire.endpoint.encode(answer, answered))
    await settle()
    _, _, _, _, buffer, _ = wire.frames[0][0]["tensors"][0]
    wire.link.buffers.returned.append(buffer)
    wire.link.flush()
    assert wire.link.shared_bytes == 2 * len(data)

    await asyncio.sleep(1.5 * IDLE_SECONDS)  # frames have been sent since then
    assert wire.link.shared_bytes == 2 * len(data)
    await asyncio.sleep(IDLE_SECONDS)
    with suppress(BlockingIOError):
        wire.endpoint.receive(wire.theirs)
    forget = wire.endpoint.flush()
    assert forget is not None
    assert not write(wire.theirs, forget)
    await settle()
    assert wire.link.shared_bytes == 0
    assert not wire.endpoint.shares
    wire.link.close()
