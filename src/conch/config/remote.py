"""Models that other servers run (``backend: "remote"``): their parameters, and fields that they must not have.

Needs only the standard library and the configuration's messages; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final
from urllib.parse import urlsplit

from conch.config.parameters import Parameter, ParameterTable
from conch.config.reading import Problem, Problems, refuse
from conch.config.schema import ModelConfig, datatype, implementation, scheduler
from conch.config.signature import parameters
from conch.core.errors import ConchError, invalid
from conch.machine.ports import host_and_port

REMOTE: Final = "remote"
#: The version of a remote model without local version directories.
ONLY_VERSION: Final = 1
#: The parameter with the backend that runs the model on the other server.
_BACKEND: Final = "backend"
#: The parameter with the task of a checkpoint there.
_TASK: Final = "task"
#: A value of ``version`` that means the version of the local model.
SAME_VERSION: Final = -2

_CONNECT_TIMEOUT: Final = 3.0
_HEALTH_INTERVAL: Final = 2.0
_AFFINITY_BYTES: Final = 256
_DEFAULT_PORTS: Final = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 443}

PARAMETERS: Final = ParameterTable(
    REMOTE,
    (
        Parameter(
            "url",
            "`http://`, `https://`, `grpc://` or `grpcs://` and `host:port`, over HTTP also a path; several, "
            "separated by commas",
            "must be given",
            "the servers of the model; several servers share its requests",
        ),
        Parameter("model", "a name", "the model's own", "the model's name on the servers"),
        Parameter(
            "version",
            "a number, `same`",
            "any",
            "its version; `same` is the version in the request",
        ),
        Parameter(
            "backend",
            "a backend's name",
            "as on the servers",
            "the backend that runs the model on the servers; its rules apply to requests and responses",
        ),
        Parameter(
            "task",
            "a task of Hugging Face",
            "as on the servers",
            "the task of the model's checkpoint on the servers, if it has one",
        ),
        Parameter(
            "connect_timeout_secs",
            "seconds",
            "3",
            "timeout for connecting and for readiness checks",
        ),
        Parameter("timeout_secs", "seconds", "none", "timeout of a request"),
        Parameter("health_interval_secs", "seconds", "2", "interval of the readiness checks of each server"),
        Parameter(
            "affinity",
            "an input of type `TYPE_STRING`",
            "none",
            "send requests with the same beginning to the same server",
        ),
        Parameter("affinity_bytes", "bytes", "256", "length of the compared beginning of that input"),
        Parameter(
            "sticky",
            "`true`, `false`",
            "`false`",
            "send all requests to one server, chosen by the model's name, unless it is much busier than the others",
        ),
        Parameter(
            "repeat_lost",
            "`true`, `false`",
            "`false`",
            "retry a request once, on another server, if its connection breaks before any response",
        ),
        Parameter(
            "authorization_env", "an environment variable", "none", "has the value of the header `Authorization`"
        ),
        Parameter("headers_env", "an environment variable", "none", "has more headers, one `name: value` per line"),
        Parameter("ca_file", "a PEM file", "the system's authorities", "trusted certificate authorities"),
        Parameter("certificate_file", "a PEM file", "none", "client certificate"),
        Parameter("key_file", "a PEM file", "none", "its private key"),
    ),
    strict=True,
)


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """The address of one server: ``text`` as written, and its parts; ``path`` precedes ``/v2``."""

    text: str
    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def is_grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    @property
    def is_encrypted(self) -> bool:
        return self.scheme in ("https", "grpcs")

    @property
    def address(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The parsed parameters of a remote model. Times are in seconds; a ``timeout`` of 0 means no limit.

    A ``version`` of -1 means any version, and ``SAME_VERSION`` the version of the local model. File names are as
    written, absolute or relative to the model's directory.
    """

    urls: tuple[str, ...]
    model: str
    version: int = -1
    connect_timeout: float = _CONNECT_TIMEOUT
    timeout: float = 0.0
    health_interval: float = _HEALTH_INTERVAL
    affinity: str = ""
    affinity_bytes: int = _AFFINITY_BYTES
    sticky: bool = False
    repeat_lost: bool = False
    authorization_env: str = ""
    headers_env: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""

    def of_version(self, version: int) -> RemoteSettings:
        """Return the settings for one local version; -1 if the request names none."""
        return replace(self, version=version) if self.version == SAME_VERSION else self


