"""Chats about images and sound with tiny checkpoints, through each API: the same tokens as transformers."""

from __future__ import annotations

import itertools
import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image

from conch.backends.io_formats.processor import MediaProcessor
from conch.backends.tasks.media import wav
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.chat import ChatTemplate
from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.conformance.raw import post as post_raw
from tests.e2e.openai_api.asking import post
from tests.media_checkpoints import picture, write
from tests.servers import ConchServer

TEXT = "How can you be sure?"
MOST = 8
PICTURES = [picture(1), picture(2, 24, 40)]
SOUND = wav(np.random.default_rng(0).uniform(-0.5, 0.5, 12_000).astype(np.float32), 16_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "models"
    for name in ("qwen2_vl", "qwen2_audio", "voxtral"):
        write(folder / name / "1", name)
    policy = "model_transaction_policy { decoupled: false }"  # as POST /v2/models/{model}/infer needs
    (folder / "qwen2_audio" / "config.pbtxt").write_text(f'backend: "huggingface" {policy}')
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_checkpoint(folder / "llama" / "1", transformers.LlamaConfig, {"intermediate_size": 64}, tokenizer, seed=1)
    (folder / "llama" / "config.pbtxt").write_text(f'backend: "huggingface" {policy}')
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ConchServer]:
    flags = ("--cache-config=local,size=1000000", "--allowed-media-domains=localhost")
    with ConchServer(models, *flags, log=models.parent / "log") as server:
        yield server


def url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(file).decode()}"


def expected(models: Path, name: str, **media: Any) -> tuple[str, int]:
    """The text that transformers generates, and the number of tokens of the prompt."""
    [text], length = expected_beams(models, name, 1, **media)
    return text, length


def expected_beams(models: Path, name: str, beams: int, **media: Any) -> tuple[list[str], int]:
    """The texts of the beams that transformers generates, and the number of tokens of the prompt."""
    checkpoint = Checkpoint.open(models / name / "1")
    processor = MediaProcessor(checkpoint).processor
    kind, count = ("audio", 1) if "audio" in media else ("image", len(media["images"]))
    parts = [{"type": kind}] * count + [{"type": "text", "text": TEXT}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    length = inputs["input_ids"].shape[1]
    rows = model.generate(**inputs, max_new_tokens=MOST, do_sample=False, num_beams=beams, num_return_sequences=beams)
    return [processor.tokenizer.decode(row[length:], skip_special_tokens=True) for row in rows], length


def image_parts(files: list[bytes]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url(file)}} for file in files]
    return [*parts, {"type": "text", "text": TEXT}]


def chat(server: ConchServer, model: str, content: Any, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": MOST, "temperature": 0}
    status, _, reply = post(server, "/v1/chat/completions", {**body, **more})
    return status, reply


def test_each_api_gives_the_text_of_transformers(server: ConchServer, models: Path) -> None:
    images = [Image.open(BytesIO(file)) for file in PICTURES]
    text, length = expected(models, "qwen2_vl", images=images)
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="qwen2_vl",
            messages=[{"role": "user", "content": image_parts(PICTURES)}],  # type: ignore[typeddict-item, misc, list-item]
            max_tokens=MOST,
            temperature=0,
        )
        assert reply.choices[0].message.content == text
        assert reply.usage is not None and reply.usage.prompt_tokens == length
        content = [*({"type": "input_image", "image_url": url(file)} for file in PICTURES)]
        response = client.responses.create(
            model="qwen2_vl",
            input=[{"role": "user", "content": [*content, {"type": "input_text", "text": TEXT}]}],  # type: ignore[list-item, misc]
            max_output_tokens=MOST,
            temperature=0,
        )
        assert response.output_text == text
    with anthropic.Anthropic(base_url=f"http://{server.http}", api_key="any", max_retries=0) as other:
        blocks = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(file).decode()}}
            for file in PICTURES
        ]
        message = other.messages.create(
            model="qwen2_vl",
            messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": TEXT}]}],  # type: ignore[list-item, typeddict-item]
            max_tokens=MOST,
            extra_body={"temperature": 0},
        )
        assert message.content[0].text == text  # type: ignore[union-attr]
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == length


def test_a_stream_gives_the_same_text(server: ConchServer, models: Path) -> None:
    text, _ = expected(models, "qwen2_vl", images=[Image.open(BytesIO(PICTURES[0]))])
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="qwen2_vl",
            messages=[{"role": "user", "content": image_parts(PICTURES[:1])}],  # type: ignore[typeddict-item, misc, list-item]
            max_tokens=MOST,
            temperature=0,
            stream=True,
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text


