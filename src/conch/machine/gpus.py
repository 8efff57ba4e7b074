"""The NVIDIA GPUs of this machine, read with NVML (the package ``nvidia-ml-py``)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Gpus:
    """The handles of all GPUs, by the driver's numbers.

    Without the package or a driver there are none, and ``error`` is the reason.
    """

    def __init__(self, load_nvml: Callable[[], Any] = lambda: import_module("pynvml")) -> None:
        self.handles: list[Any] = []
        self.error: Exception | None = None
        try:
            self._nvml = nvml = load_nvml()
            nvml.nvmlInit()
            self.handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        except Exception as error:  # ImportError, or any error of pynvml for a missing driver
            self.error = error

    def read(self, query: str, gpu: Any) -> Any:
        """Return the value of a query, such as ``MemoryInfo``, of a GPU; None if the GPU or the driver has none."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{query}")(gpu)
        except self._nvml.NVMLError:
            return None

    def uuid(self, gpu: Any) -> str:
        """Return the UUID of a GPU."""
        return text(self.read("UUID", gpu))

    @property
    def driver(self) -> str:
        """The version of the driver; empty if it is unknown."""
        try:
            return text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return ""


def text(value: str | bytes | None) -> str:
    """Return a text of NVML, which older versions of the package return as bytes; empty if it is unknown."""
    return value.decode() if isinstance(value, bytes) else value or ""
