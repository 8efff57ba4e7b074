"""What the clients send to the models of ``tests/models``."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

from pydantic import BaseModel

PLACE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a place.", "parameters": PLACE},
}
#: What makes the model call the function, and give its arguments as structured output.
CALL: Final = '!say <tool_call>{"name": "weather", "arguments": {"place": "Bonn"}}</tool_call>'
ARGUMENTS: Final = '!say {"place": "Bonn"}'


class Weather(BaseModel):
    """The weather of a place."""

    place: str


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def recording() -> bytes:
    """Return a WAV file of half a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(bytes(2 * 8000))
    return file.getvalue()
