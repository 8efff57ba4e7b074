"""Reads the texts, images and options of requests for retrieval, and converts them to the inputs of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import numpy as np

from conch.core.errors import Code
from conch.core.inference import ModelSignature, ParameterValue
from conch.core.tensors import WireTensor
from conch.core.text_parameters import MAX_LENGTH, PROMPT_TEXT, TRUNCATION
from conch.wire.openai.inputs import text_tensor
from conch.wire.openai.media import IMAGE, image_file
from conch.wire.openai.models import PROMPT, TOKEN_IDS
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.retrieval.models import COUNT, PAIR, TOKENS

#: Maximum number of texts in a request.
MAX_TEXTS: Final = 2048
#: Maximum number of padded token ids of a request to a model, unless they are at most twice the token ids.
MAX_PADDED: Final = 1 << 16
#: Maximum number of images of a request to a model, which holds them in memory together.
MAX_IMAGES: Final = 16
#: Largest token id.
MAX_TOKEN: Final = 2**31 - 1
#: ``reason`` of errors that some APIs report with a separate status.
EMPTY: Final = "empty_input"
TOO_MANY: Final = "too_many_inputs"

#: The padding of rows of ``token_ids``, INT32.
NO_TOKEN: Final = -1
#: The inputs that choose a prompt: by its name, or for a query or a document.
PROMPT_NAME: Final = "prompt_name"
TASK: Final = "task"

#: Names of tasks in ``input_type`` and ``task`` of several APIs; models need no prompt for them.
_TASKS: Final = {
    "query": "query", "search_query": "query", "retrieval.query": "query",
    "document": "document", "passage": "document", "search_document": "document", "retrieval.passage": "document",
    "classification": "classification", "clustering": "clustering",
}  # fmt: skip

#: The inputs of a request: texts and images (the contents of files), or token ids.
Texts = Sequence[str | bytes] | list[list[int]]


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for preparing texts: the prompt, by one of ``prompt_name``, ``task`` and ``prompt``, and truncation.

    ``truncation`` is ``left``, ``right`` or ``refuse``; None leaves it to the model. ``members`` are the names of the
    options in the request, for errors.
    """

    prompt_name: str | None = None
    task: str | None = None
    prompt: str | None = None
    truncation: str | None = None
    max_length: int | None = None
    members: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """The request parameters."""
        values = {PROMPT_TEXT: self.prompt, TRUNCATION: self.truncation, MAX_LENGTH: self.max_length}
        return {name: value for name, value in values.items() if value is not None}


def read_list(fields: Fields, member: str, maximum: int = MAX_TEXTS) -> list[Any]:
    """Take a required member: an array, or a text as an array of one. Raises ApiError for none or too many."""
    value = fields.required(member)
    path = fields.name(member)
    if type(value) not in (str, list):
        raise wrong(path, value, "a string or an array")
    listed = [value] if type(value) is str else value
    if not listed:
        raise empty(path)
    check_count(listed, path, maximum)
    return listed


def check_count(listed: Sequence[Any], path: str, maximum: int = MAX_TEXTS) -> None:
    """Raise ApiError for more than ``maximum`` elements."""
    if len(listed) > maximum:
        raise ApiError(f"'{path}' has {len(listed)} elements; at most {maximum} are allowed", path, reason=TOO_MANY)


def checked_texts(values: Iterable[Any], path: str) -> list[str]:
    """Return ``values``, which must be texts that are not empty. Raises ApiError with the path of any other.

    Images that have been read, which are bytes, pass.
    """
    listed = list(values)
    for index, text in enumerate(listed):
        if type(text) is bytes:
            continue
        if type(text) is not str:
            raise wrong(f"{path}[{index}]", text, "a string")
        if not text:
            raise empty(path if len(listed) == 1 else f"{path}[{index}]")
    return listed


def checked_text(text: Any, path: str) -> str:
    """Return ``text``, which must be a text that is not empty. Raises ApiError with ``path`` otherwise."""
    if type(text) is not str:
        raise wrong(path, text, "a string")
    if not text:
        raise empty(path)
    return text


def empty(path: str) -> ApiError:
    """Return the error for an empty text."""
    return ApiError(f"'{path}' must not be empty", path, reason=EMPTY)


def read_texts(fields: Fields, member: str, maximum: int = MAX_TEXTS) -> list[str]:
    """Take one text or several. Raises ApiError for none, too many, and values that are not texts."""
    return checked_texts(read_list(fields, member, maximum), fields.name(member))


