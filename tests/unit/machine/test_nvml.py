"""GPUs are read with NVML; what a GPU or an old driver does not report is unknown, and fails nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conch.machine.gpus import Gpus


def _unsupported(gpu: int) -> Any:
    raise LookupError("Not Supported")


def test_what_a_gpu_does_not_report_is_unknown() -> None:
    nvml = SimpleNamespace(
        NVMLError=LookupError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number, nvmlDeviceGetUUID=lambda gpu: b"GPU-0",
        nvmlDeviceGetName=_unsupported, nvmlDeviceGetPowerUsage=lambda gpu: 70,
    )  # fmt: skip

    gpus = Gpus(lambda: nvml)
    [gpu] = gpus.handles
    assert (gpus.uuid(gpu), gpus.read("PowerUsage", gpu), gpus.read("Name", gpu)) == ("GPU-0", 70, None)


def test_the_reason_for_no_gpus_is_known() -> None:
    def missing() -> Any:
        raise ImportError("no pynvml")

    gpus = Gpus(missing)
    assert gpus.handles == [] and isinstance(gpus.error, ImportError)