def test_other_features_apply_to_prompts_with_images(server: ConchServer, models: Path) -> None:
    images, parts = [Image.open(BytesIO(file)) for file in PICTURES], image_parts(PICTURES)
    text, _ = expected(models, "qwen2_vl", images=images)

    def choices(**members: Any) -> list[Any]:
        status, reply = chat(server, "qwen2_vl", parts, **members)
        assert status == 200, reply
        return list(reply["choices"])

    [found] = choices(logprobs=True, top_logprobs=2, cache_salt="a")
    assert found["message"]["content"] == text and len(found["logprobs"]["content"]) == MOST
    chosen = [token["logprob"] for token in found["logprobs"]["content"]]
    assert chosen == [token["top_logprobs"][0]["logprob"] for token in found["logprobs"]["content"]]
    samples = [[choice["message"]["content"] for choice in choices(n=3, temperature=1, seed=1)] for _ in range(2)]
    assert samples[0] == samples[1] and len(set(samples[0])) > 1
    beams = [choice["message"]["content"] for choice in choices(use_beam_search=True, n=2)]
    assert beams == expected_beams(models, "qwen2_vl", 2, images=images)[0]
    schema = {
        "type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert json.loads(choices(response_format=form, max_tokens=80)[0]["message"]["content"]) == {"ok": True}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    [called] = choices(tools=[tool], tool_choice="required", max_tokens=120)
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"ok": True}
    assert choices()[0]["message"]["content"] == text


def test_triton_s_routes_take_images(server: ConchServer, models: Path) -> None:
    text, _ = expected(models, "qwen2_vl", images=[Image.open(BytesIO(PICTURES[0]))])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TEXT}]}]
    body = {
        "messages": json.dumps(messages),
        "image": [b64encode(PICTURES[0]).decode()],
        "max_tokens": MOST,
        "temperature": 0,
    }
    assert post_raw(server.http, "/v2/models/qwen2_vl/generate", body).json()["text_output"] == text
    for content in (messages, [{"role": "tool", "content": [{"type": "image"}]}, *messages]):
        refused = post_raw(server.http, "/v2/models/qwen2_vl/generate", {"messages": json.dumps(content)})
        assert refused.status == 400 and "the request has no 'image'" in refused.error
    prompt = f"<user><|vision_start|><|image_pad|><|vision_end|>{TEXT}<assistant>"
    body = {**body, "text_input": prompt, "exclude_input_in_output": True}
    del body["messages"]
    assert post_raw(server.http, "/v2/models/qwen2_vl/generate", body).json()["text_output"] == text


def test_sound_gives_the_text_of_transformers(server: ConchServer, models: Path) -> None:
    import soundfile

    samples, _ = soundfile.read(BytesIO(SOUND), dtype="float32")
    text, length = expected(models, "qwen2_audio", audio=[samples], sampling_rate=16_000)
    sound = {"type": "input_audio", "input_audio": {"data": b64encode(SOUND).decode(), "format": "wav"}}
    addressed = {"type": "audio_url", "audio_url": {"url": url(SOUND, "audio/wav")}}
    for part in (sound, addressed):
        status, reply = chat(server, "qwen2_audio", [part, {"type": "text", "text": TEXT}])
        assert status == 200, reply
        assert reply["choices"][0]["message"]["content"] == text
        assert reply["usage"]["prompt_tokens"] == length
    bare = {"type": "audio_url", "audio_url": {"url": b64encode(SOUND).decode()}}
    status, reply = chat(server, "qwen2_audio", [bare])
    assert (status, reply["error"]["param"]) == (400, "messages[0].content[0].audio_url.url")


def test_images_in_results_of_tools_are_read_in_each_api(server: ConchServer) -> None:
    name, picture = "look", PICTURES[1]
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}}
    texts = []
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        for kept in (picture, PICTURES[0]):
            conversation: list[Any] = [
                {"role": "user", "content": image_parts(PICTURES[:1])},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": image_parts([kept])},
            ]
            reply = client.chat.completions.create(
                model="qwen2_vl", messages=conversation, max_tokens=MOST, temperature=0
            )
            texts.append((reply.choices[0].message.content, reply.usage and reply.usage.prompt_tokens))
        assert texts[0] != texts[1]
        items: list[Any] = [
            {"role": "user", "content": [
                {"type": "input_image", "image_url": url(PICTURES[0])}, {"type": "input_text", "text": TEXT}
            ]},
            {"type": "function_call", "call_id": "a", "name": name, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [
                {"type": "input_image", "image_url": url(picture)}, {"type": "input_text", "text": TEXT}
            ]},
        ]  # fmt: skip
        response = client.responses.create(model="qwen2_vl", input=items, max_output_tokens=MOST, temperature=0)
        assert response.output_text == texts[0][0]
    with anthropic.Anthropic(base_url=f"http://{server.http}", api_key="any", max_retries=0) as other:
        blocks = [
            [
                {"type": "image",
                 "source": {"type": "base64", "media_type": "image/png", "data": b64encode(file).decode()}},
                {"type": "text", "text": TEXT},
            ]
            for file in (PICTURES[0], picture)
        ]  # fmt: skip
        messages: list[Any] = [
            {"role": "user", "content": blocks[0]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": name, "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks[1]}]},
        ]
        message = other.messages.create(
            model="qwen2_vl", messages=messages, max_tokens=MOST, extra_body={"temperature": 0}
        )
        assert message.content[0].text == texts[0][0]  # type: ignore[union-attr]


