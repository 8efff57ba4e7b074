"""Values of trace settings, as clients read, change and clear them.

Each field of a model's setting falls back to the global setting, and that to the options at startup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from conch.core.errors import invalid

TraceMode = Literal["triton", "opentelemetry"]

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
#: Options of span batches: name, OpenTelemetry's environment variable, and default (ms or number of spans).
BATCHES: Final = (
    ("bsp_max_queue_size", "OTEL_BSP_MAX_QUEUE_SIZE", 2048),
    ("bsp_schedule_delay", "OTEL_BSP_SCHEDULE_DELAY", 5000),
    ("bsp_max_export_batch_size", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
)


@dataclass(frozen=True)
class TraceValues:
    """One setting. ``level`` contains names of :data:`LEVELS`, empty for OFF. A ``count`` of -1 means unlimited."""

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""
    mode: TraceMode = "triton"
    #: Options of the mode ``opentelemetry``, in the given order.
    options: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """The reason why these values cannot trace any request; empty if they can."""
        if not self.level:
            return "tracing is disabled"
        if not self.rate:
            return "sample rate must be non-zero"
        if self.mode == "triton" and not self.file:
            return "trace file name is not given"
        return ""

    def shown(self) -> dict[str, Any]:
        """Return the values as clients see them, in Triton's order."""
        common = {
            "trace_level": list(self.level) or ["OFF"],
            "trace_rate": str(self.rate),
            "trace_count": str(self.count),
        }
        if self.mode == "triton":
            own = {"log_frequency": str(self.log_frequency), "trace_file": self.file}
            return {**common, **own, "trace_mode": self.mode}
        resource = ",".join(f"{name}={value}" for name, value in self.resource.items())
        return {**common, "trace_mode": self.mode, **self.options, **({"resource": resource} if resource else {})}


#: Changes by a client; None clears a field, which then falls back.
TraceChanges = Mapping[str, Any]
_CHANGEABLE: Final = ("level", "rate", "count", "log_frequency")


@dataclass(frozen=True)
class OwnValues:
    """The fields set for a model, or globally since startup; the others fall back."""

    level: tuple[str, ...] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None

    def changed(self, changes: TraceChanges) -> OwnValues:
        return replace(self, **changes)

    def over(self, fallback: TraceValues) -> TraceValues:
        """Return these values; unset fields are taken from ``fallback``.

        Raises INVALID_ARG if the values enable tracing but cannot trace.
        """
        own = {name: value for name in _CHANGEABLE if (value := getattr(self, name)) is not None}
        values = replace(fallback, **own)
        if values.level and values.problem:
            raise invalid(f"Attempting to set invalid trace setting :{values.problem}")
        return values

    @property
    def empty(self) -> bool:
        return all(getattr(self, declared.name) is None for declared in fields(self))


def values_of(settings: Iterable[tuple[str, str, str]], environment: Mapping[str, str]) -> TraceValues:
    """Return the values of ``--trace-config``, given as scopes, keys and values.

    ``environment`` has OpenTelemetry's own variables, which the options override. Raises INVALID_ARG for an invalid
    option of span batches.
    """
    values = TraceValues()
    options: dict[str, str] = {}
    resource: dict[str, str] = {}
    for scope, key, value in settings:
        match scope, key:
            case "", "mode":
                values = replace(values, mode="opentelemetry" if value == "opentelemetry" else "triton")
            case "", "level":
                values = replace(values, level=_with_level(values.level, value))
            case "", "rate":
                values = replace(values, rate=int(value))
            case "", "count":
                values = replace(values, count=int(value))
            case "triton", "file":
                values = replace(values, file=value)
            case "triton", "log-frequency":
                values = replace(values, log_frequency=int(value))
            case "opentelemetry", "resource":
                name, _, text = value.partition("=")
                resource[name] = text
            case "opentelemetry", _:
                options[key] = value
    if values.mode == "opentelemetry":
        for key, variable, default in BATCHES:
            source = f"--trace-config opentelemetry,{key}" if key in options else variable
            text = options.setdefault(key, environment.get(variable) or str(default))
            if not (text.isascii() and text.isdecimal() and int(text)):
                raise invalid(f"{source} must be an integer above 0; got '{text}'")
    return replace(values, options=options, resource=resource)


def _with_level(levels: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the levels with ``name`` added; OFF clears them."""
    return () if name == "OFF" else tuple(level for level in LEVELS if level == name or level in levels)
