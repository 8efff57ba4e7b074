"""Requests that arrive in a known order, and the batches that Triton forms from them.

Both servers hold each model's first ``HOLD`` requests (``TRITONSERVER_DELAY_SCHEDULER``), so that all of them wait
when the first batch is formed. The expected results are in ``batches.json``, recorded from Triton 2.51 by
``python -m tests.conformance.batches``; each pattern has its own model.
"""

# ruff: noqa: E501  (one pattern a line)
from __future__ import annotations

import json
import queue
import re
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.models import write
from tests.oracle import TritonServer

HOLD = 6
HELD = {"TRITONSERVER_DELAY_SCHEDULER": str(HOLD)}
#: Long enough for a response and two more requests on a busy machine (µs).
DELAY = "max_queue_delay_microseconds: 4000000 "

MODEL = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.executions = 0

    def execute(self, requests):
        self.executions += 1
        told = json.dumps([self.executions, "".join(request.request_id() for request in requests)])
        return [self.answer(request, told) for request in requests]

    def answer(self, request, told):
        rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().shape[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("BATCH", np.array([[told]] * rows, dtype=object))])
"""


@dataclass(frozen=True)
class Pattern:
    """Requests, named a, b, c … in order of arrival, and the batching configuration of their model.

    A request is written as its batch size and its attributes: ``p2`` is a priority, ``t500`` a timeout (µs), ``w3``
    the width of its input X, ``y`` the optional input Y. ``|`` waits for the first response, ``~`` until short
    timeouts have passed.
    """

    requests: str
    batching: str = ""
    inputs: str = ""
    max_batch_size: int = 8
    ragged: bool = False

    @property
    def config(self) -> str:
        ragged = "allow_ragged_batch: true" if self.ragged else ""
        return (
            f'backend: "python"\nmax_batch_size: {self.max_batch_size}\n'
            f'input {{ name: "X" data_type: TYPE_INT32 dims: [ -1 ] {ragged} }}\n{self.inputs}'
            'output { name: "BATCH" data_type: TYPE_STRING dims: [ 1 ] }\n'
            f"dynamic_batching {{ {self.batching} }}\ninstance_group {{ kind: KIND_CPU }}\n"
        )


OPTIONAL = 'input { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] optional: true }\n'
#: Policies that let a request set its own timeout.
SHORTER = "default_timeout_microseconds: 60000000 allow_timeout_override: true"
DELAYED = f"timeout_action: DELAY {SHORTER}"


def prefer(*sizes: int) -> str:
    return f"preferred_batch_size: {list(sizes)} "


def levels(count: int, default: int, more: str = "") -> str:
    return f"priority_levels: {count} default_priority_level: {default} {more}"


def policy(level: int, text: str) -> str:
    return f"priority_queue_policy {{ key: {level} value {{ {text} }} }} "


def default(text: str) -> str:
    return f"default_queue_policy {{ {text} }} "


PATTERNS: dict[str, Pattern] = {
    # All waiting requests, up to the maximum batch size.
    "six of one": Pattern("1 1 1 1 1 1"),
    "sizes that fit": Pattern("2 2 2 2 2 2"),
    "sizes that leave room": Pattern("3 3 3 3 3 3"),
    "a large one in the middle": Pattern("1 1 7 1 1 1"),
    "a full one in the middle": Pattern("1 8 1 8 1 1"),
    "batches of one": Pattern("1 1 1 1 1 1", max_batch_size=1),
    # Preferred sizes without delay.
    "prefers 4": Pattern("1 1 1 1 1 1", prefer(4)),
    "prefers 2": Pattern("1 1 1 1 1 1", prefer(2)),
    "prefers 2 and 4": Pattern("1 1 1 1 1 1", prefer(2, 4)),
    "prefers 4 and 6": Pattern("1 1 1 1 1 1", prefer(4, 6)),
    "prefers 3 and 5": Pattern("1 1 1 1 1 1", prefer(3, 5)),
    "prefers 1": Pattern("1 1 1 1 1 1", prefer(1)),
    "prefers 8 of 8": Pattern("1 1 1 1 1 1", prefer(8)),
    "prefers what cannot be met": Pattern("3 3 3 3 3 3", prefer(4)),
    "prefers 4, of two": Pattern("2 2 2 2 2 2", prefer(4)),
    "prefers 6, met late": Pattern("4 1 1 4 1 1", prefer(6)),
    "prefers 4, passed by": Pattern("3 2 1 1 2 1", prefer(4)),
    "prefers 4 and 8, stops between": Pattern("2 2 3 2 2 2", prefer(4, 8)),
    "prefers 2, first is larger": Pattern("5 1 1 5 1 1", prefer(2)),
    "prefers 2, all are larger": Pattern("3 3 3 3 3 3", prefer(2)),
    "prefers 5, one is of 8": Pattern("1 1 1 8 1 1", prefer(5)),
    # Preferred sizes with a delay.
    "delay, all fit": Pattern("1 1 1 1 1 1", DELAY),
    "delay, full at once": Pattern("2 2 2 2 2 2", DELAY),
    "delay, later ones fill it": Pattern("2 2 2 2 2 2 | 2 2", DELAY),
    "delay, largest preferred": Pattern("1 1 1 1 1 1", DELAY + prefer(6)),
    "delay, passed by": Pattern("1 1 1 1 1 2", DELAY + prefer(6)),
    "delay, one beyond the preferred": Pattern("1 1 1 1 1 4", DELAY + prefer(6)),
    "delay, waits with its own delay": Pattern("1 1 1 1 1 2 | 4", DELAY + prefer(6)),
    "delay, first is larger": Pattern("6 1 1 1 1 1", DELAY + prefer(5)),
    "delay, beyond the maximum": Pattern("3 3 3 3 3 3", DELAY + prefer(7)),
    "delay over for the first": Pattern("1 ~ 1 1 1 1 1", "max_queue_delay_microseconds: 300000 " + prefer(4)),
    "delay over, not all fit": Pattern("2 ~ 2 2 2 2 2", "max_queue_delay_microseconds: 300000 " + prefer(4)),
    # Shapes and optional inputs.
    "two widths": Pattern("1w1 1w1 1w2 1w2 1w1 1w1"),
    "two widths, prefers 4": Pattern("1w1 1w1 1w2 1w2 1w2 1w2", prefer(4)),
    "two widths, preferred before": Pattern("1w1 1w1 1w1 1w2 1w2 1w1", prefer(2)),
    "two widths, delay": Pattern("1w1 1w1 1w2 1w2 1w2 1w2", DELAY + prefer(4)),
    "ragged widths": Pattern("1w1 1w2 1w3 1w1 1w2 2w3", ragged=True),
    "ragged widths, prefers 4": Pattern("1w1 1w2 1w3 1w1 1w2 2w3", prefer(4), ragged=True),
    "optional input": Pattern("1y 1y 1 1 1y 1", inputs=OPTIONAL),
    "optional input, prefers 2": Pattern("1y 1y 1y 1 1 1", prefer(2), inputs=OPTIONAL),
    "optional input, ragged": Pattern("1w1y 1w2y 1w3 1w1 1w2y 1w2y", inputs=OPTIONAL, ragged=True),
    "optional input, two widths": Pattern("1w1y 1w2y 1w2y 1w2 1w2 1w2y", inputs=OPTIONAL),
    # Priorities.
    "two levels": Pattern("1p2 1p2 1p1 1p1 1p2 1p1", levels(2, 1) + prefer(3)),
    "two levels, no priority is the default": Pattern("1p2 1 1p1 1 1p2 1", levels(2, 2) + prefer(3)),
    "three levels, sizes": Pattern("2p3 2p2 2p1 2p3 2p2 2p1", levels(3, 2) + prefer(4)),
    "priority beyond the levels": Pattern("1p9 1p1 1p2 1p9 1p1 1p2", levels(2, 1) + prefer(2)),
    "priorities, not all fit": Pattern("3p2 3p1 3p2 3p1 3p2 3p1", levels(2, 1)),
    "priorities with delay": Pattern("1p2 1p2 1p1 1p1 1p2 1p1", DELAY + levels(2, 1) + prefer(6)),
    "priorities without levels": Pattern("1p2 1p1 1 1p2 1p1 1", prefer(3)),
    "policies without levels": Pattern("1p2 1p1 1 1p2 1p1 1", policy(1, "max_queue_size: 1") + policy(2, "max_queue_size: 1")),
    "as many levels as there can be": Pattern("1p9000000000000000000 1p4294967297 1 1p4294967296 1p1 1", levels(2**64 - 1, 2**63 - 1) + prefer(2)),
    # Limits and timeouts.
    "level is full": Pattern("1p1 1p1 1p1 1p2 1p2 1p2 1p2", levels(2, 1) + policy(1, "max_queue_size: 2")),
    "default policy is full": Pattern("1p1 1p1 1p2 1p2 1p2 1p3 1p3", levels(3, 1) + default("max_queue_size: 2")),
    "refused when late": Pattern("1t1000 1 1t1000 ~ 1 1 1", default(SHORTER)),
    "late behind the others": Pattern("1t1000 1 1t1000 ~ 1 1 1", prefer(3) + default(DELAYED)),
    "override not allowed": Pattern("1t1000 1 1t1000 ~ 1 1 1", prefer(3) + default("default_timeout_microseconds: 60000000")),
    "override without a default": Pattern("1t1000 1 1t1000 ~ 1 1 1", prefer(3) + default("allow_timeout_override: true")),
    "late in one level": Pattern("1p2t1000 1p2t1000 1p1 1p1 ~ 1p2 1p1", levels(2, 1) + prefer(2) + policy(2, DELAYED)),
    "late by the level's default": Pattern("1p2 1p2 1p1 ~ 1p1 1p1 1p1", levels(2, 1) + prefer(3) + policy(2, "default_timeout_microseconds: 1000")),
    "late in all levels": Pattern("1p2t1000 1p1t1000 ~ 1p2 1p1 1p1 1p2", levels(2, 1) + prefer(2) + default(DELAYED)),
    "late with a delay": Pattern("1t1000 1t1000 ~ 1 1 1 1", DELAY + prefer(4) + default(DELAYED)),
    "late ones fill the batch": Pattern("1t1000 2t1000 ~ 1 1 1 1", prefer(6) + default(DELAYED)),
    "refused in one level, late in the other": Pattern("1p1t1000 1p2t1000 ~ 1p2 1p1 1p2 1p1", levels(2, 1) + prefer(2) + default(SHORTER) + policy(2, DELAYED)),
    "refused one is of another width": Pattern("1t1000w2 1w1 ~ 1w1 1w1 1w1 1w1", prefer(4) + default(SHORTER)),
}  # fmt: skip
RECORDED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Outcome:
    """The batches in execution order, each as the names of its requests, and the refused requests with their errors."""

    batches: list[str]
    refused: list[str]


def name_of(pattern: str) -> str:
    return re.sub(r"\W+", "_", pattern)


def lay_out(repository: Path) -> Path:
    """Write a model for each pattern."""
    for name, pattern in PATTERNS.items():
        write(repository, name_of(name), pattern.config, {"1/model.py": MODEL})
    return repository


def run(address: str, names: list[str]) -> dict[str, Outcome]:
    """Send the requests of all patterns concurrently; each pattern uses one stream, which keeps their order."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(len(names)) as pool:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return dict(zip(names, pool.map(lambda name: _outcome(stub, name), names), strict=True))


