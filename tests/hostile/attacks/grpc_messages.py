"""gRPC messages that are large, or large when decompressed."""

from __future__ import annotations

import zlib
from contextlib import ExitStack

from tritonclient.grpc import service_pb2 as pb

from tests.conftest import Server
from tests.hostile.attack import attack
from tests.hostile.http2_client import INFER, STREAM_INFER, Http2Client, message


def zeros(size: int) -> bytes:
    """Return a gzip-compressed request with an input of ``size`` zero bytes."""
    request = pb.ModelInferRequest(model_name="identity_fp32")
    request.inputs.add(name="INPUT", datatype="FP32", shape=[size // 4])
    compressor = zlib.compressobj(wbits=31)
    parts = [compressor.compress(request.SerializeToString())]
    digits, left = bytearray(b"\x3a"), size
    while left >= 128:
        digits.append(left & 127 | 128)
        left >>= 7
    parts.append(compressor.compress(bytes([*digits, left])))
    block = bytes(1 << 20)
    parts += [compressor.compress(block[: min(len(block), size - at)]) for at in range(0, size, len(block))]
    return b"".join([*parts, compressor.flush()])


@attack("8 messages of 243 kB in gzip, with 250 MB in each")
def gzip_bombs(server: Server, stack: ExitStack) -> None:
    _send_compressed(server, stack, 8, 250_000_000)


@attack("messages of 60 MB in gzip, which the limit allows")
def gzip_below_the_limit(server: Server, stack: ExitStack) -> None:
    _send_compressed(server, stack, 4, 60_000_000)


def _send_compressed(server: Server, stack: ExitStack, count: int, size: int) -> None:
    """Send ``count`` gzip-compressed messages, each with ``size`` bytes after decompression."""
    compressed = message(zeros(size), compressed=True)
    client = stack.enter_context(Http2Client(server.grpc))
    for _ in range(count):
        stream, head = client.open(INFER, ("grpc-encoding", "gzip"))
        client.send(head)
        client.send_data(stream, compressed, end=True)
    client.wait_ended(count, 60)


@attack("a `ModelInferRequest` of 400 MB that is refused, and one of 20 MB")
def hundreds_of_megabytes(server: Server, stack: ExitStack) -> None:
    client = stack.enter_context(Http2Client(server.grpc))
    for count, name in ((100_000_000, "UNKNOWN"), (5_000_000, "INPUT")):
        request = pb.ModelInferRequest(model_name="identity_fp32")
        request.inputs.add(name=name, datatype="FP32", shape=[count])
        request.raw_input_contents.append(bytes(4 * count))
        stream, head = client.open(INFER)
        client.send(head)
        client.send_data(stream, message(request.SerializeToString()), end=True)
    client.wait_ended(2, 60)


@attack("30 requests of 10 MB in turn on one connection, which stays open")
def large_requests_in_turn(server: Server, stack: ExitStack) -> None:
    request = pb.ModelInferRequest(model_name="identity_fp32")
    request.inputs.add(name="INPUT", datatype="FP32", shape=[2_500_000])
    request.raw_input_contents.append(bytes(10_000_000))
    body = message(request.SerializeToString())
    client = stack.enter_context(Http2Client(server.grpc))
    for number in range(30):
        stream, head = client.open(INFER)
        client.send(head)
        client.send_data(stream, body, end=True)
        client.wait_ended(number + 1, 30)


@attack("numbers of a 20 MB request in typed contents")
def typed_contents(server: Server, stack: ExitStack) -> None:
    request = pb.ModelInferRequest(model_name="identity_fp32")
    tensor = request.inputs.add(name="INPUT", datatype="FP32", shape=[5_000_000])
    tensor.contents.int64_contents.extend([1] * 20_000_000)
    client = stack.enter_context(Http2Client(server.grpc))
    stream, head = client.open(INFER)
    client.send(head)
    client.send_data(stream, message(request.SerializeToString()), end=True)
    client.wait_ended(1, 30)


@attack("20 clients that vanish while 5 MB of each are in flight")
def vanishing_uploads(server: Server, stack: ExitStack) -> None:
    request = pb.ModelInferRequest(model_name="identity_fp32")
    request.raw_input_contents.append(bytes(10_000_000))
    half = message(request.SerializeToString())[:5_000_000]
    clients = [stack.enter_context(Http2Client(server.grpc)) for _ in range(20)]
    for client in clients:
        stream, head = client.open(STREAM_INFER)
        client.send(head)
        client.send_data(stream, half)
    for client in clients:
        client.close()


@attack("3 million empty texts in one tensor of a gRPC message")
def many_strings_in_a_message(server: Server, stack: ExitStack) -> None:
    count = 3_000_000
    request = pb.ModelInferRequest(model_name="generate_shapes")
    request.inputs.add(name="A", datatype="INT32", shape=[1, 1])
    request.inputs.add(name="C", datatype="BYTES", shape=[1, 1, count])
    request.raw_input_contents.extend([bytes(4), bytes(4 * count)])
    client = stack.enter_context(Http2Client(server.grpc))
    stream, head = client.open(INFER)
    client.send(head)
    client.send_data(stream, message(request.SerializeToString()), end=True)
    client.wait_ended(1, 60)


@attack("a gRPC message of 2 million inputs")
def many_inputs_in_a_message(server: Server, stack: ExitStack) -> None:
    inputs = pb.ModelInferRequest(inputs=[{"name": "a"}]).SerializeToString() * 2_000_000
    client = stack.enter_context(Http2Client(server.grpc))
    stream, head = client.open(INFER)
    client.send(head)
    client.send_data(stream, message(pb.ModelInferRequest(model_name="add_sub").SerializeToString() + inputs), end=True)
    client.wait_ended(1, 60)
