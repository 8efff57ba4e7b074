"""``conch doctor``: reports the machine and the environment, and suggests packages and settings.

The facts are the members of the JSON output; the advice is a set of rules over them. No large packages are imported:
versions come from their metadata.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
import psutil

from conch import __version__
from conch.machine import extras
from conch.machine.extras import pip_install
from conch.machine.facts import cpu_flags, usable_cores
from conch.machine.gpus import Gpus, text
from conch.machine.memory import memory_limit
from conch.machine.ports import holder, is_free
from conch.measure.reports.report import CodeBlock, Paragraph, Properties, Section, Table
from conch.measure.reports.text import json_text
from conch.options.settings import SERVER_VERSION, Settings


@dataclass(frozen=True, slots=True)
class PackageFact:
    """An optional package; ``version`` is empty if it is not installed.

    ``install`` is the command that installs a missing or outdated package, otherwise empty; ``detail`` is the target of
    torch's build (``CUDA 12.8``, ``CPU``), or states that the version is too old.
    """

    name: str
    version: str
    purpose: str
    install: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A GPU; ``memory`` in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True)
class GpusFact:
    """The GPUs, the tool that reported them, and the reason if there are none."""

    devices: tuple[GpuFact, ...]
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ProcessorFact:
    """The processor: ``cores`` of the machine, ``usable`` ones of this process, whether it has ``features``."""

    name: str
    maker: str
    cores: int
    usable: int
    features: dict[str, bool]


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Memory in bytes; ``limit`` is the control group's, 0 if none. ``memfd`` is needed to share tensors."""

    total: int
    available: int
    limit: int
    shm_total: int
    shm_free: int
    memfd: bool


@dataclass(frozen=True, slots=True)
class LimitsFact:
    """Limits of the process, soft and hard; -1 is unlimited. ``memlock`` in bytes."""

    nofile: tuple[int, int]
    memlock: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PortFact:
    """A default port of the server; ``taken_by`` is empty if it is free."""

    service: str
    port: int
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class CacheFact:
    """The Hugging Face Hub's cache: sizes and free space in bytes; ``offline`` is ``HF_HUB_OFFLINE``."""

    path: str
    models: int
    size: int
    free: int
    offline: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of the report."""

    conch: str
    protocol: str
    python: str
    platform: str
    uvloop: bool
    packages: tuple[PackageFact, ...]
    gpus: GpusFact
    processor: ProcessorFact
    memory: MemoryFact
    limits: LimitsFact
    ports: tuple[PortFact, ...]
    cache: CacheFact

    def package(self, name: str) -> PackageFact:
        """Return the package with this name. Raises KeyError for an unknown name."""
        return {package.name: package for package in self.packages}[name]


def cache(environment: Mapping[str, str] = os.environ) -> CacheFact:
    """Return the cache for downloaded models, located as by ``huggingface_hub``."""
    path = _location(environment)
    models = [directory for directory in path.glob("models--*") if directory.is_dir()]
    size = sum(blob.stat().st_size for model in models for blob in model.glob("blobs/*") if blob.is_file())
    existing = next(directory for directory in (path, *path.parents) if directory.exists())
    return CacheFact(
        path=str(path),
        models=len(models),
        size=size,
        free=shutil.disk_usage(existing).free,
        offline=environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    )


def cached_models(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ids of the models in the cache, sorted."""
    folders = _location(environment).glob("models--*")
    return sorted("/".join(folder.name.split("--")[1:]) for folder in folders)


def _location(environment: Mapping[str, str]) -> Path:
    # Unlike Path's method, this leaves "~" unchanged without a home directory.
    if "HF_HUB_CACHE" in environment:
        return Path(os.path.expanduser(environment["HF_HUB_CACHE"]))
    if "HF_HOME" in environment:
        return Path(os.path.expanduser(environment["HF_HOME"])) / "hub"
    return Path(os.path.expanduser(environment.get("XDG_CACHE_HOME", "~/.cache"))) / "huggingface" / "hub"


#: The number of connections, and so of descriptors, that a server should be able to hold.
_DESCRIPTORS: Final = 4096
_GIB: Final = 1 << 30
#: Memory, or disk space for downloads, that is barely enough for a small model.
_LITTLE: Final = 2 * _GIB


@dataclass(frozen=True, slots=True)
class Advice:
    """A problem and its remedy."""

    reason: str
    action: str


def advice(facts: Facts) -> list[Advice]:
    """Return all advice for these facts."""
    return [*_of_engines(facts), *_of_gpus(facts), *_of_process(facts), *_of_machine(facts)]


