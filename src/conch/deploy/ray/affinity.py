"""What of a request decides which replica answers it: its sequence, or how its prompt begins.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

import orjson

#: So many bytes of a prompt are looked at.
PROMPT_BYTES: Final = 256
#: Inputs by which prompts are told, in the order of preference.
PROMPTS: Final = ("text_input", "prompt", "PROMPT", "QUERY")
#: JSON of more bytes is not looked into: what it holds are tensors.
_LONGEST: Final = 1 << 20


def session_of_body(body: bytes, header_length: int | None) -> str:
    """The session of a request in JSON (KServe's infer or Triton's generate); empty where any replica will do.

    ``header_length`` is that of the JSON before binary tensors (bytes).
    """
    if (len(body) if header_length is None else header_length) > _LONGEST:
        return ""
    try:
        document = orjson.loads(body[:header_length])
    except orjson.JSONDecodeError:
        return ""  # compressed, or the replica says what is wrong
    if not isinstance(document, dict):
        return ""
    parameters = document.get("parameters")
    sequence = (parameters if isinstance(parameters, dict) else document).get("sequence_id")
    if sequence:
        return f"sequence {sequence}"
    prompt = next((document[name] for name in PROMPTS if isinstance(document.get(name), str)), "")
    return of_prompt(prompt.encode()) if prompt else ""


def session_of_message(message: Any) -> str:
    """The session of a ``ModelInferRequest``; empty where any replica will do."""
    parameters: Mapping[str, Any] = message.parameters
    if "sequence_id" in parameters:
        parameter = parameters["sequence_id"]
        sequence = getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")
        if isinstance(sequence, int) and sequence < 0:
            sequence += 2**64  # as clients send numbers that a signed one cannot hold
        if sequence:
            return f"sequence {sequence}"
    for index, tensor in enumerate(message.inputs):
        if tensor.name not in PROMPTS or tensor.datatype != "BYTES":
            continue
        if index < len(message.raw_input_contents):
            data = message.raw_input_contents[index]
            prompt = data[4 : 4 + int.from_bytes(data[:4], "little")]
        else:
            prompt = next(iter(tensor.contents.bytes_contents), b"")
        return of_prompt(prompt) if prompt else ""
    return ""


def of_prompt(prompt: bytes) -> str:
    """The session of a prompt: that of all that begin alike."""
    return f"prompt {blake2b(prompt[:PROMPT_BYTES], digest_size=8).hexdigest()}"
