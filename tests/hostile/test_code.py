"""Data that could be executed: pickles and templates are never executed, addresses never fetched."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
import pytest

from conch.backends.tasks import media
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.core.errors import ConchError
from tests import text_checkpoints
from tests.conformance.raw import get, pack_strings, post
from tests.conftest import STARTERS, Server
from tests.models import build
from tests.task_checkpoints import image_file, sound_file, tone

#: Each creates the file ``marker`` in an ordinary Jinja environment.
ESCAPES: Final = (
    "{{ cycler.__init__.__globals__.os.system(touch) }}",
    "{{ joiner.__init__.__globals__.os.system(touch) }}",
    "{{ namespace.__init__.__globals__.os.system(touch) }}",
    "{{ lipsum.__globals__.os.system(touch) }}",
    "{{ lipsum['__globals__']['os'].system(touch) }}",
    "{{ lipsum | attr('__globals__') | attr('get')('os') | attr('system')(touch) }}",
    "{{ lipsum | attr('__glo' ~ 'bals__') | attr('get')('os') | attr('system')(touch) }}",
    "{{ (lipsum | attr('%sglobals%s' | format('__', '__'))).os.system(touch) }}",
    "{{ [lipsum] | map(attribute='__globals__.os.system') | first | attr('__call__')(touch) }}",
    "{% set os = cycler.__init__.__globals__.os %}{{ os.popen(touch).read() }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__.__builtins__.__import__('os').system(touch) }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system(touch) }}",
    "{{ undefined.__init__.__globals__.__builtins__.__import__('os').system(touch) }}",
    "{{ messages.__class__.__base__.__subclasses__() | selectattr('__name__', 'equalto', '_wrap_close') | "
    "map(attribute='__init__.__globals__.system') | first | attr('__call__')(touch) }}",
    "{{ ''.join.__self__.__class__.__mro__[1].__subclasses__() | selectattr('__name__', 'equalto', '_wrap_close') | "
    "map(attribute='__init__.__globals__.system') | first | attr('__call__')(touch) }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_template_does_not_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    marker = tmp_path / "marker"
    touch = f"touch {marker}"
    messages = [{"role": "user", "content": touch}]
    jinja2.Environment().from_string(template).render(touch=touch, messages=messages)
    assert marker.exists(), "no escape"
    marker.unlink()
    template = template.replace("touch", "messages[0].content")
    with contextlib.suppress(ConchError):
        ChatTemplate({"default": template}, {}, "m").render(messages)
    assert not marker.exists()


class _Touching:
    """An object that touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


class Place(NamedTuple):
    server: Server
    marker: Path


def _broken_models(repository: Path, pickled: bytes) -> None:
    """Return models with files that are pickles, or that declare a far greater length than they have."""
    files = {
        "pickled": ("pytorch_model.bin", pickled),
        "pickled_as_safetensors": ("model.safetensors", pickled),
        "long_safetensors": ("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
        "far_safetensors": ("model.safetensors", _safetensors([1 << 61], [0, 1 << 63])),
    }
    for name, (file, content) in files.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        text_checkpoints.write(version, "AutoModelForSequenceClassification")
        (version / "model.safetensors").unlink()
        (version / file).write_bytes(content)
    for name, content in {
        "pickled_onnx": pickled,
        "long_onnx": b"\x3a" + b"\xff" * 9 + b"\x01",
        "long_gguf": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
    }.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / f"model.{name.partition('_')[2]}").write_bytes(content)


def _safetensors(shape: list[int], offsets: list[int]) -> bytes:
    head = json.dumps({"classifier.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", len(head)) + head


#: The broken models, and the error messages.
BROKEN: Final = {
    "pickled": "Weights only load failed",
    "pickled_as_safetensors": "is not a safetensors file",
    "long_safetensors": "is not a safetensors file",
    "far_safetensors": "was cut off",
    "pickled_onnx": "Protobuf parsing failed",
    "long_onnx": "Protobuf parsing failed",
    "long_gguf": "it was cut off, or declares more data than it contains",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("code")
    marker = folder / "marker"
    repository = build(folder / "models", "identity_string")
    build(repository, "talker", group="openai")
    _broken_models(repository, pickle.dumps(_Touching(marker)))
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with STARTERS["conch"](repository, *flags, log=folder / "server.log") as server:
        yield Place(server, marker)


def test_models_that_are_pickles_or_lie_about_their_size_do_not_load(place: Place) -> None:
    states = {entry["name"]: entry for entry in post(place.server.http, "/v2/repository/index").json()}
    assert {name: states[name]["state"] for name in BROKEN} == dict.fromkeys(BROKEN, "UNAVAILABLE")
    assert {name: why for name, why in BROKEN.items() if why not in states[name]["reason"]} == {}, states
    assert not place.marker.exists()
    assert get(place.server.http, "/v2/models/identity_string/ready").status == 200


def test_pickle_in_a_tensor_is_bytes(place: Place) -> None:
    pickled = pickle.dumps(_Touching(place.marker))
    data = pack_strings(pickled)
    head = json.dumps({"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1],
                                   "parameters": {"binary_data_size": len(data)}}],
                       "parameters": {"binary_data_output": True}}).encode()  # fmt: skip
    reply = post(place.server.http, "/v2/models/identity_string/infer", head + data,
                 {"Inference-Header-Content-Length": str(len(head))})  # fmt: skip
    assert reply.status == 200
    assert pickled in reply.body
    assert not place.marker.exists()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://{}/image.png"}},
        {"type": "image_url", "image_url": {"url": "gopher://{}/_GET"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "http://{}/a.wav", "format": "wav"}},
        {"type": "file", "file": {"file_data": "http://{}/a.pdf"}},
        {"type": "video_url", "video_url": {"url": "http://{}/v.mp4"}},
    ],
    ids=json.dumps,
)
def test_address_in_a_conversation_is_never_fetched(place: Place, part: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        content = json.loads(json.dumps([part]).replace("{}", address))
        body = {"model": "talker", "messages": [{"role": "user", "content": content}]}
        assert post(place.server.http, "/v1/chat/completions", body).status == 400
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize(
    "data", ["http://{}/a", "https://{}/a", "gopher://{}/_GET", "ftp://{}/a", "file://{}", "{}", "data:image/png,{}"]
)
def test_address_in_the_place_of_a_file_is_no_file(tmp_path: Path, data: str) -> None:
    """Tasks read images and recordings with these two functions only; the path is that of a valid file."""
    (tmp_path / "image.png").write_bytes(image_file())
    (tmp_path / "sound.wav").write_bytes(sound_file(tone(0.1)))
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        for place in (address, tmp_path / "image.png", tmp_path / "sound.wav"):
            address_bytes = data.format(place).encode()
            with pytest.raises(ConchError):
                media.image(address_bytes)
            with pytest.raises(ConchError):
                media.audio(address_bytes, 16_000)
        with pytest.raises(BlockingIOError):
            trap.accept()
