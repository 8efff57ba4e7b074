"""Puts the facts together: the only place that asks for all of them."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from conch import __version__
from conch.cli.doctor.cache import cache
from conch.cli.doctor.facts import (
    Facts,
    GpuFact,
    GpusFact,
    LimitsFact,
    MemoryFact,
    PackageFact,
    PortFact,
    ProcessorFact,
)
from conch.machine import extras
from conch.machine.cores import cpu_flags, usable_cores
from conch.machine.memory import memory_limit
from conch.machine.ports import holder, is_free
from conch.settings import SERVER_VERSION, Settings

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
        return GpusFact((), "", "none: nvidia-smi was not found")
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
        facts = tuple(GpuFact(name, int(memory) << 20, driver) for name, memory, driver in rows)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return GpusFact((), "nvidia-smi", f"none: nvidia-smi gives no answer ({error})")
    return GpusFact(facts, "nvidia-smi", "" if facts else "none")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


#: What engines use, and the processor's flags that mean it (any of them).
FEATURES: Final[Mapping[str, frozenset[str]]] = {
    "AVX2": frozenset({"avx2"}),
    "AVX512": frozenset({"avx512f"}),
    "VNNI": frozenset({"avx512_vnni", "avx_vnni", "asimddp"}),
    "AMX": frozenset({"amx_int8", "amx_bf16"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
#: The names of makers in /proc/cpuinfo.
_MAKERS: Final = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


def processor(root: Path = Path("/")) -> ProcessorFact:
    """The processor; ``root`` is where ``proc`` and ``sys`` are mounted."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    flags = cpu_flags(root)
    maker = values.get("vendor_id", "")
    return ProcessorFact(
        name=values.get("model name") or platform.machine(),
        maker=_MAKERS.get(maker, maker or "unknown"),
        cores=os.cpu_count() or 1,
        usable=usable_cores(root),
        features={name: bool(flags & meaning) for name, meaning in FEATURES.items()},
    )


def memory(root: Path = Path("/")) -> MemoryFact:
    """The machine's memory, and the least that a control group leaves of it."""
    seen = psutil.virtual_memory()
    try:
        shm = shutil.disk_usage(root / "dev/shm")
        shm_total, shm_free = shm.total, shm.free
    except OSError:
        shm_total = shm_free = 0
    return MemoryFact(
        total=seen.total,
        available=seen.available,
        limit=memory_limit(seen.total, root),
        shm_total=shm_total,
        shm_free=shm_free,
        memfd=hasattr(os, "memfd_create"),
    )


def process_limits() -> LimitsFact:
    """The limits that the server would start with."""
    return LimitsFact(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK))


def ports(services: Mapping[str, int], address: str) -> tuple[PortFact, ...]:
    """Whether each service's port is free, and else who listens there, as far as that may be known."""
    return tuple(
        PortFact(service, port, "" if is_free(address, port) else holder(port)) for service, port in services.items()
    )


#: By the name that is imported: what each is for.
_PURPOSES: Final[Mapping[str, str]] = {
    "torch": "checkpoints as they are",
    "transformers": "checkpoints as they are",
    "onnxruntime": "ONNX graphs, converted models",
    "openvino": "OpenVINO graphs, converted models",
    "openvino_genai": "GGUF files, converted language models",
    "vllm": "language models on GPUs",
    "nncf": "conch convert",
    "llguidance": "structured output on transformers",
    "peft": "LoRA adapters on transformers",
    "PIL": "images",
    "soundfile": "sound",
    "pynvml": "metrics of GPUs",
}


def packages() -> tuple[PackageFact, ...]:
    """Every optional package, installed or not."""
    return tuple(_fact(module, purpose) for module, purpose in _PURPOSES.items())


def _fact(module: str, purpose: str) -> PackageFact:
    name = extras.PACKAGES[module].name
    if find_spec(module) is None:
        return PackageFact(name, "", purpose, extras.command_for(module))
    # Another distribution may bring the module, as onnxruntime-gpu does.
    version = extras.version_of(module) or "installed"
    if needed := extras.outdated(module):
        return PackageFact(name, version, purpose, extras.command_for(module), f"older than {needed}, which is needed")
    return PackageFact(name, version, purpose, detail=_build() if module == "torch" else "")


def _build() -> str:
    """``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``: what torch was built for, read from its file of versions."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        text = (Path((folders or [""])[0]) / "version.py").read_text("utf-8")
    except OSError:
        return ""
    for name, attribute in (("CUDA", "cuda"), ("ROCm", "hip")):
        if built := re.search(rf"^{attribute}\b[^=]*= '([^']+)'", text, re.MULTILINE):
            return f"{name} {built[1]}"
    return "CPU"


def examine() -> Facts:
    """The facts of this machine and this environment, as they are now."""
    settings = Settings()
    services = {listener.title: listener.port for listener in settings.listeners.values() if listener.allowed}
    return Facts(
        conch=__version__,
        protocol=SERVER_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        uvloop=find_spec("uvloop") is not None,
        packages=packages(),
        gpus=gpus(),
        processor=processor(),
        memory=memory(),
        limits=process_limits(),
        ports=ports(services, settings.http_address),
        cache=cache(),
    )
