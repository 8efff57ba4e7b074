"""Prometheus text format, version 0.0.4.

Implemented here because ``prometheus_client`` always appends ``_total`` to counter names, which Triton does not. Used
by the registry and by collectors of families; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf, isnan
from typing import NamedTuple


class Metric(NamedTuple):
    """A family: its name, its type (``counter``, ``gauge``, ``histogram`` or ``summary``) and its help text."""

    name: str
    type: str
    help: str


class MetricSample(NamedTuple):
    """One number of a family; ``labels`` are formatted, ``suffix`` (``_sum`` …) is appended to the name."""

    labels: str
    value: float
    suffix: str = ""


#: A family and its current samples, as collectors yield them.
Family = tuple[Metric, Iterable[MetricSample]]


def page_lines(families: Iterable[Family]) -> Iterator[str]:
    """Yield the page with all families, including those without samples; each string ends with a newline."""
    for metric, samples in families:
        yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n"
        for labels, value, suffix in samples:
            yield f"{metric.name}{suffix}{labels} {number(value)}\n"


def page(families: Iterable[Family]) -> bytes:
    """Return the whole page."""
    return "".join(page_lines(families)).encode()


def label_text(labels: Mapping[str, str]) -> str:
    """Format the labels in order, in braces; empty without labels."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def number(value: float) -> str:
    """Format a number: integers without a fraction, others with the fewest digits that preserve the value."""
    if isinstance(value, int):
        return str(value)
    if isnan(value):
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() else repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
