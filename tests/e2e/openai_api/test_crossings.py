"""Images, recordings, responses and messages with models that are cached, in ensembles, loaded on demand, or remote.

A server in front has nothing but remote models of another one, whose models are loaded by their first requests.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from safetensors.torch import load_file, save_file
from urllib3.filepost import encode_multipart_formdata

from tests import task_checkpoints
from tests.checkpoints import write_adapter
from tests.conformance.raw import get, post
from tests.e2e.openai_api.test_images import chat, image_parts
from tests.events import eventually
from tests.media_checkpoints import picture, write
from tests.servers import ConchServer
from tests.task_checkpoints import sound_file, tone

pytestmark = pytest.mark.timeout(120)

_CACHED = 'backend: "huggingface" response_cache { enable: true }'
#: A picture and a question, and a recording.
PARTS = image_parts([picture(1)])
SOUND = sound_file(tone(1.2), subtype="FLOAT")


def write_language_adapter(checkpoint: Path, folder: Path) -> None:
    """Write an adapter of the attention of the language model alone, with the names of the checkpoint's files."""
    write_adapter(checkpoint, folder, 1)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "language_model" in name}, file)


def ensemble(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """The configuration of an ensemble that passes tensors, given with their types and dims, to a model and back."""
    tensors = [
        ", ".join(f'{{ name: "{name}" {form} }}' for name, form in members.items()) for members in (inputs, outputs)
    ]
    maps = [f'input_map {{ key: "{name}" value: "{name}" }}' for name in inputs]
    maps += [f'output_map {{ key: "{name}" value: "{name}" }}' for name in outputs]
    step = f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'
    return (
        f'platform: "ensemble" input [ {tensors[0]} ] output [ {tensors[1]} ] ensemble_scheduling {{ step [ {step} ] }}'
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crossings")
    models = folder / "models"
    write(models / "reader" / "1", "qwen2_vl")
    task_checkpoints.whisper(models / "whisper" / "1")
    write(models / "tuned" / "1", "llava")
    write_language_adapter(models / "tuned" / "1", folder / "adapters" / "red")
    one, any_number = "data_type: TYPE_STRING dims: [ 1 ]", "data_type: TYPE_STRING dims: [ -1 ]"
    numbers = {"max_tokens": "TYPE_INT32", "temperature": "TYPE_FP32"}
    members = {"messages": one, "image": any_number}
    members |= {name: f"data_type: {datatype} dims: [ 1 ]" for name, datatype in numbers.items()}
    optional = {name: f"{form} optional: true" for name, form in members.items()}
    folders = json.dumps(json.dumps([str(folder / "adapters")]))
    configurations = {
        "reader": f"{_CACHED} model_transaction_policy {{ decoupled: false }}",
        "whisper": _CACHED,
        "tuned": f'backend: "huggingface" parameters {{ key: "lora_folders" value {{ string_value: {folders} }} }}',
        "described": ensemble("reader", optional, {"text_output": any_number}),
        "spoken": ensemble("whisper", {"audio": one}, {"text_output": one, "chunks": one}),
    }
    for name, text in configurations.items():
        (models / name / "1").mkdir(parents=True, exist_ok=True)
        (models / name / "config.pbtxt").write_text(text)
    (folder / "front").mkdir()
    return folder


@pytest.fixture(scope="module")
def back(folder: Path) -> Iterator[ConchServer]:
    flags = ("--model-control-mode=on-demand", "--cache-config=local,size=10000000")
    with ConchServer(folder / "models", *flags, log=folder / "log") as server:
        # The first requests load the models.
        for name in ("reader", "tuned"):
            body = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": PARTS}]}
            assert requests.post(f"http://{server.http}/v1/chat/completions", json=body, timeout=100).ok
        recordings, files = f"http://{server.http}/v1/audio/transcriptions", {"file": SOUND}
        assert requests.post(recordings, files=files, data={"model": "whisper"}, timeout=100).ok
        yield server


@pytest.fixture(scope="module")
def front(folder: Path, back: ConchServer) -> Iterator[ConchServer]:
    flags = ("--model-control-mode=explicit", "--response-store-bytes=1000000")
    with ConchServer(folder / "front", *flags, log=folder / "front.log") as server:
        yield server


def connect(server: ConchServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0, timeout=60)


def add_remote(front: ConchServer, back: ConchServer, name: str, protocol: str) -> str:
    """Load a remote model that runs as ``name`` on the other server; return its name."""
    url = {"http": f"http://{back.http}", "grpc": f"grpc://{back.grpc}"}[protocol]
    parameters = {"url": {"string_value": url}, "model": {"string_value": name}}
    config = json.dumps({"backend": "remote", "parameters": parameters})
    loaded = post(front.http, f"/v2/repository/models/{name}_{protocol}/load", {"parameters": {"config": config}})
    assert loaded.status == 200, loaded.error
    return f"{name}_{protocol}"


def current(server: ConchServer, model: str) -> Any:
    """Return what the console shows about the requests of a model."""
    return get(server.http, f"/console/models/{model}/statistics").json()


def generates_nothing(server: ConchServer, model: str) -> bool:
    """Whether no sequence of a model runs, waits, or has tokens in the KV cache."""
    [statistics] = get(server.http, f"/v2/models/{model}/stats").json()["model_stats"]
    now = statistics["generation"]
    return bool(now["running"] == now["waiting"] == now["kv_cache_tokens"] == 0)


def cancelled(server: ConchServer, model: str) -> int:
    return int(current(server, model)["failures"].get("CANCELED", 0))


@contextmanager
def hang_up_after(
    server: ConchServer, path: str, body: bytes, sent: int | None = None, content_type: str = "application/json"
) -> Iterator[socket.socket]:
    """Send a request, or its first bytes, and close its connection at the end of the context."""
    host, port = server.http.split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {server.http}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body[:sent])
        yield connection


def text_of(server: ConchServer, model: str, content: Any = PARTS, **more: Any) -> str:
    status, reply = chat(server, model, content, **more)
    assert status == 200, reply
    return str(reply["choices"][0]["message"]["content"])


def test_images_of_chats(back: ConchServer, front: ConchServer) -> None:
    text = text_of(back, "reader")
    assert text != text_of(back, "reader", image_parts([picture(2)]))
    count = back.cache_hits("reader")
    assert text_of(back, "reader") == text and back.cache_hits("reader") == count + 1
    # The ensemble asks its step for fewer outputs than a client of the model.
    assert text_of(back, "described") == text and back.cache_hits("reader") == count + 1
    assert text_of(back, "described") == text and back.cache_hits("reader") == count + 2
    for protocol in ("http", "grpc"):
        name = add_remote(front, back, "reader", protocol)
        assert text_of(front, name) == text
        status, reply = chat(front, name, image_parts([b"\x00no image"]))
        assert status == 400 and "is not an image" in reply["error"]["message"], reply


def test_recordings(back: ConchServer, front: ConchServer) -> None:
    def transcribe(server: ConchServer, model: str, sound: bytes = SOUND) -> str:
        with connect(server) as client:
            return client.audio.transcriptions.create(model=model, file=("a.wav", sound)).text

    text = transcribe(back, "whisper")
    count = back.cache_hits("whisper")
    assert transcribe(back, "whisper") == text and back.cache_hits("whisper") == count + 1
    assert transcribe(back, "spoken") == text
    for protocol in ("http", "grpc"):
        name = add_remote(front, back, "whisper", protocol)
        assert transcribe(front, name) == text
        with pytest.raises(openai.BadRequestError, match="'file' cannot be read"):
            transcribe(front, name, b"no sound")


def stream_of(client: openai.OpenAI, model: str, sound: bytes) -> Iterator[Any]:
    return iter(client.audio.transcriptions.create(model=model, file=("a.wav", sound), stream=True))


def text_of_stream(*events: Any) -> str:
    *deltas, done = events
    assert "".join(event.delta for event in deltas) == done.text
    return str(done.text)


def test_streams_of_recordings(back: ConchServer, front: ConchServer) -> None:
    sound = sound_file(tone(5.3, seed=1), subtype="FLOAT")
    with connect(back) as client, connect(front) as other:
        events = list(stream_of(client, "whisper", sound))
        text = text_of_stream(*events)
        assert len(events) > 2
        # The response cache has the whole text at once.
        count = back.cache_hits("whisper")
        assert text_of_stream(*stream_of(client, "whisper", sound)) == text
        assert client.audio.transcriptions.create(model="whisper", file=("a.wav", sound)).text == text
        assert back.cache_hits("whisper") == count + 2
        assert text_of_stream(*stream_of(client, "spoken", sound)) == text
        for protocol in ("http", "grpc"):
            assert text_of_stream(*stream_of(other, add_remote(front, back, "whisper", protocol), sound)) == text


def test_stream_of_a_recording_is_whole_beside_others_that_end_and_through_a_reload(
    back: ConchServer, folder: Path
) -> None:
    sound = sound_file(tone(12, seed=2), subtype="FLOAT")
    form, content_type = encode_multipart_formdata(
        {"model": "whisper", "stream": "true", "file": ("a.wav", sound_file(tone(40, seed=3), subtype="FLOAT"))}
    )
    before = cancelled(back, "whisper")
    with connect(back) as client:
        stream = stream_of(client, "whisper", sound)
        first = next(stream)
        with hang_up_after(back, "/v1/audio/transcriptions", form, None, content_type) as connection:
            received = b""
            while b"transcript.text.delta" not in received:
                received += connection.recv(1 << 16)
        eventually(lambda: cancelled(back, "whisper") == before + 1, "the cancellation")
        (folder / "models/whisper/1/config.json").touch()  # an unchanged model is not loaded again
        assert post(back.http, "/v2/repository/models/whisper/load", {}).status == 200
        text = text_of_stream(first, *stream)
        # A response of the old version is not cached for the new one.
        count = back.cache_hits("whisper")
        assert client.audio.transcriptions.create(model="whisper", file=("a.wav", sound)).text == text
        assert back.cache_hits("whisper") == count
    eventually(lambda: current(back, "whisper")["in_flight"] == 0, "the end of the requests")


def test_responses_and_messages_of_a_remote_model(back: ConchServer, front: ConchServer) -> None:
    name = add_remote(front, back, "tuned", "grpc")
    with connect(front) as client:
        first = client.responses.create(model=name, input="How can", max_output_tokens=4, temperature=0)
        second = client.responses.create(
            model=name, input="you be", previous_response_id=first.id, max_output_tokens=4, temperature=0
        )
        conversation = [
            {"role": "user", "content": "How can"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "you be"},
        ]
        body = {"model": "tuned", "messages": conversation, "max_tokens": 4, "temperature": 0}
        alone = post(back.http, "/v1/chat/completions", body).json()
        assert second.output_text == alone["choices"][0]["message"]["content"]
        stream = client.responses.create(model=name, input="How can", max_output_tokens=4, temperature=0, stream=True)
        assert (
            "".join(event.delta for event in stream if event.type == "response.output_text.delta") == first.output_text
        )
    body = {"model": name, "messages": conversation, "max_tokens": 4, "temperature": 0}
    message = post(front.http, "/v1/messages", body).json()
    assert message["content"] == [{"type": "text", "text": second.output_text}]
    assert second.usage is not None
    usage = alone["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (second.usage.input_tokens, 4)
    read = message["usage"]["cache_read_input_tokens"] or 0
    assert message["usage"]["input_tokens"] + read == usage["prompt_tokens"]
    counted = post(front.http, "/v1/messages/count_tokens", {"model": name, "messages": conversation}).json()
    assert counted == {"input_tokens": usage["prompt_tokens"]}


def test_images_of_a_model_with_an_adapter(back: ConchServer) -> None:
    text = text_of(back, "tuned")
    body = {"lora_name": "red", "lora_path": "red", "base_model_name": "tuned"}
    loaded = post(back.http, "/v1/load_lora_adapter", body)
    assert loaded.status == 200, loaded.error
    assert text_of(back, "red") != text
    assert text_of(back, "red") == text_of(back, "tuned", lora_name="red")
    assert text_of(back, "tuned") == text


@pytest.mark.parametrize("stage", ["at once", "at the first bytes", "before a response"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions", "/v1/completions"])
def test_client_that_hangs_up_cancels_its_request(back: ConchServer, path: str, stage: str) -> None:
    before = cancelled(back, "tuned")
    body: dict[str, Any] = {"model": "tuned", "stream": stage != "before a response", "ignore_eos": True}
    if path == "/v1/responses":
        body |= {"input": "How can", "max_output_tokens": 900}
    elif path == "/v1/completions":
        body |= {"prompt": "How can", "max_tokens": 900}
    else:
        body |= {"messages": [{"role": "user", "content": "How can"}], "max_tokens": 900}
    if path == "/v1/messages":
        del body["ignore_eos"]
    with hang_up_after(back, path, json.dumps(body).encode()) as connection:
        if stage == "at the first bytes":
            assert connection.recv(1)
        if stage == "before a response":
            eventually(lambda: current(back, "tuned")["generation"]["running"], "the sequence")
    eventually(lambda: cancelled(back, "tuned") == before + 1, "the cancellation")
    eventually(lambda: generates_nothing(back, "tuned"), "the end of the sequence")
    assert current(back, "tuned")["in_flight"] == 0


def test_client_that_hangs_up_does_not_disturb_other_recordings(back: ConchServer) -> None:
    with connect(back) as client:
        text = client.audio.transcriptions.create(model="whisper", file=("a.wav", SOUND)).text
        form, content_type = encode_multipart_formdata({"model": "whisper", "file": ("a.wav", sound_file(tone(40)))})
        for part in (len(form) // 2, len(form)):
            with hang_up_after(back, "/v1/audio/transcriptions", form, part, content_type):
                pass
        assert client.audio.transcriptions.create(model="whisper", file=("a.wav", SOUND)).text == text
    eventually(lambda: current(back, "whisper")["in_flight"] == 0, "the end of the requests")
