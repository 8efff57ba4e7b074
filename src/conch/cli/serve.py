"""``conch serve``: its flags and its help; starts the server with what they say.

The options come from their declarations in ``settings``; nothing here names one that needs no special care.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click

from conch.cli.check import shown
from conch.cli.completion import checkpoints, engines, of_option, tasks
from conch.cli.deprecated import DEPRECATED
from conch.core.errors import ConchError, invalid
from conch.options import RENAMED, parse, platform_defaults
from conch.repository.single import MODEL_OPTIONS
from conch.settings import OPTIONS, Option, Settings

#: tritonserver takes this one without a value, and all others with one.
_BARE: Final = "disable-auto-complete-config"


#: The only option for one MODEL that has no value.
_SWITCH: Final = "trust_remote_code"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_MODEL_RECORDS: Final = [
    (_flag(name) if name == _SWITCH else f"{_flag(name)} TEXT", help) for name, help in MODEL_OPTIONS.items()
]


def serve(arguments: tuple[str, ...], disable_auto_complete_config: bool, **options: Any) -> int:
    """Serve a model repository as tritonserver does, or one MODEL: a Hub id, checkpoint, .gguf, .onnx or .xml file."""
    if len(arguments) > 1:
        raise invalid(f"Unexpected argument: {arguments[1]}")
    of_model = {name: value for name in MODEL_OPTIONS if (value := options.pop(name))}
    texts: dict[str, Sequence[str]] = dict(platform_defaults(os.environ))
    texts |= {name.replace("_", "-"): values for name, values in options.items() if values}
    if disable_auto_complete_config:
        texts[_BARE] = ("true",)
    if arguments:
        return _serve_one(arguments[0], of_model, texts)
    if of_model:
        option = _flag(next(iter(of_model)))
        raise invalid(f"{option} is for 'conch serve MODEL'; for a model of a repository, say it in its config.pbtxt")
    settings = _settings(texts)

    from conch.library.app import run

    return run(settings, explain=partial(_faults, settings))


def _settings(texts: Mapping[str, Sequence[str]]) -> Settings:
    """The settings for the flags given; says which of them are deprecated."""
    settings = parse(texts)
    for flag in filter(texts.__contains__, DEPRECATED):
        print(f"Warning: {DEPRECATED[flag]}", file=sys.stderr)
    return settings


def _faults(settings: Settings, error: ConchError) -> list[str]:
    """What ``conch check`` says of the models that could not be loaded, which is more than Triton's errors say."""
    from conch.library.app import LoadFailed
    from conch.repository.backends import BackendDirectories
    from conch.repository.checks.repository import check
    from conch.repository.stores.urls import is_url

    # Models in stores would be downloaded for this with all of their versions.
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
        raise invalid(f"give either the model '{model}' or --model-repository, not both")
    settings = _settings(texts)
    name = of_model.pop("name", "")

    from conch.library.announcing import announcer
    from conch.repository.single import repository_of, settings_for

    with repository_of(model, name, of_model) as (repository, served):
        from conch.library.app import run

        return run(settings_for(settings, repository, served), announcer(served), partial(_not_on_the_hub, model))


def _not_on_the_hub(model: str, error: ConchError) -> list[str]:
    """That ``model`` is no folder either, where it was looked for on the Hub."""
    from conch.repository.single import hub_hint

    hint = hub_hint(model) if "Hub" in error.message else ""
    return [hint] if hint else []


class ServeCommand(click.Command):
    """A command whose help shows the common options, and names the others."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Common options"):
            formatter.write_dl([_record(option) for option in OPTIONS.values() if option.common])
        with formatter.section("For one MODEL"):
            formatter.write_dl(_MODEL_RECORDS)
        formatter.write("\n")
        others = [option for option in OPTIONS.values() if not option.common]
        for group, options in groupby(others, key=lambda option: option.group):
            formatter.write(_wrapped(group, (option.flag for option in options)))
        formatter.write(_wrapped("Deprecated", RENAMED))
        formatter.write("\nconch serve --help-all describes them all.\n")


def _help_all(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    formatter = context.make_formatter()
    with formatter.section("For one MODEL"):
        formatter.write_dl(_MODEL_RECORDS)
    for group, options in groupby(OPTIONS.values(), key=lambda option: option.group):
        with formatter.section(group):
            formatter.write_dl([_record(option) for option in options])
    click.echo(formatter.getvalue().strip())
    context.exit()


def _wrapped(heading: str, flags: Iterable[str]) -> str:
    return textwrap.fill(f"{heading}: {', '.join(flags)}", 100, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _record(option: Option) -> tuple[str, str]:
    """The two columns of an option in the help."""
    if option.flag == _BARE:
        return f"--{option.flag}", option.help
    default = f" [{_shown(option.default)}]" if option.default not in ("", ()) else ""
    return f"--{option.flag} {_metavar(option)}", option.help + default


def _metavar(option: Option) -> str:
    if get_origin(option.type) is Literal:
        return "|".join(get_args(option.type))
    return {bool: "BOOL", int: "N", float: "X"}.get(type(option.default), "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _click_option(flag: str) -> click.Option:
    if flag == _BARE:
        return click.Option([f"--{flag}"], is_flag=True)
    option = OPTIONS[RENAMED[flag][0] if flag in RENAMED else flag]
    # A renamed flag's values differ from those of what it became, but for a plain new name.
    complete = of_option(option) if flag not in RENAMED or RENAMED[flag][1] == "{}" else None
    return click.Option([f"--{flag}"], multiple=True, shell_complete=complete)


def _option_of_model(name: str) -> click.Option:
    complete = {"task": tasks, "engine": engines}.get(name)
    return click.Option([_flag(name)], is_flag=name == _SWITCH, shell_complete=complete)


serve_command = ServeCommand(
    "serve",
    callback=serve,
    help=serve.__doc__,
    params=[
        click.Argument(["arguments"], nargs=-1, metavar="[MODEL]", shell_complete=checkpoints),
        *map(_click_option, (*OPTIONS, *RENAMED)),
        *map(_option_of_model, MODEL_OPTIONS),
        click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all),
    ],
    context_settings={"max_content_width": 100},
    options_metavar="[options]",
)
