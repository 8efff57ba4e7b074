"""The search space: the values to try of each model's configuration, and the resulting candidates.

Pure. A choice has one index per dimension; :meth:`SearchSpace.candidate` converts it into a candidate. Choices that a
server treats the same (:func:`conch.measure.analyze.search.equality.as_served`) give the same candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Final

from conch.measure.analyze.results import DEFAULT, Candidate
from conch.measure.analyze.search.equality import as_served
from conch.measure.analyze.search.model_facts import ModelFacts
from conch.measure.analyze.search.overrides import Path, difference, key, merged, put

Choice = tuple[int, ...]

#: The choices of a larger space are not compared with each other.
_COMPARED: Final = 10_000

#: The value of the dimension ``delay`` for no dynamic batching.
OFF: Final = "off"
INSTANCES: Final[Path] = ("instance_group", 0, "count")
BATCH: Final[Path] = ("max_batch_size",)
DELAY: Final[Path] = ("dynamic_batching", "max_queue_delay_microseconds")
PREFERRED: Final[Path] = ("dynamic_batching", "preferred_batch_size")


class Shares(tuple[float, ...]):
    """Preferred batch sizes as fractions of the largest batch."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A searched field of a model's configuration: its ``path``, and the ``values`` to try in order.

    The value None leaves the field unchanged. The values of an ``ordered`` dimension (numbers) have neighbours, others
    (engines) have none. ``start`` is the index of the value nearest to the repository's own.
    """

    model: str
    path: Path
    values: tuple[Any, ...]
    start: int = 0
    ordered: bool = True

    @property
    def name(self) -> str:
        """The field as users write it."""
        return ".".join(str(step) for step in self.path if step != 0 and step != "string_value")


@dataclass(frozen=True)
class SearchSpace:
    """The dimensions, and facts about the models by name, which determine the choices that a server treats the same.

    ``name``, made of the measured models, is the prefix of the candidates' names. ``base`` are overrides that all
    candidates have, including the default.
    """

    name: str
    dimensions: tuple[Dimension, ...]
    facts: Mapping[str, ModelFacts]
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _candidates: dict[str, Candidate] = field(default_factory=dict, compare=False)
    _known: dict[Choice, tuple[str, dict[str, Any]]] = field(default_factory=dict, compare=False)

    @cached_property
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """The repository's configurations, completed, by model."""
        return {name: model.config for name, model in self.facts.items()}

    @property
    def default(self) -> Candidate:
        """The repository's own configuration."""
        return Candidate(f"{self.name}{DEFAULT}", self.base)

    @property
    def start(self) -> Choice:
        """The choice nearest to the default."""
        return tuple(dimension.start for dimension in self.dimensions)

    @property
    def size(self) -> int:
        """The number of choices."""
        return prod(len(dimension.values) for dimension in self.dimensions)

    def choices(self) -> Iterator[Choice]:
        """Iterate over all choices; the last dimension varies fastest."""
        return product(*(range(len(dimension.values)) for dimension in self.dimensions))

    @cached_property
    def distinct(self) -> int:
        """The number of choices that a server treats differently; ``size`` if there are too many to compare."""
        return len({*map(self.key_of, self.choices())}) if self.size <= _COMPARED else self.size

    def candidate(self, choice: Choice) -> Candidate:
        """Return the candidate of a choice.

        Names are numbered in the order of the first calls. Choices that a server treats the same share the candidate of
        the first of them.
        """
        key, overrides = self._described(choice)
        if key == self._default_key:
            return self.default
        name = f"{self.name}_config_{len(self._candidates)}"
        return self._candidates.setdefault(key, Candidate(name, overrides))

    def named(self, choice: Choice) -> str:
        """Return the name of the candidate of a choice; empty if it has none yet."""
        key = self.key_of(choice)
        known = self.default if key == self._default_key else self._candidates.get(key)
        return known.name if known is not None else ""

    def key_of(self, choice: Choice) -> str:
        """Return a text that choices with the same candidate share, without naming a candidate."""
        return self._described(choice)[0]

    def _described(self, choice: Choice) -> tuple[str, dict[str, Any]]:
        """Return the key of a choice, and the overrides of its candidate by model."""
        if choice not in self._known:
            wanted = self._based()
            for dimension, index in zip(self.dimensions, choice, strict=True):
                _set(wanted[dimension.model], dimension.path, dimension.values[index])
            overrides = {}
            for model, before in self._based().items():
                batched = "dynamic_batching" in self.configs[model]
                config = wanted[model]
                _settle(config, batched=batched)
                _keep_groups(config, before)
                _settle(before, batched=batched)
                changes = difference(self.configs[model], config) if config != before else self.base.get(model, {})
                if changes:
                    overrides[model] = changes
            self._known[choice] = self._key(wanted), overrides
        return self._known[choice]

    def _based(self) -> dict[str, dict[str, Any]]:
        """Return the repository's configurations with the base overrides, by model."""
        return {model: merged(config, self.base.get(model, {})) for model, config in self.configs.items()}

    @cached_property
    def _default_key(self) -> str:
        return self._key(self._based())

    def _key(self, configs: Mapping[str, Mapping[str, Any]]) -> str:
        return key({model: as_served(config, self.facts[model]) for model, config in configs.items()})

    def parallelism(self, candidate: Candidate) -> int:
        """Return the number of concurrent inferences of a candidate: instances x batch size, of the widest model."""
        widths = []
        for model, config in self.configs.items():
            changes = candidate.overrides.get(model, {})
            groups = changes.get("instance_group", config.get("instance_group")) or [{}]
            batch = changes.get("max_batch_size", config.get("max_batch_size", 0))
            batching = changes.get("dynamic_batching", config.get("dynamic_batching"))
            instances = sum(_devices(group) * int(group.get("count", 1)) for group in groups)
            widths.append(instances * (int(batch) if batching is not None and batch else 1))
        return max(widths, default=1)


