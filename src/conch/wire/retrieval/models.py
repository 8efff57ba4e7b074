"""The kinds of models for retrieval, determined from their declared tensors, and the routes that serve each kind."""

from __future__ import annotations

from enum import Enum
from typing import Final

from conch.core.errors import Code
from conch.core.inference import ModelSignature
from conch.wire.openai.models import PROMPT, TEXT, chats, embedding_output, embeds, generates, transcribes
from conch.wire.openai.reading import ApiError

PAIR: Final = "text_pair"
SCORE: Final = "score"
LABEL: Final = "label"
LOGITS: Final = "logits"
#: Sparse vectors: ascending indices, padded with -1, and their values.
INDICES: Final = "sparse_indices"
VALUES: Final = "sparse_values"
#: Multi-vectors: the vectors of each text, padded to the longest one, and their number.
VECTORS: Final = "token_embeddings"
VECTOR_COUNT: Final = "num_vectors"
#: The output of the network for each token, padded to the longest text, of models that embed texts as one vector each.
HIDDEN_STATE: Final = "last_hidden_state"
#: The output with the tokens of each row, as JSON.
TOKENS: Final = "tokens"
#: The output with the number of tokens of each row.
COUNT: Final = "num_input_tokens"


class Kind(Enum):
    """The kind of result that a model computes from texts; the value completes the sentence "the model … "."""

    DENSE = "embeds texts"
    SPARSE = "embeds texts as sparse vectors"
    MULTI_VECTOR = "embeds texts as several vectors each"
    RANKER = "scores pairs of texts"
    CLASSIFIER = "classifies texts"
    TOKEN_VECTORS = "returns a vector for each token"
    TOKENIZER = "shows the tokens of texts"
    GENERATOR = "generates text"
    TRANSCRIBER = "transcribes recordings"


def kinds(signature: ModelSignature) -> list[Kind]:
    """Return the kinds of a model, the main one first; none if no route but the Triton ones serves it."""
    own = _main_kind(signature)
    if Kind.DENSE in own and {HIDDEN_STATE, COUNT} <= signature.outputs.keys():
        own = [*own, Kind.TOKEN_VECTORS]
    tokenizes = TOKENS in signature.outputs and PROMPT in signature.inputs
    return [*own, Kind.TOKENIZER] if tokenizes else own


def _main_kind(signature: ModelSignature) -> list[Kind]:
    outputs = signature.outputs
    embedders = [Kind.DENSE] if embeds(signature) else []  # several, if one pass gives several kinds of vectors
    if INDICES in outputs and VALUES in outputs:
        embedders.append(Kind.SPARSE)
    if VECTORS in outputs and VECTOR_COUNT in outputs:
        embedders.append(Kind.MULTI_VECTOR)
    if embedders:
        return embedders if PROMPT in signature.inputs else []
    if _is_score(signature) and LABEL not in signature.outputs and PAIR in signature.inputs:
        return [Kind.RANKER]
    if PROMPT in signature.inputs and LABEL in signature.outputs and SCORE in signature.outputs:
        # Other inputs that a request must have, and texts, belong to other tasks: zero-shot classification, fill-mask.
        required = {name for name, spec in signature.inputs.items() if not spec.optional}
        return [Kind.CLASSIFIER] if required <= {PROMPT} and TEXT not in signature.outputs else []
    if transcribes(signature):
        return [Kind.TRANSCRIBER]
    return [Kind.GENERATOR] if generates(signature) or chats(signature) else []


def _is_score(signature: ModelSignature) -> bool:
    spec = signature.outputs.get(SCORE)
    return PROMPT in signature.inputs and spec is not None and spec.datatype == "FP32"


#: The routes of each kind, in the API of TEI and in the others.
TEI_ROUTES: Final = {
    Kind.DENSE: "/embed", Kind.SPARSE: "/embed_sparse", Kind.MULTI_VECTOR: "/embed_all", Kind.RANKER: "/rerank",
    Kind.CLASSIFIER: "/predict", Kind.TOKEN_VECTORS: "/embed_all", Kind.TOKENIZER: "/tokenize",
    Kind.GENERATOR: "/v1/chat/completions", Kind.TRANSCRIBER: "/v1/audio/transcriptions",
}  # fmt: skip
ROUTES: Final = {
    **TEI_ROUTES, Kind.DENSE: "/v1/embeddings", Kind.MULTI_VECTOR: "/pooling", Kind.CLASSIFIER: "/classify",
}  # fmt: skip


def require(signature: ModelSignature, accepted: tuple[Kind, ...], routes: dict[Kind, str]) -> Kind:
    """Return the kind of a model, which must be one of ``accepted``.

    Raises UNSUPPORTED for any other model, naming the route in ``routes`` that serves it.
    """
    own = kinds(signature)
    for kind in own:
        if kind in accepted:
            return kind
    wanted = " or ".join(kind.value for kind in accepted)
    if not own:
        raise ApiError(
            f"this route needs a model that {wanted}; '{signature.name}' has only /v2/models/{signature.name}/infer",
            "model",
            code=Code.UNSUPPORTED,
        )
    raise ApiError(
        f"this route needs a model that {wanted}; '{signature.name}' {own[0].value}: use {routes[own[0]]}",
        "model",
        code=Code.UNSUPPORTED,
    )


def vectors_outputs(signature: ModelSignature) -> tuple[str, str]:
    """Return the names of the output with several vectors per text, padded, and of the output with their number."""
    return (VECTORS, VECTOR_COUNT) if VECTORS in signature.outputs else (HIDDEN_STATE, COUNT)


def vector_output(signature: ModelSignature) -> str:
    """Return the name of the output with a vector per text."""
    return embedding_output(signature) or ""
