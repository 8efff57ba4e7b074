"""The batching and instances of a model's configuration, from ``GET /v2/models/M/config``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.measure.analyze.results import CandidateResult

#: Fields with their own columns, which are left out of the other changes.
_SHOWN: Final = ("instance_group", "max_batch_size", "dynamic_batching", "name")


@dataclass(frozen=True, slots=True)
class ConfigTraits:
    """Batching and instances of a model: ``instances`` by kind (``GPU``, ``CPU``), queue ``delay`` (µs)."""

    max_batch_size: int
    batching: bool
    preferred: tuple[int, ...]
    delay: int
    instances: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, gpus: bool = False) -> ConfigTraits:
        """Return the traits of a JSON configuration; ``gpus`` is whether groups without a kind run on GPUs."""
        batching = config.get("dynamic_batching")
        instances: Counter[str] = Counter()
        for group in config.get("instance_group") or [{}]:
            kind = str(group.get("kind", "KIND_AUTO")).removeprefix("KIND_")
            devices = len(group.get("gpus") or ()) if kind in ("GPU", "AUTO") else 0
            instances["GPU" if kind == "AUTO" and gpus else "CPU" if kind == "AUTO" else kind] += (
                int(group.get("count", 0)) or 1
            ) * max(1, devices)
        dynamic = batching or {}
        return cls(
            int(config.get("max_batch_size", 0)),
            batching is not None,
            tuple(int(size) for size in dynamic.get("preferred_batch_size") or ()),
            int(dynamic.get("max_queue_delay_microseconds", 0)),
            dict(instances),
        )

    @property
    def instance_text(self) -> str:
        """The instances in model analyzer's format: ``3:GPU``."""
        return " + ".join(f"{count}:{kind}" for kind, count in self.instances.items())

    @property
    def total(self) -> int:
        """The number of instances of all kinds."""
        return sum(self.instances.values())


def traits_of(result: CandidateResult, model: str, *, gpus: bool) -> ConfigTraits:
    """Return the traits of the configuration in force, or else of the candidate's overrides."""
    config = result.configs.get(model) or result.candidate.overrides.get(model) or {}
    return ConfigTraits.of(config, gpus=gpus)


def other_changes(result: CandidateResult, model: str) -> str:
    """Return the candidate's other changes, such as ``precision=int8, threads=2``; empty if there are none."""
    overrides = result.candidate.overrides.get(model, {})
    rest = {name: value for name, value in overrides.items() if name not in _SHOWN}
    return ", ".join(f"{name}={value}" for name, value in _flat("", rest))


def _flat(prefix: str, of: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in of.items():
        # In {"threads": {"string_value": "2"}}, the names around the value are redundant.
        whole = prefix if name == "string_value" else name if prefix in ("", "parameters") else f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flat(whole, value)
        else:
            yield whole, value
