"""What the machine's files say becomes facts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.cli import doctor
from conch.cli.doctor import GpuFact, GpusFact, cache, gpus, memory, packages, ports, processor

CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu avx2 avx512f avx512_vnni amx_int8 amx_tile

processor\t: 1
model name\t: another
"""


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_processors_features_are_read_from_its_flags(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", CPUINFO)

    found = processor(tmp_path)

    assert (found.maker, found.name) == ("Intel", "Intel(R) Xeon(R) Platinum 8481C")
    assert found.features == {"AVX2": True, "AVX512": True, "VNNI": True, "AMX": True, "bf16": False}
    assert 1 <= found.usable <= found.cores


def test_a_processor_that_the_system_does_not_describe_has_no_features(tmp_path: Path) -> None:
    found = processor(tmp_path)
    assert found.name
    assert not any(found.features.values())


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1048576\n"}, 1 << 20),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 0),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/memory.max": "2097152"}, 2 << 20),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "4194304\n"}, 4 << 20),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, 0),
        ({}, 0),
    ],
)  # fmt: skip
def test_the_least_memory_limit_of_the_control_groups_counts(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    for path, text in files.items():
        put(tmp_path, path, text)
    assert memory(tmp_path).limit == limit


def test_a_port_in_use_is_reported_with_its_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        [one, two] = ports({"HTTP": port, "GRPC": free}, "127.0.0.1")
    assert one.taken_by.endswith(f"(pid {os.getpid()})")
    assert two.taken_by == ""


def nvml(**given: Any) -> SimpleNamespace:
    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"550.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30),
    }
    return SimpleNamespace(**functions | given)


def test_nvml_tells_of_gpus() -> None:
    assert gpus(nvml()) == GpusFact((GpuFact("H100", 80 << 30, "550.1"),), "NVML")


def test_a_missing_driver_is_reported_with_nvmls_message() -> None:
    def fail() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    assert gpus(nvml(nvmlInit=fail)).note == "none: NVML Shared Library Not Found"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA L4, 23034, 550.1'", GpusFact((GpuFact("NVIDIA L4", 23034 << 20, "550.1"),), "nvidia-smi")),
        ("true", GpusFact((), "nvidia-smi", "none")),
    ],
)
def test_nvidia_smi_is_asked_where_nvml_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: GpusFact
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert gpus(smi=str(program)) == expected


def test_the_cache_is_measured_where_the_environment_says(tmp_path: Path) -> None:
    put(tmp_path, "hub/models--org--name/blobs/1", "x" * 100)
    put(tmp_path, "hub/models--org--other/blobs/2", "x" * 10)

    found = cache({"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})

    assert (found.path, found.models, found.size, found.offline) == (str(tmp_path / "hub"), 2, 110, True)
    assert cache({"HF_HUB_CACHE": str(tmp_path / "nowhere" / "else")}).models == 0


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "CUDA 12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", "ROCm 6.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
    ],
)
def test_what_torch_is_built_for_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: str
) -> None:
    put(tmp_path, "version.py", text)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec if name == "torch" else None)
    monkeypatch.setattr(doctor.extras, "version_of", lambda module: "2.13.0")

    found = {package.name: package for package in packages()}

    assert (found["torch"].version, found["torch"].detail) == ("2.13.0", build)
    assert found["openvino"].version == ""
    assert "openvino" in found["openvino"].install


def test_a_cache_below_a_home_that_does_not_exist_holds_nothing() -> None:
    found = cache({"HF_HOME": "~no-such-user/models"})
    assert (found.path, found.models, found.size) == ("~no-such-user/models/hub", 0, 0)
