"""What must be as before when the clients have gone: gauges, descriptors, responses, and unloads."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from tests.e2e.processes import workers
from tests.fuzz.disconnections.faults import ask
from tests.fuzz.disconnections.repository import SEQUENCES, SINGLE, STREAMING, transcription
from tests.servers import ConchServer

#: How long the server may take (s).
PATIENCE: Final = 30.0
#: Descriptors, or threads, that processes and pools may add which did not exist before the first large request.
_MORE: Final = 24
#: Gauges that are zero when no client has a request in flight.
_GAUGES: Final = (
    "nv_inference_pending_request_count", "conch_bytes_in_flight", "conch_demand_waiting_requests",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
)  # fmt: skip
#: Lines of the log that a disconnection does not explain.
_UNEXPECTED: Final = re.compile(
    r"Traceback|never retrieved|never awaited|could not be (delivered|processed|written|continue|forwarded)|"
    r"broke the protocol|was destroyed but"
)
_COMPLETION: Final = {"prompt": "Where is the library", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def until_empty(look: Callable[[], list[str]], seconds: float = PATIENCE) -> list[str]:
    """Return what ``look`` still finds after ``seconds``."""
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def busy_gauges(server: ConchServer) -> list[str]:
    """Return the gauges that are not zero, and connections other than the one that asks."""
    _, page = ask(server, "/metrics")
    found = []
    for line in page.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in _GAUGES and float(value):
            found.append(line)
        if name.startswith("conch_connections{") and float(value) > (1 if 'protocol="http"' in name else 0):
            found.append(line)
    return found


def models_not_ready(server: ConchServer, names: list[str]) -> list[str]:
    return [name for name in names if ask(server, f"/v2/models/{name}/ready")[0] != 200]


def responses(server: ConchServer) -> dict[str, Any]:
    """Return what each model responds to a request, by name."""
    results: dict[str, Any] = {}
    for name in (*SINGLE, *SEQUENCES):
        sequence = {"sequence_id": 99, "sequence_start": True, "sequence_end": True} if name in SEQUENCES else {}
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [0, 7]}
        status, body = ask(server, f"/v2/models/{name}/infer", {"inputs": [tensor], "parameters": sequence})
        results[name] = json.loads(body)["outputs"][0]["data"] if status == 200 else (status, body)
    for name in STREAMING:
        results[name] = ask(server, f"/v2/models/{name}/generate_stream", {"X": [[0, 7]]})
    for name in ("writer", "a0", "a1"):
        status, body = ask(server, "/v1/completions", {"model": name, **_COMPLETION})
        results[name] = json.loads(body)["choices"][0]["text"] if status == 200 else (status, body)
    results["embedder"] = _rounded(ask(server, "/v1/embeddings", {"model": "embedder", "input": "a bus"}))
    results["ranker"] = _rounded(
        ask(server, "/rerank", {"query": "a bus", "texts": ["a", "the bus"], "model": "ranker"})
    )
    request = transcription()
    results["listener"] = ask(server, request.path, request.body, request.headers["content-type"])
    return results


def _rounded(response: tuple[int, bytes]) -> Any:
    status, body = response
    return status, re.sub(rb"(\d\.\d{3})\d*(e-\d+)?", rb"\1", body)


def still_loaded(server: ConchServer, names: list[str]) -> list[str]:
    """Return the models whose unload has not ended."""
    entries = {entry["name"]: entry for entry in json.loads(ask(server, "/v2/repository/index", {})[1])}
    return [
        f"{name} is {entries[name].get('state')}: {entries[name].get('reason')}"
        for name in names
        if (entries[name].get("state", "UNAVAILABLE"), entries[name].get("reason", "unloaded"))
        != ("UNAVAILABLE", "unloaded")
    ]


def remaining_workers(server: ConchServer) -> list[str]:
    return [f"worker {worker.pid} is left" for worker in workers(server)]


def usage(server: ConchServer) -> tuple[int, int]:
    """Return the number of the server's descriptors and of its threads."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    return process.num_fds(), process.num_threads()


def more_used(server: ConchServer, before: tuple[int, int]) -> list[str]:
    """Return the number of descriptors and threads if there are many more than ``before``, with the same models."""
    now = usage(server)
    grown = any(after > earlier + _MORE for after, earlier in zip(now, before, strict=True))
    return [f"descriptors and threads: {now}, {before} before"] if grown else []


def unexpected_lines(log: str) -> list[str]:
    """Return the lines of a log that show a fault, each with those after it."""
    lines = log.splitlines()
    found = [number for number, line in enumerate(lines) if _UNEXPECTED.search(line)]
    return ["\n".join(lines[max(number - 1, 0) : number + 25]) for number in found[:5]]
