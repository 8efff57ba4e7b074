"""Converts the arguments of ``conch.Server`` and ``conch.serve`` to server settings.

The options are those of ``conch serve`` under their Python names. Values are parsed as on the command line, so that
both accept and refuse the same values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from conch.core.errors import did_you_mean, invalid
from conch.options.declaration import Option
from conch.options.settings import OPTIONS, Settings, parse
from conch.repository.single import MODEL_OPTIONS, repository_of, settings_for

_BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS.values()}
#: The switch and port of each front end that an in-process server opens only on request.
_PORTS: Final = (("allow_http", "http_port"), ("allow_grpc", "grpc_port"), ("allow_metrics", "metrics_port"))
_KINDS: Final = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}
_LOGGING: Final = "Logging"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server to start: ``settings``, and the single ``model`` (an ID or a path) if no repository was given.

    ``of_model`` has the options of that model. ``logs`` is true if the caller gave a logging option.
    """

    settings: Settings
    model: str = ""
    of_model: Mapping[str, Any] = field(default_factory=dict)
    logs: bool = False

    @contextmanager
    def open(self) -> Iterator[tuple[Settings, str]]:
        """Yield the settings to start with and the name of the single model; its repository exists until the exit."""
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
    """Return the server that the arguments describe; with ``ports``, it listens on the ports of the command.

    Raises INVALID_ARG for an unknown option, with the nearest name, and for a value that ``conch serve`` refuses.
    """
    if model is not None and model_repository is not None:
        raise invalid(f"pass either the model '{os.fspath(model)}' or model_repository, not both")
    for name in flags:
        if name not in _BY_NAME and name not in MODEL_OPTIONS:
            raise invalid(_unknown(name))
    if model is None and model_repository is None:
        raise invalid("pass a model, or model_repository=, the directory of the models")
    options = {name: value for name, value in flags.items() if value is not None}
    of_model = {name: options.pop(name) for name in MODEL_OPTIONS if options.get(name) is not None}
    if of_model and model is None:
        name = next(iter(of_model))
        raise invalid(f"{name}= is for a single model; for a model of a repository, set it in config.pbtxt")
    if model_repository is not None:
        options["model_repository"] = model_repository
    texts: dict[str, tuple[str, ...]] = {}
    for name, value in options.items():
        texts[name.replace("_", "-")] = _texts(_BY_NAME[name], value)
    for switch, port in () if ports else _PORTS:
        if switch not in options and port not in options:
            texts[switch.replace("_", "-")] = ("false",)
    return ServerPlan(
        parse(texts),
        "" if model is None else os.fspath(model),
        of_model,
        any(_BY_NAME[name].section == _LOGGING for name in options),
    )


def _unknown(name: str) -> str:
    others = "conch serve --help-all lists them, with dashes for underscores"
    return f"a server has no option '{name}': {did_you_mean(name, (*_BY_NAME, *MODEL_OPTIONS, 'ports'), others)}"


def _texts(option: Option, value: Any) -> tuple[str, ...]:
    """Return the value, or each value of a repeatable option, as on the command line."""
    if isinstance(value, bool):
        return ("true" if value else "false",)
    if isinstance(value, str | os.PathLike | int | float):
        return (os.fspath(value) if isinstance(value, os.PathLike) else str(value),)
    several = option.repeatable and isinstance(value, list | tuple)
    if several and all(isinstance(element, str | os.PathLike) for element in value):
        return tuple(os.fspath(element) for element in value)
    kind = "a text or a list of texts" if option.repeatable else _KINDS[option.kind]
    raise invalid(f"{option.name} takes {kind}, as {option.flag} does; got {value!r:.80}")
