"""What would be faster, or work at all, with what: rules over the facts, pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from conch.cli.doctor.facts import Facts
from conch.machine.extras import pip

#: Connections that a server should bear, each of which is a descriptor.
_DESCRIPTORS: Final = 4096
_GIB: Final = 1 << 30
#: Memory, or disk space for downloads, below which even a small model is a squeeze.
_LITTLE: Final = 2 * _GIB


@dataclass(frozen=True, slots=True)
class Advice:
    """What is in the way, and what to do about it."""

    reason: str
    action: str


def advice(facts: Facts) -> list[Advice]:
    """All advice that the facts give reason for."""
    return [*_of_engines(facts), *_of_gpus(facts), *_of_process(facts), *_of_machine(facts)]


def _of_engines(facts: Facts) -> Iterator[Advice]:
    for package in facts.packages:
        if package.version and package.install:
            yield Advice(f"{package.name} {package.version} is {package.detail}", package.install)
    engines = [facts.package(name) for name in ("torch", "onnxruntime", "openvino", "vllm")]
    torch, _, openvino, _ = engines
    if not any(engine.version for engine in engines):
        yield Advice("no engine for checkpoints is installed: only models in Python can be served", torch.install)
    elif facts.processor.features["VNNI"] and not facts.gpus.found and not openvino.version:
        yield Advice(
            "the processor has VNNI, which int8 models on OpenVINO use: where conch convert was measured, an encoder "
            "ran 4 times as fast as on PyTorch",
            openvino.install,
        )
    if torch.version and not facts.package("transformers").version:
        yield Advice("torch is installed without transformers", facts.package("transformers").install)


def _of_gpus(facts: Facts) -> Iterator[Advice]:
    torch = facts.package("torch")
    if torch.detail.startswith("CUDA") and not facts.gpus.found:
        yield Advice(
            f"torch is built for {torch.detail} and there is no GPU: its CUDA libraries take gigabytes of disk space",
            "install PyTorch's CPU build, as its site says",
        )
    if facts.gpus.found:
        if torch.detail == "CPU":
            yield Advice("torch is built for CPUs: it does not use the GPU", "install PyTorch's CUDA build")
        if not facts.package("vllm").version:
            yield Advice("vLLM is the fastest engine for language models on a GPU", facts.package("vllm").install)
        if not facts.package("nvidia-ml-py").version:
            yield Advice("metrics of the GPU need NVML", facts.package("nvidia-ml-py").install)


def _of_process(facts: Facts) -> Iterator[Advice]:
    if not facts.uvloop:
        yield Advice(
            "the server runs on asyncio's own event loop, which is slower than uvloop", f"{pip()} install uvloop"
        )
    soft, hard = facts.limits.nofile
    if 0 <= soft < _DESCRIPTORS:
        most = "unlimited" if hard < 0 else hard
        yield Advice(
            f"the process may open {soft} files, and each connection is one",
            f"ulimit -n {most}" if most != soft else "raise the hard limit of open files",
        )
    for port in facts.ports:
        if port.taken_by:
            flag = f"--{port.service.lower()}-port"
            yield Advice(f"port {port.port} ({port.service}) is taken by {port.taken_by}", f"conch serve {flag}=N")


def _of_machine(facts: Facts) -> Iterator[Advice]:
    if not facts.memory.memfd:
        yield Advice("memfd is not available: large tensors are passed in temporary files", "Linux has it from 3.17 on")
    memory = min(size for size in (facts.memory.limit, facts.memory.available) if size)
    if memory < _LITTLE:
        yield Advice(f"{memory / _GIB:.1f} GiB of memory are left for models", "end other programs, or raise the limit")
    if facts.cache.free < _LITTLE and not facts.cache.offline:
        yield Advice(
            f"{facts.cache.free / _GIB:.1f} GiB are left on the disk of the Hub's cache",
            "set HF_HUB_CACHE to another disk",
        )
