"""From the arguments of ``conch.Server`` and ``conch.serve`` to the settings of a server.

The options are those of ``conch serve`` under their names in Python; their values are read as on a command line, so
that both refuse the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from conch.errors import did_you_mean, invalid
from conch.options import parse
from conch.repository.single import MODEL_OPTIONS, repository_of, settings_for
from conch.settings import OPTIONS, Option, Settings

_BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS.values()}
#: The front ends that a server in the process has when it is asked: the switch of each, and its port.
_PORTS: Final = (("allow_http", "http_port"), ("allow_grpc", "grpc_port"), ("allow_metrics", "metrics_port"))
_KINDS: Final = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}
_LOGGING: Final = "Logging"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to start: ``settings``, and the one ``model`` (an id or a path) where no repository was given.

    ``of_model`` is what was said of that model.  ``logs`` tells whether the caller asked for Triton's log lines.
    """

    settings: Settings
    model: str = ""
    of_model: Mapping[str, Any] = field(default_factory=dict)
    logs: bool = False

    @contextmanager
    def open(self) -> Iterator[tuple[Settings, str]]:
        """The settings to start with, and the name of the one model; its repository is there until the end."""
        if not self.model:
            yield self.settings, ""
            return
        values = dict(self.of_model)
        with repository_of(self.model, values.pop("name", ""), values) as (repository, name):
            yield settings_for(self.settings, repository, name), name


def plan(
    model: str | os.PathLike[str] | None,
    model_repository: Any,
    flags: Mapping[str, Any],
    *,
    ports: bool,
) -> ServerPlan:
    """The server that the arguments ask for; with ``ports``, one that listens as the command does.

    Raises INVALID_ARG for an unknown option, naming the nearest, and for a value that ``conch serve`` refuses.
    """
    if model is not None and model_repository is not None:
        raise invalid(f"give either the model '{os.fspath(model)}' or model_repository, not both")
    for name in flags:
        if name not in _BY_NAME and name not in MODEL_OPTIONS:
            raise invalid(_unknown(name))
    if model is None and model_repository is None:
        raise invalid("give a model or model_repository=, the directory of the models")
    given = {name: value for name, value in flags.items() if value is not None}
    of_model = {name: given.pop(name) for name in MODEL_OPTIONS if given.get(name) is not None}
    if of_model and model is None:
        raise invalid(f"{next(iter(of_model))}= is for one model; for one of a repository, say it in its config.pbtxt")
    if model_repository is not None:
        given["model_repository"] = model_repository
    texts: dict[str, tuple[str, ...]] = {}
    for name, value in given.items():
        option = _BY_NAME[name]
        texts[option.flag] = _texts(option, value)
    for switch, port in () if ports else _PORTS:
        if switch not in given and port not in given:
            texts[_BY_NAME[switch].flag] = ("false",)
    return ServerPlan(
        parse(texts),
        "" if model is None else os.fspath(model),
        of_model,
        any(_BY_NAME[name].group == _LOGGING for name in given),
    )


def _unknown(name: str) -> str:
    others = "conch serve --help-all lists them, with dashes for underscores"
    return f"a server has no option '{name}': {did_you_mean(name, (*_BY_NAME, *MODEL_OPTIONS, 'ports'), others)}"


def _texts(option: Option, value: Any) -> tuple[str, ...]:
    """The value, or each of the values of a repeatable option, as on the command line."""
    if isinstance(value, bool):
        return ("true" if value else "false",)
    if isinstance(value, str | os.PathLike | int | float):
        return (os.fspath(value) if isinstance(value, os.PathLike) else str(value),)
    several = option.repeatable and isinstance(value, list | tuple)
    if several and all(isinstance(one, str | os.PathLike) for one in value):
        return tuple(os.fspath(one) for one in value)
    kind = "a text or a list of texts" if option.repeatable else _KINDS[type(option.default)]
    raise invalid(f"{option.name} takes {kind}, as --{option.flag} does; got {value!r:.80}")
