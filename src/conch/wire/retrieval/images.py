"""Reads texts and images in the members of Cohere and vLLM."""

from __future__ import annotations

from typing import Any

from conch.wire.openai.media import image_file
from conch.wire.openai.reading import ApiError, Fields, wrong


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
