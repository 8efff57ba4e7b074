"""Answers of transformers' pipelines as text or JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

import numpy as np

from conch.backends.tasks import media

#: Members of an answer that is text and nothing else.
_TEXTS: Final = ("generated_text", "answer", "text", "summary_text", "translation_text")


def text_of(answer: Any) -> str:
    """The text where an answer is one text, else the answer as JSON.

    In JSON an image is a PNG file in base64, sound beside its ``sampling_rate`` a WAV file in base64, and any other
    array a list.
    """
    only = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if isinstance(only, str):
        return only
    if isinstance(only, Mapping):
        texts = [only[name] for name in _TEXTS if isinstance(only.get(name), str)]
        if texts:
            return str(texts[0])
    return json.dumps(_plain(answer), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A pipeline's answer in the types that JSON has."""
    if isinstance(value, Mapping):
        if "sampling_rate" in value and isinstance(value.get("audio"), np.ndarray):
            rate = int(value["sampling_rate"])
            return {"audio": b64encode(media.wav(value["audio"], rate)).decode(), "sampling_rate": rate}
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(element) for element in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "save") and hasattr(value, "convert"):
        return b64encode(media.png(value)).decode()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
