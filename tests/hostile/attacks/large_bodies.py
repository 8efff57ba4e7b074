"""Large bodies and responses that take long to decompress, parse or encode."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from contextlib import ExitStack
from typing import Any, Final

from tests.conftest import Server
from tests.hostile.attack import MEBIBYTE, attack

_GZIP: Final = {"Content-Encoding": "gzip"}
_LIMIT: Final = {"max_tokens": 10_000}


def _post(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Return the status of the response; the connection is closed."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def _binary(
    name: str, datatype: str, shape: list[int], data: bytes, *, binary_output: bool
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an inference request with one binary tensor."""
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary_output}}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


@attack("gzip of a valid `infer` with 50 MB of JSON")
def compressed_json_tensor(server: Server, stack: ExitStack) -> None:
    count = 10_000_000
    tensor = b'{"name":"INPUT","datatype":"FP32","shape":[%d],"data":[%b0.25]}' % (count, b"0.25," * (count - 1))
    outputs = b'"outputs":[{"name":"OUTPUT","parameters":{"binary_data":true}}]'
    body = gzip.compress(b'{"inputs":[%b],%b}' % (tensor, outputs), 1)
    _post(server, "/v2/models/identity_fp32/infer", body, _GZIP)


@attack("gzip of 20 million `{}`")
def compressed_empty_objects(server: Server, stack: ExitStack) -> None:
    _post(server, "/v2/models/identity_fp32/infer", gzip.compress(b"[%b{}]" % (b"{}," * 20_000_000), 1), _GZIP)


@attack("an OpenAI chat of 1.9 million messages in 138 kB of gzip", conch_only=True)
def compressed_chat(server: Server, stack: ExitStack) -> None:
    message = b'{"role":"user","content":"a"}'
    messages = b"%b%b" % (b"%b," % message * 1_900_000, message)
    body = gzip.compress(b'{"model":"talker","messages":[%b]}' % messages)
    _post(server, "/v1/chat/completions", body, _GZIP)


@attack("an OpenAI chat with an unknown member whose name has 50 million characters", conch_only=True)
def compressed_member(server: Server, stack: ExitStack) -> None:
    name = b"a" * 50_000_000
    body = gzip.compress(b'{"model":"talker","messages":[{"role":"user","content":"a"}],"%b":1}' % name, 1)
    _post(server, "/v1/chat/completions", body, _GZIP)


@attack("forms in gzip: 150,000 parts, and 50 MB that resemble boundaries", conch_only=True)
def compressed_forms(server: Server, stack: ExitStack) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=" + 70 * "a", **_GZIP}
    part = b"--%b\r\nContent-Disposition: form-data; name=model\r\n\r\n" % (70 * b"a")
    almost = b"\r\n--%b" % (69 * b"a")
    for body in ((part + b"talker\r\n") * 150_000, part + almost * 700_000):
        _post(server, "/v1/audio/transcriptions", gzip.compress(body, 1), headers)


@attack("a response and a message of 150,000 items in gzip", conch_only=True)
def compressed_items(server: Server, stack: ExitStack) -> None:
    item = b'{"role":"user","content":"a"}'
    items = b"%b%b" % (b"%b," % item * 150_000, item)
    _post(server, "/v1/responses", gzip.compress(b'{"model":"talker","store":false,"input":[%b]}' % items), _GZIP)
    block = b'{"type":"text","text":"a"}'
    blocks = b"%b%b" % (b"%b," % block * 150_000, block)
    message = b'{"model":"talker","max_tokens":1,"messages":[{"role":"user","content":[%b]}]}' % blocks
    _post(server, "/v1/messages", gzip.compress(message), _GZIP)


@attack("responses of 3 MB that continue each other, with the lists of their input", conch_only=True)
def continued_responses(server: Server, stack: ExitStack) -> None:
    body = {"model": "talker", "max_output_tokens": 1, "input": "word " * 600_000}
    connection = http.client.HTTPConnection(server.http, timeout=60)
    stack.callback(connection.close)
    ids = []
    for _ in range(4):
        connection.request("POST", "/v1/responses", json.dumps(body))
        body["previous_response_id"] = json.load(connection.getresponse())["id"]
        ids.append(body["previous_response_id"])
        connection.request("GET", f"/v1/responses/{ids[-1]}/input_items")
        assert len(json.load(connection.getresponse())["data"]) == 2 * len(ids) - 1
    for id in ids:
        connection.request("DELETE", f"/v1/responses/{id}")
        assert json.load(connection.getresponse())["deleted"]


