"""Gauges of the machine, read from fakes of psutil and pynvml."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conch.machine.gpus import Gpus
from conch.telemetry.exposition import page
from conch.telemetry.metrics import CpuGauges, GpuGauges


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakePsutil:
    percent = 25.0

    def cpu_percent(self, interval: None) -> float:
        return self.percent

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=1000, available=300)


class FakeNvml:
    """Two GPUs; the second has no energy counter."""

    class NVMLError(Exception):
        pass

    energy = 5000

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str | bytes:
        return ["GPU-a", b"GPU-b"][gpu]

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=50 + gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=100, used=40)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 71_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 300_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        if gpu == 1:
            raise self.NVMLError("Not Supported")
        return self.energy


def samples(gauges: CpuGauges | GpuGauges) -> dict[str, str]:
    lines = page(gauges.collect()).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_cpu_and_memory_are_reported() -> None:
    assert samples(CpuGauges(1.0, Clock(), FakePsutil())) == {
        "nv_cpu_utilization": "0.25",
        "nv_cpu_memory_total_bytes": "1000",
        "nv_cpu_memory_used_bytes": "700",
    }


def test_machine_is_read_once_an_interval() -> None:
    clock, psutil = Clock(), FakePsutil()
    gauges = CpuGauges(1.0, clock, psutil)
    gauges.collect()
    psutil.percent = 75.0
    clock.now = 0.9
    assert samples(gauges)["nv_cpu_utilization"] == "0.25"
    clock.now = 1.0
    assert samples(gauges)["nv_cpu_utilization"] == "0.75"


def test_gpus_are_reported_by_uuid_in_triton_units() -> None:
    nvml = FakeNvml()
    gauges = GpuGauges(1.0, Clock(), Gpus(lambda: nvml))
    nvml.energy = 7500
    assert samples(gauges) == {
        'nv_gpu_utilization{gpu_uuid="GPU-a"}': "0.5",
        'nv_gpu_utilization{gpu_uuid="GPU-b"}': "0.51",
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"}': "100",
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"}': "100",
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"}': "40",
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"}': "40",
        'nv_gpu_power_usage{gpu_uuid="GPU-a"}': "71.5",
        'nv_gpu_power_usage{gpu_uuid="GPU-b"}': "71.5",
        'nv_gpu_power_limit{gpu_uuid="GPU-a"}': "300",
        'nv_gpu_power_limit{gpu_uuid="GPU-b"}': "300",
        'nv_energy_consumption{gpu_uuid="GPU-a"}': "2.5",
    }
