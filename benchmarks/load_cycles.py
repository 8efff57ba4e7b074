"""Checks that unloading releases all resources: loads, runs and unloads a model many times.

``python -m benchmarks.load_cycles [--cycles 1000] [--models echo uploaded encoder writer]``: a Python model, the same
model from a client's files, an encoder and a language model. After each cycle, its workers must have ended. At the
end, the server must not have more descriptors, threads and temporary files than after the first cycles, and its
resident size must not have grown by more than 2 %.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any, Final, NamedTuple
from urllib.request import Request, urlopen

import psutil

from benchmarks.soak.repository import echo_file, write_repository
from tests.e2e.processes import workers
from tests.servers import ConchServer

#: Warm-up cycles of each model: caches fill, modules are imported, the allocator reaches its size.
WARM_UP: Final = 10
#: Maximum relative growth of the resident size.
GROWTH: Final = 0.02
_UNLOAD_SECONDS: Final = 30.0
#: Models that are loaded at once before the cycles: twice as many as asyncio's default pool may have threads.
_AT_ONCE: Final = 2 * min(32, (os.cpu_count() or 1) + 4)
#: The pool is full when it has not grown in this many rounds.
_ROUNDS: Final = 3


class Kept(NamedTuple):
    """The server's resources between two cycles: resident memory (bytes), and counts."""

    memory: int
    descriptors: int
    threads: int
    files: int


class CycledServer:
    """A server in explicit mode, with its temporary files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        repository = write_repository(folder / "models")
        environment = {"TMPDIR": str(self._temporary)}
        flags = ("--model-control-mode=explicit",)
        self._server = ConchServer(repository, *flags, log=folder / "server.log", env=environment)

    def __enter__(self) -> CycledServer:
        self._server.__enter__()
        assert self._server.process is not None
        self._process = psutil.Process(self._server.process.pid)
        self._fill_thread_pool()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.stop()

    def _fill_thread_pool(self) -> None:
        """Load and unload models at once until no more threads are added to the server's thread pool.

        The pool adds a thread whenever all others are busy, which may otherwise happen for the first time in any cycle.
        """
        names = [f"uploaded{number}" for number in range(_AT_ONCE)]
        threads, rounds = 0, 0
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while rounds < _ROUNDS:
                list(pool.map(lambda name: self._post(f"/v2/repository/models/{name}/load", _uploaded()), names))
                list(pool.map(lambda name: self._post(f"/v2/repository/models/{name}/unload", {}), names))
                for name in names:
                    self._wait_until_unloaded(name)
                before, threads = threads, max(threads, self._process.num_threads())
                rounds = rounds + 1 if threads == before else 0

    def cycle(self, model: str) -> Kept:
        """Load a model, send it a request, unload it, and wait for its workers; raises TimeoutError if one stays."""
        load, ask = MODELS[model]
        self._post(f"/v2/repository/models/{model}/load", load())
        path, body = ask
        self._post(path.format(model), body)
        with urlopen(f"http://{self._server.metrics}/metrics") as page:
            assert f'model="{model}"'.encode() in page.read()
        self._post(f"/v2/repository/models/{model}/unload", {})
        self._wait_until_unloaded(model)
        sleep(0.05)  # a thread removes its folder
        return self._kept()

    def _wait_until_unloaded(self, model: str) -> None:
        deadline = monotonic() + _UNLOAD_SECONDS
        while workers(self._server) or self._is_there(model):
            if monotonic() > deadline:
                raise TimeoutError(f"'{model}' is still there {_UNLOAD_SECONDS:g} s after it was unloaded")
            sleep(0.02)

    def _is_there(self, model: str) -> bool:
        index = json.loads(self._post("/v2/repository/index", {}))
        return any(entry["name"] == model and entry.get("state") != "UNAVAILABLE" for entry in index)

    def metrics_of(self, model: str) -> list[str]:
        """Return the lines of the metrics page that name ``model``."""
        with urlopen(f"http://{self._server.metrics}/metrics") as page:
            return [line for line in page.read().decode().splitlines() if f'"{model}"' in line]

    def _kept(self) -> Kept:
        with self._process.oneshot():
            return Kept(
                self._process.memory_info().rss,
                self._process.num_fds(),
                self._process.num_threads(),
                sum(len(files) for _, _, files in os.walk(self._temporary)),
            )

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        request = Request(f"http://{self._server.http}{path}", json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=600) as response:
            content: bytes = response.read()
        return content


def _text(name: str, shape: Sequence[int]) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "BYTES", "shape": shape, "data": ["some words"]}]}


def _uploaded() -> dict[str, Any]:
    config = {
        "backend": "python",
        "max_batch_size": 16,
        "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]}],
    }
    content = base64.b64encode(echo_file(0).encode()).decode()
    return {"parameters": {"config": json.dumps(config), "file:1/model.py": content}}


_Load = Callable[[], dict[str, Any]]
#: For each model, the body of its load request, and the path and the body of an inference request.
MODELS: Final[Mapping[str, tuple[_Load, tuple[str, dict[str, Any]]]]] = {
    "echo": (dict, ("/v2/models/{}/infer", _text("TEXT", [1, 1]))),
    "uploaded": (_uploaded, ("/v2/models/{}/infer", _text("TEXT", [1, 1]))),
    "encoder": (dict, ("/v2/models/{}/infer", _text("text_input", [1, 1]))),
    "writer": (dict, ("/v2/models/{}/generate", {"text_input": "Where is it?", "max_tokens": 4})),
}


class Growth(NamedTuple):
    """The server's resources after the first cycles with a model and at the end; memory as medians over some cycles."""

    early: Kept
    late: Kept

    @property
    def share(self) -> float:
        """The relative growth of the resident size; negative if it shrank."""
        return self.late.memory / self.early.memory - 1

    def problems(self, allowed: float) -> list[str]:
        """Describe the resources that grew."""
        problems = [
            f"{before} {name} became {after}"
            for name, before, after in zip(Kept._fields[1:], self.early[1:], self.late[1:], strict=True)
            if after > before
        ]
        if self.share > allowed:
            problems.append(f"the resident size grew by {self.share:.1%}")
        return problems


