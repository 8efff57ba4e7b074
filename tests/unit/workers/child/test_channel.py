"""Framing and tensor packing over real socket pairs, both ends in this process."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conch.core.errors import ConchError
from conch.core.tensors import Loan, StoredData, WireTensor
from conch.workers.child import channel, frames
from conch.workers.child.buffers import BufferMap, anonymous_file
from conch.workers.child.channel import Channel, Endpoint, write
from conch.workers.child.frames import Frame, FrameReader, Header, dumps, encode_frame
from conch.workers.child.packing import INLINE_LIMIT, PAYLOAD_LIMIT, Packer, Unpacker, lent_outputs


class Server:
    """The server's end, reading as a blocking program would."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.endpoint = Endpoint()
        self.frames: list[Frame] = []

    def send(self, header: Header, *tensors: WireTensor) -> None:
        packer = Packer()
        if tensors:
            header["tensors"] = packer.pack(tensors)
        self.connection.sendall(write(self.connection, self.endpoint.encode(header, packer)))

    @contextmanager
    def sending(self, header: Header, *tensors: WireTensor) -> Iterator[None]:
        """Send what may not fit into the socket while the other end is not reading."""
        thread = threading.Thread(target=self.send, args=(header, *tensors))
        thread.start()
        yield
        thread.join()

    def receive(self) -> Frame:
        while not self.frames:
            self.frames += self.endpoint.receive(self.connection)
        return self.frames.pop(0)

    def tensors(self) -> list[WireTensor]:
        header, payload = self.receive()
        return Unpacker(payload, self.endpoint.buffers).unpack(header["tensors"])


@pytest.fixture
def server() -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        server = Server(ours)
        server.theirs = theirs  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def worker(server: Server) -> Channel:
    return Channel(server.theirs)  # type: ignore[attr-defined]


def fp32(name: str, count: int) -> WireTensor:
    return WireTensor(name, "FP32", (count,), os.urandom(4 * count))


def raw_frame(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(payload)) + header + payload


def test_frame_arrives_with_its_payload(server: Server, worker: Channel) -> None:
    server.connection.sendall(b"".join(encode_frame({"op": "x", "text": "ü"}, [b"ab", b"c"], 3)))
    assert worker.receive() == ({"op": "x", "text": "ü"}, bytearray(b"abc"))


def test_frames_that_arrive_together_are_distinguished(server: Server, worker: Channel) -> None:
    server.connection.sendall(b"".join(b"".join(encode_frame({"op": "x", "n": n})) for n in range(1000)))
    assert [worker.receive()[0]["n"] for _ in range(1000)] == list(range(1000))


def test_frame_that_arrives_byte_by_byte_is_put_together() -> None:
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    frames = []
    for byte in raw_frame(b'{"op":"x"}', b"payload") * 2:
        ours.sendall(bytes((byte,)))
        frames += reader.receive(theirs)
    assert frames == [({"op": "x"}, bytearray(b"payload"))] * 2


def test_frame_larger_than_the_buffer_arrives(server: Server, worker: Channel) -> None:
    text = "x" * 3_000_000
    with server.sending({"op": "x", "text": text}):
        assert worker.receive()[0]["text"] == text
    server.send({"op": "y"})
    assert worker.receive()[0] == {"op": "y"}


def test_surrogates_in_text_are_replaced() -> None:
    assert b"\\ud800" not in dumps({"op": "x", "text": "a\ud800"})
    assert frames.loads(memoryview(dumps({"op": "x", "text": "a\ud800é"}))) == {"op": "x", "text": "a?é"}


@pytest.mark.parametrize(
    "data",
    [
        raw_frame(b"nonsense"),
        raw_frame(b"[]"),
        raw_frame(b"{}"),
        raw_frame(b'{"op":5}'),
        raw_frame(b"\xff\xfe"),
        struct.pack("<II", 0xFFFFFFFF, 0),
        struct.pack("<II", 10, 0xFFFFFFFF),
        raw_frame(b'{"op":"buffer","buffer":1,"size":10}'),
        raw_frame(b'{"op":"forget","buffer":1}'),
        raw_frame(b'{"op":"release","buffers":[1]}'),
        raw_frame(b'{"op":"release"}'),
        raw_frame(b'{"op":"x","release":5}'),
    ],
)
def test_broken_frame_is_refused(server: Server, worker: Channel, data: bytes) -> None:
    server.connection.sendall(data)
    with pytest.raises(ConchError):
        worker.receive()


