"""Reads the YAML file of ``-f``, and keeps the line of everything in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch import extras
from conch.config.reading import read_small
from conch.errors import invalid, one_line


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of a file, and the line of each key by its path, as ``profile_models.add.parameters``."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[str, int]


def read_document(path: Path) -> SettingsFile:
    """The options in a file.

    Raises INVALID_ARG for one that cannot be read or is no mapping, UNSUPPORTED where PyYAML is missing.
    """
    yaml = extras.load(f"reading {path}", "yaml")
    try:
        text = read_small(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{path} cannot be read: {one_line(error)}") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        lines = _note(path, root) if root is not None else {}
        content = loader.construct_document(root) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise invalid(f"{path}, line {mark.line + 1 if mark else 1}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise invalid(f"{path} is not YAML: {one_line(error)}") from None
    finally:
        loader.dispose()
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise invalid(f"{path} does not have options as 'name: value'")
    return SettingsFile(path, content, lines)


def _note(path: Path, root: Any) -> dict[str, int]:
    """The lines of all keys by their paths.  Raises INVALID_ARG for a key that is twice in one mapping."""
    lines: dict[str, int] = {}
    noted: set[int] = set()

    def note(node: Any, where: str) -> None:
        if isinstance(node.value, str) or id(node) in noted:
            return
        noted.add(id(node))  # an alias stands for one node at several places
        names: dict[str, int] = {}
        for child in node.value:
            # An element of a list has the path of the list, so that a model is found by its name in either form.
            key, value = child if isinstance(child, tuple) else (child, child)
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                note(value, where)
                continue
            if key is not value and key.value in names:
                raise invalid(f"{path}, line {line}: '{key.value}' is in line {names[key.value]} already")
            names[key.value] = line
            below = f"{where}.{key.value}" if where else key.value
            lines.setdefault(below, line)
            note(value, below)

    note(root, "")
    return lines
