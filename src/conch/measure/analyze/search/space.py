"""The search space: the values to try of each model's configuration, and the resulting candidates.

Pure. A choice has one index per dimension; :meth:`SearchSpace.candidate` converts it into a candidate. Choices that a
server treats the same (:func:`conch.measure.analyze.search.space.as_served`) give the same candidate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import inf, prod
from typing import Any, Final

from google.protobuf import json_format

from conch.backends.table import BACKENDS, Backend, backend_of
from conch.config.schema import ModelConfig
from conch.core.errors import invalid
from conch.machine.facts import shared_pool_threads
from conch.measure.analyze.results import DEFAULT, Candidate


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model.

    ``config`` is its completed configuration, as the server shows it for the unchanged repository. ``variants`` are the
    usable variants in its ``conch.json``, and ``auto`` the default one. ``threads`` is the number of cores that its
    server may use. Each request has ``request_batch`` inferences, and at most ``most_waiting`` inferences are in
    flight.
    """

    name: str
    config: Mapping[str, Any]
    variants: Sequence[str] = ()
    auto: str = ""
    threads: int = 1
    request_batch: int = 1
    most_waiting: float = inf


# Configurations are JSON as in ``GET /v2/models/M/config``.


#: The path of a value: field names, map keys, and list indexes.
Path = tuple[str | int, ...]


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides to a configuration: messages are merged, lists and values replaced, None removes a field."""
    result = deepcopy(dict(config))
    for name, value in overrides.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            below = result.get(name)
            result[name] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[name] = deepcopy(value)
    return result


def message(config: Mapping[str, Any]) -> ModelConfig:
    """Convert a configuration to the message that ``conch.config`` checks; raises INVALID_ARG if it is invalid."""
    try:
        return json_format.ParseDict(dict(config), ModelConfig())
    except json_format.ParseError as error:
        raise invalid(f"not a model configuration: {error}") from None


def at(config: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none."""
    for step in path:
        try:
            config = config[step]
        except (KeyError, IndexError, TypeError):
            return None
    return config


