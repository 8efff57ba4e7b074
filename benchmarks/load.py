"""A load generator for texts: persistent HTTP/1.1 connections, one request at a time on each.

perf_analyzer repeats a single text and supports the inference protocol only. This generator sends many texts in turn,
also to a plain web service. It runs as a separate process (``python -m benchmarks.load``, with its task as JSON on
standard input); requests are prepared before the clock starts, and responses are not decoded.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from time import perf_counter_ns
from typing import cast

import numpy as np
import numpy.typing as npt

from conch.core.tensors import pack_bytes

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Target:
    """The destination: a model of an inference server, or without ``model`` the web service of ``peers/web.py``.

    With ``openai`` it is a model of any server of OpenAI's ``/v1/embeddings``.
    """

    address: str
    model: str = ""
    input: str = "TEXT"
    output: str = "EMBEDDING"
    openai: bool = False

    @property
    def path(self) -> str:
        if self.openai:
            return "/v1/embeddings"
        return f"/v2/models/{self.model}/infer" if self.model else "/embed"

    def content(self, text: str) -> tuple[dict[str, str], bytes]:
        """Return headers and body of a request for the embedding of ``text``; all tensors are binary."""
        if self.openai:
            return {"Content-Type": "application/json"}, json.dumps({"model": self.model, "input": text}).encode()
        if not self.model:
            return {"Content-Type": "application/json"}, json.dumps({"text": text}).encode()
        packed = pack_bytes([text.encode()])
        size = {"binary_data_size": len(packed)}
        document = {
            "inputs": [{"name": self.input, "shape": [1, 1], "datatype": "BYTES", "parameters": size}],
            "outputs": [{"name": self.output, "parameters": {"binary_data": True}}],
        }
        header = json.dumps(document).encode()
        return {_HEADER_LENGTH: str(len(header))}, header + packed

    def request(self, text: str) -> bytes:
        """Return a complete HTTP request."""
        headers, body = self.content(text)
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {self.address}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def embedding(self, text: str) -> npt.NDArray[np.float32]:
        """Return the embedding from a response, FP32 ``[dimension]``."""
        headers, body = self.content(text)
        request = urllib.request.Request(f"http://{self.address}{self.path}", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
            split = response.headers.get(_HEADER_LENGTH)
        if self.openai:
            return np.array(json.loads(content)["data"][0]["embedding"], np.float32)
        if not self.model:
            return np.array(json.loads(content)["embedding"], np.float32)
        return np.frombuffer(content[int(split) :], np.float32)


@dataclass(frozen=True, slots=True)
class Load:
    """The result: responses per second, latencies in µs, and optionally each request's times
    (``perf_counter_ns`` before sending and after receiving)."""

    throughput: float
    median: float
    p99: float
    moments: list[tuple[int, int]] = field(default_factory=list)


class Run:
    """One measurement, shared by its connections.

    The window opens when the warm-up is over and every connection has received a response, and stays open until there
    is at least one response.
    """

    def __init__(self, requests: Sequence[bytes], concurrency: int, seconds: float, warm_up: float) -> None:
        self.requests = cycle(requests)
        self.seconds = seconds
        self.open_from = perf_counter_ns() + int(warm_up * 1e9)
        self.unanswered = concurrency
        self.begin = 0
        self.end = 0
        self.moments: list[tuple[int, int]] = []
        self.failure = ""

    @property
    def over(self) -> bool:
        return bool(self.failure or self.end)

    def record(self, sent: int, received: int, first: bool) -> None:
        """Count one response."""
        if self.over:
            return
        if self.begin:
            self.moments.append((sent, received))
            if received >= self.begin + int(self.seconds * 1e9):
                self.end = received
            return
        self.unanswered -= first
        if received >= self.open_from and not self.unanswered:
            self.begin = received


class Connection(asyncio.Protocol):
    """Sends the next request when the response to the previous one is complete."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.received = b""
        self.sent = 0
        self.answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        request = next(self.run.requests)
        self.sent = perf_counter_ns()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head = self.received.find(b"\r\n\r\n")
        length = _LENGTH.search(self.received, 0, head + 2) if head > 0 else None
        if head < 0 or (length is not None and len(self.received) < head + 4 + int(length[1])):
            return
        now = perf_counter_ns()
        if length is None or not self.received.startswith(b"HTTP/1.1 200"):
            self.run.failure = self.received[:500].decode("latin-1")
            self.transport.close()
            return
        self.run.record(self.sent, now, first=not self.answers)
        self.answers += 1
        self.received = b""
        if self.run.over:
            self.transport.close()
        else:
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.run.over:
            self.run.failure = f"the server hung up: {error}"
        self.done.set_result(None)


async def drive(target: Target, texts: Sequence[str], concurrency: int, seconds: float, warm_up: float) -> Run:
    """Request the embeddings of ``texts`` repeatedly for the given time."""
    host, port = target.address.split(":")
    loop = asyncio.get_running_loop()
    run = Run([target.request(text) for text in texts], concurrency, seconds, warm_up)
    pairs = [await loop.create_connection(lambda: Connection(run), host, int(port)) for _ in range(concurrency)]
    for _, connection in pairs:
        connection.send()
    await asyncio.gather(*(connection.done for _, connection in pairs))
    return run


def measure(
    target: Target,
    texts: Sequence[str],
    concurrency: int,
    *,
    seconds: float,
    warm_up: float = 0.5,
    moments: bool = False,
) -> Load:
    """Measure ``target`` in a separate process. Raises RuntimeError with a response whose status is not 200."""
    task = {"target": asdict(target), "texts": texts, "concurrency": concurrency, "seconds": seconds}
    command = [sys.executable, "-m", "benchmarks.load"]
    done = subprocess.run(
        command, input=json.dumps({**task, "warm_up": warm_up}), capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{target.model or 'the web service'}: {done.stderr.strip()[-800:]}")
    result = json.loads(done.stdout)
    spans = [(int(sent), int(received)) for sent, received in result["moments"]]
    latencies = sorted((received - sent) / 1000 for sent, received in spans)
    return Load(
        len(spans) / result["seconds"],
        statistics.median(latencies),
        latencies[int(len(latencies) * 0.99)],
        spans if moments else [],
    )


def main() -> None:
    import uvloop

    task = json.load(sys.stdin)
    target = Target(**task.pop("target"))
    run = uvloop.run(drive(target, **task))
    if run.failure:
        raise SystemExit(run.failure)
    json.dump({"seconds": (run.end - run.begin) / 1e9, "moments": run.moments}, sys.stdout)


if __name__ == "__main__":
    main()
