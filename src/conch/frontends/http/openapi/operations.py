"""Descriptions of the HTTP endpoints for the OpenAPI document; a test requires one for every endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


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
