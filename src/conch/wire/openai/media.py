"""Images and recordings in the bodies of requests: files in base64."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any, Final

from conch.core.tensors import Buffer
from conch.wire.openai.reading import ApiError, wrong

#: The inputs of models that read images and recordings: the contents of files.
IMAGE: Final = "image"
AUDIO: Final = "audio"
_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,")
_AUDIO_URL: Final = re.compile(r"data:audio/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64,")
_EXPECTED: Final = "a data URL with an image in base64, such as data:image/png;base64,..."


#: Returns the files at URLs.
Fetch = Callable[[list[str]], Sequence[Buffer]]


def fetch_images(document: dict[str, Any], fetch: Fetch | None) -> None:
    """Put data URLs in the place of the URLs of images in the messages or items of a request, if ``fetch`` is given."""
    if fetch is None:
        return
    places = []
    for entry in (*_objects(document.get("messages")), *_objects(document.get("input"))):
        for part in _objects(entry.get("content")):
            holders = [(part, "image_url"), (part.get("image_url"), "url"), (part.get("source"), "url")]
            places += [(holder, name) for holder, name in holders if type(holder) is dict and _is_url(holder.get(name))]
    if not places:
        return
    files = fetch([holder[name] for holder, name in places])
    for (holder, name), file in zip(places, files, strict=True):
        holder[name] = f"data:image/fetched;base64,{b64encode(file).decode()}"


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if type(item) is dict] if type(value) is list else []


def _is_url(value: Any) -> bool:
    return type(value) is str and value.lower().startswith(("http://", "https://"))


def image_file(value: Any, path: str, *, bare: bool = False) -> bytes:
    """Return the file in a data URL, or in base64 alone if ``bare``. Raises ApiError, naming ``path``, for others."""
    if type(value) is not str or not value:
        raise wrong(path, value, _EXPECTED)
    prefix = _DATA_URL.match(value)
    if prefix is None and _is_url(value):
        raise ApiError(
            f"'{path}' is the address of an image, and this server fetches no images: send the image as a data URL",
            path,
        )
    if prefix is None and (not bare or ":" in value):
        raise wrong(path, value, _EXPECTED)
    return decode_base64(value[prefix.end() if prefix else 0 :], path)


def audio_file(value: Any, path: str) -> bytes:
    """Return the file in base64, also as a data URL. Raises ApiError, naming ``path``, for others."""
    if type(value) is not str or not value:
        raise wrong(path, value, "a recording in base64")
    prefix = _AUDIO_URL.match(value)
    return decode_base64(value[prefix.end() if prefix else 0 :], path)


def decode_base64(text: str, path: str) -> bytes:
    """Return the bytes in base64. Raises ApiError, naming ``path``, if it is invalid or empty."""
    try:
        file = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"'{path}' is not base64: {error}", path) from None
    if not file:
        raise ApiError(f"'{path}' has no content", path)
    return file
