"""Builds the OpenAPI document from the endpoints of a port, and serves it with the page that shows it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, Protocol

import orjson

from conch import __version__
from conch.frontends.http.dialects import ANTHROPIC, COHERE, KSERVE, OPENAI, TEI, Dialect
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.openapi.operations import OPERATIONS, Operation
from conch.frontends.http.openapi.schemas import SCHEMAS, Schema, reference

_ERRORS: Final[Mapping[Dialect, str]] = {
    KSERVE: "Error", OPENAI: "OpenAiError", ANTHROPIC: "AnthropicError", COHERE: "CohereError", TEI: "TeiError",
}  # fmt: skip
#: The names of parameters in paths, where those of the patterns are not for readers.
_PARAMETERS: Final = {"traced": "model"}
_HTML: Final = (b"Content-Type", b"text/html; charset=utf-8")
_REFERENCE: Final = re.compile(r"#/components/schemas/(\w+)")


class DescribedEndpoint(Protocol):
    """The parts of an endpoint that the document shows; see :class:`conch.frontends.http.routes.HttpEndpoint`."""

    @property
    def pattern(self) -> str: ...

    @property
    def api(self) -> str: ...

    @property
    def handlers(self) -> Mapping[bytes, Callable[..., None]]: ...

    @property
    def binary(self) -> bool: ...

    @property
    def dialect(self) -> Dialect: ...


def paths(pattern: str) -> list[str]:
    """Return the path templates of an endpoint's pattern, first the one without its optional parts."""
    templates = [""]
    at = 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "(":
            end = _end_of_group(pattern, at)
            inner = pattern[at + 1 : end - 1]
            if named := re.match(r"\?P<(\w+)>", inner):
                parts = [f"{{{_PARAMETERS.get(named[1], named[1])}}}"]
            else:
                parts = [path for choice in _choices(inner.removeprefix("?:")) for path in paths(choice)]
        elif pattern.startswith("[^/]+", at):
            end, parts = at + 5, ["{repository}"]
        elif pattern[at] == "\\":
            end, parts = at + 2, [pattern[at + 1]]
        else:
            parts = [pattern[at]]
        if pattern[end : end + 1] == "?":
            end, parts = end + 1, ["", *parts]
        templates = [before + part for before in templates for part in parts]
        at = end
    return templates


def _end_of_group(pattern: str, start: int) -> int:
    depth = 0
    for at in range(start, len(pattern)):
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError(pattern)


def _choices(inner: str) -> list[str]:
    """Split the alternatives of a group without groups inside; others have one."""
    return inner.split("|") if "(" not in inner else [inner]


def described(endpoints: Iterable[DescribedEndpoint]) -> Iterator[tuple[DescribedEndpoint, str, str, Operation]]:
    """Yield every method of every path: its endpoint, the method, the path, and what it does."""
    for endpoint in endpoints:
        templates = paths(endpoint.pattern)
        for method in endpoint.handlers:
            operation = OPERATIONS.get((method.decode(), templates[0]))
            if operation is not None:
                for path in templates:
                    yield endpoint, method.decode(), path, operation


def openapi_document(
    endpoints: Iterable[DescribedEndpoint], *, keyless: Collection[str], restrictions: Mapping[str, str]
) -> dict[str, Any]:
    """Return the document of the ``endpoints``.

    Requests to other APIs than the ``keyless`` ones need an API key; all are keyless without keys (``*``).
    ``restrictions`` has the header that a restricted API demands, by the API's name.
    """
    operations: dict[str, dict[str, Any]] = {}
    schemes: dict[str, Schema] = {}
    groups: dict[str, None] = {}
    for endpoint, method, path, operation in described(endpoints):
        entry = _operation(endpoint, method, path, operation)
        if security := _security(endpoint.api, keyless, restrictions, schemes):
            entry["security"] = security
        operations.setdefault(path, {})[method.lower()] = entry
        groups[operation.group] = None
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "conch",
            "version": __version__,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "description": "The HTTP API of this server: KServe's v2 protocol with Triton's extensions, and the APIs of"
            " OpenAI, Anthropic, Cohere, Jina, text-embeddings-inference and vLLM.",
        },
        "tags": [{"name": group} for group in groups],
        "paths": operations,
    }
    components = {"schemas": _used_schemas(document), "securitySchemes": schemes}
    return {**document, "components": components}


