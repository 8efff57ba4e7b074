"""The JSON schemas of request and response bodies, by name, for the OpenAPI document.

Tests compare the members with those that the readers of requests take. Sampling parameters come from their
declarations. Members of requests without an effect are left out. Most responses allow further members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.core.sampling.parameters import PARAMETERS
from conch.core.sampling.values import Biases, Flag, Integer, Number, Text, TextList, TokenIds, ValueType
from conch.core.tensors import ELEMENT_SIZE

Schema = dict[str, Any]


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


def _text(description: str = "", *values: str) -> Schema:
    return _described({"type": "string", **({"enum": [*values]} if values else {})}, description)


def _integer(description: str = "", low: int | None = None, high: int | None = None) -> Schema:
    bounds = {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
    return _described({"type": "integer", **bounds}, description)


def _number(description: str = "", low: float | None = None, high: float | None = None) -> Schema:
    bounds = {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
    return _described({"type": "number", **bounds}, description)


def _flag(description: str = "") -> Schema:
    return _described({"type": "boolean"}, description)


def _array(items: Schema, description: str = "") -> Schema:
    return _described({"type": "array", "items": items}, description)


def _any_of(*schemas: Schema, description: str = "") -> Schema:
    return _described({"anyOf": [*schemas]}, description)


def _free(description: str = "") -> Schema:
    return _described({"type": "object"}, description)


def _object(properties: Mapping[str, Schema], *required: str, description: str = "", example: Any = None) -> Schema:
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = [*required]
    if example is not None:
        schema["examples"] = [example]
    return _described(schema, description)


def reference(name: str) -> Schema:
    """Return the reference to a schema of ``SCHEMAS``."""
    return {"$ref": f"#/components/schemas/{name}"}


def _sampling_type(type: ValueType) -> Schema:
    match type:
        case Integer(low=low, high=high):
            return _integer("", low, high)
        case Number(low=low, high=high, above=above):
            return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}
        case Flag():
            return _flag()
        case Text():
            return _text()
        case TextList():
            return _TEXTS
        case TokenIds():
            return _array(_integer("", 0))
        case Biases():
            return {"type": "object", "additionalProperties": _number("", -100, 100)}
        case _:  # documents
            return _free()


_TEXTS: Final = _any_of(_text(), _array(_text()))
_TOKENS: Final = _array(_integer("", 0))
_MODEL: Final = {"model": _text("the name of the model")}
_OPTIONAL_MODEL: Final = {"model": _text("the name of the model; not needed if only one can serve the request")}

_SAMPLING: Final = {
    parameter.name: _described(_sampling_type(parameter.type), parameter.description)
    for parameter in PARAMETERS
    if parameter.openai != "absent"
}
_GENERATION: Final = {
    **{name: schema for name, schema in _SAMPLING.items() if name not in ("logprobs", "prompt_logprobs", "seed")},
    "seed": _integer("makes the choice of tokens repeatable", -(2**63), 2**64 - 1),
    "temperature": _number("divides the logits; 0 means greedy decoding", 0, 2),
    "top_p": _number("sample only from the most likely tokens whose probabilities add up to this", 0, 1),
    "max_completion_tokens": _integer("the newer name of max_tokens", 1),
    "allowed_token_ids": {**_TOKENS, "minItems": 1, "description": "the only tokens that may be chosen"},
    "response_format": _object(
        {"type": _text("", "text", "json_object", "json_schema"), "json_schema": _object({"schema": _free()})}, "type"
    ),
    "guided_json": _free("vLLM's older name of a JSON schema"),
    "guided_regex": _text("vLLM's older name of a regular expression"),
    "guided_grammar": _text("vLLM's older name of a grammar"),
    "guided_choice": _array(_text(), "vLLM's older name of a choice"),
    "stream": _flag("send the response as events while it is generated"),
    "stream_options": _object({"include_usage": _flag(), "continuous_usage_stats": _flag()}),
    "request_id": {**_text("the client's identifier of the request"), "maxLength": 256},
    "priority": _integer("the level in the model's queue", 0),
    "return_token_ids": _flag("the response has the ids of the tokens of the prompt and the choices"),
}
_CALL: Final = _object(
    {
        "id": _text(),
        "type": _text("", "function"),
        "function": _object({"name": _text(), "arguments": _any_of(_text(), _free())}, "name"),
    },
    "function",
)
_USAGE: Final = _object(
    {"prompt_tokens": _integer(), "completion_tokens": _integer(), "total_tokens": _integer()},
    description="null if the model does not report its tokens",
)
_NULLABLE_USAGE: Final = _any_of(_USAGE, {"type": "null"})

_TENSOR: Final = {
    "name": _text(),
    "shape": _array(_integer("", 0)),
    "datatype": _text("", *ELEMENT_SIZE, "BYTES"),
    "parameters": _free("binary_data_size, or shared_memory_region, shared_memory_offset and shared_memory_byte_size"),
    "data": {"type": "array", "description": "the elements in row-major order, flat or nested"},
}
_SPEC: Final = _object({"name": _text(), "datatype": _text(), "shape": _array(_integer())}, "name", "datatype", "shape")
_INFER_EXAMPLE: Final = {"inputs": [{"name": "name", "datatype": "BYTES", "shape": [1, 1], "data": ["Ada"]}]}

_KSERVE: Final[dict[str, Schema]] = {
    "InferRequest": _object(
        {
            "id": _text("returned in the response"),
            "inputs": _array(_object(_TENSOR, "name", "shape", "datatype")),
            "outputs": _array(
                _object({"name": _text(), "parameters": _free("binary_data, classification, or a region")}, "name"),
                "the outputs to return; all without it",
            ),
            "parameters": _free("sequence_id, sequence_start, sequence_end, priority, timeout (µs), or others"),
        },
        "inputs", example=_INFER_EXAMPLE,
    ),
    "InferResponse": _object(
        {
            "id": _text(),
            "model_name": _text(),
            "model_version": _text(),
            "outputs": _array(_object(_TENSOR, "name", "shape", "datatype")),
            "parameters": _free(),
        },
        "model_name", "model_version", "outputs",
    ),
    "GenerateRequest": _free(
        "Members with the names of inputs are tensors, all others are parameters of the request. Several texts in a"
        " list are several requests for models that take one text."
    ) | {"examples": [{"text_input": "The capital of France is", "max_tokens": 8}]},
    "GenerateResponse": _object(
        {"model_name": _text(), "model_version": _text()}, description="Every output is a member."
    ),
    "ServerMetadata": _object({"name": _text(), "version": _text(), "extensions": _array(_text())}, "name", "version"),
    "ModelMetadata": _object(
        {
            "name": _text(), "versions": _array(_text()), "platform": _text(), "inputs": _array(_SPEC),
            "outputs": _array(_SPEC),
        },
        "name", "platform", "inputs", "outputs",
    ),
    "ModelConfig": _free("config.pbtxt as JSON, completed"),
    "Statistics": _object({"model_stats": _array(_free("counts and durations (ns) of a version"))}, "model_stats"),
    "IndexRequest": _object({"ready": _flag("only models that are ready")}),
    "Index": _array(_object({"name": _text(), "version": _text(), "state": _text(), "reason": _text()}, "name")),
    "LoadRequest": _object(
        {
            "parameters": {
                "type": "object",
                "properties": {
                    "config": _text("a configuration as JSON, in place of config.pbtxt"),
                    "lora_name": _text("load this LoRA adapter for the model"),
                    "lora_path": _text("the folder of the adapter"),
                },
                "additionalProperties": _text("file:PATH: the file in base64, for a model without a folder"),
            }
        }
    ),
    "UnloadRequest": _object(
        {
            "parameters": _object(
                {
                    "unload_dependents": _flag("also the models of an ensemble's steps"),
                    "lora_name": _text("unload this LoRA adapter, not the model"),
                }
            )
        }
    ),
    "LogSettings": _object(
        {
            "log_file": _text("cannot be changed"), "log_info": _flag(), "log_warning": _flag(), "log_error": _flag(),
            "log_verbose_level": _integer("", 0), "log_format": _text(),
        }
    ),
    "TraceSetting": _object(
        {
            "trace_file": _text("cannot be changed"),
            "trace_level": _any_of(_text(), _array(_text()), {"type": "null"}),
            "trace_rate": _any_of(_text(), {"type": "null"}),
            "trace_count": _any_of(_text(), {"type": "null"}),
            "log_frequency": _any_of(_text(), {"type": "null"}),
        },
        description="null returns a setting of a model to that of the server",
    ),
    "SystemRegion": _object(
        {"key": _text("the name of the shared memory object"), "offset": _integer("", 0), "byte_size": _integer("", 0)},
        "key", "byte_size",
    ),
    "CudaRegion": _object(
        {
            "raw_handle": _object({"b64": _text("a cudaIpcMemHandle_t")}, "b64"), "device_id": _integer("", 0),
            "byte_size": _integer("", 0),
        },
        "raw_handle", "device_id", "byte_size",
    ),
    "Regions": _array(_free("a registered region")),
    "Error": _object({"error": _text()}, "error"),
}  # fmt: skip

_PROMPT: Final = {
    "prompt_name": _text("a prompt of the checkpoint"), "prompt": _text("a text before each text"),
}  # fmt: skip
_TRUNCATED: Final = {
    "truncate_prompt_tokens": _integer("-1: the maximum of the model", -1),
    "truncation_side": _text("", "left", "right"),
}  # fmt: skip
_OPENAI: Final[dict[str, Schema]] = {
    "ChatRequest": _object(
        {
            **_MODEL,
            "messages": {
                **_array(
                    _object(
                        {
                            "role": _text("", "system", "developer", "user", "assistant", "tool", "function"),
                            "content": _any_of(_text(), _array(_free()), {"type": "null"}),
                            "tool_calls": _array(_CALL),
                            "tool_call_id": _text(),
                        },
                        "role",
                    )
                ),
                "minItems": 1,
            },
            **_GENERATION,
            "logprobs": _flag("the log-probability of every token"),
            "top_logprobs": _integer("also those of this many likely tokens", 0, 20),
            "tools": _array(_free("a function with its JSON schema")),
            "tool_choice": _any_of(_text("", "none", "auto", "required"), _free("the function to call")),
            "parallel_tool_calls": _flag(),
            "functions": _array(_free(), "OpenAI's older name of tools"),
            "function_call": _any_of(_text(), _free(), description="OpenAI's older name of tool_choice"),
            "chat_template_kwargs": _free("values for the chat template"),
            "continue_final_message": _flag("complete the last message"),
            "add_generation_prompt": _flag("begin a message of the assistant"),
            "reasoning_effort": _text("", "none", "minimal", "low", "medium", "high", "xhigh", "max"),
            "modalities": _array(_text("", "text")),
        },
        "model", "messages",
        example={"model": "smollm2", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 64},
    ),
    "ChatResponse": _object(
        {
            "id": _text(), "object": _text(), "created": _integer(), "model": _text(),
            "choices": _array(
                _object(
                    {
                        "index": _integer(),
                        "message": _object(
                            {
                                "role": _text(), "content": _any_of(_text(), {"type": "null"}),
                                "reasoning_content": _text(), "tool_calls": _array(_CALL),
                            }
                        ),
                        "finish_reason": _text("", "stop", "length", "tool_calls", "function_call"),
                    },
                    "index", "message", "finish_reason",
                )
            ),
            "usage": _NULLABLE_USAGE,
        },
        "id", "choices",
    ),
    "CompletionRequest": _object(
        {
            **_MODEL,
            "prompt": _any_of(_TEXTS, _TOKENS, _array(_TOKENS), description="one or several, as text or token ids"),
            **_GENERATION,
            "best_of": _integer("", 1),
            "logprobs": _integer("the log-probabilities of this many likely tokens", 0, 20),
            "echo": _flag("begin with the prompt"),
            "suffix": _text("the text after the completion, for models with fill-in-the-middle"),
            "prompt_logprobs": _integer("the log-probabilities of the prompt's tokens", 0, 20),
        },
        "model", "prompt", example={"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8},
    ),
    "CompletionResponse": _object(
        {
            "id": _text(), "object": _text(), "created": _integer(), "model": _text(),
            "choices": _array(_object({"index": _integer(), "text": _text(), "finish_reason": _text()}, "text")),
            "usage": _NULLABLE_USAGE,
        },
        "id", "choices",
    ),
    "EmbeddingsRequest": _object(
        {
            **_MODEL,
            "input": _any_of(_TEXTS, _TOKENS, _array(_TOKENS), description="texts or token ids"),
            "messages": _array(_free(), "a text or an image in place of input, as in vLLM"),
            "encoding_format": _any_of(_text("", "float", "base64"), _array(_text())),
            "output_dtype": _any_of(_text(), _array(_text()), description="int8, uint8, binary, ubinary or float"),
            "embedding_type": _any_of(_text(), _array(_text()), description="the same, or base64"),
            "dimensions": _integer("the first of the model's dimensions", 1),
            "normalize": _flag(), "normalized": _flag(),
            "input_type": _text("query or document, or the name of a prompt"), "task": _text("the same"),
            **_PROMPT,
            "truncate": _any_of(_flag(), _text("", "NONE", "START", "END")),
            **_TRUNCATED,
        },
        "model", example={"model": "minilm", "input": ["Where is the library?"]},
    ),
    "EmbeddingsResponse": _object(
        {
            "object": _text(), "model": _text(),
            "data": _array(
                _object({"index": _integer(), "embedding": _any_of(_array(_number()), _text("base64"))}, "embedding")
            ),
            "usage": _free(),
        },
        "data",
    ),
    "ResponsesRequest": _object(
        {
            **_MODEL,
            "input": _any_of(_text(), _array(_free("an item: a message, a call or its output"))),
            "instructions": _text("the system message"),
            "previous_response_id": _text("continue a stored response"),
            "store": _flag("keep the response, so that others can continue it"),
            "stream": _flag("send the response as events while it is generated"),
            "max_output_tokens": _integer("", 1), "temperature": _number("", 0, 2), "top_p": _number("", 0, 1),
            "tools": _array(_free()), "tool_choice": _any_of(_text(), _free()), "parallel_tool_calls": _flag(),
            "text": _object({"format": _free("text, json_object or json_schema")}),
            "reasoning": _object({"effort": _text(), "summary": _text()}),
            "include": _array(_text()), "top_logprobs": _integer("", 0, 20), "metadata": _free(),
            "truncation": _text("auto drops the oldest items of a prompt that is too long", "auto", "disabled"),
            **{name: _GENERATION[name] for name in ("priority", "cache_salt")},
        },
        "model", "input", example={"model": "smollm2", "input": "Who are you?", "max_output_tokens": 64},
    ),
    "Response": _object(
        {"id": _text(), "object": _text(), "status": _text(), "model": _text(), "output": _array(_free("an item"))},
        "id", "output",
    ),
    "Items": _object({"object": _text(), "data": _array(_free("an item"))}, "data"),
    "Deleted": _object({"id": _text(), "object": _text(), "deleted": _flag()}, "id", "deleted"),
    "TranscriptionForm": _object(
        {
            **_MODEL,
            "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": "a recording"},
            "language": _text("of the recording"), "prompt": _text("a text before it"),
            "temperature": _number("", 0, 1), "stream": _flag(),
            "response_format": _text("", "json", "text", "srt", "vtt", "verbose_json"),
            "timestamp_granularities[]": _array(_text("", "segment", "word")),
        },
        "model", "file",
    ),
    "Transcription": _object({"text": _text()}, "text"),
    "Models": _object({"object": _text(), "data": _array(reference("Model"))}, "data"),
    "Model": _object({"id": _text(), "object": _text(), "created": _integer(), "owned_by": _text()}, "id"),
    "Version": _object({"version": _text()}, "version"),
    "LoadAdapter": _object(
        {
            "lora_name": _text("the name that requests use as their model"), "lora_path": _text("the adapter's folder"),
            "base_model_name": _text("one of several models"), "load_inplace": _flag("replace a loaded adapter"),
        },
        "lora_name", "lora_path",
    ),
    "UnloadAdapter": _object({"lora_name": _text(), "base_model_name": _text()}, "lora_name"),
    "OpenAiError": _object(
        {
            "error": _object(
                {
                    "message": _text(), "type": _text(), "param": _any_of(_text(), {"type": "null"}),
                    "code": _any_of(_text(), {"type": "null"}),
                },
                "message", "type",
            )
        },
        "error",
    ),
}  # fmt: skip

_MESSAGES: Final = {
    **_MODEL,
    "messages": {
        **_array(
            _object(
                {
                    "role": _text("", "user", "assistant", "system"),
                    "content": _any_of(_text(), _array(_free("a block: text, tool_use, tool_result or thinking"))),
                },
                "role", "content",
            )
        ),
        "minItems": 1,
    },
    "system": _any_of(_text(), _array(_free("a block of text"))),
    "tools": _array(_free("a tool with its input_schema")),
    "tool_choice": _free("auto, any, tool or none"),
    "thinking": _free("enabled, adaptive or disabled"),
    "output_config": _object({"format": _free("a JSON schema"), "effort": _text()}),
}  # fmt: skip
_ANTHROPIC: Final[dict[str, Schema]] = {
    "MessageRequest": _object(
        {
            **_MESSAGES,
            "max_tokens": _integer("", 1), "stop_sequences": _array(_text()), "stream": _flag(),
            "temperature": _number("", 0, 1), "top_k": _integer("", 0), "top_p": _number("", 0, 1),
            **{name: _GENERATION[name] for name in ("priority", "cache_salt")},
        },
        "model", "messages", "max_tokens",
        example={"model": "smollm2", "max_tokens": 64, "messages": [{"role": "user", "content": "Who are you?"}]},
    ),
    "Message": _object(
        {
            "id": _text(), "type": _text(), "role": _text(), "model": _text(), "content": _array(_free("a block")),
            "stop_reason": _text(), "usage": _free(),
        },
        "id", "content",
    ),
    "CountRequest": _object(_MESSAGES, "model", "messages"),
    "Count": _object({"input_tokens": _integer()}, "input_tokens"),
    "AnthropicError": _object(
        {"type": _text("", "error"), "error": _object({"type": _text(), "message": _text()}, "type", "message")},
        "type", "error",
    ),
}  # fmt: skip

_COHERE_EMBED: Final = _object(
    {
        **_OPTIONAL_MODEL,
        "texts": _array(_text()), "images": _array(_text("a data URL")),
        "inputs": _array(_free("content: texts and images")),
        "input_type": _text("search_query, search_document, classification, clustering or image"),
        "embedding_types": _array(_text("", "float", "int8", "uint8", "binary", "ubinary", "base64")),
        "output_dimension": _integer("", 1), "max_tokens": _integer("", 1), **_PROMPT,
        "truncate": _text("", "NONE", "START", "END"),
    },
    example={"model": "minilm", "texts": ["Where is the library?"], "embedding_types": ["float"]},
)  # fmt: skip
_TEI_PROMPT: Final = {
    "prompt_name": _text("a prompt of the checkpoint"), "truncate": _flag("long texts; the model decides without it"),
    "truncation_direction": _text("", "Left", "Right", "left", "right"),
}  # fmt: skip
_SCORES: Final = _array(_object({"index": _integer(), "score": _number(), "text": _text()}, "index", "score"))
_VECTOR: Final = _array(_number())
_RETRIEVAL: Final[dict[str, Schema]] = {
    "CohereEmbedRequest": _COHERE_EMBED,
    "CohereEmbedResponse": _object({"id": _text(), "embeddings": {}, "texts": _array(_text()), "meta": _free()}),
    "RerankRequest": _object(
        {
            **_OPTIONAL_MODEL,
            "query": _text(), "documents": _array(_any_of(_text(), _free("an object with text"))),
            "texts": _array(_text(), "makes it a request of text-embeddings-inference"),
            "top_n": _integer("return this many", 1), "return_documents": _flag(),
            "rank_fields": _array(_text()), "max_tokens_per_doc": _integer("", 1), "truncation": _flag(),
            **_TRUNCATED,
            "truncate": _flag("of text-embeddings-inference"),
            "truncation_direction": _text("of text-embeddings-inference"),
            "raw_scores": _flag("of text-embeddings-inference: logits"),
            "return_text": _flag("of text-embeddings-inference"),
        },
        "query",
        example={"query": "Where is the library?", "documents": ["The library is in Main Street.", "It rains."]},
    ),
    "RerankResponse": _any_of(
        _object({"id": _text(), "results": _array(_object({"index": _integer(), "relevance_score": _number()}))}),
        _SCORES,
    ),
    "ScoreRequest": _object(
        {
            **_OPTIONAL_MODEL,
            "text_1": _TEXTS, "text_2": _TEXTS,
            "queries": _TEXTS, "documents": _TEXTS,
            **_TRUNCATED,
        },
        example={"text_1": "Where is the library?", "text_2": ["The library is in Main Street."]},
    ),
    "ClassifyRequest": _object({**_OPTIONAL_MODEL, "input": _TEXTS, **_TRUNCATED}, "input"),
    "PoolingRequest": _object(
        {
            **_OPTIONAL_MODEL, "input": _any_of(_TEXTS, _TOKENS, _array(_TOKENS)), "task": _text(),
            "messages": _array(_free(), "a text or an image in place of input"),
            "encoding_format": _text("", "float", "base64"), "dimensions": _integer("", 1),
            "input_type": _text("query or document, or the name of a prompt"), **_PROMPT, **_TRUNCATED,
            "truncate": _any_of(_flag(), _text("", "NONE", "START", "END")),
        },
    ),
    "PoolingResponse": _object({"id": _text(), "object": _text(), "model": _text(), "data": _array(_free())}, "data"),
    "TokenizeRequest": _object(
        {
            **_OPTIONAL_MODEL, "prompt": _text(), "messages": _array(_free(), "a chat in place of the prompt"),
            "tools": _array(_free()), "chat_template_kwargs": _free(), "add_generation_prompt": _flag(),
            "inputs": _any_of(_TEXTS, description="makes it a request of text-embeddings-inference"),
            "add_special_tokens": _flag(), "return_token_strs": _flag(),
            "prompt_name": _text("of text-embeddings-inference"),
        },
        example={"prompt": "Where is the library?"},
    ),
    "TokenizeResponse": _any_of(
        _object({"count": _integer(), "max_model_len": _any_of(_integer(), {"type": "null"}), "tokens": _TOKENS}),
        _array(_array(_object({"id": _integer(), "text": _text(), "special": _flag()}))),
    ),
    "DetokenizeRequest": _object({**_OPTIONAL_MODEL, "tokens": _TOKENS}, "tokens"),
    "DetokenizeResponse": _object({"prompt": _text()}, "prompt"),
    "TeiEmbedRequest": _object(
        {
            **_OPTIONAL_MODEL, "inputs": _any_of(_TEXTS, _TOKENS, _array(_TOKENS)), **_TEI_PROMPT,
            "normalize": _flag("true without it"), "dimensions": _integer("", 1), "encoding_format": _text("", "float"),
        },
        "inputs", example={"inputs": "Where is the library?"},
    ),
    "TeiTextsRequest": _object({**_OPTIONAL_MODEL, "inputs": _any_of(_TEXTS, _TOKENS), **_TEI_PROMPT}, "inputs"),
    "TeiRerankRequest": _object(
        {
            **_OPTIONAL_MODEL, "query": _text(), "texts": _array(_text()), "truncate": _flag(),
            "truncation_direction": _text(), "raw_scores": _flag("logits"), "return_text": _flag(),
        },
        "query", "texts",
    ),
    "TeiPredictRequest": _object(
        {
            **_OPTIONAL_MODEL, "inputs": _any_of(_text(), _array(_any_of(_text(), _array(_text())))),
            "truncate": _flag(), "truncation_direction": _text(), "raw_scores": _flag(), "parameters": _free(),
        },
        "inputs",
    ),
    "TeiSimilarityRequest": _object(
        {
            **_OPTIONAL_MODEL, "parameters": _free(),
            "inputs": _object(
                {"source_sentence": _text(), "sentences": _array(_text())}, "source_sentence", "sentences"
            ),
        },
        "inputs",
    ),
    "TeiRequest": _object({**_OPTIONAL_MODEL, "inputs": {}}, "inputs", description="as for what the model is for"),
    "TeiTokenizeRequest": _object(
        {**_OPTIONAL_MODEL, "inputs": _TEXTS, "add_special_tokens": _flag(), "prompt_name": _text()}, "inputs"
    ),
    "TeiDecodeRequest": _object(
        {**_OPTIONAL_MODEL, "ids": _any_of(_TOKENS, _array(_TOKENS)), "skip_special_tokens": _flag()}, "ids"
    ),
    "Vectors": _array(_VECTOR),
    "SparseVectors": _array(_array(_object({"index": _integer(), "value": _number()}, "index", "value"))),
    "TokenVectors": _array(_array(_VECTOR)),
    "Scores": _SCORES,
    "Classes": _array(_any_of(_free("a label and its score"), _array(_free("a label and its score")))),
    "Similarities": _VECTOR,
    "Any": {},
    "Tokens": _array(_array(_free("a token"))),
    "Texts": _array(_text()),
    "Info": _object({"model_id": _text(), "model_type": _free(), "version": _text()}, "model_id"),
    "CohereError": _object({"message": _text()}, "message"),
    "TeiError": _object({"error": _text(), "error_type": _text()}, "error", "error_type"),
}  # fmt: skip

SCHEMAS: Final[Mapping[str, Schema]] = {**_KSERVE, **_OPENAI, **_ANTHROPIC, **_RETRIEVAL}
