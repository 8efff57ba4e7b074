"""Images and recordings of chats that are bombs: one clear refusal each, and the server stays responsive and small."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.conformance.raw import post
from tests.conftest import STARTERS, Server
from tests.hostile.health_watch import HealthWatch
from tests.media_checkpoints import picture, write
from tests.task_checkpoints import png_chunk

#: The longest wait of a health request (s).
WAIT = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("media")
    for name in ("llava", "qwen2_audio"):
        write(folder / "models" / name / "1", name)
        (folder / "models" / name / "config.pbtxt").write_text(
            'backend: "huggingface" parameters { key: "max_image_pixels" value { string_value: "1000000" } }'
        )
    with STARTERS["conch"](folder / "models", log=folder / "server.log") as server:
        yield server


def png(width: int, height: int, rows: int) -> bytes:
    """A PNG file with this size in its header, and ``rows`` black rows, each a byte for a pixel."""
    data = zlib.compress(bytes(rows * (width + 1)), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def sound(seconds: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(1)
        written.setframerate(1000)
        written.writeframes(b"\x80\x90" * (500 * seconds))
    return file.getvalue()


def image(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file).decode()}"}}


def recording(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64encode(file).decode(), "format": "wav"}}


ATTACKS: dict[str, tuple[str, Any, str]] = {
    "an image of 50,000 rows and columns": ("llava", lambda: [image(png(50_000, 50_000, 400))], "pixels"),
    "an image that is larger than its header": ("llava", lambda: [image(png(64, 4, 1_000_000))], ""),
    "a strip": ("llava", lambda: [image(png(60_000, 2, 2))], "one side"),
    "a part of an image": ("llava", lambda: [image(png(900, 900, 900)[:400])], "cannot be read"),
    "five of the largest images": (
        "llava",
        lambda: [image(png(1000, 985 + more, 995)) for more in range(-4, 1)],
        "together",
    ),
    "a hundred images": ("llava", lambda: [image(picture(1))] * 100, "at most 32"),
    "no base64": ("llava", lambda: [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}], "base64"),
    "a placeholder without an image": (
        "llava",
        lambda: [image(picture(1)), {"type": "text", "text": "<image>"}],
        "2 times",
    ),
    "a recording of an hour": ("qwen2_audio", lambda: [recording(sound(3600))], "seconds long"),
    "sound that is no sound": ("qwen2_audio", lambda: [recording(b"RIFF" + bytes(1000))], "cannot be read"),
}


def ask(server: Server, model: str, parts: list[dict[str, Any]]) -> Any:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    return post(server.http, "/v1/chat/completions", body)


def test_bombs_are_refused_and_the_server_stays_responsive(server: Server) -> None:
    assert ask(server, "llava", [image(picture(1))]).status == 200
    for name, (model, parts, reason) in ATTACKS.items():
        content = parts()
        with HealthWatch(server.http, server.process.pid) as watch:
            reply = ask(server, model, content)
            seen = watch.stop()
        message = reply.json().get("error", {}).get("message", "")
        assert (reply.status == 400 and reason in message) or (not reason and reply.status == 200), (name, message)
        assert seen.longest_wait < WAIT, name
    assert ask(server, "llava", [image(picture(1))]).status == 200