def growth(seen: Sequence[Kept]) -> Growth:
    """Compute the growth over all cycles with a model; the first cycles are a warm-up."""
    rest = seen[min(WARM_UP, len(seen) // 2) :]
    some = max(1, len(rest) // 10)
    return Growth(_typical(rest[:some]), _typical(rest[-some:]))


def _typical(seen: Sequence[Kept]) -> Kept:
    return Kept(*(int(median(values)) for values in zip(*seen, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9, help="at most for each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()

    heads = ("model", "cycles", "resident size", "growth", *Kept._fields[1:])
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    bad = []
    with tempfile.TemporaryDirectory(prefix="conch-cycles-") as folder, CycledServer(Path(folder)) as server:
        for model in options.models:
            until = monotonic() + options.minutes * 60
            seen: list[Kept] = []
            while len(seen) < options.cycles and monotonic() < until:
                seen.append(server.cycle(model))
            grown = growth(seen)
            early, late = grown
            sizes = f"{early.memory / (1 << 20):.1f} → {late.memory / (1 << 20):.1f} MiB"
            counts = " | ".join(f"{before} → {after}" for before, after in zip(early[1:], late[1:], strict=True))
            print(f"| {model} | {len(seen):,} | {sizes} | {grown.share:+.1%} | {counts} |", flush=True)
            bad += [f"{model}: {problem}" for problem in grown.problems(GROWTH)]
            bad += [f"{model}: the metrics page still has {line}" for line in server.metrics_of(model)[:3]]
    print("\n".join(bad), file=sys.stderr)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