def _devices(group: Mapping[str, Any]) -> int:
    return max(1, len(group.get("gpus") or ()))


def _set(config: dict[str, Any], path: Path, value: Any) -> None:
    if value is None:
        return
    if path == DELAY and value == OFF:
        config.pop("dynamic_batching", None)
    elif isinstance(value, Shares):
        _prefer(config, value)
    else:
        put(config, path, value)


def _prefer(config: dict[str, Any], shares: Shares) -> None:
    """Set the preferred batch sizes."""
    batching = config.get("dynamic_batching")
    if batching is None:
        return
    most = int(config.get("max_batch_size", 0))
    batching.pop("preferred_batch_size", None)
    if sizes := sorted({int(most * share) for share in shares} - {0, 1}):
        batching["preferred_batch_size"] = sizes


def _keep_groups(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Restore the original instance groups if the new ones are equal to them: servers name and complete groups."""
    wanted, before = config.get("instance_group") or [], own.get("instance_group") or []
    if (
        wanted
        and len(wanted) == len(before)
        and all(
            all(old.get(name) == value for name, value in group.items())
            for group, old in zip(wanted, before, strict=True)
        )
    ):
        config["instance_group"] = before


def _settle(config: dict[str, Any], *, batched: bool) -> None:
    """Remove fields without effect, so that equivalent configurations are equal.

    Without batches, ``dynamic_batching`` stays as it was (``batched``), because servers may require it. The largest
    batch is the default preferred size.
    """
    most = int(config.get("max_batch_size", 0))
    if most <= 1 and batched:
        config.setdefault("dynamic_batching", {})
    batching = config.get("dynamic_batching")
    if batching is None:
        return
    preferred = [size for size in batching.get("preferred_batch_size", ()) if size <= most and most > 1]
    if preferred and preferred != [most]:
        batching["preferred_batch_size"] = preferred
    else:
        batching.pop("preferred_batch_size", None)
    if most <= 1 or not int(batching.get("max_queue_delay_microseconds", 0)):
        batching.pop("max_queue_delay_microseconds", None)
    if most <= 1 and not batched and not batching:
        config.pop("dynamic_batching")
