"""``conch serve``: starts the server with the options of the command line, which ``settings`` declares."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from conch.cli.check import shown
from conch.cli.completion import checkpoints
from conch.cli.options import OptionsCommand, click_option
from conch.core.errors import ConchError, invalid
from conch.options.declaration import Values
from conch.options.settings import OPTIONS, RENAMED, Settings, parse, platform_defaults
from conch.repository.single import MODEL_OPTIONS


def serve(arguments: tuple[str, ...], **options: Any) -> int:
    """Serve a model repository as tritonserver does, or one MODEL: a Hub id, checkpoint, .gguf, .onnx or .xml file."""
    if len(arguments) > 1:
        raise invalid(f"Unexpected argument: {arguments[1]}")
    given = {name: options.pop(name) for name in MODEL_OPTIONS}
    of_model = {name: value for name, value in given.items() if value != MODEL_OPTIONS[name].default}
    texts: dict[str, Sequence[str]] = dict(platform_defaults(os.environ))
    for name, value in options.items():
        if value not in (None, ()) and (value is not False or OPTIONS[name.replace("_", "-")].default is None):
            texts[name.replace("_", "-")] = value if isinstance(value, tuple) else (str(value),)
    if arguments:
        return _serve_one(arguments[0], of_model, texts)
    if of_model:
        option = MODEL_OPTIONS[next(iter(of_model))].flag
        raise invalid(f"{option} is for 'conch serve MODEL'; for a model of a repository, set it in config.pbtxt")
    settings = _settings(texts)

    from conch.library.app import run

    return run(settings, explain=partial(_faults, settings))


def _settings(texts: Mapping[str, Sequence[str]]) -> Settings:
    """Return the settings for the given flags; warns of deprecated flags."""
    settings = parse(texts)
    for flag, older in RENAMED.items():
        if older.warning and flag in texts:
            print(f"Warning: {older.warning}", file=sys.stderr)
    return settings


def _faults(settings: Settings, error: ConchError) -> list[str]:
    """Return the findings of ``conch check`` for models that failed to load; they are more detailed than Triton's
    errors."""
    from conch.library.app import LoadFailed
    from conch.repository.backends import BackendDirectories
    from conch.repository.checks.repository import check
    from conch.repository.stores.urls import is_url

    # Otherwise models in stores would be downloaded with all of their versions.
    roots = [Path(path) for path in settings.model_repository if not is_url(path)]
    if not isinstance(error, LoadFailed) or not roots:
        return []
    backends = BackendDirectories.beginning_with(settings.backend_directory)
    directories = [root.resolve() / name for root in roots for name in error.names]
    return [
        f"conch check: {shown(finding, roots)}"
        for finding in check(roots, settings.model_config_name or None, backends)
        if finding.severity == "error" and not {finding.path, *finding.path.parents}.isdisjoint(directories)
    ]


def _serve_one(model: str, of_model: dict[str, Any], texts: Mapping[str, Sequence[str]]) -> int:
    """Serve ``model`` from a repository made for it."""
    if not texts.keys().isdisjoint(("model-repository", "model-store")):
        raise invalid(f"pass either the model '{model}' or --model-repository, not both")
    settings = _settings(texts)
    name = of_model.pop("name", "")

    from conch.library.announcing import announcer
    from conch.repository.single import repository_of, settings_for

    with repository_of(model, name, of_model) as (repository, served):
        from conch.library.app import run

        return run(settings_for(settings, repository, served), announcer(served), partial(_not_on_the_hub, model))


def _not_on_the_hub(model: str, error: ConchError) -> list[str]:
    """Return a hint that ``model`` is not a folder either, if it was looked up on the Hub."""
    from conch.repository.single import hub_hint

    hint = hub_hint(model) if "Hub" in error.message else ""
    return [hint] if hint else []


def _renamed(flag: str) -> click.Option:
    """Return the parameter for an older name of an option."""
    target, template, _ = RENAMED[flag]
    option = OPTIONS[target]
    # The values of an older name differ, unless it is only an alias.
    values = Values() if template != "{}" else Values(known=("true", "false")) if option.switch else option.values
    name = flag.replace("-", "_")
    return click_option(replace(option, name=name, flags=(f"--{flag}",), values=values, switch=False))


serve_command = OptionsCommand(
    "serve",
    [*OPTIONS.values(), *MODEL_OPTIONS.values()],
    [click.Argument(["arguments"], nargs=-1, metavar="[MODEL]", shell_complete=checkpoints), *map(_renamed, RENAMED)],
    {"Deprecated": RENAMED},
    callback=serve,
    help=serve.__doc__,
    options_metavar="[options]",
)