def _of_engines(facts: Facts) -> Iterator[Advice]:
    for package in facts.packages:
        if package.version and package.install:
            yield Advice(f"{package.name} {package.version} is {package.detail}", package.install)
    engines = [facts.package(name) for name in ("torch", "onnxruntime", "openvino", "vllm")]
    torch, _, openvino, _ = engines
    if not any(engine.version for engine in engines):
        yield Advice("no engine for checkpoints is installed: only models in Python can be served", torch.install)
    elif facts.processor.features["VNNI"] and not facts.gpus.devices and not openvino.version:
        yield Advice(
            "the processor has VNNI, which makes int8 models on OpenVINO faster (conch convert)", openvino.install
        )
    if torch.version and not facts.package("transformers").version:
        yield Advice("torch is installed without transformers", facts.package("transformers").install)


def _of_gpus(facts: Facts) -> Iterator[Advice]:
    torch = facts.package("torch")
    if torch.detail.startswith("CUDA") and not facts.gpus.devices:
        yield Advice(
            f"torch is built for {torch.detail} but there is no GPU: its CUDA libraries take gigabytes of disk space",
            "install PyTorch's CPU build, as described on its site",
        )
    if facts.gpus.devices:
        if torch.detail == "CPU":
            yield Advice("torch is built for CPUs: it does not use the GPU", "install PyTorch's CUDA build")
        if not facts.package("vllm").version:
            yield Advice("vLLM is the fastest engine for language models on a GPU", facts.package("vllm").install)
        if not facts.package("nvidia-ml-py").version:
            yield Advice("metrics of the GPU need NVML", facts.package("nvidia-ml-py").install)