def _operation(endpoint: DescribedEndpoint, method: str, path: str, operation: Operation) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "tags": [operation.group],
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
    }
    if parameters := list(_path_parameters(path)):
        entry["parameters"] = parameters
    if operation.request:
        kind = "multipart/form-data" if operation.form else "application/json"
        content: dict[str, Any] = {kind: {"schema": reference(operation.request)}}
        if endpoint.binary:
            content["application/octet-stream"] = {
                "schema": {"description": "JSON, followed by binary tensors"},
            }
            entry.setdefault("parameters", []).append(
                {
                    "name": "Inference-Header-Content-Length", "in": "header", "schema": {"type": "integer"},
                    "description": "the size of the JSON (bytes), if binary tensors follow it",
                }
            )  # fmt: skip
        entry["requestBody"] = {"required": not operation.optional, "content": content}
    success: dict[str, Any] = {"description": "Success"}
    kinds = ["application/json"] if operation.response else []
    kinds += ["text/event-stream"] if operation.streams else []
    kinds += ["text/plain", "text/vtt"] if operation.form else []
    if kinds:
        schemas = {"application/json": reference(operation.response)} if operation.response else {}
        success["content"] = {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in kinds}
    error = {"schema": reference(_ERRORS[endpoint.dialect])}
    entry["responses"] = {
        "200": success,
        "default": {"description": "An error", "content": {"application/json": error}},
    }
    return entry


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", path):
        schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string"}
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _security(
    api: str, keyless: Collection[str], restrictions: Mapping[str, str], schemes: dict[str, Schema]
) -> list[dict[str, Sequence[str]]]:
    """Return what a request to an API needs, as alternatives, and add the schemes that they name."""
    needed: dict[str, Sequence[str]] = {}
    if api in restrictions:
        name = f"restricted-{api}"
        schemes[name] = {"type": "apiKey", "in": "header", "name": restrictions[api]}
        needed[name] = []
    if api in keyless or "*" in keyless:
        return [needed] if needed else []
    schemes["bearer"] = {"type": "http", "scheme": "bearer", "description": "an API key of this server"}
    schemes["x-api-key"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "the same key"}
    return [{**needed, "bearer": []}, {**needed, "x-api-key": []}]


def _used_schemas(document: Mapping[str, Any]) -> dict[str, Schema]:
    """Return the schemas that are referred to, directly or by others."""
    used: dict[str, Schema] = {}
    waiting = _REFERENCE.findall(orjson.dumps(document).decode())
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = SCHEMAS[name]
            waiting += _REFERENCE.findall(orjson.dumps(used[name]).decode())
    return dict(sorted(used.items()))


class ApiPages:
    """The handlers of ``/openapi.json`` and ``/docs``; the document is built when it is first requested."""

    def __init__(
        self, endpoints: Sequence[DescribedEndpoint], *, keyless: Collection[str], restrictions: Mapping[str, str]
    ) -> None:
        self._endpoints = endpoints
        self._keyless = keyless
        self._restrictions = restrictions
        self._document = b""

    def document(self, exchange: HttpExchange) -> None:
        """Handle ``GET /openapi.json``."""
        if not self._document:
            self._document = orjson.dumps(
                openapi_document(self._endpoints, keyless=self._keyless, restrictions=self._restrictions)
            )
        exchange.respond(200, [JSON], self._document)

    def page(self, exchange: HttpExchange) -> None:
        """Handle ``GET /docs``: a page that fetches the document and nothing else."""
        page = files("conch.frontends.http.openapi").joinpath("page.html").read_bytes()
        script, style = (_hash_of(page, tag) for tag in (b"script", b"style"))
        policy = b"default-src 'none'; connect-src 'self'; script-src %b; style-src %b; base-uri 'none'" % (
            script,
            style,
        )
        policy += b"; form-action 'none'; frame-ancestors 'none'"
        headers = [_HTML, (b"Content-Security-Policy", policy), (b"X-Content-Type-Options", b"nosniff")]
        exchange.respond(200, headers, page)


def _hash_of(page: bytes, tag: bytes) -> bytes:
    """Return the source expression that allows the only element ``tag`` of the page."""
    text = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
    return b"'sha256-%b'" % b64encode(sha256(text).digest())
