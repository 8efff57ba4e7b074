"""Checks that the tensors that a ``model.py`` names are those of its configuration."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from conch.checks.finding import Finding
from conch.checks.imports import UNREADABLE
from conch.checks.model import CheckedModel
from conch.config.reading import read_small
from conch.errors import did_you_mean


def check_tensor_names(model: CheckedModel) -> Iterator[Finding]:
    """Inputs that a model asks for and outputs that it makes, by names that the configuration does not declare.

    ``model`` is one in Python.
    """
    config = model.config
    if model.completes_itself():
        return
    sequences = config.sequence_batching
    inputs = [tensor.name for tensor in (*config.input, *sequences.control_input)]
    inputs += [state.input_name for state in sequences.state]
    outputs = [tensor.name for tensor in config.output] + [state.output_name for state in sequences.state]
    for path in model.sources():
        tree = _parsed(path)
        if config.input:
            yield from _unknown(path, _names(tree, "get_input_tensor_by_name", 1), inputs, "input")
        # A model that calls others makes tensors for their inputs, too.
        if config.output and not any(_called(node) == "InferenceRequest" for node in ast.walk(tree)):
            yield from _unknown(path, _names(tree, "Tensor", 0), outputs, "output")


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(read_small(path), str(path))
    except UNREADABLE:
        return ast.Module([], [])  # said elsewhere


def _unknown(path: Path, names: Iterator[tuple[str, int]], known: Collection[str], kind: str) -> Iterator[Finding]:
    for name, line in names:
        if name not in known:
            fix = did_you_mean(name, known, f"it declares {', '.join(known)}")
            problem = f"the configuration declares no {kind} '{name}'"
            yield Finding(path, line, "warning", problem, fix)


def _names(tree: ast.Module, function: str, place: int) -> Iterator[tuple[str, int]]:
    """The texts given as argument number ``place`` to calls of ``pb_utils``' ``function``, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == function and len(node.args) > place:
            argument = node.args[place]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, argument.lineno


def _called(node: ast.AST) -> str:
    """The attribute that a call calls (``Tensor`` of ``pb_utils.Tensor(…)``), empty for anything else."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