def test_items_of_results_follow_them_where_the_template_leaves_them_out(models: Path) -> None:
    processor = MediaProcessor(Checkpoint.open(models / "qwen2_vl" / "1"))
    [mark] = processor.marks.values()
    only_users = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% elif m.role == 'user' %}MARK{% endif %}{% endfor %} {% endfor %}"
    )
    image, text = {"type": "image"}, {"type": "text", "text": "seen"}
    messages: list[Any] = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": [image, text]},
        {"role": "tool", "content": [text, image]},
        {"role": "assistant", "content": "so"},
    ]
    for template, expected in (
        (only_users, "user:MARK assistant: tool:seen tool:seen user:MARKMARK assistant:so "),
        (only_users.replace("elif m.role == 'user'", "else"),
         "user:MARK assistant: tool:MARKseen tool:seenMARK assistant:so "),
    ):  # fmt: skip
        chat = ChatTemplate({"default": template.replace("MARK", mark)}, {}, "a test")
        fresh = MediaProcessor(Checkpoint.open(models / "qwen2_vl" / "1"))
        assert chat.render(fresh.with_parts(messages, chat)) == expected.replace("MARK", mark)


def test_texts_alone_are_read_by_the_same_models(server: ConchServer) -> None:
    status, reply = chat(server, "qwen2_vl", TEXT)
    assert status == 200 and reply["choices"][0]["message"]["content"], reply


def test_what_cannot_be_read_is_refused(server: ConchServer, models: Path) -> None:
    def refusal(model: str, content: Any) -> str:
        status, reply = chat(server, model, content)
        assert status == 400, reply
        return str(reply["error"]["message"])

    parts = image_parts(PICTURES[:1])
    assert "does not read images" in refusal("llama", parts)
    assert "does not read 'image': it reads 'audio'" in refusal("qwen2_audio", parts)
    sound = {"type": "input_audio", "input_audio": {"data": b64encode(SOUND).decode(), "format": "wav"}}
    assert "VoxtralProcessor does not process 'audio' beside a text" in refusal("voxtral", [sound])
    assert chat(server, "voxtral", TEXT)[0] == 200
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}}
    body = {"model": "qwen2_vl", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    assert "'messages[0].content[0].source' is not base64" in post(server, "/v1/messages", body)[2]["error"]["message"]
    assert "is not base64" in refusal(
        "qwen2_vl", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]
    )
    assert "is not an image" in refusal("qwen2_vl", [{"type": "image_url", "image_url": {"url": url(b"text")}}])
    assert "image file is truncated" in refusal("qwen2_vl", image_parts([PICTURES[0][:-30]]))
    assert "truncated" not in (models.parent / "log").read_text()
    assert "at most 32" in refusal("qwen2_vl", image_parts(PICTURES[:1] * 33))
    assert "2 times '<|image_pad|>'" in refusal("qwen2_vl", [*parts, {"type": "text", "text": "<|image_pad|>"}])


@pytest.mark.parametrize("part", ["text", 1, None, [], {"type": ["image"]}, {"type": None}])
def test_parts_that_are_no_objects_are_refused(server: ConchServer, part: Any) -> None:
    for role, kind in itertools.product(("user", "tool"), ("image", "audio")):
        text = json.dumps([{"role": role, "content": [{"type": kind}, part]}])
        tensor = {"name": "messages", "shape": [1], "datatype": "BYTES", "data": [text]}
        for path, body in (
            ("llama/infer", {"inputs": [tensor]}),
            ("qwen2_audio/infer", {"inputs": [tensor]}),
            ("qwen2_vl/generate", {"messages": text, "max_tokens": 1}),
        ):
            reply = post_raw(server.http, f"/v2/models/{path}", body)
            assert reply.status == 400 and "messages[0].content[1] must be a JSON object" in reply.error, reply


def test_an_address_in_the_operator_s_network_is_never_connected_to(server: ConchServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        port = trap.getsockname()[1]
        for url, reason, kind in (
            ("http://localhost/a.png", "not public", "image_url"),
            (f"http://127.0.0.1:{port}/a.png", "not fetched", "audio_url"),
        ):
            parts: dict[str, dict[str, list[Any]]] = {
                "/v1/chat/completions": {"messages": [{"type": kind, kind: {"url": url}}]},
                "/v1/responses": {"input": [{"type": "input_image", "image_url": url}]},
                "/v1/messages": {"messages": [
                    {"type": "tool_result", "tool_use_id": "a",
                     "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
                ]},
            }  # fmt: skip
            for path, members in parts.items():
                body = {name: [{"role": "user", "content": content}] for name, content in members.items()}
                status, _, reply = post(server, path, {"model": "qwen2_vl", "max_tokens": 1, **body})
                assert status == 400 and reason in reply["error"]["message"], reply
        with pytest.raises(BlockingIOError):
            trap.accept()