def read_input(fields: Fields) -> Texts:
    """Take ``input``, or vLLM's ``messages``."""
    if not fields.has("messages"):
        return read_texts_or_tokens(fields, "input")
    if fields.has("input"):
        raise ApiError("'messages' cannot be combined with 'input'", "messages")
    return checked_texts(_read_message(fields), "messages[0].content")


def read_texts_or_tokens(fields: Fields, member: str) -> Texts:
    """Take texts and images, one or several, or the token ids of one text or of several."""
    path = fields.name(member)
    listed = read_list(fields, member, MAX_TOKEN)
    if type(listed[0]) is int:
        return [checked_tokens(listed, path)]
    check_count(listed, path)
    if type(listed[0]) is list:
        return [checked_tokens(tokens, f"{path}[{index}]") for index, tokens in enumerate(listed)]
    items = enumerate(listed)
    read = [item if type(item) is str else text_or_image(item, f"{path}[{index}]") for index, item in items]
    return checked_texts(read, path)


def text_or_image(item: Any, path: str) -> Any:
    """Return the text or image in an object of Jina's API, and any other value unchanged.

    Raises ApiError for an empty text and an invalid image.
    """
    if type(item) is dict and len(item) == 1:
        if "text" in item:
            return checked_text(item["text"], f"{path}.text")
        if IMAGE in item:
            return image_file(item[IMAGE], f"{path}.{IMAGE}", bare=True)
    return item


def read_content(content: Any, path: str) -> str | bytes:
    """Return the text or image of an input of Cohere, or of a message: a text, or parts with ``type``.

    Parts with texts are joined to one text. Raises ApiError for several images, and for an image beside a text.
    """
    if type(content) is str:
        return content
    if type(content) is not list or not content:
        raise wrong(path, content, "a string or an array of parts")
    parts = [_content_part(part, f"{path}[{index}]") for index, part in enumerate(content)]
    texts = [part for part in parts if type(part) is str]
    if len(texts) == len(parts):
        return "\n".join(texts)
    if len(parts) > 1:
        raise ApiError(f"'{path}' must be one text or one image: the model embeds them separately", path)
    return parts[0]


def _read_message(fields: Fields) -> list[str | bytes]:
    """Take vLLM's ``messages``, one message with a text or an image."""
    messages = fields.array("messages") or []
    if len(messages) != 1 or type(messages[0]) is not dict:
        raise ApiError("'messages' must have one message, with a text or an image", "messages")
    return [read_content(messages[0].get("content"), "messages[0].content")]


def _content_part(part: Any, path: str) -> str | bytes:
    kind = part.get("type") if type(part) is dict else None
    if kind == "text":
        if type(part.get("text")) is not str:
            raise wrong(f"{path}.text", part.get("text"), "a string")
        return str(part["text"])
    if kind != "image_url":
        raise wrong(f"{path}.type", kind, "text or image_url")
    url, named = part.get("image_url"), f"{path}.image_url"
    return image_file(url.get("url"), f"{named}.url") if type(url) is dict else image_file(url, named)


def checked_tokens(ids: Any, path: str) -> list[int]:
    """Return ``ids``, which must be token ids, at least one. Raises ApiError with the path of any other value."""
    if type(ids) is not list:
        raise wrong(path, ids, "an array of token ids")
    if not ids:
        raise empty(path)
    for index, id in enumerate(ids):
        if type(id) is not int or not 0 <= id <= MAX_TOKEN:
            raise wrong(f"{path}[{index}]", id, f"a token id, from 0 to {MAX_TOKEN}")
    return ids


def read_prompt(fields: Fields, *members: str) -> TextOptions:
    """Take ``prompt_name`` and ``prompt``, and the ``members`` that choose a task (query, document, clustering …).

    Any other value of ``members`` (``sts`` …) is the name of a prompt. Raises ApiError for several of them.
    """
    options, chosen = TextOptions(), ""
    for member in (*members, PROMPT_NAME, PROMPT_TEXT):
        value = fields.text(member)
        if value is None:
            continue
        if chosen:
            raise ApiError(f"'{fields.name(member)}' cannot be combined with '{chosen}'", fields.name(member))
        chosen = fields.name(member)
        if member in (PROMPT_NAME, PROMPT_TEXT):
            named: dict[str, Any] = {member: value}
            options = replace(options, **named, members={member: chosen})
        elif value in _TASKS:
            options = replace(options, task=_TASKS[value], members={TASK: chosen})
        else:
            options = replace(options, prompt_name=value, members={PROMPT_NAME: chosen})
    return options