def _outcome(stub: Any, name: str) -> Outcome:
    words = PATTERNS[name].requests.split()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stream = stub.ModelStreamInfer(iter(requests.get, None), timeout=60)
    told: dict[int, str] = {}
    refused: list[str] = []

    def receive(count: int) -> None:
        for _ in range(count):
            answer = next(stream)
            if answer.error_message:
                refused.append(answer.error_message)
            else:
                batch, ids = json.loads(_first_text(answer.infer_response.raw_output_contents[0]))
                told[batch] = ids

    names = iter("abcdefghijkl")
    sent = received = 0
    for word in words:
        if word == "|":
            receive(1)
            received += 1
        elif word == "~":
            time.sleep(0.45)
        else:
            requests.put(_request(name, next(names), word))
            sent += 1
    receive(sent - received)
    requests.put(None)
    return Outcome([told[batch] for batch in sorted(told)], sorted(refused))


def _request(name: str, id: str, word: str) -> Any:
    found = re.fullmatch(r"(\d+)(?:p(\d+))?(?:t(\d+))?(?:w(\d+))?(y)?", word)
    assert found, word
    size, width = int(found[1]), int(found[4] or 1)
    request = service_pb2.ModelInferRequest(model_name=name_of(name), id=id)
    for key, value in (("priority", found[2]), ("timeout", found[3])):
        if value:
            request.parameters[key].int64_param = int(value)
    for tensor, shape in (("X", (size, width)), *((("Y", (size, 1)),) if found[5] else ())):
        request.inputs.add(name=tensor, datatype="INT32", shape=shape)
        request.raw_input_contents.append(bytes(4 * shape[0] * shape[1]))
    return request


def _first_text(data: bytes) -> bytes:
    return data[4 : 4 + struct.unpack_from("<I", data)[0]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with TritonServer(lay_out(Path(folder)), env=HELD) as triton:
            outcomes = run(triton.grpc, list(PATTERNS))
    recorded = {name: [outcome.batches, outcome.refused] for name, outcome in outcomes.items()}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(told)}" for name, told in recorded.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")
