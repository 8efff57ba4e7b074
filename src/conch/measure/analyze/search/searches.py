"""The searches of an analysis: the models that are measured together, their search space and their goals.

Pure. :mod:`conch.measure.analyze.profiling.profile` reads the facts about the models, and runs a strategy for each
search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError, did_you_mean, invalid
from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.options.settings import SWEPT, AnalyzeSettings
from conch.measure.analyze.options.values import OptionProblem, wrong
from conch.measure.analyze.search.axis import axis_of
from conch.measure.analyze.search.space import (
    BATCH,
    DELAY,
    INSTANCES,
    OFF,
    PREFERRED,
    Dimension,
    ModelFacts,
    Path,
    SearchSpace,
    Shares,
    at,
    message,
    put,
)

# Automatic dimensions. Combinations that a model does not support are skipped: batches if ``max_batch_size`` is 0,
# dynamic batching of sequences, and batching of decoupled models.


#: Queue delays (µs): no batching, no delay, and about the compute time of small, medium and large models.
DELAYS: Final = (OFF, 0, 100, 500, 2000)
#: Preferred batch sizes, as fractions of the largest batch.
PREFERENCES: Final = (Shares(), Shares((1.0,)), Shares((0.5, 1.0)))

#: The parameter for the number of cores that the instances share, by backend.
_THREADS: Final[Mapping[str, str]] = {
    "huggingface": "threads",
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
}
_BY_DEFAULT: Final[Mapping[str, tuple[str, ...]]] = {"brute": ("instances", "batch", "variant")}


def automatic_dimensions(settings: AnalyzeSettings, facts: ModelFacts) -> list[Dimension]:
    """Return the automatic dimensions of a model; none for an ensemble, which computes nothing itself."""
    if facts.config.get("ensemble_scheduling") or facts.config.get("platform") == "ensemble":
        return []
    if settings.run_config_search_disable or settings.reload_model_disable:
        return []
    chosen = settings.sweep or _BY_DEFAULT.get(settings.run_config_search_mode, SWEPT)
    dimensions = [
        dimension
        for dimension in _automatic(settings, facts)
        if _kind(dimension) in chosen and len(dimension.values) > 1
    ]
    if (
        "delay" not in chosen
        and any(dimension.path == BATCH for dimension in dimensions)
        and facts.config.get("dynamic_batching") is None
    ):
        # Larger batches do not help a model that gets each request alone.
        dimensions.append(Dimension(facts.name, DELAY, (0,)))
    return dimensions


def _kind(dimension: Dimension) -> str:
    named = {INSTANCES: "instances", BATCH: "batch", DELAY: "delay", PREFERRED: "preferred"}
    if dimension.path in named:
        return named[dimension.path]
    return "variant" if dimension.path[1] == "variant" else "threads"


def _automatic(settings: AnalyzeSettings, facts: ModelFacts) -> Iterator[Dimension]:
    config, name = facts.config, facts.name
    minimum, maximum = settings.run_config_search_min_instance_count, settings.run_config_search_max_instance_count
    yield _automatic_dimension(name, config, INSTANCES, range(minimum, maximum + 1))
    decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
    if int(config.get("max_batch_size", 0)) > 0 and not config.get("sequence_batching") and not decoupled:
        minimum, maximum = (
            settings.run_config_search_min_model_batch_size,
            settings.run_config_search_max_model_batch_size,
        )
        # A request must fit into a batch.
        minimum = max(minimum, settings.batch_size_of(name))
        yield _automatic_dimension(name, config, BATCH, doubled(minimum, max(minimum, maximum)))
        delay = int(at(config, DELAY) or 0) if config.get("dynamic_batching") is not None else OFF
        yield Dimension(name, DELAY, DELAYS, _nearest(DELAYS, delay))
        yield Dimension(name, PREFERRED, PREFERENCES)
    if facts.variants:
        yield _unsaid(name, config, "variant", facts.variants, facts.auto, ordered=False)
    parameter = _THREADS.get(str(config.get("backend", "")))
    if parameter and facts.threads > 1:
        counts = [str(count) for count in (*doubled(1, facts.threads - 1), facts.threads)]
        yield _unsaid(name, config, parameter, counts, str(facts.threads), ordered=True)


def _unsaid(
    model: str, config: Mapping[str, Any], parameter: str, values: Sequence[str], unsaid: str, *, ordered: bool
) -> Dimension:
    """Return the dimension of a parameter whose default is ``unsaid``."""
    path: Path = ("parameters", parameter, "string_value")
    own = at(config, path)
    tried = [None if own is None and value == unsaid else value for value in values]
    return Dimension(model, path, tuple(tried), _nearest(tried, own), ordered=ordered)


def doubled(minimum: int, maximum: int) -> list[int]:
    """Return ``minimum``, twice that, and so on, up to ``maximum``."""
    powers = [minimum]
    while powers[-1] * 2 <= maximum:
        powers.append(powers[-1] * 2)
    return powers


def _automatic_dimension(model: str, config: Mapping[str, Any], path: Path, values: Sequence[Any]) -> Dimension:
    return Dimension(model, path, tuple(values), _nearest(values, at(config, path)))


def _nearest(values: Sequence[Any], value: Any) -> int:
    if value in values:
        return list(values).index(value)
    numbers = [index for index, value in enumerate(values) if isinstance(value, int)]
    if not isinstance(value, int) or not numbers:
        return 0
    return min(numbers, key=lambda index: abs(values[index] - value))


# Manual dimensions. As in model analyzer, a list for a field with a single value has the values to try. For a list
# field (``preferred_batch_size``, ``instance_group``), a list is one value, and a list of lists has the values to try.


#: Maximum number of values of a field; a longer sweep would never end.
_MOST: Final = 1000


def manual_dimensions(model: str, tree: Mapping[str, Any], config: Mapping[str, Any]) -> list[Dimension]:
    """Return a dimension per field in ``tree``; a field with one value is set in every candidate.

    ``config`` is the repository's. Raises INVALID_ARG for an unknown field, with the nearest known one.
    """
    where = f"profile_models.{model}.model_config_parameters"
    fields = _fields(ModelConfig.DESCRIPTOR, tree, where)
    return [_manual_dimension(model, where, path, values, config) for path, values in fields]


def _manual_dimension(model: str, where: str, path: Path, values: list[Any], config: Mapping[str, Any]) -> Dimension:
    for value in values:
        probe: dict[str, Any] = {}
        put(probe, path, value)
        try:
            message(probe)
        except ConchError as error:
            raise OptionProblem(f"{where}: {error.message}", f"{where}.{path[0]}") from None
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    tried = sorted(set(values)) if numbers else values
    own = at(config, path)
    start = tried.index(own) if own in tried else 0
    if numbers and isinstance(own, int | float):
        start = min(range(len(tried)), key=lambda index: abs(tried[index] - own))
    return Dimension(model, path, tuple(tried), start, ordered=numbers)


def _fields(kind: Descriptor, tree: Any, where: str, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Yield each field below a message, with the values to try."""
    if not isinstance(tree, Mapping):
        raise wrong(where, tree, "a mapping of fields of a configuration")
    for key, value in tree.items():
        field = _field(kind, key, where)
        field_path: Path = (*path, field.name)
        inside = f"{where}.{key}"
        if _is_map(field):
            yield from _entries(field, value, inside, field_path)
        elif not _is_list(field) and field.message_type is not None and isinstance(value, Mapping) and value:
            yield from _fields(field.message_type, value, inside, field_path)
        else:
            yield field_path, _limited(_alternatives(field, value, inside), inside)


