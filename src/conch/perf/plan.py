"""What is measured, and how long: the meaning of the command line.

Pure.  The flags are perf_analyzer's, with their meanings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

from conch.errors import invalid
from conch.perf.figures.generation import Objective
from conch.perf.figures.latency import PERCENTILES
from conch.perf.inputs.data import DataOptions
from conch.perf.senders.channels.connecting import Address

Protocol = Literal["http", "grpc", "openai"]
#: As many connections as one machine has ports for, nearly.
MOST_CALLERS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of load to measure, from ``first`` to ``last`` (0: without end) in steps of ``step``."""

    first: float
    last: float
    step: float

    def __iter__(self) -> Iterator[float]:
        """All levels, ``last`` as well if steps lead there."""
        if not self.last:
            return (self.first + number * self.step for number in count())
        many = int((self.last - self.first) / self.step + 1e-9) + 1
        return (self.first + number * self.step for number in range(many))

    @classmethod
    def parse(cls, flag: str, text: str, *, callers: bool = False) -> Levels:
        """``start``, ``start:end`` or ``start:end:step``; raises INVALID_ARG, naming ``flag``, for anything else.

        Numbers of ``callers`` are whole.
        """
        parts = text.split(":")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        endless = len(numbers) > 1 and numbers[1] == 0
        positive = [number for place, number in enumerate(numbers) if not (endless and place == 1)]
        if not 1 <= len(numbers) <= 3 or any(not 0 < number < 1e9 for number in positive):
            raise invalid(
                f"{flag} {text}: expected start, start:end or start:end:step, all above 0 (an end of 0: none)"
            )
        if callers and any(number % 1 or number > MOST_CALLERS for number in numbers):
            raise invalid(f"{flag} {text}: callers are whole numbers, {MOST_CALLERS:,} at most")
        first = numbers[0]
        last = numbers[1] if len(numbers) > 1 else first
        if last < first and not endless:
            raise invalid(f"{flag} {text}: the end is below the start")
        return cls(first, last, numbers[2] if len(numbers) > 2 else 1.0)


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """``length`` is that of sequences, give or take ``variation`` of it (0: as long as the data, or 20).

    ``count`` of them run at a time where rates are given.  Ids begin at ``first`` and end before ``last`` (0: no end).
    """

    length: int = 0
    variation: float = 0.2
    count: int = 4
    first: int = 1
    last: int = 0

    @classmethod
    def ids(cls, text: str) -> tuple[int, int]:
        """``start`` or ``start:end``; raises INVALID_ARG for anything else."""
        first, colon, last = text.partition(":")
        if not first.isdecimal() or (colon and not last.isdecimal()) or not 0 < int(first) < 1 << 63:
            raise invalid(f"--sequence-id-range {text}: expected start or start:end, from 1 on")
        if colon and int(last) <= int(first):
            raise invalid(f"--sequence-id-range {text}: there is no id from {first} to before {last}")
        return int(first), int(last or 0)


@dataclass(frozen=True, slots=True)
class PerfPlan:
    """``rates`` (requests a second) is given for an open load, otherwise ``concurrency`` counts; ``intervals`` (ns) are
    the distances of requests where they are given one by one.

    ``interval`` is the length of a window (s), ``share`` how far windows that agree may be from their mean,
    ``percentile`` the latency that has to agree (0 for the average), ``trials`` how many windows there are at most.
    ``timeout`` ends requests (s); ``processes`` send (0: as many as are worth it).  With ``requests`` a window lasts
    until so many have ended.  With ``total_requests`` so many are sent, and that is the only window.  ``warm_up`` (s)
    or ``warm_up_requests`` come first and do not count.

    Levels end where latency is above ``latency_limit`` (s, 0: never); ``binary_search`` looks for the highest one that
    keeps it.

    Each level is measured ``runs`` times.  ``sender_limit`` measures what the senders can do; ``keep_records`` keeps
    every request in the result.  ``metrics_url`` is where the server's metrics are read every ``metrics_interval``
    seconds, if they are.

    ``endpoint`` is ``infer``, ``generate`` or ``generate_stream`` of the model, or a path of OpenAI's API;
    ``parameters`` go with requests.  ``streaming`` asks OpenAI's API for a stream, and uses ``ModelStreamInfer`` of
    gRPC; ``encoding`` compresses its messages.  ``sequences`` is given for models with state.  ``shared_memory`` puts
    tensors there, with ``output_size`` bytes for outputs of unknown size.  ``composing`` are models that the model
    calls, with their versions.
    """

    model: str
    address: Address
    protocol: Protocol = "http"
    version: str = ""
    batch_size: int = 1
    concurrency: Levels = Levels(1, 1, 1)
    rates: Levels | None = None
    distribution: Literal["constant", "poisson", "given"] = "constant"
    max_calls: int = 256
    interval: float = 5.0
    share: float = 0.1
    percentile: float = 0.0
    trials: int = 10
    warm_up: float = 1.0
    warm_up_requests: int = 0
    requests: int = 0
    total_requests: int = 0
    intervals: Sequence[int] = ()
    latency_limit: float = 0.0
    binary_search: bool = False
    binary: bool = True
    binary_output: bool = True
    timeout: float = 600.0
    processes: int = 0
    endpoint: str = "infer"
    streaming: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    data: DataOptions = field(default_factory=DataOptions)
    runs: int = 1
    sender_limit: bool = False
    keep_records: bool = False
    metrics_url: str = ""
    metrics_interval: float = 1.0
    encoding: str = ""
    sequences: SequenceOptions | None = None
    shared_memory: bool = False
    output_size: int = 100 * 1024
    composing: Mapping[str, str] = field(default_factory=dict)
    further_percentiles: Sequence[float] = ()

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to show: the usual ones, the one that has to agree, and further ones."""
        agreeing = [self.percentile] if self.percentile else []
        return tuple(sorted({*PERCENTILES, *agreeing, *self.further_percentiles}))

    @property
    def callers(self) -> int:
        """How many requests may run at a time, at most."""
        if self.rates is None:
            return int(self.concurrency.last or self.concurrency.first)
        return self.max_calls if self.sequences is None else self.sequences.count


def read_address(url: str, protocol: Protocol) -> tuple[Address, str]:
    """The server and the path before all paths in ``host``, ``host:port`` or ``http://host:port/path``.

    The port is Triton's where none is given.  Raises INVALID_ARG for anything else.
    """
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme not in ("http", "https", "grpc", "grpcs"):
        raise invalid(f"-u {url}: unknown scheme '{scheme}'")
    place, slash, path = rest.partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, ""
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise invalid(f"-u {url}: expected host:port")
    encrypted = scheme in ("https", "grpcs")
    number = int(port) if port else (8001 if protocol == "grpc" else 443 if encrypted else 8000)
    return Address(host.strip("[]"), number, encrypted), (slash + path).rstrip("/")
