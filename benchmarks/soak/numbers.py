"""Requests of numbers, to the models of :mod:`benchmarks.soak.features`: inline, in shared memory and on streams."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import tritonclient.grpc as grpcclient

from benchmarks.soak.asking import GrpcAsker, HttpAsker
from benchmarks.soak.features import RELAYING, TRIPLING

#: The size of a region in numbers, and the number of requests after which it is registered again.
_MOST: Final = 1 << 15
_USES: Final = 50


def tripled(values: np.ndarray) -> np.ndarray:
    return values * 3 + 1


class NumberClients:
    """Sends requests over HTTP through ``asker``."""

    def __init__(self, asker: HttpAsker) -> None:
        self._asker = asker
        self._regions = _Regions()

    def triple(self, chance: random.Random) -> None:
        """Send a request to a tripling model, with one of few different numbers, so that the cache is hit."""
        values = np.full((1, chance.randint(1, 4)), chance.randint(0, 50), np.int32)
        self._infer(chance.choice(TRIPLING), values, tripled(values))

    def sum(self, chance: random.Random) -> None:
        """Send a request to the model that batches requests of different lengths."""
        values = np.array([[chance.randint(0, 1000) for _ in range(chance.randint(1, 20))]], np.int32)
        self._infer("ragged", values, values.sum(axis=1))

    def share(self, chance: random.Random) -> None:
        """Send a request to ``plain`` with its input in the first half of a region and its output in the second."""
        region = self._regions.region
        if region is None:
            region = self._regions.region = _Region()
            if not self._register(region):
                self._forget(region)
                return
        numbers, size = chance.randint(1, _MOST), 4 * _MOST
        region.memory[:numbers] = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 1 << 20, numbers)
        region.memory[_MOST:] = -1
        used = {"shared_memory_region": region.name, "shared_memory_byte_size": 4 * numbers}
        body = {
            "inputs": [{"name": "X", "datatype": "INT32", "shape": [1, numbers], "parameters": used}],
            "outputs": [{"name": "Y", "parameters": {**used, "shared_memory_offset": size}}],
        }

        def check(response: Any) -> str:
            expected = tripled(region.memory[:numbers])
            untouched = bool((region.memory[_MOST + numbers :] == -1).all())
            right = untouched and np.array_equal(region.memory[_MOST : _MOST + numbers], expected)
            return "" if right else f"other bytes in shared memory than there should be, {response!s:.200}"

        succeeded = self._asker.ask("shared memory", "/v2/models/plain/infer", body, check)
        region.uses += 1
        # After an error, the model may still write to the region, so the next request uses another one.
        if not succeeded or region.uses >= _USES:
            self._forget(region)

    def end(self) -> None:
        """Unregister and remove the region of this thread."""
        if self._regions.region is not None:
            self._forget(self._regions.region)

    def _infer(self, model: str, values: np.ndarray, expected: np.ndarray) -> None:
        tensor = {"name": "X", "datatype": "INT32", "shape": list(values.shape), "data": values.ravel().tolist()}

        def check(response: Any) -> str:
            got = response["outputs"][0]["data"]
            return "" if got == expected.ravel().tolist() else f"answered {got!s:.200} to {values!s:.200}"

        self._asker.ask(model, f"/v2/models/{model}/infer", {"inputs": [tensor]}, check)

    def _register(self, region: _Region) -> bool:
        size = {"key": f"/{region.name}", "offset": 0, "byte_size": 8 * _MOST}
        path = f"/v2/systemsharedmemory/region/{region.name}/register"
        return self._asker.ask("registering", path, size, lambda response: "")

    def _forget(self, region: _Region) -> None:
        """Unregister a region, with retries until the server responds, and remove it."""
        path = f"/v2/systemsharedmemory/region/{region.name}/unregister"
        for _ in range(100):
            if self._asker.ask("registering", path, {}, lambda response: ""):
                break
        region.path.unlink()
        self._regions.region = None


def relay(asker: GrpcAsker, chance: random.Random) -> bool:
    """Send a request to a decoupled model that calls others; each number has one response."""
    values = np.array([chance.randint(0, 1000) for _ in range(chance.randint(1, 20))], np.int32)
    tensor = grpcclient.InferInput("IN", list(values.shape), "INT32")
    tensor.set_data_from_numpy(values)
    model, expected = chance.choice(RELAYING), tripled(values).tolist()

    def check(results: list[Any]) -> str:
        got = [int(result.as_numpy("OUT").item()) for result in results]
        # Instances of a step respond in any order.
        right = got == expected if model == "relay" else sorted(got) == sorted(expected)
        return "" if right else f"answered {got} instead of {expected}"

    return asker.stream(model, tensor, check)


class _Region:
    """Shared memory for inputs and outputs of a request."""

    def __init__(self) -> None:
        self.name = f"conch_soak_{uuid4().hex[:12]}"
        self.path = Path("/dev/shm", self.name)
        self.memory = np.memmap(self.path, np.int32, "w+", shape=(2 * _MOST,))
        self.uses = 0


class _Regions(threading.local):
    """One region per thread."""

    region: _Region | None = None
