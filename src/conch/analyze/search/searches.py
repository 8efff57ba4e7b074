"""What is searched: the models that are measured together, their space and their goals.

Pure.  :mod:`conch.analyze.profiling.profile` reads the facts about the models, and runs a strategy for each search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from conch.analyze.judging.goals import Goals
from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.search.automatic_dimensions import automatic_dimensions
from conch.analyze.search.axis import axis_of
from conch.analyze.search.manual_dimensions import manual_dimensions
from conch.analyze.search.model_facts import ModelFacts
from conch.analyze.search.space import Dimension, SearchSpace
from conch.errors import invalid


@dataclass(frozen=True)
class Search:
    """Models that are measured together: all at the same time, or one after the other in searches of their own.

    ``models`` are sent requests; the space has their dimensions and those of the models that they use.
    """

    models: tuple[str, ...]
    space: SearchSpace
    goals: Goals
    facts: Mapping[str, ModelFacts] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that those of the candidates begin with."""
        return self.space.name


def searches(settings: AnalyzeSettings, facts: Mapping[str, ModelFacts]) -> list[Search]:
    """The searches to make, one after the other.  ``facts`` have every model that is measured or composing.

    Raises INVALID_ARG for a model that is not there, and for settings that a model cannot have.
    """
    names = [one.name for one in settings.profile_models]
    missing = [name for name in names if name not in facts]
    if missing:
        raise invalid(f"profile_models: there is no model '{missing[0]}'; there are {', '.join(sorted(facts))}")
    together = settings.run_config_profile_models_concurrently_enable and len(names) > 1
    return [_search(settings, group, facts) for group in ([names] if together else [[name] for name in names])]


def _search(settings: AnalyzeSettings, names: Sequence[str], facts: Mapping[str, ModelFacts]) -> Search:
    used = [*names, *(one for name in names for one in composing(settings, name, facts))]
    tuned = list(dict.fromkeys(used))
    dimensions = [one for name in tuned for one in dimensions_of(settings, facts[name])]
    configs = {name: facts[name].config for name in tuned}
    base = {name: changes for name in tuned if (changes := _base(settings, facts[name]))}
    loads = axis_of(settings, names)
    known = {name: facts[name] for name in tuned}
    steps = {step for name in names for step in composing(settings, name, facts)}
    for name in set(names) - steps:
        size = settings.batch_size_of(name)
        waiting = inf if loads.rates else size * max(loads.given, default=loads.most)
        known[name] = replace(facts[name], request_batch=size, most_waiting=waiting)
    space = SearchSpace("+".join(names), tuple(dimensions), configs, base, known)
    return Search(tuple(names), space, settings.goals(names), known)


def dimensions_of(settings: AnalyzeSettings, facts: ModelFacts) -> list[Dimension]:
    """What is tried of a model: the fields that the settings name, and by itself what they leave open.

    A full sweep of fields that are named leaves the others as they are, as model analyzer's does.
    """
    named = settings.model(facts.name).config
    manual = manual_dimensions(facts.name, named, facts.config)
    if manual and settings.run_config_search_mode == "brute" and not settings.sweep:
        return manual
    taken = {one.path[:2] if one.path[0] == "parameters" else one.path[:1] for one in manual}
    return [
        *manual,
        *(one for one in automatic_dimensions(settings, facts) if taken.isdisjoint((one.path[:1], one.path[:2]))),
    ]


def _base(settings: AnalyzeSettings, facts: ModelFacts) -> dict[str, Any]:
    """What all candidates of a model have, the default too: instances on the CPU where that is wanted."""
    groups = facts.config.get("instance_group") or []
    if not settings.stays_on_cpu(facts.name) or all(group.get("kind") == "KIND_CPU" for group in groups):
        return {}
    moved = [
        {name: value for name, value in group.items() if name != "gpus"} | {"kind": "KIND_CPU"} for group in groups
    ]
    return {"instance_group": moved}


def composing(settings: AnalyzeSettings, name: str, facts: Mapping[str, ModelFacts]) -> list[str]:
    """The models that a measured one uses: an ensemble's steps, and for a BLS model those that the settings name."""
    steps = (facts[name].config.get("ensemble_scheduling") or {}).get("step") or []
    if not steps:
        return [one.name for one in settings.bls_composing_models if one.name in facts]
    chosen = {one.name for one in settings.ensemble_composing_models}
    members = [step["model_name"] for step in steps if not chosen or step["model_name"] in chosen]
    below = [one for member in members if member in facts for one in composing(settings, member, facts)]
    return [one for one in dict.fromkeys([*members, *below]) if one in facts]
