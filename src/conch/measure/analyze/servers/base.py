"""The interface of measured servers, and the client that controls them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from conch.client.deadline import Deadline, DeadlineError
from conch.client.transport import ConnectionFailedError
from conch.config import render
from conch.core.errors import ConchError, internal, unavailable
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.api import transport_to

#: Overrides by model name, as in ``Candidate.overrides``.
Overrides = Mapping[str, Mapping[str, Any]]
#: Configurations in force by model name, as in ``GET /v2/models/M/config``.
Configs = Mapping[str, Mapping[str, Any]]


class ServerGone(ConchError):
    """The server has ended or does not respond; INTERNAL because its previous actions are unknown."""


class ServerLost(ConchError):
    """The server has ended and does not return: nothing more can be measured."""


class AnalyzedServer(Protocol):
    """A server that loads the profiled models under one configuration after the other."""

    @property
    def address(self) -> Address:
        """The address of requests, for the measured protocol."""

    def load(self, overrides: Overrides) -> Configs:
        """Load all models, with ``overrides`` of the repository's configurations.

        Returns the configurations in force, including those of ensemble steps, which precede their ensemble. Raises
        ServerGone, and ConchError for a configuration that does not load.
        """

    def check(self) -> None:
        """Raise ServerGone if the server cannot be reached."""

    def complaints(self) -> str:
        """Return the server's errors since the last load; empty if its log is unavailable."""

    def restart(self) -> None:
        """Restart the server after :class:`ServerGone`, or if a model completes no request.

        A server that was not started here is only waited for. Raises ServerLost if it does not return.
        """

    def close(self) -> None:
        """Restore the initial state; raises INTERNAL, naming models that could not be restored."""


# The interface is the same over HTTP and gRPC; errors contain the server's message.


#: Timeout for calls that need no model (s).
_SECONDS: Final = 10.0
#: Interval between queries of a state (s).
_PAUSE: Final = 0.05
#: The error of conch and Triton servers on which clients may not load models.
_NOT_EXPLICIT: Final = "explicit model load / unload is not allowed"
_Result = TypeVar("_Result")


class ControlClient:
    """Loads and unloads models over HTTP, or over gRPC with ``grpc``; ``timeout`` applies to each of them (s).

    All methods raise ServerGone if the server cannot be reached, UNAVAILABLE if it does not let clients load models or
    exceeds the timeout, and INTERNAL with the server's reason if it refuses.
    """

    def __init__(self, address: Address, timeout: float, *, grpc: bool = False) -> None:
        self.timeout = timeout
        self.where = address.shown
        self._transport = transport_to(address, grpc=grpc)

    def config(self, model: str) -> Mapping[str, Any]:
        """Return the configuration in force of a loaded model."""
        action = f"read the configuration of '{model}'"
        config = self._call(action, _SECONDS, lambda deadline: self._transport.config(model, -1, deadline))
        document: Mapping[str, Any] = json.loads(render.to_json(config))
        return document

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model; ``config`` replaces the repository's configuration."""
        text = None if config is None else json.dumps(config)
        self._call(f"load '{model}'", self.timeout, lambda deadline: self._transport.load(model, text, {}, deadline))

    def request_unload(self, model: str) -> None:
        """Request the unloading of a model, which may complete later."""
        action = f"unload '{model}'"
        self._call(action, self.timeout, lambda deadline: self._transport.unload(model, False, deadline))

    def index(self) -> Iterable[Mapping[str, Any]]:
        """Return ``name``, ``version`` and ``state`` of every model in the repository."""
        return self._call("list the models", _SECONDS, self._transport.index)

    def configs(self, models: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return the configurations in force of loaded models; the steps of an ensemble precede it."""
        configs: dict[str, Mapping[str, Any]] = {}
        for model in models:
            config = self.config(model)
            steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
            step_models = [
                step_model
                for step_model in dict.fromkeys(str(step["model_name"]) for step in steps)
                if step_model not in configs
            ]
            configs = {**configs, **(self.configs(step_models) if step_models else {}), model: config}
        return configs

    def ready(self) -> set[str]:
        """Return the loaded models."""
        return {str(entry["name"]) for entry in self.index() if entry.get("state") == "READY"}

    def known(self) -> set[str]:
        """Return the models of the server's repository."""
        return {str(entry["name"]) for entry in self.index()}

    def unload(self, model: str) -> None:
        """Unload a model, and wait until it is unloaded."""
        self.request_unload(model)
        end = time.monotonic() + self.timeout
        while any(
            version["name"] == model and version.get("state", "") not in ("", "UNAVAILABLE") for version in self.index()
        ):
            if time.monotonic() > end:
                raise self._too_slow(f"unload '{model}'")
            time.sleep(_PAUSE)

    def _call(self, action: str, seconds: float, call: Callable[[Deadline], _Result]) -> _Result:
        """Return the response; ``action`` names the call in errors."""
        try:
            return call(Deadline.after(seconds))
        except DeadlineError:
            raise self._too_slow(action) from None
        except ConchError as error:
            if _NOT_EXPLICIT in error.message:
                raise unavailable(
                    f"the server at {self.where} does not let clients load models:"
                    " start it with --model-control-mode=explicit"
                ) from None
            if isinstance(error, ConnectionFailedError):
                raise ServerGone(f"no server responds at {self.where}: {error.reason}") from None
            raise internal(f"{action}: {error.message.rstrip().rstrip(';').rstrip()}") from None

    def _too_slow(self, action: str) -> ConchError:
        return unavailable(f"the server has not responded after {self.timeout:g} s: {action}")
