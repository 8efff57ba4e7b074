"""The GPUs that NVIDIA's driver tells of: through NVML where pynvml is installed, else through ``nvidia-smi``."""

from __future__ import annotations

import shutil
import subprocess
from importlib import import_module
from typing import Any, Final

from conch.doctor.facts import GpuFact, GpusFact

_QUERY: Final = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SECONDS: Final = 10


def gpus(nvml: Any = None, smi: str | None = None) -> GpusFact:
    """The GPUs; ``nvml`` stands for the module pynvml, ``smi`` for the path of ``nvidia-smi``."""
    try:
        return GpusFact(_by_nvml(nvml or import_module("pynvml")), "NVML")
    except ImportError:
        pass
    except Exception as error:  # whatever pynvml says of a missing driver
        return GpusFact((), "NVML", f"none: {error}")
    program = smi or shutil.which("nvidia-smi")
    if program is None:
        return GpusFact((), "", "none: there is no nvidia-smi, so no NVIDIA driver that could be asked")
    return _by_smi(program)


def _by_nvml(nvml: Any) -> tuple[GpuFact, ...]:
    nvml.nvmlInit()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            GpuFact(_text(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetMemoryInfo(handle).total), driver)
            for handle in handles
        )
    finally:
        nvml.nvmlShutdown()


def _by_smi(program: str) -> GpusFact:
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        found = tuple(GpuFact(name, int(memory) << 20, driver) for name, memory, driver in rows)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return GpusFact((), "nvidia-smi", f"none: nvidia-smi gives no answer ({error})")
    return GpusFact(found, "nvidia-smi", "" if found else "none")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