def _entries(field: FieldDescriptor, tree: Any, where: str, path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the entries of a map, such as ``parameters: {threads: [1, 2]}``.

    The text of a parameter may be written without its ``string_value``.
    """
    if not isinstance(tree, Mapping):
        raise wrong(where, tree, "a mapping")
    assert field.message_type is not None
    below = field.message_type.fields_by_name["value"]
    for key, value in tree.items():
        inside, entry_path = f"{where}.{key}", (*path, str(key))
        if below.message_type is None:
            yield entry_path, _limited(_alternatives(below, value, inside), inside)
        elif isinstance(value, Mapping):
            yield from _fields(below.message_type, value, inside, entry_path)
        else:
            elements = value if isinstance(value, list) else [value]
            texts = [str(element).lower() if isinstance(element, bool) else str(element) for element in elements]
            yield (*entry_path, "string_value"), _limited(texts, inside)


def _alternatives(field: FieldDescriptor, value: Any, where: str) -> list[Any]:
    """Return the values to try of a field without subfields: scalars, lists, and whole messages."""
    if _is_list(field):
        lists = (
            value
            if isinstance(value, list) and value and all(isinstance(element, list) for element in value)
            else [value]
        )
        return [list(chosen) for element in lists for chosen in _elements(field, element, where)]
    elements = value if isinstance(value, list) else [value]
    return [choice for element in elements for choice in _values(field, element, where)]


def _elements(field: FieldDescriptor, value: Any, where: str) -> Iterator[Sequence[Any]]:
    """Yield the lists that a list expands to if its elements have several values to try."""
    if not isinstance(value, list):
        value = [value]
    return product(*(_values(field, element, where) for element in value))


def _values(field: FieldDescriptor, value: Any, where: str) -> list[Any]:
    if field.message_type is None:
        return [value]
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a mapping of fields of a configuration")
    names = [_field(field.message_type, key, where) for key in value]
    choices = [
        _alternatives(name, element, f"{where}.{name.name}")
        for name, element in zip(names, value.values(), strict=True)
    ]
    return [dict(zip((name.name for name in names), chosen, strict=True)) for chosen in product(*choices)]


def _limited(values: list[Any], where: str) -> list[Any]:
    if not 0 < len(values) <= _MOST:
        raise OptionProblem(f"{where}: there are {len(values)} values to try; 1 to {_MOST} are possible", where)
    return values


def _field(kind: Descriptor, key: Any, where: str) -> FieldDescriptor:
    field = kind.fields_by_name.get(str(key))
    if field is None:
        hint = did_you_mean(str(key), kind.fields_by_name, f"the fields are {', '.join(kind.fields_by_name)}")
        raise OptionProblem(f"{where}: unknown field '{key}'; {hint}", f"{where}.{key}")
    return field


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_list(field: FieldDescriptor) -> bool:
    return isinstance(field.default_value, list)


@dataclass(frozen=True)
class Search:
    """Models that are measured together: several at the same time, or a single one.

    ``models`` receive requests; the space also has the dimensions of the models that they use.
    """

    models: tuple[str, ...]
    space: SearchSpace
    goals: Goals

    @property
    def name(self) -> str:
        """The prefix of the candidates' names."""
        return self.space.name


def searches(settings: AnalyzeSettings, facts: Mapping[str, ModelFacts]) -> list[Search]:
    """Return the searches in order; ``facts`` include every measured or composing model.

    Raises INVALID_ARG for an unknown model, and for settings that a model does not support.
    """
    names = [model.name for model in settings.profile_models]
    missing = [name for name in names if name not in facts]
    if missing:
        raise invalid(f"profile_models: there is no model '{missing[0]}'; the models are {', '.join(sorted(facts))}")
    together = settings.run_config_profile_models_concurrently_enable and len(names) > 1
    return [_search(settings, group, facts) for group in ([names] if together else [[name] for name in names])]


def _search(settings: AnalyzeSettings, names: Sequence[str], facts: Mapping[str, ModelFacts]) -> Search:
    used = [model for name in names for model in composing(settings, name, facts)]
    tuned = {name: facts[name] for name in (*names, *used)}
    dimensions = [dimension for model in tuned.values() for dimension in dimensions_of(settings, model)]
    base = {name: changes for name, model in tuned.items() if (changes := _base(settings, model))}
    loads = axis_of(settings, names)
    for name in set(names) - set(used):
        size = settings.batch_size_of(name)
        waiting = inf if loads.rates else size * max(loads.loads, default=loads.maximum)
        tuned[name] = replace(facts[name], request_batch=size, most_waiting=waiting)
    space = SearchSpace("+".join(names), tuple(dimensions), tuned, base)
    return Search(tuple(names), space, settings.goals(names))


def dimensions_of(settings: AnalyzeSettings, facts: ModelFacts) -> list[Dimension]:
    """Return the dimensions of a model: the fields named in the settings, and the automatic ones of other fields.

    Like model analyzer's, a brute search of named fields leaves the others unchanged.
    """
    named = settings.model(facts.name).config
    manual = manual_dimensions(facts.name, named, facts.config)
    if manual and settings.run_config_search_mode == "brute" and not settings.sweep:
        return manual
    taken = {dimension.path[:2] if dimension.path[0] == "parameters" else dimension.path[:1] for dimension in manual}
    return [
        *manual,
        *(
            dimension
            for dimension in automatic_dimensions(settings, facts)
            if taken.isdisjoint((dimension.path[:1], dimension.path[:2]))
        ),
    ]


def _base(settings: AnalyzeSettings, facts: ModelFacts) -> dict[str, Any]:
    """Return the overrides of all candidates, including the default: instances on the CPU if required."""
    groups = facts.config.get("instance_group") or []
    if not settings.stays_on_cpu(facts.name) or all(group.get("kind") == "KIND_CPU" for group in groups):
        return {}
    moved = [
        {name: value for name, value in group.items() if name != "gpus"} | {"kind": "KIND_CPU"} for group in groups
    ]
    return {"instance_group": moved}


def composing(settings: AnalyzeSettings, name: str, facts: Mapping[str, ModelFacts]) -> list[str]:
    """Return the models that a measured model uses: an ensemble's steps, or a BLS model's composing models."""
    steps = (facts[name].config.get("ensemble_scheduling") or {}).get("step") or []
    if not steps:
        return [model.name for model in settings.bls_composing_models if model.name in facts]
    chosen = {model.name for model in settings.ensemble_composing_models}
    step_models = [step["model_name"] for step in steps if not chosen or step["model_name"] in chosen]
    below = [
        composed
        for step_model in step_models
        if step_model in facts
        for composed in composing(settings, step_model, facts)
    ]
    return [model for model in dict.fromkeys([*step_models, *below]) if model in facts]