def put(config: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at a path in place; missing messages, maps and list elements on the path are created."""
    holder: Any = config
    for step, below in pairwise(path):
        empty: Any = [] if isinstance(below, int) else {}
        if isinstance(step, int):
            while len(holder) <= step:
                holder.append({})
        elif not isinstance(holder.get(step), list | dict):
            holder[step] = empty
        holder = holder[step]
    if isinstance(path[-1], int):
        while len(holder) <= path[-1]:
            holder.append({})
    holder[path[-1]] = value


def difference(config: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that turn ``config`` into ``target``."""
    changes: dict[str, Any] = {name: None for name in config if name not in target}
    for name, value in target.items():
        before = config.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if below := difference(before, value):
                changes[name] = below
        elif name not in config or before != value:
            changes[name] = deepcopy(value)
    return changes


def key(overrides: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal overrides only."""
    return json.dumps(overrides, sort_keys=True)


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
            configs = self._based()
            for dimension, index in zip(self.dimensions, choice, strict=True):
                _set(configs[dimension.model], dimension.path, dimension.values[index])
            overrides = {}
            for model, before in self._based().items():
                batched = "dynamic_batching" in self.configs[model]
                config = configs[model]
                _settle(config, batched=batched)
                _keep_groups(config, before)
                _settle(before, batched=batched)
                changes = difference(self.configs[model], config) if config != before else self.base.get(model, {})
                if changes:
                    overrides[model] = changes
            self._known[choice] = self._key(configs), overrides
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
    max_batch_size = int(config.get("max_batch_size", 0))
    batching.pop("preferred_batch_size", None)
    if sizes := sorted({int(max_batch_size * share) for share in shares} - {0, 1}):
        batching["preferred_batch_size"] = sizes


def _keep_groups(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Restore the original instance groups if the new ones are equal to them: servers name and complete groups."""
    groups, before = config.get("instance_group") or [], own.get("instance_group") or []
    if (
        groups
        and len(groups) == len(before)
        and all(
            all(old.get(name) == value for name, value in group.items())
            for group, old in zip(groups, before, strict=True)
        )
    ):
        config["instance_group"] = before


def _settle(config: dict[str, Any], *, batched: bool) -> None:
    """Remove fields without effect, so that equivalent configurations are equal.

    Without batches, ``dynamic_batching`` stays as it was (``batched``), because servers may require it. The largest
    batch is the default preferred size.
    """
    max_batch_size = int(config.get("max_batch_size", 0))
    if max_batch_size <= 1 and batched:
        config.setdefault("dynamic_batching", {})
    batching = config.get("dynamic_batching")
    if batching is None:
        return
    preferred = [
        size for size in batching.get("preferred_batch_size", ()) if size <= max_batch_size and max_batch_size > 1
    ]
    if preferred and preferred != [max_batch_size]:
        batching["preferred_batch_size"] = preferred
    else:
        batching.pop("preferred_batch_size", None)
    if max_batch_size <= 1 or not int(batching.get("max_queue_delay_microseconds", 0)):
        batching.pop("max_queue_delay_microseconds", None)
    if max_batch_size <= 1 and not batched and not batching:
        config.pop("dynamic_batching")


# Follows ``conch.server.execution.scheduling`` (the scheduler of a model and the fields that it reads) and the
# backends' use of threads. A Python model receives its configuration and may read any field, so only its scheduler
# fields are compared.


_PYTHON: Final = "python"
_DELAY: Final = "max_queue_delay_microseconds"
_PREFERRED: Final = "preferred_batch_size"
#: The thread count of ONNX Runtime in a configuration, and the one in force as conch shows it.
_THREADS: Final = "intra_op_thread_count"
_RUNS_WITH: Final = "conch.machine.threads"


def as_served(config: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """Return the configuration without fields that have no effect, and with effective values for the others.

    Configurations that become equal give the same responses with the same performance, under the requests that
    ``facts`` describe.
    """
    served = deepcopy(dict(config))
    served.pop("instance_group", None)
    groups = [dict(group) for group in config.get("instance_group") or ()]
    backend = _backend(config)
    if backend is not None and backend.generates:
        # A single engine per device forms its own batches.
        served["instance_group"] = [group | {"count": 1} for group in groups]
        served["max_batch_size"] = min(1, _number(config, "max_batch_size"))
        _leave_out(served, _DELAY, _PREFERRED)
        return served
    if groups:
        served["instance_group"] = groups
    if not config.get("sequence_batching"):
        _batch(served, facts, backend)
    if _threads(config, facts) is not None and _threads(facts.config, facts) == _text(facts.config, _RUNS_WITH):
        served["parameters"] = {**(served.get("parameters") or {}), _THREADS: {"string_value": _threads(config, facts)}}
    return served


def _backend(config: Mapping[str, Any]) -> Backend | None:
    """Return the backend that runs the model; None if it is not one of conch's own."""
    name = str(config.get("backend", ""))
    parameters = {key: _text(config, key) for key in config.get("parameters") or {}}
    return backend_of(name, parameters) if name in BACKENDS and not config.get("runtime") else None


def _batch(served: dict[str, Any], facts: ModelFacts, backend: Backend | None) -> None:
    """Replace the batching fields by their effective values, in place."""
    batching, largest = served.get("dynamic_batching"), _number(served, "max_batch_size")
    delay, preferred = _number(batching or {}, _DELAY), sorted(set((batching or {}).get(_PREFERRED) or ()))
    if backend is not None and backend.prepares:
        # The batcher by length only checks whether a delayed batch is large enough. It counts sequences; a request may
        # have several.
        preferred = preferred[-1:] if delay else []
        reached: float = largest
    elif preferred not in ([], [largest]):
        reached = largest
    elif delay:
        # A delayed batch waits until it is full; if it never fills up, it waits for the whole delay.
        reached = min(largest, facts.most_waiting + facts.request_batch)
    else:
        reached = min(largest // facts.request_batch * facts.request_batch, facts.most_waiting)
    alone = batching is None or min(largest, reached) <= facts.request_batch
    _leave_out(served, _DELAY, _PREFERRED)
    if not alone:
        kept = {_DELAY: delay or None, _PREFERRED: preferred if preferred != [largest] else None}
        served["dynamic_batching"] = {**served.get("dynamic_batching", {}), **{k: v for k, v in kept.items() if v}}
    if largest and not (backend is None or backend is BACKENDS[_PYTHON]):
        served["max_batch_size"] = facts.request_batch if alone else reached


def _leave_out(served: dict[str, Any], *names: str) -> None:
    """Remove fields of ``dynamic_batching``, and the message itself if it becomes empty."""
    batching = served.pop("dynamic_batching", None) or {}
    if rest := {name: value for name, value in batching.items() if name not in names}:
        served["dynamic_batching"] = rest


def _threads(config: Mapping[str, Any], facts: ModelFacts) -> str | None:
    """Return the size of the thread pool that ONNX Runtime instances share on the server's cores; None if unknown."""
    groups = config.get("instance_group") or [{}]
    text = _text(config, _THREADS) or "0"
    if config.get("backend") != "onnxruntime" or len(groups) != 1 or groups[0].get("kind") != "KIND_CPU":
        return None
    if not (text.isascii() and text.isdigit()):
        return None
    return str(int(text) or shared_pool_threads(facts.threads, _number(groups[0], "count")))


def _text(config: Mapping[str, Any], parameter: str) -> str:
    value = (config.get("parameters") or {}).get(parameter)
    return str(value.get("string_value", "")) if isinstance(value, Mapping) else ""


def _number(of: Mapping[str, Any], name: str) -> int:
    return int(of.get(name) or 0)
