"""From a candidate to configurations: what it changes in files, and whether a server took it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conch.analyze.servers.base import Configs, Overrides
from conch.errors import internal


def concise(overrides: Overrides, configs: Configs) -> Overrides:
    """Overrides whose instance groups say only what differs from ``configs``, the completed ones of the repository.

    A server names groups and fills in their GPUs; a file in which nobody did that is not to hold it afterwards.
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
    """Overrides under which no ensemble allows larger batches than a model that it is made of: no server loads that."""
    changed = {model: dict(changes) for model, changes in overrides.items()}
    for model, config in configs.items():  # those that an ensemble is made of come before it
        steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
        sizes = [size for step in steps if (size := _batch(str(step["model_name"]), changed, configs))]
        own = _batch(model, changed, configs)
        if own and sizes and min(sizes) < own:
            changed.setdefault(model, {})["max_batch_size"] = min(sizes)
    return changed


def check_in_force(overrides: Overrides, configs: Configs) -> None:
    """Raise INTERNAL where ``configs``, which are in force, are not what a candidate wants.

    A server completes configurations: what it adds by itself cannot be left out.  One that overlooks a change would be
    measured under another candidate's name.
    """
    for model, changes in overrides.items():
        found = configs.get(model, {})
        for name, value in changes.items():
            if value is None and found.get(name):
                raise internal(f"model '{model}' has {name} all the same: the server adds it by itself")
            for where, wanted, known in _differences(value, found.get(name), name):
                raise internal(
                    f"model '{model}': {where} should be {wanted} and is {known}, as the server did not take it"
                )


def _differences(wanted: Any, found: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """The numbers and texts of ``wanted`` that are others in ``found``, with their places; lists may be completed."""
    if isinstance(wanted, Mapping):
        for name, value in wanted.items():
            yield from _differences(value, found.get(name) if isinstance(found, Mapping) else None, f"{where}.{name}")
        if found is None:
            yield where, "set", "not set"
    elif isinstance(wanted, list):
        groups = found if isinstance(found, list) else []
        for group, known in zip(wanted, groups, strict=False):
            if isinstance(group, Mapping):
                yield from _differences({"count": group["count"]} if "count" in group else {}, known, where)
    elif wanted is not None and found is not None and str(wanted) != str(found):
        yield where, wanted, found


def _batch(model: str, overrides: Overrides, configs: Configs) -> int:
    known = {**configs.get(model, {}), **overrides.get(model, {})}
    return int(known.get("max_batch_size") or 0)


def _groups(groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    changed: list[Mapping[str, Any]] = []
    for number, group in enumerate(groups):
        was = before[number] if number < len(before) else {}
        changed.append({name: value for name, value in group.items() if name not in was or was[name] != value})
    return changed
