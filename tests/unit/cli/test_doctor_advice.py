"""Each rule speaks where there is reason, and is silent where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conch.cli.doctor import (
    CacheFact,
    Facts,
    GpuFact,
    GpusFact,
    LimitsFact,
    MemoryFact,
    PackageFact,
    PortFact,
    ProcessorFact,
    advice,
    packages,
)
from conch.machine.extras import pip_install

GIB = 1 << 30
INSTALLED = tuple(
    replace(package, version="9", install="", detail="CPU" * (package.name == "torch")) for package in packages()
)
ENGINES = ("torch", "onnxruntime", "openvino", "vllm")
TOO_OLD = PackageFact("transformers", "4.40", "checkpoints", "pip install it", "older than 5.5, the minimum")
#: A machine about which there is nothing to say.
GOOD = Facts(
    conch="1", protocol="2.51.0", python="3.12", platform="Linux", uvloop=True, packages=INSTALLED,
    gpus=GpusFact((), "", "none"),
    processor=ProcessorFact("a processor", "Intel", 2, 2, {"AVX2": True, "VNNI": True}),
    memory=MemoryFact(16 * GIB, 8 * GIB, 0, GIB, GIB, True),
    limits=LimitsFact((1 << 20, 1 << 20), (0, 0)),
    ports=(PortFact("HTTP", 8000),),
    cache=CacheFact("/cache", 0, 0, 100 * GIB, False),
)  # fmt: skip
GPU = GpusFact((GpuFact("H100", 80 * GIB, "550"),), "NVML")


def without(*names: str) -> tuple[PackageFact, ...]:
    return tuple(replace(one, version="", install="pip install it") if one.name in names else one for one in INSTALLED)


def built_for(detail: str) -> tuple[PackageFact, ...]:
    return tuple(replace(one, detail=detail) if one.name == "torch" else one for one in INSTALLED)


def test_a_good_machine_gets_no_advice() -> None:
    assert advice(GOOD) == []


@pytest.mark.parametrize(
    ("facts", "reason", "action"),
    [
        (replace(GOOD, packages=without(*ENGINES)), "no engine for check", "pip install it"),
        (replace(GOOD, packages=without("openvino")), "the processor has VNNI", "pip install it"),
        (replace(GOOD, packages=without("transformers")), "torch is installed without transformers", "pip install it"),
        (replace(GOOD, packages=(*INSTALLED, TOO_OLD)), "transformers 4.40 is older than 5.5", "pip install it"),
        (replace(GOOD, packages=built_for("CUDA 12.8")), "torch is built for CUDA 12.8 but there is no GPU", "install"),
        (replace(GOOD, uvloop=False), "the server runs on asyncio's own event loop", f"{pip_install()} uvloop"),
        (replace(GOOD, limits=LimitsFact((1024, 65536), (0, 0))), "the process may open 1024 files", "ulimit -n 65536"),
        (replace(GOOD, limits=LimitsFact((1024, -1), (0, 0))), "the process may open 1024", "ulimit -n unlimited"),
        (replace(GOOD, limits=LimitsFact((1024, 1024), (0, 0))), "the process may open 1024", "raise the hard limit"),
        (replace(GOOD, ports=(PortFact("HTTP", 8000, "x (pid 1)"),)), "port 8000 (HTTP) is", "conch serve --http-p"),
        (replace(GOOD, memory=replace(GOOD.memory, limit=GIB)), "1.0 GiB of memory is left", "end other programs"),
        (replace(GOOD, memory=replace(GOOD.memory, memfd=False)), "memfd is not available", "Linux"),
        (replace(GOOD, cache=replace(GOOD.cache, free=GIB)), "1.0 GiB is left on the disk", "set HF_HUB_CACHE"),
    ],
)  # fmt: skip
def test_a_reason_is_given_with_what_to_do(facts: Facts, reason: str, action: str) -> None:
    [given] = advice(facts)
    assert given.reason.startswith(reason)
    assert given.action.startswith(action)


def test_a_gpu_without_what_uses_it_is_reported() -> None:
    facts = replace(GOOD, gpus=GPU, packages=without("nvidia-ml-py", "openvino", "vllm"))
    assert [one.reason.partition(":")[0] for one in advice(facts)] == [
        "torch is built for CPUs",
        "vLLM is the fastest engine for language models on a GPU",
        "metrics of the GPU need NVML",
    ]