def is_remote(config: ModelConfig) -> bool:
    """Return whether another server runs the model."""
    return implementation(config) == REMOTE


def take_over(config: ModelConfig, theirs: ModelConfig) -> None:
    """Copy the fields that determine the form of requests from the other server's configuration to ``config``.

    Does not copy reshapes and labels, because the other server applies them. Copies the name of the backend, because
    requests may depend on it.
    """
    config.max_batch_size = theirs.max_batch_size
    config.model_transaction_policy.CopyFrom(theirs.model_transaction_policy)
    for kind in ("input", "output"):
        for tensor in getattr(theirs, kind):
            own = getattr(config, kind).add()
            own.CopyFrom(tensor)
            own.ClearField("reshape")  # clients send the shape before reshaping
            if kind == "output":
                own.ClearField("label_filename")  # a file on the other server
    runs_there = parameters(theirs).get(_BACKEND, "") if is_remote(theirs) else theirs.backend
    if runs_there and _BACKEND not in config.parameters:
        config.parameters[_BACKEND].string_value = runs_there
    if (task := parameters(theirs).get(_TASK)) and _TASK not in config.parameters:
        config.parameters[_TASK].string_value = task
    if scheduler(theirs) == "sequence_batching" and not scheduler(config):
        idle = theirs.sequence_batching.max_sequence_idle_microseconds
        config.sequence_batching.max_sequence_idle_microseconds = idle


