"""Completes values in the shell: models, tasks, engines, and the values of flags.

click calls these functions for shell completion (docs/doctor.md describes the setup). Each gets the context, the
parameter and the incomplete value, and imports other modules only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from conch.options.declaration import Values

#: A completion function of click.
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completer(values: Values) -> Complete | None:
    """Return the completer of an option's values; None if any value is allowed."""
    if values.known:
        return lambda context, parameter, typed: _begin(values.known, typed)
    return _KINDS[values.kind] if values.kind else None


def directories(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete directories; the shell lists them."""
    return [CompletionItem(typed, type="dir")]


def files(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete files and directories; the shell lists them."""
    return [CompletionItem(typed, type="file")]


def checkpoints(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete models in the Hub's cache, and the shell's files and directories."""
    from conch.cli.doctor import cached_models

    return [*_begin(cached_models(), typed), CompletionItem(typed, type="file")]


def tasks(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete tasks of checkpoints."""
    from conch.checkpoints.task import TASK_NAMES

    return _begin(sorted(TASK_NAMES), typed)


def engines(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete engines that run checkpoints."""
    from conch.checkpoints.options import ENGINES, TEXT_ENGINES

    return _begin(dict.fromkeys(("auto", *ENGINES, *TEXT_ENGINES)), typed)


def models(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the models of the repositories on the command line, or of ``models`` without any."""
    return _begin(sorted({path.name for root in _repositories(context) for path in _model_directories(root)}), typed)


def models_to_load(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the models of the repositories, and the value for all models."""
    return [*_begin("*", typed), *models(context, parameter, typed)]


def configurations(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the names of the models' additional configurations."""
    stems = {
        path.stem
        for root in _repositories(context)
        for model in _model_directories(root)
        for path in model.glob("configs/*.pbtxt")
    }
    return _begin(sorted(stems), typed)


def _begin(values: Iterable[str], typed: str) -> list[CompletionItem]:
    return [CompletionItem(value) for value in values if value.startswith(typed)]


def _repositories(context: click.Context) -> list[Path]:
    """Return the repositories on the command line, under any of the command's names for the option."""
    for name in ("model_repository", "directories", "repository"):
        typed: Any = context.params.get(name)
        if typed:
            return [Path(path) for path in ((typed,) if isinstance(typed, (str, Path)) else typed)]
    return [Path("models")]


def _model_directories(repository: Path) -> list[Path]:
    try:
        return [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


#: The completers by the kind of value in a declaration.
_KINDS: Final[Mapping[str, Complete]] = {
    "checkpoints": checkpoints, "configurations": configurations, "directories": directories, "engines": engines,
    "files": files, "models_to_load": models_to_load, "tasks": tasks,
}  # fmt: skip
