"""Prepares the overrides of a candidate for files and servers, and checks that the server applied them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conch.core.errors import internal
from conch.measure.analyze.servers.base import Configs, Overrides


def concise(overrides: Overrides, configs: Configs) -> Overrides:
    """Reduce instance groups in overrides to the differences from ``configs``, the repository's completed ones.

    A server names groups and fills in their GPUs; the user's file must not get these additions.
    """
    return {
        model: {
            name: _groups(value, configs.get(model, {}).get(name) or ())
            if name == "instance_group" and value
            else value
            for name, value in changes.items()
        }
        for model, changes in overrides.items()
    }


def with_ensembles(overrides: Overrides, configs: Configs) -> Overrides:
    """Limit the batch size of ensembles to that of their steps, as servers refuse larger ones."""
    changed = {model: dict(changes) for model, changes in overrides.items()}
    for model, config in configs.items():  # steps precede their ensemble
        steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
        sizes = [size for step in steps if (size := _batch(str(step["model_name"]), changed, configs))]
        own = _batch(model, changed, configs)
        if own and sizes and min(sizes) < own:
            changed.setdefault(model, {})["max_batch_size"] = min(sizes)
    return changed


def check_in_force(overrides: Overrides, configs: Configs) -> None:
    """Raise INTERNAL if ``configs``, which are in force, differ from a candidate's overrides.

    Servers complete configurations, so a field that they add cannot be removed. If a server ignored a change, the
    measurement would be attributed to the wrong candidate.
    """
    for model, changes in overrides.items():
        in_force = configs.get(model, {})
        for name, value in changes.items():
            if value is None and in_force.get(name):
                raise internal(f"model '{model}' has {name} anyway: the server adds it")
            for where, expected, known in _differences(value, in_force.get(name), name):
                raise internal(
                    f"model '{model}': {where} should be {expected} but is {known}: the server ignored the change"
                )


def _differences(expected: Any, in_force: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the ``expected`` values that differ ``in_force``, with their paths; lists may have been completed."""
    if isinstance(expected, Mapping):
        for name, value in expected.items():
            yield from _differences(
                value, in_force.get(name) if isinstance(in_force, Mapping) else None, f"{where}.{name}"
            )
        if in_force is None:
            yield where, "set", "not set"
    elif isinstance(expected, list):
        groups = in_force if isinstance(in_force, list) else []
        for group, known in zip(expected, groups, strict=False):
            if isinstance(group, Mapping):
                yield from _differences({"count": group["count"]} if "count" in group else {}, known, where)
    elif expected is not None and in_force is not None and str(expected) != str(in_force):
        yield where, expected, in_force


def _batch(model: str, overrides: Overrides, configs: Configs) -> int:
    known = {**configs.get(model, {}), **overrides.get(model, {})}
    return int(known.get("max_batch_size") or 0)


def _groups(groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    changed: list[Mapping[str, Any]] = []
    for number, group in enumerate(groups):
        was = before[number] if number < len(before) else {}
        changed.append({name: value for name, value in group.items() if name not in was or was[name] != value})
    return changed