def read_url(text: str) -> RemoteUrl:
    """Parse a server's address. Raises INVALID_ARG for an unusable one."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise invalid(f"url '{text}' cannot be read: {error}") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise invalid(
            f"url '{text}' is not the address of a server; it must begin with http://, https://, grpc:// or grpcs://"
        )
    if not host:
        raise invalid(f"url '{text}' has no host: write {parts.scheme}://host:port")
    if parts.username or parts.password:
        raise invalid(
            "url contains a user name or a password: set 'authorization_env' to the name of an environment variable"
        )
    if parts.query or parts.fragment:
        raise invalid(f"url '{text}' must end after its path")
    path = parts.path.rstrip("/")
    if path and parts.scheme.startswith("grpc"):
        raise invalid(f"url '{text}' has a path, but gRPC addresses have none: write {parts.scheme}://{parts.netloc}")
    return RemoteUrl(text, parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path)


def check_urls(urls: Iterable[str], *, decoupled: bool, model: str) -> None:
    """Raise INVALID_ARG for an address that cannot serve the model; a decoupled model needs gRPC streams."""
    for url in urls:
        if not read_url(url).is_grpc and decoupled:
            raise invalid(
                f"model '{model}' is decoupled, and its responses can be forwarded only over gRPC: "
                f"use the server's gRPC address, grpc://host:port, instead of {url}"
            )


def read_remote(config: ModelConfig) -> RemoteSettings:
    """Parse the parameters of a remote model. Raises INVALID_ARG for the first error."""
    PARAMETERS.check(parameters(config))
    refuse(field_problems(config))
    reader = _ParameterReader(config)
    settings = reader.settings()
    refuse(reader.problems)
    return settings


def value_problems(config: ModelConfig) -> Problems:
    """Yield all errors in the values of a remote model's parameters.

    The second part of a problem's field path is the parameter's name.
    """
    reader = _ParameterReader(config)
    reader.settings()
    yield from reader.problems


def field_problems(config: ModelConfig) -> Problems:
    """Yield fields of the configuration that are meaningless for a remote model."""
    chosen = scheduler(config)
    if chosen == "dynamic_batching":
        yield _meaningless(config, "dynamic_batching", "the remote server batches its requests")
    if config.instance_group:
        yield _meaningless(config, "instance_group", "its instances are those of the remote server")
    if config.model_warmup:
        yield _meaningless(config, "model_warmup", "the remote server warms it up")
    for kind in ("input", "output"):
        for index, tensor in enumerate(getattr(config, kind)):
            if tensor.HasField("reshape"):
                yield Problem(
                    f"{kind} '{tensor.name}' of remote model '{config.name}' has a reshape: the remote server applies "
                    "it, so write the shape that its clients see",
                    (kind, index, "reshape"),
                    hint="leave it out",
                )


def _meaningless(config: ModelConfig, field: str, reason: str) -> Problem:
    return Problem(
        f"remote model '{config.name}' may not have '{field}': {reason}", (field, 0), hint=f"leave '{field}' out"
    )


class _ParameterReader:
    """Parses the parameters, and collects their errors in ``problems``."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._parameters = parameters(config)
        self.problems: list[Problem] = []

    def settings(self) -> RemoteSettings:
        values = self._parameters
        return RemoteSettings(
            urls=self._urls(),
            model=values.get("model", "") or self._config.name,
            version=SAME_VERSION if values.get("version") == "same" else int(self._number("version", -1, whole=True)),
            connect_timeout=self._number("connect_timeout_secs", _CONNECT_TIMEOUT, above_zero=True),
            timeout=self._number("timeout_secs", 0.0),
            health_interval=self._number("health_interval_secs", _HEALTH_INTERVAL, above_zero=True),
            affinity=self._affinity(),
            affinity_bytes=int(self._number("affinity_bytes", _AFFINITY_BYTES, whole=True, above_zero=True)),
            sticky=self._flag("sticky"),
            repeat_lost=self._flag("repeat_lost"),
            authorization_env=values.get("authorization_env", ""),
            headers_env=values.get("headers_env", ""),
            ca_file=values.get("ca_file", ""),
            certificate_file=values.get("certificate_file", ""),
            key_file=self._key(),
        )

    def _note(self, name: str, message: str) -> None:
        self.problems.append(Problem(message, ("parameters", name)))

    def _urls(self) -> tuple[str, ...]:
        urls = tuple(filter(None, (text.strip() for text in self._parameters.get("url", "").split(","))))
        if not urls and "url" not in self._parameters:
            self._note("url", f"remote model '{self._config.name}' has no parameter 'url'")
        decoupled = self._config.model_transaction_policy.decoupled
        try:
            check_urls(urls, decoupled=decoupled, model=self._config.name)
        except ConchError as error:
            self._note("url", error.message)
        return tuple(dict.fromkeys(urls))

    def _number(self, name: str, default: float, *, whole: bool = False, above_zero: bool = False) -> float:
        text = self._parameters.get(name, "")
        if not text:
            return default
        try:
            number: float = int(text) if whole else float(text)
            usable = isfinite(number) and (number > 0 if above_zero else number >= 0)
        except (OverflowError, ValueError):
            usable = False
        if not usable:
            kind = "a whole number" if whole else "a number of seconds"
            bound = "more than 0" if above_zero else "0 or more"
            self._note(name, f"parameter '{name}' is '{text}'; it must be {kind}, {bound}")
            return default
        return number

    def _flag(self, name: str) -> bool:
        text = self._parameters.get(name, "false").lower()
        if text not in ("true", "false", "1", "0"):
            self._note(name, f"parameter '{name}' is '{text}'; it must be true or false")
        return text in ("true", "1")

    def _affinity(self) -> str:
        name, inputs = self._parameters.get("affinity", ""), self._config.input
        texts = [tensor.name for tensor in inputs if datatype(tensor.data_type) == "BYTES"]
        if name and inputs and name not in texts:
            self._note(
                "affinity",
                f"parameter 'affinity' is '{name}'; it must be an input of type TYPE_STRING of model "
                f"'{self._config.name}'",
            )
        return name

    def _key(self) -> str:
        certificate, key = self._parameters.get("certificate_file", ""), self._parameters.get("key_file", "")
        if bool(certificate) != bool(key):
            present, missing = ("certificate_file", "key_file") if certificate else ("key_file", "certificate_file")
            self._note(present, f"parameter '{present}' requires '{missing}'")
        return key
