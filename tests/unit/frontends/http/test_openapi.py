"""The OpenAPI document has every endpoint, its schemas are those of the readers, and access to it is the usual."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from conch.frontends.api_keys import ApiKeys
from conch.frontends.budget import ByteBudget
from conch.frontends.http.console.routes import Console
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.openapi.document import OPERATIONS, described, openapi_document, paths
from conch.frontends.http.openapi.schemas import SCHEMAS
from conch.frontends.http.routes import Router
from conch.frontends.loop_budget import YieldingLister
from conch.frontends.offloading.offloader import Offloader
from conch.options.triton_values import RESTRICTABLE, Restriction
from conch.wire import endpoints as generation
from conch.wire.openai import sampling
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.retrieval import endpoints as retrieval
from tests.unit.frontends.http.site import WrittenConnection
from tests.unit.frontends.http.test_retrieval import Site
from tests.unit.wire.retrieval import models

_MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
_REFUSED_IN_CHATS = {"audio", "prediction", "verbosity", "web_search_options"}
_IGNORED_BY_ANTHROPIC = {
    "cache_control", "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "metadata",
    "service_tier", "speed", "user_profile_id", "workspace_id",
}  # fmt: skip
_NOT_FOR_TOKENS = {
    "chat_template", "continue_final_message", "function_call", "functions", "mm_processor_kwargs",
    "parallel_tool_calls", "tool_choice",
}  # fmt: skip
#: For each reader: the schema of its requests, a request, and the members that have no effect or are refused.
GENERATION = {
    "chat": ("ChatRequest", _MESSAGES, {*sampling.IGNORED, *_REFUSED_IN_CHATS}),
    "completion": ("CompletionRequest", {"prompt": "x"}, {*sampling.IGNORED}),
    "message": ("MessageRequest", {**_MESSAGES, "max_tokens": 1}, _IGNORED_BY_ANTHROPIC),
    "message_count": ("CountRequest", _MESSAGES, _IGNORED_BY_ANTHROPIC),
}
TOKENIZER = models.signature(
    [*models.EMBEDDER.inputs.values(), models.optional("messages"), models.optional("tokenize_only", "BOOL")],
    [*models.EMBEDDER.outputs.values()],
)
_PAIR = {"query": "x", "documents": ["y"]}
_TEI_PAIR = {"query": "x", "texts": ["y"]}
RETRIEVAL = {
    "embeddings": (
        "EmbeddingsRequest", models.EMBEDDER, [{"model": "m", "input": "x", "user": "u"}], {*sampling.IGNORED},
    ),
    "cohere_embed": ("CohereEmbedRequest", models.EMBEDDER, [{"texts": ["x"]}], {"priority"}),
    "cohere_embed_v1": ("CohereEmbedRequest", models.EMBEDDER, [{"texts": ["x"]}], {"priority"}),
    "cohere_rerank": (
        "RerankRequest", models.RANKER, [_PAIR, _TEI_PAIR],
        {"max_chunks_per_doc", "priority", "return_embeddings", "user"},
    ),
    "tei_rerank": ("TeiRerankRequest", models.RANKER, [_TEI_PAIR], set()),
    "vllm_score": (
        "ScoreRequest", models.RANKER, [{"text_1": "x", "text_2": "y"}, {"queries": "x", "documents": "y"}],
        {*sampling.IGNORED},
    ),
    "vllm_classify": ("ClassifyRequest", models.CLASSIFIER, [{"input": "x"}], {*sampling.IGNORED}),
    "vllm_pooling": ("PoolingRequest", models.EMBEDDER, [{"input": "x"}], {*sampling.IGNORED}),
    "vllm_tokenize": ("TokenizeRequest", TOKENIZER, [{"prompt": "x"}, _MESSAGES, {"inputs": "x"}], _NOT_FOR_TOKENS),
    "tei_embed": ("TeiEmbedRequest", models.EMBEDDER, [{"inputs": "x"}], set()),
    "tei_embed_sparse": ("TeiTextsRequest", models.SPARSE, [{"inputs": "x"}], set()),
    "tei_embed_all": ("TeiTextsRequest", models.MULTI_VECTOR, [{"inputs": "x"}], set()),
    "tei_predict": ("TeiPredictRequest", models.CLASSIFIER, [{"inputs": "x"}], set()),
    "tei_similarity": (
        "TeiSimilarityRequest", models.EMBEDDER, [{"inputs": {"source_sentence": "x", "sentences": ["y"]}}], set(),
    ),
    "tei_tokenize": ("TeiTokenizeRequest", models.EMBEDDER, [{"inputs": "x"}], set()),
}  # fmt: skip


class Taken(Fields):
    """Remembers which members a reader asks for."""

    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__(members)
        self.members: set[str] = set()

    def take(self, member: str) -> Any:
        self.members.add(member)
        return super().take(member)

    def has(self, member: str) -> bool:
        self.members.add(member)
        return super().has(member)


@pytest.fixture
def site() -> Site:
    return Site(offloader())


def offloader() -> Offloader:
    return Offloader(1 << 30, 30, ByteBudget(1 << 30))


def router_of(site: Site, keys: ApiKeys = ApiKeys.read("", {})) -> Router:  # noqa: B008
    """Return the router of a server with a console."""
    console = Console(SimpleNamespace(overview=None), YieldingLister(), keys)  # type: ignore[arg-type]
    return Router(site, offloader(), YieldingLister(), keys=keys, further=console.endpoints)  # type: ignore[arg-type]


def document(router: Router) -> dict[str, Any]:
    return openapi_document(router.endpoints, keyless="*", restrictions={})


def test_every_endpoint_has_an_operation_and_every_operation_an_endpoint(site: Site) -> None:
    router = router_of(site)
    methods = {
        (method.decode(), paths(endpoint.pattern)[0]) for endpoint in router.endpoints for method in endpoint.handlers
    }
    assert methods - {("GET", "/console"), ("GET", "/console/{file}")} == OPERATIONS.keys()


def test_paths_of_the_document_are_those_of_the_router(site: Site) -> None:
    router = router_of(site)
    for _, method, path, _ in described(router.endpoints):
        asked = re.sub(r"\{version\}", "1", re.sub(r"\{(?!version)\w+\}", "x", path))
        assert method.encode() in router.methods(asked.encode()), path


def test_document_is_valid(site: Site) -> None:
    whole = document(router_of(site))
    OpenAPIV31SpecValidator(whole).validate()
    assert whole["components"]["schemas"].keys() == SCHEMAS.keys()


def test_a_port_for_openai_alone_describes_what_it_has(site: Site) -> None:
    whole = document(Router(site, offloader(), YieldingLister(), openai_only=True))  # type: ignore[arg-type]
    assert "/v1/chat/completions" in whole["paths"]
    assert not any(path.endswith("/infer") for path in whole["paths"])


def test_examples_are_as_their_schemas_say() -> None:
    examples = [(name, example) for name, schema in SCHEMAS.items() for example in schema.get("examples", ())]
    assert len(examples) > 5
    for name, example in examples:
        root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": dict(SCHEMAS)}}
        Draft202012Validator(root).validate(example)


@pytest.mark.parametrize("endpoint", GENERATION)
def test_members_of_requests_for_texts_are_those_that_are_read(endpoint: str) -> None:
    schema, body, others = GENERATION[endpoint]
    fields = Taken(dict(body))
    generation.ENDPOINTS[endpoint].read(fields)
    assert fields.members | {"model"} == SCHEMAS[schema]["properties"].keys() | others


@pytest.mark.parametrize("endpoint", RETRIEVAL)
def test_members_of_requests_for_retrieval_are_those_that_are_read(endpoint: str) -> None:
    schema, model, bodies, others = RETRIEVAL[endpoint]
    members = set()
    for body in bodies:
        fields = Taken(dict(body))
        retrieval.decode(fields, endpoint, "m", lambda _: model)
        members |= fields.members
    shown = SCHEMAS[schema]["properties"].keys()
    assert shown - members - {"model"} == set()
    assert members - shown - others == set()


def test_a_documented_range_is_the_one_that_is_checked() -> None:
    for name, schema in SCHEMAS["ChatRequest"]["properties"].items():
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in schema and name in ("temperature", "top_p", "presence_penalty", "top_logprobs"):
                with pytest.raises(ApiError, match=name):
                    generation.ENDPOINTS["chat"].read(Fields({**_MESSAGES, name: schema[bound] + step}))


def test_document_says_what_restricted_apis_and_keys_demand(site: Site) -> None:
    whole = openapi_document(
        router_of(site).endpoints, keyless=("health", "public"), restrictions={"model-repository": "admin-key"}
    )
    load = whole["paths"]["/v2/repository/models/{name}/load"]["post"]
    assert load["security"] == [
        {"restricted-model-repository": [], "bearer": []}, {"restricted-model-repository": [], "x-api-key": []},
    ]  # fmt: skip
    assert whole["components"]["securitySchemes"]["restricted-model-repository"]["name"] == "admin-key"
    assert "security" not in whole["paths"]["/v2/health/ready"]["get"]
    OpenAPIV31SpecValidator(whole).validate()


def test_document_needs_a_key_and_the_page_that_shows_it_does_not(site: Site, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one=secret-of-sixteen-characters\n")
    site.router = router_of(site, ApiKeys.read(str(keys), {}))
    assert site.ask("/openapi.json")[0] == 401
    status, whole = site.ask("/openapi.json", headers={b"authorization": b"Bearer secret-of-sixteen-characters"})
    assert (status, whole["openapi"]) == (200, "3.1.0")
    assert whole["paths"]["/v2"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    site.connection.written = b""
    site.open("/docs")
    assert site.connection.written.startswith(b"HTTP/1.1 200")


def test_every_route_but_public_pages_belongs_to_an_api_that_can_be_restricted() -> None:
    site = Site(offloader(), http_restricted_api=(Restriction(RESTRICTABLE, "admin", "x"),))
    site.router = router_of(site)
    public = {endpoint.pattern for endpoint in site.router.endpoints if endpoint.api not in RESTRICTABLE}
    assert public == {"/console", r"/console/(?P<file>[a-z0-9A-Z_./-]*)", "/docs"}
    routes = [(endpoint, method) for endpoint in site.router.endpoints for method in endpoint.handlers]
    for endpoint, method in routes:
        for path in paths(endpoint.pattern):
            example = re.sub(r"\{version\}", "1", re.sub(r"\{(?!version)\w+\}", "x", path)).encode()
            statuses = []
            for headers in ({}, {b"admin": b"y"}, {b"admin": b"x"}):
                exchange = HttpExchange(site.connection, method, example, headers, True)  # type: ignore[arg-type]
                site.router.open(exchange)
                statuses.append(exchange.refusal and exchange.refusal[1])
            refused = None if endpoint.pattern in public else endpoint.dialect.denied
            assert statuses == [refused, refused, None], (method, path)


def test_document_is_restricted_as_metadata() -> None:
    site = Site(offloader(), http_restricted_api=(Restriction(("metadata",), "admin", "x"),))
    assert site.ask("/openapi.json")[0] in (401, 403)
    assert site.ask("/openapi.json", headers={b"admin": b"x"})[0] == 200


def test_page_loads_nothing_and_its_policy_allows_only_its_own_script(site: Site) -> None:
    site.connection = WrittenConnection()
    site.open("/docs")
    head, _, body = site.connection.written.partition(b"\r\n\r\n")
    script = re.search(rb"<script>(.*?)</script>", body, re.DOTALL)
    assert script is not None
    assert b"script-src 'sha256-%b'" % b64encode(sha256(script[1]).digest()) in head
    assert b"default-src 'none'" in head
    assert not re.search(rb"(?:src|href)=[\"']?https?:|innerHTML|eval\(", body)


def test_other_methods_and_paths_are_not_found(site: Site) -> None:
    assert site.ask("/openapi.json", {})[0] == 404
    assert site.ask("/docs/x")[0] == 404
