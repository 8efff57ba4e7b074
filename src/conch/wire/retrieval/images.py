"""Reads images in requests: data URLs in the members of Jina, Cohere and vLLM."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from typing import Any, Final

from conch.wire.openai.reading import ApiError, Fields, wrong

#: The input of models that embed images: the content of a file.
IMAGE: Final = "image"
_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,")
_EXPECTED: Final = "a data URL with an image in base64, such as data:image/png;base64,..."


def image_file(value: Any, path: str, *, bare: bool = False) -> bytes:
    """Return the file in a data URL, or in base64 alone if ``bare``. Raises ApiError, naming ``path``, for others."""
    if type(value) is not str or not value:
        raise wrong(path, value, _EXPECTED)
    prefix = _DATA_URL.match(value)
    if prefix is None and value.lower().startswith(("http://", "https://")):
        raise ApiError(
            f"'{path}' is the address of an image, and this server fetches no images: send the image as a data URL",
            path,
        )
    if prefix is None and (not bare or ":" in value):
        raise wrong(path, value, _EXPECTED)
    try:
        file = b64decode(value[prefix.end() if prefix else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"'{path}' is not base64: {error}", path) from None
    if not file:
        raise ApiError(f"'{path}' has no content", path)
    return file


def read_content(content: Any, path: str) -> str | bytes:
    """Return the text or image of an input of Cohere, or of a message: a text, or parts with ``type``.

    Parts with texts are joined to one text. Raises ApiError for several images, and for an image beside a text.
    """
    if type(content) is str:
        return content
    if type(content) is not list or not content:
        raise wrong(path, content, "an array of parts")
    parts = [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]
    texts = [part for part in parts if type(part) is str]
    if len(texts) == len(parts):
        return "\n".join(texts)
    if len(parts) > 1:
        raise ApiError(f"'{path}' must be one text or one image: the model embeds them separately", path)
    return parts[0]


def read_messages(fields: Fields) -> list[str | bytes]:
    """Take vLLM's ``messages``, one message with a text or an image."""
    messages = fields.array("messages") or []
    if len(messages) != 1 or type(messages[0]) is not dict:
        raise ApiError("'messages' must have one message, with a text or an image", "messages")
    return [read_content(messages[0].get("content"), "messages[0].content")]


def _part(part: Any, path: str) -> str | bytes:
    kind = part.get("type") if type(part) is dict else None
    if kind == "text":
        if type(part.get("text")) is not str:
            raise wrong(f"{path}.text", part.get("text"), "a string")
        return str(part["text"])
    if kind != "image_url":
        raise wrong(f"{path}.type", kind, "text or image_url")
    url, named = part.get("image_url"), f"{path}.image_url"
    return image_file(url.get("url"), f"{named}.url") if type(url) is dict else image_file(url, named)