def test_closing_one_end_is_seen_at_the_other(server: Server, worker: Channel) -> None:
    server.connection.close()
    with pytest.raises(EOFError):
        worker.receive()


def test_sending_to_a_closed_end_calls_on_closed(server: Server) -> None:
    closed = []
    worker = Channel(server.theirs, lambda: closed.append(True))  # type: ignore[attr-defined]
    server.connection.close()
    with pytest.raises(ConnectionError):
        worker.send({"op": "x"})
    assert closed


def test_small_tensors_travel_in_the_frame(server: Server, worker: Channel) -> None:
    sent = [fp32("A", 3), WireTensor("B", "BYTES", (2, 1), b"\1\0\0\0a\0\0\0\0"), WireTensor("C", "INT8", (0, 4), b"")]
    server.send({"op": "x"}, *sent)
    header, payload = worker.receive()
    received = Unpacker(payload, worker.buffers).unpack(header["tensors"])
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in received] == [
        (t.name, t.datatype, t.shape, t.data) for t in sent
    ]
    assert not server.endpoint.pool.lent


def test_large_tensors_travel_in_one_buffer(server: Server, worker: Channel) -> None:
    sent = [fp32("A", INLINE_LIMIT // 4), fp32("B", 5), fp32("C", INLINE_LIMIT // 4 + 1)]
    server.send({"op": "x"}, *sent)
    header, payload = worker.receive()
    assert [len(descriptor) for descriptor in header["tensors"]] == [6, 4, 6]
    assert header["tensors"][0][4] == header["tensors"][2][4]
    received = Unpacker(payload, worker.buffers).unpack(header["tensors"])
    assert [bytes(t.data) for t in received] == [t.data for t in sent]


def test_many_small_tensors_do_not_make_a_huge_payload(server: Server, worker: Channel) -> None:
    sent = [fp32(str(n), 15_000) for n in range(40)]
    with server.sending({"op": "x"}, *sent):
        header, payload = worker.receive()
    assert len(payload) <= PAYLOAD_LIMIT
    received = Unpacker(payload, worker.buffers).unpack(header["tensors"])
    assert [bytes(t.data) for t in received] == [t.data for t in sent]


def test_frame_of_hundreds_of_buffers_is_sent(server: Server, worker: Channel) -> None:
    sent = [fp32(str(n), 200) for n in range(1200)]
    with server.sending({"op": "x"}, *sent):
        header, payload = worker.receive()
    received = Unpacker(payload, worker.buffers).unpack(header["tensors"])
    assert [bytes(t.data) for t in received] == [t.data for t in sent]


def test_buffer_copied_out_is_given_back_with_the_next_frame(server: Server, worker: Channel) -> None:
    packer = Packer()
    tensor = fp32("A", 50_000)
    worker.send({"op": "x", "tensors": packer.pack([tensor])}, packer)
    (received,) = server.tensors()
    assert received.data == tensor.data
    server.send({"op": "y"})
    assert worker.receive()[0] == {"op": "y"}
    pool = worker.endpoint.pool
    assert not pool.lent and len(pool.free) == 1


def test_buffer_is_used_again_for_the_next_frame(server: Server, worker: Channel) -> None:
    for _ in range(5):
        packer = Packer()
        tensor = fp32("A", 50_000)
        worker.send({"op": "x", "tensors": packer.pack([tensor])}, packer)
        assert server.tensors()[0].data == tensor.data
        server.send({"op": "y"})
        worker.receive()
    assert list(worker.endpoint.pool.free) == [1]
    assert len(server.endpoint.buffers) == 1


def test_dropped_buffer_is_unmapped_by_the_reader(server: Server, worker: Channel) -> None:
    worker.endpoint.pool.idle_limit = 0
    packer = Packer()
    worker.send({"op": "x", "tensors": packer.pack([fp32("A", 50_000)])}, packer)
    server.tensors()
    server.send({"op": "y"})
    worker.receive()
    worker.send({"op": "z"})
    assert server.receive()[0] == {"op": "z"}
    assert len(server.endpoint.buffers) == 0


def test_buffer_given_back_while_idle_is_sent_alone(server: Server, worker: Channel) -> None:
    server.send({"op": "x"}, fp32("A", 50_000))
    header, _ = worker.receive()
    waiting = threading.Thread(target=worker.receive)
    waiting.start()
    worker.release_buffer(header["tensors"][0][4])
    server.connection.settimeout(20)
    assert server.endpoint.receive(server.connection) == []
    assert not server.endpoint.pool.lent
    server.send({"op": "end"})
    waiting.join()


class Owner:
    """Somebody to whom a file belongs."""

    def __init__(self, content: bytes) -> None:
        self.fd = anonymous_file()
        os.write(self.fd, content)

    def loan(self, offset: int, size: int) -> Loan:
        return Loan(self, self.fd, offset, size)


class Lent(StoredData):
    def __init__(self, loan: Loan) -> None:
        self.loaned = loan

    def __len__(self) -> int:
        return self.loaned.size

    def lend(self) -> Loan:
        return self.loaned


class LentPlaces:
    """The outputs ``names`` may be written by the other end; none is written by this one."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def lends(self, name: str) -> bool:
        return name in self.names

    def put(self, name: str, data: memoryview) -> bool:
        return False


def test_lent_file_is_read_and_written_by_the_other_end(server: Server, worker: Channel) -> None:
    owner = Owner(bytes(range(8)) + bytes(INLINE_LIMIT))
    packer = Packer()
    descriptor = packer.add("A", "UINT8", [INLINE_LIMIT], Lent(owner.loan(4, INLINE_LIMIT)))  # type: ignore[arg-type]
    place = packer.offer(owner.loan(INLINE_LIMIT, 8))
    header = {"op": "x", "tensors": [descriptor], "loans": {"B": place}}
    server.connection.sendall(write(server.connection, server.endpoint.encode(header, packer)))
    assert not server.endpoint.pool.lent

    received, payload = worker.receive()
    [tensor] = Unpacker(payload, worker.buffers).unpack(received["tensors"])
    assert bytes(tensor.data) == bytes((4, 5, 6, 7)) + bytes(INLINE_LIMIT - 4)
    loans = lent_outputs(received["loans"], worker.buffers)
    answer = Packer()
    assert len(answer.add("B", "UINT8", [9], bytes(9), loans["B"])) == 4  # it does not fit
    outputs = [answer.add("B", "UINT8", [8], b"\7" * 8, loans["B"])]
    os.truncate(owner.fd, INLINE_LIMIT + 7)
    assert len(answer.add("B", "UINT8", [8], b"\7" * 8, loans["B"])) == 4  # it would grow again
    worker.send({"op": "y", "outputs": outputs})
    assert os.pread(owner.fd, 8, INLINE_LIMIT) == b"\7" * 7

    header, payload = server.receive()
    unpacker = Unpacker(payload, server.endpoint.buffers)
    [output] = unpacker.unpack(header["outputs"], LentPlaces("B"))
    assert (output.name, output.shape, bytes(output.data)) == ("B", (8,), b"")
    for elsewhere in (None, LentPlaces()):
        with pytest.raises(ConchError, match="the output 'B' is in an invalid location"):
            unpacker.unpack(header["outputs"], elsewhere)


def test_lent_file_is_closed_when_its_owner_has_gone(server: Server, worker: Channel) -> None:
    owner, untold = Owner(b"1234"), Owner(b"")
    ended: list[int] = []
    server.endpoint.pool.on_loan_ended = lambda: ended.append(1)
    for _ in range(2):
        packer = Packer()
        place = packer.offer(owner.loan(0, 4))
        header = {"op": "x", "place": place}
        server.connection.sendall(write(server.connection, server.endpoint.encode(header, packer)))
        assert worker.receive()[0]["place"] == [1, 0, 4]
    file = worker.buffers.files[1]
    assert os.pread(file.fd, 4, 0) == b"1234"
    server.endpoint.pool.lend(untold.loan(0, 4))
    del owner, untold
    packer.offers.clear()
    assert ended == [1, 1]
    server.send({"op": "y"})
    assert worker.receive()[0] == {"op": "y"}
    assert not worker.buffers.files
    with pytest.raises(OSError):
        os.fstat(file.fd)


@pytest.mark.parametrize(
    "descriptor",
    [
        ["A", "FP32", [4], 16, 1, -16],
        ["A", "FP32", [4], 16, 1, 1 << 40],
        ["A", "FP32", [1 << 30], 1 << 32, 1, 0],
        ["A", "FP32", [4], 16, 99, 0],
        ["A", "FP32", [4], 16, -1, 0],
        ["A", "FP32", [4], 16, 1, "0"],
        ["A", "FP32", [4], 16, [1], 0],
        ["A", "FP32", [4], 16, 1],
        ["A", "FP32", [4], 16],
        ["A", "FP32", [4], -16],
        ["A", "FP32", [1], 8],
        ["A", "FP32", [-1, -1], 4],
        ["A", "FP33", [1], 4],
        ["A", "BYTES", [1], 9],
        ["A", "BYTES", [1], "1"],
        ["A", "BYTES", [1], True],
        ["A"],
        5,
        None,
    ],
)
def test_descriptor_that_lies_is_refused(server: Server, worker: Channel, descriptor: object) -> None:
    server.send({"op": "x"}, fp32("A", 50_000))
    worker.receive()
    with pytest.raises(ConchError):
        Unpacker(b"12345678", worker.buffers).unpack([descriptor])  # type: ignore[list-item]


def test_second_descriptor_cannot_read_on_beyond_the_payload() -> None:
    unpacker = Unpacker(b"12345678", BufferMap())
    unpacker.unpack([["A", "UINT8", [8], 8]])
    with pytest.raises(ConchError, match="more bytes than it has"):
        unpacker.unpack([["B", "UINT8", [1], 1]])


def test_poll_keeps_what_is_not_handled(server: Server, worker: Channel) -> None:
    for header in ({"op": "a"}, {"op": "b"}, {"op": "a", "n": 2}):
        server.send(header)
    seen = []
    worker.early = lambda header, payload: header["op"] == "a" and not seen.append(header)
    worker.poll()
    assert seen == [{"op": "a"}, {"op": "a", "n": 2}]
    worker.early = lambda header, payload: seen.append(header) is not None
    worker.poll()
    assert seen[2:] == [{"op": "b"}]
    assert worker.receive()[0] == {"op": "b"}


def test_poll_sees_frames_that_came_along_with_an_earlier_one(server: Server, worker: Channel) -> None:
    server.connection.sendall(b"".join(b"".join(encode_frame({"op": op})) for op in ("execute", "cancel")))
    assert worker.receive()[0] == {"op": "execute"}
    seen = []
    worker.early = lambda header, payload: not seen.append(header)
    worker.poll()
    assert seen == [{"op": "cancel"}]


def test_poll_does_not_wait_for_a_thread_that_receives(server: Server, worker: Channel) -> None:
    received = threading.Event()
    worker.early = lambda header, payload: header["op"] == "early" and received.set() is None
    receiving = threading.Thread(target=worker.receive)
    receiving.start()
    server.send({"op": "early"})
    assert received.wait(60)  # and the thread receives the next frame
    worker.poll()
    server.send({"op": "x"})
    receiving.join(60)
    assert not receiving.is_alive()


def test_threads_that_wait_get_what_any_of_them_receives(server: Server, worker: Channel) -> None:
    arrived: set[int] = set()
    worker.early = lambda header, payload: header["op"] == "n" and arrived.add(header["n"]) is None

    def wait(n: int) -> None:
        worker.wait(lambda: n in arrived)

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(20)]
    threads.append(threading.Thread(target=lambda: arrived.add(worker.receive()[0]["x"])))
    for thread in threads:
        thread.start()
    for n in reversed(range(20)):
        server.send({"op": "n", "n": n})
        if n == 10:
            server.send({"op": "x", "x": 100})
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert arrived == {*range(20), 100}


def test_frames_of_many_threads_are_not_mixed_up(server: Server, worker: Channel) -> None:
    def send(thread: int) -> None:
        for n in range(20):
            packer = Packer()
            tensor = WireTensor("A", "BYTES", (1,), bytes((thread,)) * (100_000 if n % 2 else 1000))
            worker.send({"op": "x", "thread": thread, "tensors": packer.pack([tensor])}, packer)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        header, payload = server.receive()
        (tensor,) = Unpacker(payload, server.endpoint.buffers).unpack(header["tensors"])
        assert set(bytes(tensor.data)) == {header["thread"]}
    for thread in threads:
        thread.join()


def test_write_to_a_full_socket_returns_the_rest() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    data = os.urandom(4_000_000)
    message: channel.Message = ([data[:1_000], data[1_000:]], [])
    rest = write(ours, message)
    assert 0 < len(rest) < len(data)
    received = b""
    while len(received) < len(data) - len(rest):
        received += theirs.recv(1 << 20)
    assert received + bytes(rest) == data


def test_closed_endpoint_leaves_no_descriptor_behind(server: Server) -> None:
    gc.collect()  # what other tests left to be closed
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    worker = Channel(server.theirs)  # type: ignore[attr-defined]
    server.send({"op": "x"}, fp32("A", 50_000))
    worker.receive()
    worker.endpoint.close()
    server.endpoint.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
