"""Reads metadata, configurations and statistics from the server, over the measured protocol.

Called before and after windows, never while the same process times requests.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from conch.errors import Code, ConchError, internal, invalid, not_found, unavailable, unsupported
from conch.perf.senders.channels.connecting import Address

_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 3.0


def check_listens(address: Address) -> None:
    """Raise UNAVAILABLE unless the address accepts connections."""
    try:
        socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        raise unavailable(f"no server answers at {address.shown}: {error}") from None


class ServerApi(Protocol):
    """The server's metadata, configurations and statistics, as in the JSON of the HTTP protocol."""

    def server(self) -> Mapping[str, Any]:
        """Return ``name``, ``version`` and ``extensions`` of the server; raises UNAVAILABLE if it cannot be reached."""

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        """Return the inputs and outputs of a model; raises NOT_FOUND if the server does not serve it."""

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """Return the configuration of a model; empty if the server does not provide it."""

    def statistics(self, model: str, version: str) -> list[Mapping[str, Any]]:
        """Return ``model_stats`` of the model's versions, or of all models; empty if the server has no statistics."""

    def register_memory(self, region: str, key: str, size: int) -> None:
        """Register system shared memory of ``size`` bytes under ``key``."""

    def unregister_memory(self, region: str) -> None:
        """Unregister a region."""


class HttpApi:
    """The API over HTTP."""

    def __init__(self, address: Address, prefix: str = "", headers: Mapping[str, str] | None = None) -> None:
        scheme = "https" if address.encrypted else "http"
        self._base = f"{scheme}://{address.shown}{prefix}"
        self._headers = {"Accept": "application/json", **(headers or {})}
        self._tls: ssl.SSLContext | None = address.tls()

    def server(self) -> Mapping[str, Any]:
        return self._get("/v2")

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        path = _path(model, version)
        metadata = self._get(path)
        if "name" not in metadata:  # a web server that returns the same page for every path
            raise internal(f"{self._base}{path} describes no model: is this a server of the KServe protocol?")
        return metadata

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        return self._optional(f"{_path(model, version)}/config")

    def statistics(self, model: str, version: str) -> list[Mapping[str, Any]]:
        path = f"{_path(model, version)}/stats" if model else "/v2/models/stats"
        statistics: list[Mapping[str, Any]] = self._optional(path).get("model_stats", [])
        return statistics

    def register_memory(self, region: str, key: str, size: int) -> None:
        self._post(f"{_region(region)}/register", {"key": key, "offset": 0, "byte_size": size})

    def unregister_memory(self, region: str) -> None:
        self._post(f"{_region(region)}/unregister", {})

    def _optional(self, path: str) -> Mapping[str, Any]:
        try:
            return self._get(path)
        except ConchError as error:
            if error.code is Code.NOT_FOUND:
                return {}
            raise

    def _get(self, path: str) -> Mapping[str, Any]:
        url = self._base + path
        document: Mapping[str, Any] = self._ask(url)
        if not isinstance(document, dict):
            raise internal(f"{url} answers with no object, as a server of the KServe protocol would")
        return document

    def _post(self, path: str, document: Mapping[str, Any]) -> None:
        self._ask(self._base + path, json.dumps(document).encode())

    def _ask(self, url: str, posted: bytes | None = None) -> Any:
        try:
            request = Request(url, posted, self._headers)
            with urlopen(request, timeout=_SECONDS, context=self._tls) as answer:
                body = answer.read()
                return json.loads(body) if body else {}
        except HTTPError as error:
            message, status = _message(error), f"{error.code} {error.reason}"
            # Triton responds with 400 for an unknown model.
            if error.code in (400, 404):
                raise not_found(message or f"{url}: {status}") from None
            raise internal(f"{url}: {message or status}") from None
        except UnicodeEncodeError as error:
            raise invalid(f"{self._base}: {error}") from None
        except (OSError, ValueError, HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            shown = " ".join(str(why).split()) or type(error).__name__
            raise unavailable(f"no server answers at {self._base}: {shown}") from None


class GrpcApi:
    """The API over gRPC, with NVIDIA's client."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        from tritonclient.grpc import InferenceServerClient

        self._where = address.shown
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        address.tls()  # reports unusable files, which gRPC does not
        self._client = InferenceServerClient(
            self._where, ssl=address.encrypted, root_certificates=address.authorities or None,
            private_key=address.key or None, certificate_chain=address.certificate or None,
        )  # fmt: skip

    def __enter__(self) -> GrpcApi:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

    def server(self) -> Mapping[str, Any]:
        return self._ask(self._client.get_server_metadata)

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        return self._ask(self._client.get_model_metadata, model, version)

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self._optional(self._client.get_model_config, model, version).get("config", {})
        return config

    def statistics(self, model: str, version: str) -> list[Mapping[str, Any]]:
        statistics: list[Mapping[str, Any]] = self._optional(self._client.get_inference_statistics, model, version).get(
            "model_stats", []
        )
        return statistics

    def register_memory(self, region: str, key: str, size: int) -> None:
        self._call(self._client.register_system_shared_memory, region, key, size)

    def unregister_memory(self, region: str) -> None:
        self._call(self._client.unregister_system_shared_memory, region)

    def _optional(self, call: Any, *arguments: str) -> Mapping[str, Any]:
        """Return the response of an extension; empty if the server does not implement it."""
        try:
            return self._ask(call, *arguments)
        except ConchError as error:
            if error.code is Code.UNSUPPORTED:
                return {}
            raise

    def _ask(self, call: Any, *arguments: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._call(call, *arguments, as_json=True)
        return answer

    def _call(self, call: Any, *arguments: Any, **options: Any) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return call(*arguments, **options, headers=self._headers, client_timeout=_SECONDS)
        except InferenceServerException as error:
            status = str(error.status())
            if status.endswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")):
                raise unavailable(f"no server answers at {self._where}: {error.message()}") from None
            if status.endswith(("NOT_FOUND", "INVALID_ARGUMENT")):
                raise not_found(str(error.message())) from None
            if status.endswith("UNIMPLEMENTED"):
                raise unsupported(f"{self._where}: {error.message()}") from None
            raise internal(f"{self._where}: {error.message()}") from None


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _region(name: str) -> str:
    return f"/v2/systemsharedmemory/region/{name}"


def _message(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (OSError, ValueError, HTTPException, KeyError, TypeError):
        return ""
