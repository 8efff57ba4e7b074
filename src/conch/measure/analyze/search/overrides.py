"""Overrides of a model's configuration: nested fields, read and set by path.

Pure. Configurations are JSON as in ``GET /v2/models/M/config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any

from google.protobuf import json_format

from conch.config.schema import ModelConfig
from conch.core.errors import invalid

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


def difference(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that turn ``config`` into ``wanted``."""
    changes: dict[str, Any] = {name: None for name in config if name not in wanted}
    for name, value in wanted.items():
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
