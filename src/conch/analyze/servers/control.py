"""Loads and unloads the models of a running server with the model repository extension.

The interface is the same over HTTP and gRPC; errors contain the server's message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from conch.analyze.servers.base import ServerGone
from conch.config import render
from conch.errors import ConchError, internal, unavailable
from conch.perf.senders.channels.connecting import Address
from conch.perf.server.api import HttpApi

#: Timeout for calls that need no model (s).
_SECONDS: Final = 10.0
#: Interval between queries of a state (s).
_PAUSE: Final = 0.05
#: The error of conch and Triton servers on which clients may not load models.
_NOT_EXPLICIT: Final = "explicit model load / unload is not allowed"


class ControlClient:
    """Loads and unloads models; ``timeout`` applies to each of them (s).

    All methods raise ServerGone if the server cannot be reached, UNAVAILABLE if it does not let clients load models or
    exceeds the timeout, and INTERNAL with the server's reason if it refuses.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.timeout = timeout
        self.where = f"{address.host}:{address.port}"

    def config(self, model: str) -> Mapping[str, Any]:
        """Return the configuration in force of a loaded model."""
        raise NotImplementedError

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model; ``config`` replaces the repository's configuration."""
        raise NotImplementedError

    def ask_unload(self, model: str) -> None:
        """Request the unloading of a model, which may complete later."""
        raise NotImplementedError

    def index(self) -> Iterable[Mapping[str, Any]]:
        """Return ``name``, ``version`` and ``state`` of every model in the repository."""
        raise NotImplementedError

    def configs(self, models: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return the configurations in force of loaded models; the steps of an ensemble precede it."""
        configs: dict[str, Mapping[str, Any]] = {}
        for model in models:
            config = self.config(model)
            steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
            members = [
                member for member in dict.fromkeys(str(step["model_name"]) for step in steps) if member not in configs
            ]
            configs = {**configs, **(self.configs(members) if members else {}), model: config}
        return configs

    def ready(self) -> set[str]:
        """Return the loaded models."""
        return {str(entry["name"]) for entry in self.index() if entry.get("state") == "READY"}

    def known(self) -> set[str]:
        """Return the models of the server's repository."""
        return {str(entry["name"]) for entry in self.index()}

    def unload(self, model: str) -> None:
        """Unload a model, and wait until it is unloaded."""
        self.ask_unload(model)
        end = time.monotonic() + self.timeout
        while any(
            version["name"] == model and version.get("state", "") not in ("", "UNAVAILABLE") for version in self.index()
        ):
            if time.monotonic() > end:
                raise self.too_slow(f"unload '{model}'")
            time.sleep(_PAUSE)

    def too_slow(self, what: str) -> ConchError:
        """Return the error for a timeout."""
        return unavailable(f"the server has not answered after {self.timeout:g} s: {what}")

    def refused(self, what: str, reason: str) -> ConchError:
        """Return the error for a refused call."""
        if _NOT_EXPLICIT in reason:
            return unavailable(
                f"the server at {self.where} does not let clients load models:"
                " start it with --model-control-mode=explicit"
            )
        return internal(f"{what}: {reason.rstrip().rstrip(';').rstrip()}")


class HttpControl(ControlClient):
    """Model control over HTTP."""

    def __init__(self, address: Address, timeout: float) -> None:
        super().__init__(address, timeout)
        scheme = "https" if address.encrypted else "http"
        self._base = f"{scheme}://{address.host}:{address.port}/v2/repository"
        self._tls = address.tls()
        self._api = HttpApi(address)

    def config(self, model: str) -> Mapping[str, Any]:
        return self._api.config(model, "")

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        self._post(f"/models/{quote(model, safe='')}/load", body, f"load '{model}'", self.timeout)

    def ask_unload(self, model: str) -> None:
        self._post(f"/models/{quote(model, safe='')}/unload", {}, f"unload '{model}'", self.timeout)

    def index(self) -> Iterable[Mapping[str, Any]]:
        entries: list[Mapping[str, Any]] = self._post("/index", {}, "list the models", _SECONDS)
        return entries

    def _post(self, path: str, body: Mapping[str, Any], what: str, seconds: float) -> Any:
        request = Request(self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=seconds, context=self._tls) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            raise self.refused(what, _message(error)) from None
        except TimeoutError:
            raise self.too_slow(what) from None
        except (OSError, ValueError) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise ServerGone(f"no server answers at {self.where}: {why}") from None


class GrpcControl(ControlClient):
    """Model control over gRPC, with NVIDIA's client."""

    def __init__(self, address: Address, timeout: float) -> None:
        from tritonclient.grpc import InferenceServerClient

        super().__init__(address, timeout)
        self._client = InferenceServerClient(self.where, ssl=address.encrypted)

    def config(self, model: str) -> Mapping[str, Any]:
        ask = self._client.get_model_config
        answer = self._ask(f"read the configuration of '{model}'", ask, model, client_timeout=_SECONDS)
        # In the form of HTTP: protobuf's own JSON has 64-bit numbers as strings, and omits defaults.
        config: Mapping[str, Any] = json.loads(render.to_json(answer.config))
        return config

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        text = None if config is None else json.dumps(config)
        self._ask(f"load '{model}'", self._client.load_model, model, config=text, client_timeout=self.timeout)

    def ask_unload(self, model: str) -> None:
        self._ask(f"unload '{model}'", self._client.unload_model, model, client_timeout=self.timeout)

    def index(self) -> Iterable[Mapping[str, Any]]:
        ask = self._client.get_model_repository_index
        answer = self._ask("list the models", ask, as_json=True, client_timeout=_SECONDS)
        entries: list[Mapping[str, Any]] = answer.get("models", [])
        return entries

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return call(*arguments, **named)
        except InferenceServerException as error:
            status, message = str(error.status()), str(error.message())
            if status.endswith("DEADLINE_EXCEEDED"):
                raise self.too_slow(what) from None
            if status.endswith("UNAVAILABLE") and _NOT_EXPLICIT not in message:
                raise ServerGone(f"no server answers at {self.where}: {message}") from None
            raise self.refused(what, message) from None


def _message(error: HTTPError) -> str:
    """Return the server's reason in the response to a refused request."""
    with error:
        try:
            return str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError, OSError):
            return f"{error.code} {error.reason}"
