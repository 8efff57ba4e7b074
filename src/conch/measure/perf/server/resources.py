"""The resources that a server uses during a measurement, sampled from its metrics and from NVML.

On this machine, the server's processes are those that listen on its port, and their descendants.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from statistics import fmean
from threading import Event, Thread
from time import monotonic_ns
from typing import Any, Final, Generic, NamedTuple, TypeVar

import psutil

from conch.core.errors import ConchError, invalid
from conch.machine.gpus import Gpus
from conch.machine.ports import listening_processes, listens
from conch.machine.processes import family, process_times
from conch.measure.metrics_page import read_page, samples, with_scheme
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.records import Span


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The figures of a GPU: average utilization (0 to 1), maximum memory in use (bytes), average power (W)."""

    utilisation: float
    memory: int
    power: float = 0.0


@dataclass(frozen=True, slots=True)
class ResourceFigures:
    """The server with all its processes: average ``cores``, maximum resident ``memory`` (bytes), and GPUs by UUID.

    Memory shared by processes counts once (sum of their proportional set sizes).
    """

    cores: float
    memory: int
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)

    @property
    def gpu_memory(self) -> int:
        """Memory in use on all GPUs (bytes)."""
        return sum(gpu.memory for gpu in self.gpus.values())

    @property
    def gpu_utilisation(self) -> float | None:
        """The average utilization of the GPUs, or None."""
        return fmean(gpu.utilisation for gpu in self.gpus.values()) if self.gpus else None


@dataclass(frozen=True, slots=True)
class MetricFigures:
    """The average and the largest value of a server metric."""

    average: float
    largest: float


Sample = TypeVar("Sample")


class Sampler(Generic[Sample]):
    """Calls ``read`` every ``interval`` seconds while the context is entered, and keeps the results."""

    def __init__(self, read: Callable[[], Sample], interval: float) -> None:
        self._read = read
        self._interval = interval
        self._samples: list[tuple[int, Sample]] = []
        self._ended = Event()
        self._thread = Thread(target=self._run, name="conch perf samples", daemon=True)

    def __enter__(self) -> Sampler[Sample]:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def within(self, spans: Sequence[Span]) -> list[Sample]:
        """Return the samples in ``spans``, or all samples if there are none."""
        inside = [sample for moment, sample in self._samples if any(start < moment <= end for start, end in spans)]
        return inside or [sample for _, sample in self._samples]

    def _run(self) -> None:
        while True:
            sample = self._read()
            self._samples.append((monotonic_ns(), sample))
            if self._ended.wait(self._interval):
                return


#: The gauges that are read. perf_analyzer reads those of GPUs.
GAUGES: Final = (
    "nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes", "nv_gpu_power_usage",
    "nv_cpu_utilization", "nv_cpu_memory_used_bytes",
)  # fmt: skip
_SECONDS: Final = 5.0


class MetricsSampler(Sampler[Mapping[str, float]]):
    """Reads ``url`` every ``interval`` seconds while the context is entered.

    Raises INVALID_ARG if none of the gauges is present. A later failure leaves a gap in the samples.
    """

    def __init__(self, url: str, interval: float) -> None:
        super().__init__(self._read_or_nothing, interval)
        self._url = with_scheme(url)
        try:
            gauges = self._scrape()
        except ConchError as error:
            raise invalid(f"no metrics at {self._url}: {error} (choose another URL with --metrics-url)") from None
        if not gauges:
            raise invalid(f"{self._url} has none of: {', '.join(GAUGES)}")

    def figures(self, spans: Sequence[Span]) -> dict[str, MetricFigures]:
        """Return the average and maximum of each gauge, by name with labels, in the windows ``spans``."""
        values: dict[str, list[float]] = {}
        for sample in self.within(spans):
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        return {name: MetricFigures(fmean(samples), max(samples)) for name, samples in values.items()}

    def _scrape(self) -> Mapping[str, float]:
        return read_gauges(read_page(self._url, _SECONDS))

    def _read_or_nothing(self) -> Mapping[str, float]:
        with suppress(ConchError):
            return self._scrape()
        return {}


def read_gauges(text: str) -> dict[str, float]:
    """Return the gauges in a text of the Prometheus format, by name with labels as written."""
    return {f"{name}{{{labels}}}" if labels else name: value for name, labels, value in samples(text) if name in GAUGES}


