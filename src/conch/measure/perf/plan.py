"""The options of a measurement: its subject and duration.

Pure. The options have the names and meanings of perf_analyzer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

from conch.core.errors import invalid
from conch.measure.perf.figures import PERCENTILES, Objective
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.senders.channels.connecting import Address

Protocol = Literal["http", "grpc", "openai"]
#: Nearly the number of ports, and so of connections, of one machine.
MOST_CALLERS: Final = 50_000
#: A name or an address in the authority of a URL; IPv6 addresses have brackets.
_HOST: Final = re.compile(r"\[[^\[\]@]+\]|[^:@\[\]]+")


@dataclass(frozen=True, slots=True)
class Levels:
    """Load levels from ``first`` to ``last`` (0: no end) in steps of ``step``."""

    first: float
    last: float
    step: float

    def __iter__(self) -> Iterator[float]:
        """Iterate over the levels; ``last`` is included if a step reaches it."""
        if not self.last:
            return (self.first + number * self.step for number in count())
        many = int((self.last - self.first) / self.step + 1e-9) + 1
        return (self.first + number * self.step for number in range(many))

    @classmethod
    def parse(cls, flag: str, text: str, *, callers: bool = False) -> Levels:
        """Parse ``start``, ``start:end`` or ``start:end:step``.

        Numbers of ``callers`` are whole. Raises INVALID_ARG, naming ``flag``, for other text.
        """
        parts = text.split(":")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        endless = len(numbers) > 1 and numbers[1] == 0
        positive = [number for index, number in enumerate(numbers) if not (endless and index == 1)]
        if not 1 <= len(numbers) <= 3 or any(not 0 < number < 1e9 for number in positive):
            raise invalid(
                f"{flag} {text}: expected start, start:end or start:end:step, all above 0 (an end of 0: none)"
            )
        if callers and any(number % 1 or number > MOST_CALLERS for number in numbers):
            raise invalid(f"{flag} {text}: the number of callers must be a whole number, at most {MOST_CALLERS:,}")
        first = numbers[0]
        last = numbers[1] if len(numbers) > 1 else first
        if last < first and not endless:
            raise invalid(f"{flag} {text}: the end is below the start")
        return cls(first, last, numbers[2] if len(numbers) > 2 else 1.0)


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Length, number and correlation IDs of the sequences to send.

    ``length`` is the mean number of requests in a sequence (0: that of the data, or 20 if it is generated), which
    varies by the fraction ``variation``. ``count`` sequences run at a time if the plan has request rates. Correlation
    IDs begin at ``first`` and end before ``last`` (0: no end).
    """

    length: int = 0
    variation: float = 0.2
    count: int = 4
    first: int = 1
    last: int = 0

    @classmethod
    def ids(cls, text: str) -> tuple[int, int]:
        """Parse ``start`` or ``start:end``; raises INVALID_ARG for other text."""
        first, colon, last = text.partition(":")
        if not first.isdecimal() or (colon and not last.isdecimal()) or not 0 < int(first) < 1 << 63:
            raise invalid(f"--sequence-id-range {text}: expected start or start:end, from 1 on")
        if colon and int(last) <= int(first):
            raise invalid(f"--sequence-id-range {text}: the range from {first} up to {last} has no id")
        return int(first), int(last or 0)


@dataclass(frozen=True, slots=True)
class PerfPlan:
    """The options of a measurement.

    ``rates`` (requests per second) are the levels of an open load; without them, ``concurrency`` has the levels of a
    closed one. ``intervals`` (ns) are the times between requests if the user gives each of them.

    ``interval`` is the length of a measurement window (s). Windows are stable if each is within the fraction ``share``
    of their mean; ``percentile`` is the latency percentile that must be stable (0: the average), and ``trials`` the
    largest number of windows. ``timeout`` ends requests (s). ``processes`` is the number of sending processes (0:
    chosen by the number of callers). With ``requests``, a window lasts until that many requests have completed. With
    ``total_requests``, exactly that many requests are sent, in a single window. ``warm_up`` (s) or ``warm_up_requests``
    precede the windows and do not count.

    The search ends at the first level with a latency above ``latency_limit`` (s, 0: no limit); ``binary_search``
    searches for the highest level within the limit.

    Each level is measured ``runs`` times. ``sender_limit`` measures the request rate that the senders can reach;
    ``keep_records`` keeps every request in the result. The server's metrics are read from ``metrics_url`` (empty: not
    read) every ``metrics_interval`` seconds.

    ``endpoint`` is ``infer``, ``generate`` or ``generate_stream`` of the model, or a path of the OpenAI API;
    ``parameters`` are added to requests. ``streaming`` requests a stream from the OpenAI API, and uses
    ``ModelStreamInfer`` over gRPC; ``encoding`` is the compression of gRPC messages. ``sequences`` is set for stateful
    models. ``shared_memory`` puts tensors into shared memory, with ``output_size`` bytes for each output of unknown
    size. ``composing`` are the models that the model calls, with their versions.
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
        """The percentiles to report: the default ones, the one that must be stable, and ``further_percentiles``."""
        agreeing = [self.percentile] if self.percentile else []
        return tuple(sorted({*PERCENTILES, *agreeing, *self.further_percentiles}))

    @property
    def callers(self) -> int:
        """The maximum number of concurrent requests."""
        if self.rates is None:
            return int(self.concurrency.last or self.concurrency.first)
        return self.max_calls if self.sequences is None else self.sequences.count


def read_address(url: str, protocol: Protocol) -> tuple[Address, str]:
    """Split ``host``, ``host:port`` or ``http://host:port/path`` into the server's address and the path prefix.

    The default port is Triton's. Raises INVALID_ARG for other text.
    """
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme not in ("http", "https", "grpc", "grpcs"):
        raise invalid(f"-u {url}: unknown scheme '{scheme}'")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host, port = authority, ""
    if not _HOST.fullmatch(host) or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise invalid(f"-u {url}: expected host:port, with brackets around an IPv6 address")
    encrypted = scheme in ("https", "grpcs")
    number = int(port) if port else (8001 if protocol == "grpc" else 443 if encrypted else 8000)
    return Address(host.strip("[]"), number, encrypted), (slash + path).rstrip("/")