def _batches(texts: Texts, signature: ModelSignature, *, output: str) -> list[slice]:
    """Divide texts into requests that the model takes: of its maximum batch size, or one by one.

    Rows of token ids are divided further where padding them to the longest one would take much more memory.
    """
    count, spec = len(texts), signature.inputs[PROMPT]
    whole = spec.dims == (-1,) and output in signature.outputs and len(signature.outputs[output].dims) == 2
    size = signature.max_batch_size or (count if whole else 1)
    if any(type(item) is bytes for item in texts):
        size = min(size, MAX_IMAGES)
    if type(texts[0]) is not list:
        return [slice(start, start + size) for start in range(0, count, size)]
    lengths = [len(row) for row in texts]
    starts, longest, total = [0], 0, 0
    for index, length in enumerate(lengths):
        rows = index - starts[-1] + 1
        longest, total = max(longest, length), total + length
        if rows > size or rows * longest > max(MAX_PADDED, 2 * total):
            starts.append(index)
            longest = total = length
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


def text_inputs(
    signature: ModelSignature,
    texts: Texts,
    options: TextOptions,
    *,
    output: str,
    pairs: Sequence[str] | None = None,
) -> tuple[list[dict[str, WireTensor]], list[int]]:
    """Return the inputs of the requests to a model, and the rows of each.

    Raises ApiError for an option or for token ids that the model does not take.
    """
    inputs, rows = [], []
    for part in _batches(texts, signature, output=output):
        chunk: list[Any] = list(texts[part])
        if type(chunk[0]) is list:
            tensors = {TOKEN_IDS: _token_tensor(signature, chunk)}
        else:
            tensors = _text_tensors(signature, chunk)
        for name in (PROMPT, PAIR) if output == TOKENS else (PROMPT,):  # ignored with token ids, and by a tokenizer
            if name in signature.inputs and not signature.inputs[name].optional and name not in tensors:
                tensors[name] = _texts_tensor(signature, name, [""] * len(chunk))
        if pairs is not None:
            tensors[PAIR] = _texts_tensor(signature, PAIR, pairs[part])
        for name, value in ((PROMPT_NAME, options.prompt_name), (TASK, options.task)):
            if value is not None and _takes(signature, name, options):
                tensors[name] = _texts_tensor(signature, name, [value] * len(chunk))
        inputs.append(tensors)
        rows.append(len(chunk))
    return inputs, rows


def _takes(signature: ModelSignature, name: str, options: TextOptions) -> bool:
    """Whether the model has the input ``name``.

    A model without prompts embeds queries and documents in the same way; only a prompt that the client names itself is
    refused.
    """
    if name in signature.inputs:
        return True
    member = options.members.get(name, name)
    if member.rpartition(".")[2] == PROMPT_NAME:
        raise ApiError(f"model '{signature.name}' has no prompts, and takes no '{member}'", member)
    return False


def counted(signature: ModelSignature, *outputs: str) -> tuple[str, ...]:
    """Return ``outputs`` and, if the model has it, the one that counts tokens."""
    return tuple(dict.fromkeys([*outputs, COUNT])) if COUNT in signature.outputs else outputs


def _texts_tensor(signature: ModelSignature, name: str, texts: Sequence[str]) -> WireTensor:
    return text_tensor(signature, name, [text.encode() for text in texts])


def _text_tensors(signature: ModelSignature, items: Sequence[str | bytes]) -> dict[str, WireTensor]:
    """Return the inputs for texts and images; the rows of images have no text, and those of texts no image."""
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) == len(items):
        return {PROMPT: _texts_tensor(signature, PROMPT, texts)}
    texts = [item if isinstance(item, str) else "" for item in items]
    files = [item if isinstance(item, bytes) else b"" for item in items]
    if IMAGE not in signature.inputs:
        raise ApiError(f"model '{signature.name}' embeds no images: send texts", code=Code.UNSUPPORTED)
    tensors = {IMAGE: text_tensor(signature, IMAGE, files)}
    return {**tensors, PROMPT: _texts_tensor(signature, PROMPT, texts)} if any(texts) else tensors


def _token_tensor(signature: ModelSignature, rows: Sequence[list[int]]) -> WireTensor:
    if TOKEN_IDS not in signature.inputs:
        raise ApiError(f"model '{signature.name}' takes no token ids: send texts", "input")
    ids = np.full((len(rows), max(map(len, rows))), NO_TOKEN, "<i4")
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    shape = ids.shape if signature.max_batch_size else (prod(ids.shape),)
    return WireTensor(TOKEN_IDS, "INT32", shape, ids.tobytes())
