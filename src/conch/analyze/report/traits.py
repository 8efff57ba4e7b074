"""What a model's configuration says about batches and instances, read from ``GET /v2/models/M/config``.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.analyze.results import CandidateResult

#: What has a column of its own, and is not among the other changes.
_SHOWN: Final = ("instance_group", "max_batch_size", "dynamic_batching", "name")


@dataclass(frozen=True, slots=True)
class ConfigTraits:
    """``instances`` by kind (``GPU``, ``CPU``); ``delay`` is how long the queue may hold a request (µs)."""

    max_batch_size: int
    batching: bool
    preferred: tuple[int, ...]
    delay: int
    instances: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, gpus: bool = False) -> ConfigTraits:
        """Of a configuration in JSON; ``gpus`` says what groups are that leave their kind to the server."""
        batching = config.get("dynamic_batching")
        found: Counter[str] = Counter()
        for group in config.get("instance_group") or [{}]:
            kind = str(group.get("kind", "KIND_AUTO")).removeprefix("KIND_")
            devices = len(group.get("gpus") or ()) if kind in ("GPU", "AUTO") else 0
            found["GPU" if kind == "AUTO" and gpus else "CPU" if kind == "AUTO" else kind] += (
                int(group.get("count", 0)) or 1
            ) * max(1, devices)
        given = batching or {}
        return cls(
            int(config.get("max_batch_size", 0)),
            batching is not None,
            tuple(int(size) for size in given.get("preferred_batch_size") or ()),
            int(given.get("max_queue_delay_microseconds", 0)),
            dict(found),
        )

    @property
    def instance_text(self) -> str:
        """``3:GPU``, as model analyzer writes it."""
        return " + ".join(f"{count}:{kind}" for kind, count in self.instances.items())

    @property
    def total(self) -> int:
        """Instances of all kinds."""
        return sum(self.instances.values())


def traits_of(result: CandidateResult, model: str, *, gpus: bool) -> ConfigTraits:
    """Of the configuration in force, else of what the candidate says."""
    config = result.configs.get(model) or result.candidate.overrides.get(model) or {}
    return ConfigTraits.of(config, gpus=gpus)


def other_changes(result: CandidateResult, model: str) -> str:
    """What else the candidate changes, as ``precision=int8, threads=2``; empty for nothing."""
    overrides = result.candidate.overrides.get(model, {})
    rest = {name: value for name, value in overrides.items() if name not in _SHOWN}
    return ", ".join(f"{name}={value}" for name, value in _flat("", rest))


def _flat(prefix: str, of: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in of.items():
        # Parameters are {"threads": {"string_value": "2"}}: the names around the value say nothing.
        whole = prefix if name == "string_value" else name if prefix in ("", "parameters") else f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flat(whole, value)
        else:
            yield whole, value
