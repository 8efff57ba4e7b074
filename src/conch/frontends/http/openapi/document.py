"""Builds the OpenAPI document from the endpoints of a port, and serves it with the page that shows it.

``OPERATIONS`` describes the endpoints; a test requires an entry for every endpoint.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, NamedTuple, Protocol

import orjson

from conch import __version__
from conch.frontends.http.dialects import ANTHROPIC, COHERE, KSERVE, OPENAI, TEI, Dialect
from conch.frontends.http.exchange import JSON, HttpExchange
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


class Operation(NamedTuple):
    """A method of an endpoint: its group, a summary, and the names of the schemas of its bodies, if it has any.

    ``streams``: the response may be a stream of events. ``optional``: the request may have no body. ``form``: the body
    is a form, not JSON.
    """

    group: str
    summary: str
    request: str = ""
    response: str = ""
    streams: bool = False
    optional: bool = False
    form: bool = False


_HEALTH, _INFER, _MODELS = "Health and metadata", "Inference", "Model repository"
_SETTINGS, _REGIONS = "Logging and tracing", "Shared memory"
_OPENAI, _ANTHROPIC, _SPEECH = "OpenAI", "Anthropic", "Speech"
_CONSOLE: Final = "Console (may change between versions)"
_EMBED, _RANK, _TOKENS = "Embeddings", "Ranking and classification", "Tokenizer"

#: The operations of TEI below a model, by the name of the path.
_BELOW_MODELS: Final = {
    "embed": Operation(_EMBED, "Embed texts (TEI)", "TeiEmbedRequest", "Vectors"),
    "embed_sparse": Operation(_EMBED, "Return sparse vectors (TEI)", "TeiTextsRequest", "SparseVectors"),
    "embed_all": Operation(_EMBED, "Return token vectors (TEI)", "TeiTextsRequest", "TokenVectors"),
    "rerank": Operation(_RANK, "Rank texts (TEI)", "TeiRerankRequest", "Scores"),
    "predict": Operation(_RANK, "Classify texts (TEI)", "TeiPredictRequest", "Classes"),
    "similarity": Operation(_EMBED, "Compare texts (TEI)", "TeiSimilarityRequest", "Similarities"),
    "tokenize": Operation(_TOKENS, "Return the tokens of texts (TEI)", "TeiTokenizeRequest", "Tokens"),
    "decode": Operation(_TOKENS, "Return the texts of token ids (TEI)", "TeiDecodeRequest", "Texts"),
}
#: By method and the path of the endpoint without its optional parts.
OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("GET", "/v2"): Operation(_HEALTH, "Describe the server", "", "ServerMetadata"),
    ("GET", "/v2/health/live"): Operation(_HEALTH, "Whether the server runs"),
    ("GET", "/v2/health/ready"): Operation(_HEALTH, "Whether the server and its models are ready"),
    ("GET", "/health/ready"): Operation(_HEALTH, "The same, at the path of Triton's OpenAI front end"),
    ("GET", "/health"): Operation(_HEALTH, "The same; 503 while the server is not ready"),
    ("GET", "/version"): Operation(_HEALTH, "Return the version of conch", "", "Version"),
    ("GET", "/v2/models/{model}"): Operation(_HEALTH, "Describe a model and its tensors", "", "ModelMetadata"),
    ("GET", "/v2/models/{model}/ready"): Operation(_HEALTH, "Whether a model is ready"),
    ("GET", "/v2/models/{model}/config"): Operation(_HEALTH, "Return the configuration of a model", "", "ModelConfig"),
    ("GET", "/v2/models/{model}/stats"): Operation(_HEALTH, "Return the statistics of a model", "", "Statistics"),
    ("GET", "/v2/models/stats"): Operation(_HEALTH, "Return the statistics of all models", "", "Statistics"),
    ("POST", "/v2/models/{model}/infer"): Operation(
        _INFER, "Run a model on tensors, as JSON or as binary data after the JSON", "InferRequest", "InferResponse"
    ),
    ("POST", "/v2/models/{model}/generate"): Operation(
        _INFER, "Run a model on plain JSON", "GenerateRequest", "GenerateResponse"
    ),
    ("POST", "/v2/models/{model}/generate_stream"): Operation(
        _INFER, "Run a model on plain JSON, with a stream of responses", "GenerateRequest", "GenerateResponse",
        streams=True,
    ),
    ("POST", "/v2/repository/index"): Operation(
        _MODELS, "List all models with their states", "IndexRequest", "Index", optional=True
    ),
    ("POST", "/v2/repository/models/{name}/load"): Operation(
        _MODELS, "Load or reload a model", "LoadRequest", optional=True
    ),
    ("POST", "/v2/repository/models/{name}/unload"): Operation(
        _MODELS, "Unload a model", "UnloadRequest", optional=True
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(_MODELS, "Load a LoRA adapter, as vLLM does", "LoadAdapter"),
    ("POST", "/v1/unload_lora_adapter"): Operation(_MODELS, "Unload a LoRA adapter", "UnloadAdapter"),
    ("GET", "/v2/logging"): Operation(_SETTINGS, "Return the settings of the log", "", "LogSettings"),
    ("POST", "/v2/logging"): Operation(_SETTINGS, "Change the settings of the log", "LogSettings", "LogSettings"),
    ("GET", "/v2/trace/setting"): Operation(_SETTINGS, "Return the trace settings of the server", "", "TraceSetting"),
    ("POST", "/v2/trace/setting"): Operation(
        _SETTINGS, "Change the trace settings of the server", "TraceSetting", "TraceSetting"
    ),
    ("GET", "/v2/models/{model}/trace/setting"): Operation(
        _SETTINGS, "Return the trace settings of a model", "", "TraceSetting"
    ),
    ("POST", "/v2/models/{model}/trace/setting"): Operation(
        _SETTINGS, "Change the trace settings of a model", "TraceSetting", "TraceSetting"
    ),
    ("GET", "/v2/systemsharedmemory/status"): Operation(_REGIONS, "List the regions of shared memory", "", "Regions"),
    ("POST", "/v2/systemsharedmemory/register"): Operation(_REGIONS, "Register a region", "SystemRegion"),
    ("POST", "/v2/systemsharedmemory/unregister"): Operation(_REGIONS, "Unregister a region, or all"),
    ("GET", "/v2/cudasharedmemory/status"): Operation(_REGIONS, "List the regions of CUDA memory", "", "Regions"),
    ("POST", "/v2/cudasharedmemory/register"): Operation(_REGIONS, "Register CUDA memory", "CudaRegion"),
    ("POST", "/v2/cudasharedmemory/unregister"): Operation(_REGIONS, "Unregister CUDA memory, or all"),
    ("GET", "/v1/models"): Operation(_OPENAI, "List the models that OpenAI's clients can use", "", "Models"),
    ("GET", "/v1/models/{id}"): Operation(_OPENAI, "Describe one of them", "", "Model"),
    ("POST", "/v1/chat/completions"): Operation(_OPENAI, "Chat", "ChatRequest", "ChatResponse", streams=True),
    ("POST", "/v1/completions"): Operation(
        _OPENAI, "Complete a prompt", "CompletionRequest", "CompletionResponse", streams=True
    ),
    ("POST", "/v1/responses"): Operation(_OPENAI, "Create a response", "ResponsesRequest", "Response", streams=True),
    ("GET", "/v1/responses/{id}"): Operation(_OPENAI, "Return a stored response", "", "Response"),
    ("DELETE", "/v1/responses/{id}"): Operation(_OPENAI, "Delete a stored response", "", "Deleted"),
    ("GET", "/v1/responses/{id}/input_items"): Operation(_OPENAI, "List the input of a stored response", "", "Items"),
    ("POST", "/v1/messages"): Operation(_ANTHROPIC, "Create a message", "MessageRequest", "Message", streams=True),
    ("POST", "/v1/messages/count_tokens"): Operation(
        _ANTHROPIC, "Count the tokens of a message", "CountRequest", "Count"
    ),
    ("POST", "/v1/audio/transcriptions"): Operation(
        _SPEECH, "Transcribe a recording", "TranscriptionForm", "Transcription", streams=True, form=True
    ),
    ("POST", "/v1/audio/translations"): Operation(
        _SPEECH, "Translate a recording into English", "TranscriptionForm", "Transcription", form=True
    ),
    ("POST", "/v1/embeddings"): Operation(_EMBED, "Embed texts (OpenAI)", "EmbeddingsRequest", "EmbeddingsResponse"),
    ("POST", "/v2/embed"): Operation(
        _EMBED, "Embed texts or images (Cohere)", "CohereEmbedRequest", "CohereEmbedResponse"
    ),
    ("POST", "/v1/embed"): Operation(
        _EMBED, "Embed texts or images (Cohere, older)", "CohereEmbedRequest", "CohereEmbedResponse"
    ),
    ("POST", "/pooling"): Operation(_EMBED, "Return the model's output (vLLM)", "PoolingRequest", "PoolingResponse"),
    **{("POST", f"/{name}"): _BELOW_MODELS[name] for name in _BELOW_MODELS if name not in ("rerank", "tokenize")},
    **{("POST", f"/v2/models/{{model}}/{name}"): operation for name, operation in _BELOW_MODELS.items()},
    ("POST", "/"): Operation(_EMBED, "Do what the only model is for (TEI)", "TeiRequest", "Any"),
    ("POST", "/rerank"): Operation(_RANK, "Rank documents (Cohere, Jina, TEI)", "RerankRequest", "RerankResponse"),
    ("POST", "/v2/rerank"): Operation(_RANK, "Rank documents (Cohere)", "RerankRequest", "RerankResponse"),
    ("POST", "/score"): Operation(_RANK, "Score pairs of texts (vLLM)", "ScoreRequest", "PoolingResponse"),
    ("POST", "/classify"): Operation(_RANK, "Classify texts (vLLM)", "ClassifyRequest", "PoolingResponse"),
    ("POST", "/tokenize"): Operation(
        _TOKENS, "Return the tokens of a text or a chat (vLLM, TEI)", "TokenizeRequest", "TokenizeResponse"
    ),
    ("POST", "/detokenize"): Operation(
        _TOKENS, "Return the text of token ids (vLLM)", "DetokenizeRequest", "DetokenizeResponse"
    ),
    ("GET", "/info"): Operation(_HEALTH, "Describe a model for retrieval (TEI)", "", "Info"),
    ("GET", "/openapi.json"): Operation(_HEALTH, "Return this document", "", "Any"),
    ("GET", "/docs"): Operation(_HEALTH, "Show this document as a page"),
    ("GET", "/console/events"): Operation(_CONSOLE, "Return the overview, as a stream of events", streams=True),
    ("GET", "/console/models/{model}"): Operation(_CONSOLE, "Return a model's configuration and verdict", "", "Any"),
    ("GET", "/console/models/{model}/statistics"): Operation(
        _CONSOLE, "Return a model's statistics, workers and times of steps", "", "Any"
    ),
    ("GET", "/console/models/{model}/log"): Operation(_CONSOLE, "Return the last log lines about a model", "", "Any"),
}  # fmt: skip
