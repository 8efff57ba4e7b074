"""Reads the entries of ``profile_models``: names, or mappings with sweeps and goals.

Pure. Keys are model analyzer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import did_you_mean, invalid
from conch.measure.analyze.judging.goals import Constraint, WeightedObjective
from conch.measure.analyze.options import goal_texts, values
from conch.options.declaration import Reader


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The options of one model: its sweeps, goals and requests.

    ``config`` is the nested ``model_config_parameters`` (:mod:`conch.measure.analyze.search.searches`). Empty loads,
    sizes and goals default to those of the whole analysis.
    """

    name: str
    batch_sizes: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    perf_flags: Mapping[str, Any] = field(default_factory=dict)
    cpu_only: bool = False
    objectives: tuple[WeightedObjective, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    weighting: float = 1.0


#: The field and the reader of each key in the file.
_KEYS: Mapping[str, tuple[str, Reader]] = {
    "model_config_parameters": ("config", values.mapping),
    "perf_analyzer_flags": ("perf_flags", values.mapping),
    "cpu_only": ("cpu_only", values.flag),
    "objectives": ("objectives", goal_texts.objectives),
    "constraints": ("constraints", goal_texts.constraints),
    "weighting": ("weighting", values.positive),
}
_PARAMETERS: Mapping[str, Reader] = {
    "batch_sizes": values.counts,
    "concurrency": values.counts,
    "request_rate": values.rates,
}


def models(name: str, value: Any) -> tuple[ModelSettings, ...]:
    """Read models: a list of names, a mapping of names to options, or a list of both."""
    if isinstance(value, str):
        value = values.names(name, value)
    listed: list[tuple[Any, Any]] = []
    for entry in [value] if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]:
        listed += entry.items() if isinstance(entry, Mapping) else [(entry, None)]
    settings = [_model(f"{name}.{key}", values.text(name, key), options) for key, options in listed]
    twice = {model.name for model in settings if sum(model.name == other.name for other in settings) > 1}
    if not settings or twice:
        raise invalid(f"{name}: {'no model is given' if not settings else f'{min(twice)} is given twice'}")
    return tuple(settings)


def _model(path: str, name: str, options: Any) -> ModelSettings:
    if options is None:
        return ModelSettings(name=name)
    if not isinstance(options, Mapping):
        raise values.wrong(path, options, "a mapping of the model's settings")
    fields: dict[str, Any] = {}
    for key, value in options.items():
        if key == "parameters":
            fields |= _parameters(f"{path}.parameters", value)
        elif key in _KEYS:
            target, read = _KEYS[key]
            fields[target] = read(f"{path}.{key}", value)
        else:
            raise _unknown(path, key, ("parameters", *_KEYS))
    return ModelSettings(name=name, **fields)


def _parameters(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise values.wrong(path, value, "a mapping with batch_sizes, concurrency or request_rate")
    for key in value:
        if key not in _PARAMETERS:
            raise _unknown(path, key, tuple(_PARAMETERS))
    return {key: _PARAMETERS[key](f"{path}.{key}", option) for key, option in value.items()}


def _unknown(path: str, key: Any, known: tuple[str, ...]) -> values.OptionProblem:
    hint = did_you_mean(str(key), known, f"the keys are {', '.join(known)}")
    return values.OptionProblem(f"{path}: unknown key '{key}'; {hint}", f"{path}.{key}")