@attack("20 streams of events that are not read, of responses and messages", conch_only=True)
def unread_events(server: Server, stack: ExitStack) -> None:
    text = "!say " + "word " * 5_000
    bodies = {
        "responses": {"model": "talker", "stream": True, "input": text},
        "messages": {**_LIMIT, "model": "talker", "stream": True, "messages": [{"role": "user", "content": text}]},
    }
    host, port = server.http.split(":")
    for path, body in bodies.items():
        data = json.dumps(body).encode()
        head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
        for _ in range(10):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(head + data)
    # The last one is served after the others.
    _post(server, "/v1/responses", json.dumps({"model": "talker", "input": "word"}).encode())


@attack("60 MB of JSON for a load, and for the repository index")
def json_for_control(server: Server, stack: ExitStack) -> None:
    body = b"[%b{}]" % (b"{}," * (20 * MEBIBYTE))
    for path in ("/v2/repository/models/add_sub/load", "/v2/repository/index"):
        try:
            _post(server, path, body)
        except OSError:
            pass  # refused before it was read


@attack("3 million parameters before a binary tensor")
def json_before_a_tensor(server: Server, stack: ExitStack) -> None:
    parameters = b",".join([b'"%d":1' % number for number in range(3_000_000)])
    head = b'{"parameters":{%b}}' % parameters
    _post(server, "/v2/models/identity_fp32/infer", head, {"Inference-Header-Content-Length": str(len(head))})


@attack("32 MB of binary floats, to be answered as JSON")
def large_json_answer(server: Server, stack: ExitStack) -> None:
    count = 8_000_000
    body, headers = _binary("INPUT", "FP32", [count], b"\x12\x34\x56\x3e" * count, binary_output=False)
    _post(server, "/v2/models/identity_fp32/infer", body, headers)


@attack("40 MB of binary floats, to be answered in gzip")
def large_compressed_answer(server: Server, stack: ExitStack) -> None:
    count = 10_000_000
    body, headers = _binary("INPUT", "FP32", [count], b"\x12\x34\x56\x3e" * count, binary_output=True)
    _post(server, "/v2/models/identity_fp32/infer", body, {**headers, "Accept-Encoding": "gzip"})


@attack("3 million empty texts in one tensor")
def many_strings(server: Server, stack: ExitStack) -> None:
    count = 3_000_000
    number = {"name": "A", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    texts = {
        "name": "C",
        "datatype": "BYTES",
        "shape": [1, 1, count],
        "parameters": {"binary_data_size": 4 * count},
    }
    head = json.dumps({"inputs": [number, texts]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    _post(server, "/v2/models/generate_shapes/infer", head + bytes(4 * count), headers)


@attack("1 million empty texts in a shape of one more, in JSON and behind 300 kB of JSON")
def miscounted_strings(server: Server, stack: ExitStack) -> None:
    count = 1_000_000
    number = {"name": "A", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    texts: dict[str, Any] = {"name": "C", "datatype": "BYTES", "shape": [1, 1, count + 1]}
    path = "/v2/models/generate_shapes/infer"
    assert _post(server, path, json.dumps({"inputs": [number, {**texts, "data": [""] * count}]}).encode()) == 400
    texts["parameters"] = {"binary_data_size": 4 * count}
    parameters = {"text": "a" * 300_000}
    head = json.dumps({"inputs": [number, texts], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert _post(server, path, head + bytes(4 * count), headers) == 400


@attack("a load whose configuration warms up with 3 GB of zeros", conch_only=True)
def large_warm_up(server: Server, stack: ExitStack) -> None:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    stack.callback(connection.close)
    connection.request("GET", "/v2/models/identity_fp32/config")
    config = json.load(connection.getresponse())
    data = {"data_type": "TYPE_FP32", "dims": [750_000_000], "zero_data": True}
    config["model_warmup"] = [{"name": "large", "batch_size": 1, "inputs": {"INPUT": data}}]
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    status = _post(server, "/v2/repository/models/identity_fp32/load", body)
    assert status == 400, status
