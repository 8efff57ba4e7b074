"""Converts chats and completions to the inputs that a model declares.

A model with the input ``sampling_parameters`` gets all sampling parameters there, as JSON with vLLM's names. Any other
model gets each in its own input, as in TensorRT-LLM's models; parameters without an input are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

import orjson

from conch.core.errors import ConchError
from conch.core.inference import ModelSignature
from conch.core.sampling.parameters import DEFAULT_TEMPERATURE, DROP_OLDEST, PARAMETERS
from conch.core.sampling.structures import GUIDE_TYPES
from conch.core.sampling.values import Integer
from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.json.tensor import from_json
from conch.wire.openai.models import TOKEN_IDS
from conch.wire.openai.reading import ApiError
from conch.wire.output.formats import INCLUDE_MARKS

SAMPLING: Final = "sampling_parameters"
#: OpenAI's default of ``max_tokens``, for models that require the input.
DEFAULT_MAX_TOKENS: Final = 16

#: Inputs for a parameter, the first declared one is used; each also with the prefix ``sampling_param_``.
_INPUTS: Final = {
    known.name: tuple(filter(None, (known.name, known.text_input, *known.inflight_inputs))) for known in PARAMETERS
} | {"stop": ("stop_words", "stop")}  # the in-flight batcher's ``stop`` is a flag that ends a request
#: Values without effect, which a model need not support.
_NEUTRAL: Final = {known.name: known.neutral for known in PARAMETERS if known.neutral is not None}
#: For parameters with several equivalent values: the lowest of them, and the one that is always understood.
_CLAMPS: Final = {
    known.name: (known.type.low, known.type.clamp)
    for known in PARAMETERS
    if isinstance(known.type, Integer) and known.type.clamp is not None
}
_DETAILS: Final = (
    "return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens", "return_finish_reason",
    "return_stop_reason",
)  # fmt: skip
#: The input, and vLLM's member, for the ids of the tokens of a completion; and the input for those of the prompt.
RETURN_TOKEN_IDS: Final = "return_token_ids"
RETURN_PROMPT_IDS: Final = "return_prompt_token_ids"


def generation_inputs(
    signature: ModelSignature,
    texts: Mapping[str, bytes],
    sampling: dict[str, Any],
    *,
    stream: bool,
    echo: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    marks: bool = False,
    tokenize_only: bool = False,
    token_ids: bool = False,
    drop_oldest: bool = False,
) -> dict[str, WireTensor]:
    """Return all inputs of a request: the ``texts`` by input name, and those for the client's parameters.

    ``echo``: the text of the response begins with the prompt.
    ``marks``: the marks of the output format stay in the text, if the model has an input for it.
    ``drop_oldest``: the oldest messages are dropped until the prompt fits.
    ``tokenize_only``: a model with this input only counts the tokens of the prompt.

    Raises ApiError for a parameter that has no input in the model or does not fit it.
    """
    declared = signature.inputs
    values: dict[str, list[Any]] = {}
    if SAMPLING in declared:
        if logprobs is not None:
            if "logprobs" not in signature.outputs:
                raise _cannot(signature, "logprobs")
            sampling = {**sampling, "logprobs": logprobs}
        if prompt_logprobs is not None:
            if "prompt_logprobs" not in signature.outputs:
                raise _cannot(signature, "prompt_logprobs")
            sampling = {**sampling, "prompt_logprobs": prompt_logprobs}
        values[SAMPLING] = [orjson.dumps(sampling).decode()]
    elif logprobs is not None or prompt_logprobs is not None:
        raise _cannot(signature, "logprobs" if logprobs is not None else "prompt_logprobs")
    else:
        _separately(signature, sampling, values)
    streaming = stream and signature.decoupled
    flags = {"stream": streaming, "streaming": streaming, "exclude_input_in_output": not echo, INCLUDE_MARKS: marks}
    for name, value in flags.items():
        if name in declared:
            values[name] = [value]
    if token_ids:
        if RETURN_TOKEN_IDS not in declared:
            raise _cannot(signature, RETURN_TOKEN_IDS)
        values[RETURN_TOKEN_IDS] = [True]
        if RETURN_PROMPT_IDS in declared:
            values[RETURN_PROMPT_IDS] = [True]
    if drop_oldest:
        if DROP_OLDEST not in declared:
            raise ApiError(f"model '{signature.name}' does not drop messages: send fewer items", "truncation")
        values[DROP_OLDEST] = [True]
    for name in _DETAILS:
        if name in declared:
            values[name] = [True]
    if tokenize_only and "tokenize_only" in declared:
        values["tokenize_only"] = [True]
    if logprobs is not None and "return_logprobs" in declared:
        values["return_logprobs"] = [True]
    tensors = {name: text_tensor(signature, name, [text]) for name, text in texts.items()}
    for name, items in values.items():
        tensors[name] = _tensor(signature, name, items)
    return tensors


def model_inputs(
    signature: ModelSignature, texts: Mapping[str, bytes], values: Mapping[str, Any], preferences: Mapping[str, Any]
) -> dict[str, WireTensor]:
    """Return the inputs of a request: ``texts``, and one element of each of ``values``.

    ``preferences`` are the same, and omitted where the model has no such input. Raises ApiError for any other that has
    no input, and for values that do not fit it.
    """
    tensors = {name: text_tensor(signature, name, [text]) for name, text in texts.items()}
    for name, value in {**preferences, **values}.items():
        if name in signature.inputs:
            tensors[name] = _tensor(signature, name, [value])
        elif name in values:
            raise _cannot(signature, name)
    return tensors


def default_temperature(signature: ModelSignature, value: float) -> dict[str, WireTensor]:
    """Return the input for the temperature of requests that set none; empty if the model has no such input."""
    if DEFAULT_TEMPERATURE not in signature.inputs:
        return {}
    return {DEFAULT_TEMPERATURE: _tensor(signature, DEFAULT_TEMPERATURE, [value])}


def text_tensor(signature: ModelSignature, name: str, texts: list[bytes]) -> WireTensor:
    """Return texts as a BYTES tensor; each is a row if the model batches."""
    count = len(texts)
    return WireTensor(name, "BYTES", _shape(signature, name, count, rows=True), pack_bytes(texts), count)


def token_tensor(signature: ModelSignature, tokens: list[int]) -> WireTensor:
    """Return the ids of a prompt. Raises ApiError for a model that takes only texts."""
    if TOKEN_IDS not in signature.inputs:
        raise ApiError(f"model '{signature.name}' takes texts, not token ids", "prompt")
    return _tensor(signature, TOKEN_IDS, tokens)


def _separately(signature: ModelSignature, sampling: dict[str, Any], values: dict[str, list[Any]]) -> None:
    """Put each parameter into ``values``, by the name of its input."""
    declared = signature.inputs
    for key, value in sampling.items():
        if key == "structured_outputs":
            _guide(signature, value, values)
            continue
        if key in _CLAMPS and type(value) is int:
            low, clamp = _CLAMPS[key]
            value = clamp if low <= value < clamp else value
        name = next((name for name in (*_INPUTS[key], f"sampling_param_{key}") if name in declared), None)
        if name is not None:
            values[name] = value if type(value) is list else [value]
        elif key not in _NEUTRAL or value != _NEUTRAL[key]:
            raise _cannot(signature, key)
    # Older TensorRT-LLM repositories require these in every request.
    for name, default in (("max_tokens", DEFAULT_MAX_TOKENS), ("stop_words", ""), ("bad_words", "")):
        if name in declared and not declared[name].optional and name not in values:
            values[name] = [default]


def _guide(signature: ModelSignature, structure: Any, values: dict[str, list[Any]]) -> None:
    """Put structured output into ``values``, in the form of the in-flight batcher's inputs."""
    kind, content = next(iter(structure.items())) if type(structure) is dict and len(structure) == 1 else ("", None)
    if kind not in GUIDE_TYPES or "guided_decoding_guide" not in signature.inputs:
        raise _cannot(signature, "response_format")
    values["guided_decoding_guide_type"] = [GUIDE_TYPES[kind]]
    values["guided_decoding_guide"] = [content if type(content) is str else orjson.dumps(content).decode()]


def _cannot(signature: ModelSignature, member: str) -> ApiError:
    return ApiError(f"model '{signature.name}' has no input for '{member}'", member)


def _tensor(signature: ModelSignature, name: str, values: list[Any]) -> WireTensor:
    spec = signature.inputs[name]
    try:
        data = from_json(name, spec.datatype, len(values), values)
    except ConchError as error:
        raise ApiError(f"'{name}' does not fit the model's input, {spec.datatype}: {error.message}", name) from None
    return WireTensor(name, spec.datatype, _shape(signature, name, len(values)), data)


def _shape(signature: ModelSignature, name: str, count: int, *, rows: bool = False) -> tuple[int, ...]:
    """Return the declared shape with ``count`` elements, in the last variable dimension or as ``rows`` of a batch."""
    batched = signature.max_batch_size > 0
    batch = () if not batched else (count,) if rows else (1,)
    elements = left = 1 if batched and rows else count
    dims: list[int] = []
    for dim in reversed(signature.inputs[name].dims):
        dims.append(left if dim == -1 else dim)
        left = 1 if dim == -1 else left
    if prod(dims) != elements:
        raise ApiError(f"input '{name}' of model '{signature.name}' does not take {count} values", name)
    return (*batch, *reversed(dims))
