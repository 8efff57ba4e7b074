"""Custom metrics of models: families and series with the same name and labels are shared between workers.

A family or a series exists as long as a worker holds it. Runs on the event loop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from conch.core.errors import internal
from conch.telemetry.exposition import Family, Metric, MetricSample, label_text
from conch.telemetry.statistics import Histogram

Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
Labels = tuple[tuple[str, str], ...]

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
#: Name prefixes reserved for the server.
_RESERVED: Final = ("nv_", "conch_")


class CustomSeries:
    """A number or a histogram of a family."""

    def __init__(self, labels: Labels, bounds: Sequence[float] | None) -> None:
        self.labels = dict(labels)
        self.value = 0.0
        self.histogram = None if bounds is None else Histogram(bounds)

    def change(self, absolute: bool, amount: float, buckets: Sequence[tuple[int, int]]) -> None:
        """Set the value to ``amount`` or add it; ``buckets`` are pairs of bucket index and increment."""
        if self.histogram is not None:
            self.histogram.add(buckets, amount)
        else:
            self.value = amount if absolute else self.value + amount

    def samples(self) -> Iterator[MetricSample]:
        """Yield the samples for the metrics page."""
        if self.histogram is None:
            yield MetricSample(label_text(self.labels), self.value)
        else:
            yield from self.histogram.samples(lambda **more: label_text({**self.labels, **more}))


class CustomFamily:
    """A family, its series, and reference counts of both."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.series: dict[Labels, CustomSeries] = {}
        #: Reference counts by series; the key None is the family itself.
        self.holders: Counter[Labels | None] = Counter()

    def samples(self) -> list[MetricSample]:
        """Return the samples of all series for the metrics page."""
        return [sample for series in self.series.values() for sample in series.samples()]


class CustomMetrics:
    """All custom families. ``types`` are the types of server families that models may extend, by name."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self._families: dict[str, CustomFamily] = {}

    def holder(self) -> MetricsHolder:
        """Return an empty holder for a worker."""
        return MetricsHolder(self)

    def joined(self, families: Iterator[Family]) -> Iterator[Family]:
        """Yield the server's ``families`` with the models' samples added, then the models' own families."""
        shown = set()
        for metric, samples in families:
            shown.add(metric.name)
            more = self._families.get(metric.name)
            yield metric, samples if more is None else [*samples, *more.samples()]
        for family in list(self._families.values()):
            if family.series and family.metric.name not in shown:
                yield family.metric, family.samples()

    def hold_family(self, name: str, description: str, kind: Kind) -> CustomFamily:
        """Return the family of that name and add a reference; later descriptions of the same family are ignored."""
        if not _NAME.fullmatch(name):
            raise internal("Invalid metric name")
        if name.startswith(_RESERVED):
            raise internal(
                f"Family name '{name}' begins with '{name.partition('_')[0]}_', which is reserved for metrics of the "
                "server"
            )
        family = self._families.get(name)
        types = {self._types.get(name), family and family.metric.type} - {None}
        if types - {kind.lower()}:
            raise internal("Family name already exists with different type")
        if family is None:
            description = description.replace("\\", r"\\").replace("\n", r"\n")
            family = self._families[name] = CustomFamily(Metric(name, kind.lower(), description))
        family.holders[None] += 1
        return family

    def hold_series(self, family: CustomFamily, labels: Mapping[str, str], bounds: Sequence[float]) -> Labels:
        """Return the key in ``family.series`` of the series with these labels, and add a reference."""
        for name in labels:
            if not _LABEL.fullmatch(name) or (name == "le" and family.metric.type == "histogram"):
                raise internal("Invalid label name")
        key = tuple(sorted(labels.items()))
        if key not in family.series:
            family.series[key] = CustomSeries(key, bounds if family.metric.type == "histogram" else None)
        family.holders[key] += 1
        return key

    def release(self, family: CustomFamily, key: Labels | None) -> None:
        """Remove a reference to a family (``None``) or to one of its series."""
        family.holders[key] -= 1
        if family.holders[key] > 0:
            return
        del family.holders[key]
        if key is not None:
            del family.series[key]
        if not family.holders:
            del self._families[family.metric.name]


class MetricsHolder:
    """The families and series of one worker, by the worker's ids for them."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics = metrics
        self._families: dict[int, CustomFamily] = {}
        self._series: dict[int, tuple[int, CustomFamily, Labels]] = {}

    def add_family(self, id: int, name: str, description: str, kind: Kind) -> None:
        """Add a family. Raises INTERNAL, with Triton's texts, for an invalid name or a conflicting type."""
        self._families[id] = self._metrics.hold_family(name, description, kind)

    def add_series(self, id: int, family: int, labels: Mapping[str, str], bounds: Sequence[float]) -> tuple[float, ...]:
        """Add a series and return its bounds, those of its first holder. Raises INTERNAL for invalid labels."""
        of = self._families[family]
        key = self._metrics.hold_series(of, labels, bounds)
        self._series[id] = family, of, key
        histogram = of.series[key].histogram
        return () if histogram is None else histogram.bounds

    def value(self, id: int) -> float:
        """Return the value of a series other than a histogram."""
        _, family, key = self._series[id]
        return family.series[key].value

    def change(self, id: int, absolute: bool, amount: float, buckets: Sequence[tuple[int, int]]) -> None:
        """Change a series; a dropped series is ignored."""
        if id in self._series:
            _, family, key = self._series[id]
            family.series[key].change(absolute, amount, buckets)

    def drop_series(self, id: int) -> None:
        """Release a series."""
        if id in self._series:
            _, family, key = self._series.pop(id)
            self._metrics.release(family, key)

    def drop_family(self, id: int) -> None:
        """Release a family and all series created with it."""
        for series in [series for series, (family, _, _) in self._series.items() if family == id]:
            self.drop_series(series)
        self._metrics.release(self._families.pop(id), None)

    def close(self) -> None:
        """Release everything."""
        for id in list(self._families):
            self.drop_family(id)
