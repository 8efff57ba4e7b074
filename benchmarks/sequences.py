"""Checks that no request of a sequence is lost while clients cancel, disconnect and time out, and workers are killed.

Many concurrent sequences use models that add up their numbers, with both strategies; every response is checked.
``python -m benchmarks.sequences [--seconds 600] [--sequences 200] [--kill-every 5]``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.processes import workers
from tests.servers import ConchServer

#: The models' idle timeout of a sequence (s).
MAX_IDLE: Final = 0.3
#: How long (s) after its death a worker may still receive requests.
NOTICED: Final = 1.0
#: How long (s) a client waits for a response before it reports that there is none.
PATIENCE: Final = 60.0
_MODEL: Final = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()

        if not value("READY"):
            return pb_utils.InferenceResponse([])
        state = pb_utils.get_input_tensor_by_name(request, "BEFORE")
        if state is not None:
            total = state.as_numpy() + value("NUMBER")
            return pb_utils.InferenceResponse([pb_utils.Tensor(name, total) for name in ("TOTAL", "AFTER")])
        before = 0 if value("START") else self.totals[value("ID")]
        total = self.totals[value("ID")] = before + value("NUMBER")
        if value("END"):
            del self.totals[value("ID")]
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", np.array([[total]], np.int32))])
"""
_CONFIG: Final = """
backend: "python"
max_batch_size: 16
instance_group { count: 2 kind: KIND_CPU }
input { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "TOTAL" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 300000
  %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
}
"""
_STATE: Final = """
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 1 ]
          initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
"""
_OLDEST: Final = "oldest { max_candidate_sequences: 24 }"
#: For both strategies: models that keep their sums themselves, and models with implicit state.
MODELS: Final = {
    "direct": "direct { }",
    "oldest": _OLDEST,
    "direct_state": f"direct {{ }} {_STATE}",
    "oldest_state": f"{_OLDEST} {_STATE}",
}
#: Errors that a client may get.
_EXPIRED: Final = "timeout of the corresponding sequence has been expired"
_NO_START: Final = "must specify the START flag on the first request of the sequence"
_UNHEALTHY: Final = "is not healthy"


def write_repository(folder: Path) -> Path:
    for name, strategy in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(_MODEL)
        (folder / name / "config.pbtxt").write_text(_CONFIG % strategy)
    return folder


class Clients:
    """Concurrent sequences; ``outcomes`` counts the results of requests, ``wrong`` describes impossible results.

    ``causes`` are additional reasons for errors, each with a regular expression for their messages.
    """

    def __init__(self, channel: grpc.aio.Channel, seed: int, causes: Mapping[str, str] | None = None) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kills = 0
        #: When a worker was last killed.
        self.killed = 0.0
        self.longest = 0.0
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)
        self._causes = causes or {}

    async def run(self, sequences: int, seconds: float) -> None:
        """Run this many sequences at a time for the given time."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._one_after_another(until) for _ in range(sequences)))

    async def _one_after_another(self, until: float) -> None:
        while time.monotonic() < until:
            await self.sequence(self._chance.choice(list(MODELS)))

    async def sequence(self, model: str, calm: bool = False) -> bool:
        """Send one sequence; returns whether it was completed. In a ``calm`` one, no request is cancelled."""
        id, length, total = f"s{next(self._numbers)}", self._chance.randint(1, 6), 0
        start = sent = time.monotonic()
        for step in range(length):
            number = self._chance.randint(1, 1000)
            request = _request(model, id, number, start=step == 0, end=step == length - 1)
            fate = 1.0 if calm else self._chance.random()
            if 0.04 <= fate < 0.09:
                request.parameters["timeout"].int64_param = self._chance.randint(1000, 100_000)
            before, sent_before, sent = total, sent, time.monotonic()
            outcome = await self._outcome(request, before + number, give_up=fate < 0.04)
            self.outcomes[outcome] += 1
            if outcome != "right":
                if outcome == "worker died" and self.killed <= start - NOTICED:
                    self.wrong.append(f"{model} {id}: {outcome}, though none was killed")
                if outcome == "unknown" and time.monotonic() - sent_before < MAX_IDLE:
                    self.wrong.append(f"{model} {id}: {outcome}, though it was not idle")
                return False
            total = before + number
        return True

    async def _outcome(self, request: Any, expected: int, give_up: bool) -> str:
        began = time.monotonic()
        call = self._stub.ModelInfer(request, timeout=self._chance.uniform(0.0, 0.03) if give_up else PATIENCE)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            return self._explained(request, error, give_up)
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        total = int.from_bytes(response.raw_output_contents[0], "little")
        if total != expected:
            self.wrong.append(f"{request.model_name} {_id(request)}: {total} instead of {expected}")
        return "right"

    def _explained(self, request: Any, error: grpc.aio.AioRpcError, give_up: bool) -> str:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and give_up:
            return "given up"
        if _EXPIRED in details and "timeout" in request.parameters:
            return "expired"
        if _NO_START in details and "sequence_start" not in request.parameters:
            return "unknown"
        if _UNHEALTHY in details:
            return "worker died"
        for cause, pattern in self._causes.items():
            if re.search(pattern, details):
                return cause
        self.wrong.append(f"{request.model_name} {_id(request)}: {error.code().name} {details}")
        return "wrong"


def _id(request: Any) -> str:
    return str(request.parameters["sequence_id"].string_param)


def _request(model: str, id: str, number: int, *, start: bool, end: bool) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="NUMBER", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.append(number.to_bytes(4, "little"))
    request.parameters["sequence_id"].string_param = id
    for name, value in (("sequence_start", start), ("sequence_end", end)):
        if value:
            request.parameters[name].bool_param = True
    return request


async def _kill(server: ConchServer, clients: Clients, every: float, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(every)
        processes = workers(server)
        if processes:
            clients.kills += 1
            clients.killed = time.monotonic()
            chance.choice(processes).kill()


async def soak(server: ConchServer, options: argparse.Namespace) -> Clients:
    """Run the sequences, then check that the server has released everything."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        clients = Clients(channel, options.seed)
        killer = asyncio.create_task(_kill(server, clients, options.kill_every, options.seed))
        await clients.run(options.sequences, options.seconds)
        killer.cancel()
        await asyncio.sleep(1.0)  # idle sequences time out, and workers restart
        for model in MODELS:
            if not all(await asyncio.gather(*(clients.sequence(model, calm=True) for _ in range(100)))):
                clients.wrong.append(f"{model}: a sequence did not come to its end when all was over")
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        waiting = re.findall(r"nv_inference_pending_request_count\{.*\} ([1-9]\d*)", page.read().decode())
    if waiting:
        clients.wrong.append(f"{waiting} requests still wait")
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--sequences", type=int, default=200, help="how many run at a time")
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between two deaths of workers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conch-sequences-") as folder:
        repository = write_repository(Path(folder) / "models")
        with ConchServer(repository, log=Path(folder) / "server.log") as server:
            clients = asyncio.run(soak(server, options))
    counts = ", ".join(f"{name} {count:,}" for name, count in sorted(clients.outcomes.items()) if count)
    print(f"- {options.sequences} sequences at a time for {options.seconds:g} s: requests {counts}")
    print(f"- workers killed: {clients.kills}; longest wait for an answer: {clients.longest:.1f} s")
    print("\n".join(clients.wrong[:20]) or "Every request was answered, or failed for a known reason.", file=sys.stderr)
    raise SystemExit(bool(clients.wrong))


if __name__ == "__main__":
    main()
