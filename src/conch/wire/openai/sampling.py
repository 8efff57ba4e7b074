"""The sampling parameters of chats and completions, with the names of vLLM's ``SamplingParams``.

OpenAI's parameters are checked here, so that errors name the member. Extensions of other servers are passed on
unchanged and checked by the model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from conch.core.sampling.parameters import MAX_SAMPLES, PARAMETERS
from conch.core.sampling.structures import KINDS
from conch.core.sampling.values import INT32
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.response import ResponseSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding(ResponseSettings):
    """The common part of chats and completions; ``sampling`` has the parameters of the request."""

    sampling: dict[str, Any]

    def with_adapter(self, id: str, name: str) -> Self:
        """Return the request for the LoRA adapter ``name``, whose id as a model is ``id``.

        Raises ApiError if the request names another adapter.
        """
        if self.sampling.get("lora_name", name) != name:
            raise ApiError(f"'lora_name' names an adapter other than the model '{id}'", "lora_name")
        return replace(self, adapter=id, sampling={**self.sampling, "lora_name": name})

    @property
    def choices(self) -> int:
        """The number of choices per prompt."""
        count: int = self.sampling.get("n", 1)
        return count

    @property
    def common(self) -> dict[str, Any]:
        """The members common to all ``ResponsePlan`` classes."""
        settings = {field.name: getattr(self, field.name) for field in fields(ResponseSettings)}
        return {"choices": self.choices, "limit": self.sampling.get("max_tokens"), **settings}


#: Members of other servers' APIs that models support under the same name.
EXTENSIONS: Final = tuple(sorted(known.name for known in PARAMETERS if known.openai == "extension"))
#: vLLM's member for the only tokens that may be chosen.
_ALLOWED: Final = "allowed_token_ids"
#: The maximum number of characters in the client's identifier of a request.
_LONGEST_ID: Final = 256
#: vLLM's older names for kinds of structured output.
_GUIDED: Final = {f"guided_{kind}": kind for kind in KINDS}
#: Members about accounts and bookkeeping, which do not affect the response.
IGNORED: Final = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip


def read_sampling(fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters of a request, and the request's names of those that have another name for the model.

    Log-probabilities differ between chats and completions and are not among them.
    """
    members: dict[str, str] = {}
    options: dict[str, Any] = {
        "n": fields.integer("n", 1, MAX_SAMPLES),
        "max_tokens": _max_tokens(fields, members),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": _top_p(fields),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "seed": _seed(fields),
        "stop": fields.strings("stop"),
        "logit_bias": _logit_bias(fields, members),
    }
    for name in EXTENSIONS:
        options[name] = fields.take(name)
    structures = {"response_format": _response_format(fields), "structured_outputs": options["structured_outputs"]}
    structures |= {name: _guided(fields, name, kind) for name, kind in _GUIDED.items()}
    structures = {name: structure for name, structure in structures.items() if structure is not None}
    if len(structures) > 1:
        raise ApiError("only one of response_format and the members for structured output may be given")
    for name, structure in structures.items():
        members["structured_outputs"] = name
        options["structured_outputs"] = structure
    return {name: value for name, value in options.items() if value is not None}, members


def read_marks(fields: Fields) -> dict[str, Any]:
    """Return vLLM's members about a response: its identifier and priority, and whether it has token ids."""
    request_id = fields.text("request_id") or ""
    if len(request_id) > _LONGEST_ID:
        raise ApiError(f"'request_id' has more than {_LONGEST_ID} characters", "request_id")
    priority = fields.integer("priority", 0, INT32) or 0
    return {"request_id": request_id, "token_ids": fields.flag("return_token_ids"), "priority": priority}


def read_stream(fields: Fields) -> dict[str, Any]:
    """Return the members of :class:`Decoding` about the stream."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return {"stream": stream, "include_usage": False}
    if not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", "stream_options")
    include_usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.finish()
    return {"stream": stream, "include_usage": include_usage, "continuous_usage": include_usage and continuous}


def _max_tokens(fields: Fields, members: dict[str, str]) -> int | None:
    newer = fields.integer("max_completion_tokens", 1, INT32)
    older = fields.integer("max_tokens", 1, INT32)
    if newer is None:
        return older
    members["max_tokens"] = "max_completion_tokens"
    return newer


def _top_p(fields: Fields) -> float | None:
    value = fields.number("top_p", 0, 1)
    # OpenAI accepts 0, which leaves only the likeliest token; other servers do not.
    return 1e-6 if value == 0 else value


def _seed(fields: Fields) -> int | None:
    value = fields.integer("seed", -(2**63), 2**64 - 1)
    return None if value is None else value % 2**64


def _logit_bias(fields: Fields, members: dict[str, str]) -> dict[str, float] | None:
    biases = fields.take("logit_bias")
    allowed = _allowed_tokens(fields)
    if biases is None or biases == {}:
        if allowed is not None:
            members["logit_bias"] = _ALLOWED
        return allowed
    if type(biases) is not dict:
        raise wrong("logit_bias", biases, "an object")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit()) or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong("logit_bias", biases, "an object of numbers from -100 to 100 by token id")
    if allowed is not None:
        raise ApiError(f"'{_ALLOWED}' cannot be combined with 'logit_bias'", _ALLOWED)
    return dict(biases)


def _allowed_tokens(fields: Fields) -> dict[str, float] | None:
    """Return the bias that selects among the allowed tokens alone: the largest one, which is the same for all."""
    allowed = fields.array(_ALLOWED)
    if allowed is None:
        return None
    if not allowed or any(type(token) is not int or token < 0 for token in allowed):
        raise wrong(_ALLOWED, allowed, "an array of token ids that is not empty")
    return dict.fromkeys(map(str, allowed), 100)


def _response_format(fields: Fields) -> dict[str, Any] | None:
    chosen = fields.object("response_format")
    if chosen is None:
        return None
    kind = chosen.take("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object", "additionalProperties": True}}
    if kind != "json_schema":
        raise wrong("response_format.type", kind, "text, json_object or json_schema")
    named = chosen.object("json_schema")
    schema = named.take("schema") if named is not None else None
    if type(schema) is not dict:
        raise ApiError(
            "'response_format.json_schema.schema' must be a JSON schema", "response_format.json_schema.schema"
        )
    return {"json": schema}


def _guided(fields: Fields, name: str, kind: str) -> dict[str, Any] | None:
    value = fields.take(name)
    return None if value is None else {kind: value}
