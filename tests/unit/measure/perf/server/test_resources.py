"""What a server uses: its processes, its GPUs, the metrics that it shows; and what is said where it is not seen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.measure.perf.level import MachineWatch
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.resources import GpuReader, GpuSampler, MetricsSampler, Sampler, find_server, read_gauges

METRICS = """# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1000
nv_inference_count{model="m",version="1"} 7
nv_cpu_utilization 0.25
"""
#: Listens, computes for a moment with a child of its own, and waits.
SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
child = os.fork()
sum(range(3_000_000))
if not child:
    sys.stdin.read()
    os._exit(0)
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    try:
        yield process, port
    finally:
        process.communicate()


def test_the_server_is_found_by_its_port_with_all_that_it_has_started() -> None:
    with serving() as (process, port):
        found = find_server(Address("localhost", port))
        # The child holds the socket too, and is found through the one that has started it.
        assert (found.pids, found.unseen) == ((process.pid,), "")
        watch = MachineWatch(found)
        reading = watch.since_last()
        used = watch.resources([reading])
    assert used is not None and used.memory > 2**20 and used.cores >= 0
    assert not watch.machine([reading]).unseen


def test_a_server_that_cannot_be_seen_causes_no_other_suspicion() -> None:
    elsewhere = find_server(Address("192.0.2.1", 8000))
    assert elsewhere.unseen == "the server runs on another machine, 192.0.2.1"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        hidden = find_server(Address("127.0.0.1", nobody.getsockname()[1]))
    assert "the interference is unknown" in hidden.unseen
    watch = MachineWatch(hidden)
    reading = watch.since_last()
    assert reading.interference.others == 0 and watch.resources([reading]) is None
    assert watch.machine([reading]).unseen == hidden.unseen and not watch.machine([reading]).rivals


class FakeNvml(SimpleNamespace):
    """Two GPUs, the first of which does not report its power; this process computes on the second."""

    NVMLError = KeyError

    def __init__(self) -> None:
        super().__init__(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUUID(self, gpu: int) -> bytes:
        return b"GPU-%d" % gpu

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=1000 + gpu)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return {1: 70_500}[gpu]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> Any:
        return [SimpleNamespace(pid=os.getpid())] if gpu == 1 else []


def test_the_gpus_are_those_that_the_server_uses_else_all() -> None:
    reader = GpuReader(FakeNvml)
    with GpuSampler(reader) as sampler:
        pass
    figures = sampler.figures([(0, 1)], [os.getpid()])
    assert list(figures) == ["GPU-1"]
    assert (figures["GPU-1"].utilisation, figures["GPU-1"].memory, figures["GPU-1"].power) == (0.5, 1001, 70.5)
    others = sampler.figures([(0, 1)], [os.getppid() + 10**6])
    assert list(others) == ["GPU-0", "GPU-1"] and others["GPU-0"].power == 0


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    def missing() -> Any:
        raise ImportError

    assert not GpuReader(missing).handles


def test_gauges_are_read_with_their_labels() -> None:
    assert read_gauges(METRICS) == {
        'nv_gpu_utilization{gpu_uuid="GPU-1"}': 0.5,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': 1000,
        "nv_cpu_utilization": 0.25,
    }


def test_metrics_that_are_not_there_are_missed_before_anything_is_sent() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConchError, match=r"no metrics at http://.*metrics-url"):
            MetricsSampler(f"127.0.0.1:{nobody.getsockname()[1]}/metrics", 1.0)


def test_samples_are_those_of_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.measure.perf.server.resources.monotonic_ns", count(100, 100).__next__)
    numbers = count()
    with Sampler(numbers.__next__, 0.0) as sampler:
        while len(sampler.within([])) < 3:
            pass
    assert sampler.within([(100, 300)]) == [1, 2]
    assert sampler.within([(0, 1)]) == list(range(next(numbers)))