def _of_process(facts: Facts) -> Iterator[Advice]:
    if not facts.uvloop:
        yield Advice(
            "the server runs on asyncio's own event loop, which is slower than uvloop", f"{pip_install()} uvloop"
        )
    soft, hard = facts.limits.nofile
    if 0 <= soft < _DESCRIPTORS:
        maximum = "unlimited" if hard < 0 else hard
        yield Advice(
            f"the process may open {soft} files, and each connection uses one",
            f"ulimit -n {maximum}" if maximum != soft else "raise the hard limit of open files",
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
        yield Advice(f"{memory / _GIB:.1f} GiB of memory is left for models", "end other programs, or raise the limit")
    if facts.cache.free < _LITTLE and not facts.cache.offline:
        yield Advice(
            f"{facts.cache.free / _GIB:.1f} GiB is left on the disk of the Hub's cache",
            "set HF_HUB_CACHE to another disk",
        )


_QUERY: Final = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SECONDS: Final = 10


def gpus(nvml: Any = None, smi: str | None = None) -> GpusFact:
    """Return the GPUs; ``nvml`` is the module pynvml, ``smi`` the path of ``nvidia-smi``."""
    by_nvml = Gpus() if nvml is None else Gpus(lambda: nvml)
    if by_nvml.error is None:
        driver = by_nvml.driver
        facts = [
            GpuFact(text(by_nvml.read("Name", gpu)), getattr(by_nvml.read("MemoryInfo", gpu), "total", 0), driver)
            for gpu in by_nvml.handles
        ]
        return GpusFact(tuple(facts), "NVML")
    if not isinstance(by_nvml.error, ImportError):
        return GpusFact((), "NVML", f"none: {by_nvml.error}")
    program = smi or shutil.which("nvidia-smi")
    if program is None:
        return GpusFact((), "", "none: nvidia-smi was not found")
    return _by_smi(program)


def _by_smi(program: str) -> GpusFact:
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        facts = tuple(GpuFact(name, int(memory) << 20, driver) for name, memory, driver in rows)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return GpusFact((), "nvidia-smi", f"none: nvidia-smi does not respond ({error})")
    return GpusFact(facts, "nvidia-smi", "" if facts else "none")


#: The features that engines use, and the processor flags that indicate them (any of these).
FEATURES: Final[Mapping[str, frozenset[str]]] = {
    "AVX2": frozenset({"avx2"}),
    "AVX512": frozenset({"avx512f"}),
    "VNNI": frozenset({"avx512_vnni", "avx_vnni", "asimddp"}),
    "AMX": frozenset({"amx_int8", "amx_bf16"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
#: The names of manufacturers in /proc/cpuinfo.
_MAKERS: Final = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


def processor(root: Path = Path("/")) -> ProcessorFact:
    """Return the processor; ``proc`` and ``sys`` are mounted in ``root``."""
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
    """Return the machine's memory, and the lowest limit of a control group."""
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
    """Return the limits with which the server would start."""
    return LimitsFact(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK))


def ports(services: Mapping[str, int], address: str) -> tuple[PortFact, ...]:
    """Return whether each service's port is free; if not, with the program that listens there, if known."""
    return tuple(
        PortFact(service, port, "" if is_free(address, port) else holder(port)) for service, port in services.items()
    )


#: The purpose of each package, by import name.
_PURPOSES: Final[Mapping[str, str]] = {
    "torch": "unconverted checkpoints",
    "transformers": "unconverted checkpoints",
    "onnxruntime": "ONNX graphs, converted models",
    "openvino": "OpenVINO graphs, converted models",
    "openvino_genai": "GGUF files on OpenVINO",
    "llama_cpp": "GGUF files",
    "vllm": "language models on GPUs",
    "nncf": "conch convert",
    "llguidance": "structured output",
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
    # Another distribution may contain the module, such as onnxruntime-gpu.
    version = extras.version_of(module) or "installed"
    if needed := extras.outdated(module):
        return PackageFact(name, version, purpose, extras.command_for(module), f"older than {needed}, the minimum")
    return PackageFact(name, version, purpose, detail=_build() if module == "torch" else "")


def _build() -> str:
    """Return the target of torch's build, ``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``, from its version file."""
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
    """Return the current facts of this machine and this environment."""
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


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def doctor_command(as_json: bool) -> None:
    """Show versions, engines, GPUs, processor, memory, limits and ports, with advice on performance."""
    from conch.measure.reports import terminal
    from conch.measure.reports.terminal import show

    facts = examine()
    advised = advice(facts)
    if as_json:
        document = {**asdict(facts), "advice": [asdict(item) for item in advised]}
        click.echo(json_text(document), nl=False)
    else:
        show(terminal.console(), *sections(facts, advised))


def sections(facts: Facts, suggestions: Sequence[Advice]) -> Iterator[Section]:
    """Yield the report, one fact per line."""
    yield _facts("Versions", [
        ("conch", facts.conch), ("Triton's protocol", facts.protocol), ("Python", facts.python),
        ("system", facts.platform), ("event loop", "uvloop" if facts.uvloop else "asyncio"),
    ])  # fmt: skip
    rows = [(package.name, _version(package), package.purpose) for package in facts.packages]
    yield Section("Engines and extras", [Table.of(["", "", ""], rows), *_commands(facts.packages)])
    gpus = [(gpu.name, f"{_size(gpu.memory)}, driver {gpu.driver}") for gpu in facts.gpus.devices]
    yield _facts("GPUs", gpus or [("NVIDIA", facts.gpus.note)])
    processor = facts.processor
    features = ", ".join(f"{name}" if present else f"no {name}" for name, present in processor.features.items())
    yield _facts("Processor", [
        (processor.maker, processor.name), ("features", features),
        ("cores", f"{processor.usable} of {processor.cores} may be used"),
    ])  # fmt: skip
    memory, limits = facts.memory, facts.limits
    yield _facts("Memory and limits", [
        ("memory", _free(memory.available, memory.total)),
        ("control group", f"at most {_size(memory.limit)}" if memory.limit else "no limit"),
        ("/dev/shm", _free(memory.shm_free, memory.shm_total) if memory.shm_total else "not available"),
        ("memfd", "available" if memory.memfd else "not available"),
        ("open files", _range(limits.nofile)), ("locked memory", _range(limits.memlock, bytes_=True)),
    ])  # fmt: skip
    yield _facts(
        "Ports",
        [
            (f"{port.port}", f"{port.service}: " + (f"taken by {port.taken_by}" if port.taken_by else "free"))
            for port in facts.ports
        ],
    )
    cache = facts.cache
    held = f"{cache.models} models, {_size(cache.size)}, {_size(cache.free)} free" + (
        ", offline" if cache.offline else ""
    )
    yield _facts("Hub's cache", [("folder", cache.path), ("holds", held)])
    advised = [CodeBlock(item.action, item.reason) for item in suggestions]
    yield Section("What would help", advised or [Paragraph("no suggestions")])


def _facts(title: str, items: Sequence[tuple[str, str]]) -> Section:
    return Section(title, [Properties(items)])


def _commands(packages: Iterable[PackageFact]) -> Iterator[CodeBlock]:
    """Yield the commands that install missing or outdated packages, each with the names of these packages."""
    names: dict[str, list[str]] = {}
    for package in packages:
        if package.install:
            names.setdefault(package.install, []).append(package.name)
    if names:
        text = "\n".join(f"{command}  # {', '.join(packages)}" for command, packages in names.items())
        yield CodeBlock(text, "To install the others:")


def _version(package: PackageFact) -> str:
    return f"{package.version} ({package.detail})" if package.detail else package.version or "-"


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 or not size else f"{size / 2**20:.0f} MiB"


def _free(free: int, total: int) -> str:
    return f"{_size(free)} of {_size(total)} free"


def _range(limit: tuple[int, int], *, bytes_: bool = False) -> str:
    soft, hard = ("unlimited" if bound < 0 else _size(bound) if bytes_ else str(bound) for bound in limit)
    return f"{soft}, at most {hard}"