#: NVML averages utilization over a period between a sixth of a second and a second (s).
_INTERVAL: Final = 0.25


class GpuReading(NamedTuple):
    """The state of a GPU: fraction of busy time, memory in use (bytes), power (W)."""

    utilisation: float
    memory: int
    power: float


class GpuReader(Gpus):
    """Reads the state of all GPUs of this machine."""

    def states(self) -> Mapping[str, GpuReading]:
        """Return the state of every GPU by its UUID; unavailable values are 0."""
        states = {}
        for gpu in self.handles:
            rates, memory = self.read("UtilizationRates", gpu), self.read("MemoryInfo", gpu)
            states[self.uuid(gpu)] = GpuReading(
                rates.gpu / 100 if rates else 0.0,
                int(memory.used) if memory else 0,
                (self.read("PowerUsage", gpu) or 0) / 1000,
            )
        return states

    def used_by(self, pids: Collection[int]) -> set[str]:
        """Return the GPUs used by any of the processes; empty if the driver does not report it, as in containers."""
        return {
            self.uuid(gpu)
            for gpu in self.handles
            if any(process.pid in pids for process in self.read("ComputeRunningProcesses", gpu) or ())
        }


class GpuSampler(Sampler[Mapping[str, GpuReading]]):
    """Samples the GPUs while the context is entered."""

    def __init__(self, reader: GpuReader) -> None:
        super().__init__(reader.states, _INTERVAL)
        self._reader = reader

    def figures(self, spans: Sequence[Span], roots: Iterable[int]) -> dict[str, GpuFigures]:
        """Return the figures in ``spans`` of the GPUs that ``roots`` and their children use, or of all if unknown."""
        samples = self.within(spans)
        used = self._reader.used_by(family(process_times(), roots))
        names = [uuid for uuid in (samples[0] if samples else ()) if not used or uuid in used]
        return {uuid: _figures([sample[uuid] for sample in samples]) for uuid in names}


def _figures(readings: Sequence[GpuReading]) -> GpuFigures:
    return GpuFigures(
        fmean(reading.utilisation for reading in readings), max(reading.memory for reading in readings),
        fmean(reading.power for reading in readings),
    )  # fmt: skip


#: Programs that listen on behalf of a server elsewhere: on another machine, or in a container.
_FORWARDERS: Final = ("docker-proxy", "kubectl", "rootlessport", "slirp4netns", "ssh", "sshd")


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """The listening processes, ancestors of all others of the server; ``unseen`` is the reason if there are none."""

    pids: tuple[int, ...] = ()
    unseen: str = ""


def find_server(address: Address) -> ServerProcesses:
    """Return the server's processes, if they are on this machine and visible."""
    if not _is_local(address.host):
        return ServerProcesses(unseen=f"the server runs on another machine, {address.host}")
    try:
        oldest = [_oldest(process, address.port) for process in listening_processes(address.port)]
        names = {process.pid: process.name() for process in oldest}
    except (psutil.Error, OSError):
        names = {}
    if not names:
        return ServerProcesses(
            unseen=f"the processes that listen on port {address.port} are not visible (they belong to another"
            " user or a container), so the interference is unknown"
        )
    for name in names.values():
        if name in _FORWARDERS:
            return ServerProcesses(
                unseen=f"port {address.port} is forwarded by {name}: the server's processes are not visible, so the"
                " interference is unknown"
            )
    return ServerProcesses(tuple(sorted(names)))


def _oldest(process: Any, port: int) -> Any:
    """Return the first process that has the socket, from which the others inherited it."""
    parent = process.parent()
    while parent is not None:
        connections = getattr(parent, "net_connections", None) or parent.connections  # before psutil 6
        try:
            shared = any(listens(connection, port) for connection in connections("tcp"))
        except psutil.AccessDenied:
            break
        if not shared:
            break
        process, parent = parent, parent.parent()
    return process


def _is_local(host: str) -> bool:
    """Return whether a host is an address of this machine."""
    own = {address.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for address in interface}
    try:
        resolved: list[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {entry[4][0].partition("%")[0] for entry in resolved}
    return any(ip_address(address).is_loopback or address in own for address in addresses)
