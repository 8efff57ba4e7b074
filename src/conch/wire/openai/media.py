"""Images and recordings in the bodies of requests: files in base64."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any, Final

from conch.core.tensors import Buffer
from conch.wire.openai.reading import ApiError, Fields, one_of, wrong

#: The inputs of models that read images and recordings: the contents of files.
IMAGE: Final = "image"
AUDIO: Final = "audio"
#: vLLM's part of a message with the address of a recording.
AUDIO_URL: Final = "audio_url"
_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,")
_AUDIO_URL: Final = re.compile(r"data:audio/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64,")
_FORMATS: Final = ("wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm")
#: The values of ``detail`` of an image, which have no effect.
DETAILS: Final = ("auto", "low", "high", "original")
_EXPECTED: Final = "a data URL with an image in base64, such as data:image/png;base64,..."


#: Returns the files at URLs.
Fetch = Callable[[list[str]], Sequence[Buffer]]


def fetch_media(document: dict[str, Any], fetch: Fetch | None) -> None:
    """Put data URLs in the place of the URLs of files in the messages or items of a request, if ``fetch`` is given."""
    if fetch is None:
        return
    places: list[tuple[Any, str, str]] = []
    for entry in (*_objects(document.get("messages")), *_objects(document.get("input"))):
        parts = [*_objects(entry.get("content")), *_objects(entry.get("output"))]
        parts += [inner for part in parts for inner in _objects(part.get("content"))]
        for part in parts:
            holders = [
                (part, "image_url", "image"), (part.get("image_url"), "url", "image"),
                (part.get("source"), "url", "image"), (part.get(AUDIO_URL), "url", "audio"),
            ]  # fmt: skip
            places += [place for place in holders if type(place[0]) is dict and _is_url(place[0].get(place[1]))]
    if not places:
        return
    files = fetch([holder[name] for holder, name, _ in places])
    for (holder, name, kind), file in zip(places, files, strict=True):
        holder[name] = f"data:{kind}/fetched;base64,{b64encode(file).decode()}"


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
            f"'{path}' is the URL of an image, and this server does not fetch images: send the image as a data URL",
            path,
        )
    if prefix is None and (not bare or ":" in value):
        raise wrong(path, value, _EXPECTED)
    return decode_base64(value[prefix.end() if prefix else 0 :], path)


def audio_file(value: Any, path: str, *, bare: bool = True) -> bytes:
    """Return the file in a data URL, or in base64 alone if ``bare``. Raises ApiError, naming ``path``, for others."""
    prefix = _AUDIO_URL.match(value) if type(value) is str else None
    if _is_url(value):
        raise ApiError(
            f"'{path}' is the URL of a recording, and this server does not fetch recordings: send the recording as a "
            "data URL",
            path,
        )
    if type(value) is not str or not value or (prefix is None and not bare):
        expected = "a recording in base64" if bare else "a data URL with a recording in base64"
        raise wrong(path, value, expected)
    return decode_base64(value[prefix.end() if prefix else 0 :], path)


def sound_file(value: Any, path: str) -> bytes:
    """Return the file in OpenAI's object for a recording. Raises ApiError, naming its member, for others."""
    if type(value) is not dict:
        raise wrong(path, value, "an object")
    members = Fields(value, path)
    data, form = members.take("data"), members.take("format")
    members.finish()
    if form is not None:
        one_of(f"{path}.format", form, _FORMATS)
    return audio_file(data, f"{path}.data")


def decode_base64(text: str, path: str) -> bytes:
    """Return the bytes in base64. Raises ApiError, naming ``path``, if it is invalid or empty."""
    try:
        file = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"'{path}' is not base64: {error}", path) from None
    if not file:
        raise ApiError(f"'{path}' has no content", path)
    return file
