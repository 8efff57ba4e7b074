"""The endpoints of retrieval: the models that each accepts, and the reader of its requests.

A path may be that of several APIs, which the body tells apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from conch.core.inference import ModelSignature
from conch.wire.openai.reading import Fields
from conch.wire.retrieval import cohere, openai, tei, vllm
from conch.wire.retrieval.models import ROUTES, TEI_ROUTES, Kind, require
from conch.wire.retrieval.plans import DecodedRequest, RetrievalPlan

#: The APIs, which differ in their errors.
OPENAI: Final = "openai"
COHERE: Final = "cohere"
TEI: Final = "tei"


class RetrievalEndpoint(NamedTuple):
    """The ``kinds`` of models that an endpoint accepts, its ``api``, and ``read``, which raises ApiError.

    Models of ``other_kinds`` serve requests that name them, or if there is no model of ``kinds``.
    """

    api: str
    kinds: tuple[Kind, ...]
    read: Callable[[Fields, ModelSignature], DecodedRequest]
    needs_model: bool = False
    other_kinds: tuple[Kind, ...] = ()

    def decode(self, fields: Fields, signature: ModelSignature) -> DecodedRequest:
        """Read a request to a model. Raises ApiError, UNSUPPORTED for a model of another kind."""
        require(signature, self.kinds + self.other_kinds, TEI_ROUTES if self.api == TEI else ROUTES)
        return self.read(fields, signature)


ENDPOINTS: Final[Mapping[str, RetrievalEndpoint]] = {
    "embeddings": RetrievalEndpoint(OPENAI, (Kind.DENSE,), openai.read_embeddings, needs_model=True),
    "cohere_embed": RetrievalEndpoint(COHERE, (Kind.DENSE,), partial(cohere.read_embed, version="2")),
    "cohere_embed_v1": RetrievalEndpoint(COHERE, (Kind.DENSE,), partial(cohere.read_embed, version="1")),
    "cohere_rerank": RetrievalEndpoint(
        COHERE, (Kind.RANKER,), partial(cohere.read_rerank, shows=True), other_kinds=(Kind.MULTI_VECTOR,)
    ),
    "cohere_rerank_v2": RetrievalEndpoint(
        COHERE, (Kind.RANKER,), partial(cohere.read_rerank, shows=False), other_kinds=(Kind.MULTI_VECTOR,)
    ),
    "vllm_score": RetrievalEndpoint(
        OPENAI, (Kind.RANKER, Kind.DENSE), vllm.read_score, other_kinds=(Kind.MULTI_VECTOR,)
    ),
    "vllm_classify": RetrievalEndpoint(OPENAI, (Kind.CLASSIFIER,), vllm.read_classify),
    "vllm_pooling": RetrievalEndpoint(OPENAI, (Kind.DENSE, Kind.MULTI_VECTOR, Kind.CLASSIFIER), vllm.read_pooling),
    "vllm_tokenize": RetrievalEndpoint(OPENAI, (Kind.TOKENIZER,), vllm.read_tokenize),
    "vllm_detokenize": RetrievalEndpoint(OPENAI, (Kind.TOKENIZER,), vllm.read_detokenize),
    "tei_embed": RetrievalEndpoint(TEI, (Kind.DENSE,), tei.read_embed),
    "tei_embed_sparse": RetrievalEndpoint(TEI, (Kind.SPARSE,), tei.read_embed_sparse),
    "tei_embed_all": RetrievalEndpoint(
        TEI, (Kind.MULTI_VECTOR,), tei.read_embed_all, other_kinds=(Kind.TOKEN_VECTORS,)
    ),
    "tei_rerank": RetrievalEndpoint(TEI, (Kind.RANKER,), tei.read_rerank),
    "tei_predict": RetrievalEndpoint(TEI, (Kind.CLASSIFIER,), tei.read_predict),
    "tei_similarity": RetrievalEndpoint(TEI, (Kind.DENSE,), tei.read_similarity),
    "tei_root": RetrievalEndpoint(
        TEI, (Kind.DENSE, Kind.SPARSE, Kind.MULTI_VECTOR, Kind.RANKER, Kind.CLASSIFIER), tei.read_root
    ),
    "tei_tokenize": RetrievalEndpoint(TEI, (Kind.TOKENIZER,), tei.read_tokenize),
    "tei_decode": RetrievalEndpoint(TEI, (Kind.TOKENIZER,), tei.read_decode),
}

#: For paths of several APIs: the member that only the other API has, and its endpoint.
_OTHERS: Final = {"cohere_rerank": ("texts", "tei_rerank"), "vllm_tokenize": ("inputs", "tei_tokenize")}

#: The classes of plans, which offloading processes return.
PLANS: Final[tuple[type[RetrievalPlan], ...]] = (
    openai.EmbeddingsPlan, cohere.CohereEmbedPlan, cohere.CohereRerankPlan, vllm.ScoresPlan, vllm.ClassesPlan,
    vllm.PoolingPlan, vllm.TokensPlan, vllm.DetokenizePlan, tei.EmbedPlan, tei.SparsePlan,
    tei.EmbedAllPlan, tei.RerankPlan, tei.PredictPlan,
    tei.SimilarityPlan, tei.TokenizePlan, tei.DecodePlan,
)  # fmt: skip


def decode(
    fields: Fields, endpoint: str, model: str, signature_of: Callable[[list[str]], ModelSignature]
) -> DecodedRequest:
    """Decode a request to an endpoint, or to the other API of its path.

    ``model`` is the name in the path; without one, the body may name the model. ``signature_of`` is called with the
    endpoint and the name, which is empty if the request names no model; its errors refuse the request.
    """
    member, other = _OTHERS.get(endpoint, ("", ""))
    if member and fields.has(member):
        endpoint = other
    chosen = ENDPOINTS[endpoint]
    named = fields.required_text("model") if chosen.needs_model else fields.text("model")
    signature = signature_of([endpoint, model or named or ""])
    return chosen.decode(fields, signature)
