"""Chats with a tiny checkpoint whose format of tool calls has special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import openai
import pytest
from transformers import GenerationConfig, LlamaConfig

from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.conformance.raw import post as post_raw
from tests.e2e.openai_api.asking import TOOL, post
from tests.servers import ConchServer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} [TOOL_CALLS]{% endif %}<assistant>"
)
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
THINK = ("<think>", "</think>")
THINKING_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ open if begun else '' }}"
    "{{ open + close if enable_thinking is defined and not enable_thinking else '' }}"
)
BROKEN = "{{ messages[0].content }}\n{% if %}"
PROBLEM = "the chat template of the model has an error in line 2: Expected an expression, got 'end of statement block'"
IGNORE_EOS = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "How can you be"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", *FIM]})
    tokenizer.chat_template = TEMPLATE
    version = folder / "models" / "llama" / "1"
    write_checkpoint(version, LlamaConfig, {"intermediate_size": 64}, tokenizer, seed=1)
    GenerationConfig(bos_token_id=0, eos_token_id=0).save_pretrained(version)
    thinking = train_tokenizer(every_byte=True)
    thinking.add_tokens([*THINK])
    thinking.chat_template = f"{{% set open, close = '{THINK[0]}', '{THINK[1]}' %}}" + THINKING_TEMPLATE
    version = folder / "models" / "thinker" / "1"
    write_checkpoint(version, LlamaConfig, {"intermediate_size": 64}, thinking, seed=1)
    GenerationConfig(bos_token_id=0, eos_token_id=0).save_pretrained(version)
    broken = train_tokenizer()
    broken.chat_template = BROKEN
    for name in ("broken", "misled"):
        version = folder / "models" / name / "1"
        write_checkpoint(version, LlamaConfig, {"intermediate_size": 64}, broken, seed=1)
    (folder / "own.jinja").write_text(BROKEN)
    parameter = f'parameters {{ key: "chat_template" value {{ string_value: "{folder / "own.jinja"}" }} }}'
    (folder / "models" / "misled" / "config.pbtxt").write_text(f'backend: "huggingface" {parameter}')
    loaded = [f"--load-model={name}" for name in ("llama", "thinker", "broken")]
    with ConchServer(folder / "models", "--model-control-mode=explicit", *loaded, log=folder / "log") as server:
        yield server


def chat(server: ConchServer, **more: Any) -> tuple[int, Any]:
    status, _, reply = post(server, "/v1/chat/completions", {"model": "llama", "messages": MESSAGES, **more})
    return status, reply


def test_special_tokens_of_the_format_reach_the_parser_and_not_the_client(server: ConchServer) -> None:
    mark = len(train_tokenizer(every_byte=True))  # the first token that was added
    only = {"logit_bias": {str(mark): 100}}
    body = {"messages": json.dumps(MESSAGES), "sampling_parameters": json.dumps({**only, "max_tokens": 2})}
    texts = [
        post_raw(server.http, "/v2/models/llama/generate", {**body, "include_marks": marks}).json()["text_output"]
        for marks in (False, True)
    ]
    assert texts == ["", "[TOOL_CALLS][TOOL_CALLS]"]
    for tools in ([TOOL], None):
        _, reply = chat(server, tools=tools, max_tokens=2, **only)
        assert reply["choices"][0]["message"]["content"] == ""


def test_error_in_a_chat_template_is_told_at_load_and_to_conversations_only(server: ConchServer) -> None:
    assert server.log is not None
    assert server.log.read_text().count(f"model 'broken': it refuses conversations: {PROBLEM}") == 1
    for _ in range(2):
        status, reply = chat(server, model="broken")
        assert (status, reply["error"]["message"]) == (400, PROBLEM)
    assert server.log.read_text().count(PROBLEM) == 1
    assert post(server, "/v1/completions", {"model": "broken", "prompt": "How can", "max_tokens": 2})[0] == 200
    refused = post_raw(server.http, "/v2/repository/models/misled/load", {})
    assert refused.status == 400 and f"parameter 'chat_template': {PROBLEM}" in refused.error


def test_chat_without_a_temperature_is_sampled(server: ConchServer) -> None:
    def contents(**members: Any) -> set[str]:
        replies = [chat(server, seed=seed, max_tokens=16, ignore_eos=True, **members)[1] for seed in (1, 2)]
        return {reply["choices"][0]["message"]["content"] for reply in replies}

    assert len(contents()) == 2
    assert len(contents(temperature=0)) == 1


def test_usage_and_tokens_of_a_chat(server: ConchServer) -> None:
    long = [{"role": "user", "content": "How can you be " * 10}]
    for _ in range(2):
        _, reply = chat(server, messages=long, max_tokens=3, ignore_eos=True, return_token_ids=True, request_id="mine")
    assert reply["id"] == "chatcmpl-mine"
    assert len(reply["choices"][0]["token_ids"]) == reply["usage"]["completion_tokens"] == 3
    assert 0 < reply["usage"]["prompt_tokens_details"]["cached_tokens"] < reply["usage"]["prompt_tokens"]


def test_ids_of_prompts(server: ConchServer) -> None:
    tokenizer = train_tokenizer(every_byte=True)
    asked: dict[str, Any] = {"model": "llama", "max_tokens": 4, "extra_body": {"return_token_ids": True, **IGNORE_EOS}}
    prompts = ["How can you be", "The sea is"]
    ids = [tokenizer(text)["input_ids"] for text in prompts]
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        expected = tokenizer(f"<user>{prompts[0]}<assistant>")["input_ids"]
        messages: Any = MESSAGES
        whole = client.chat.completions.create(messages=messages, n=2, temperature=1, **asked)
        assert (whole.model_extra or {})["prompt_token_ids"] == expected
        chunks = [*client.chat.completions.create(messages=messages, n=2, temperature=1, stream=True, **asked)]
        assert [(chunk.model_extra or {}).get("prompt_token_ids") for chunk in chunks] == [
            expected,
            *[None] * (len(chunks) - 1),
        ]
        choices = client.completions.create(prompt=prompts, n=2, temperature=1, **asked).choices
        assert [(choice.model_extra or {})["prompt_token_ids"] for choice in choices] == [
            ids[0],
            ids[0],
            ids[1],
            ids[1],
        ]
        found: dict[int, list[Any]] = {}
        for chunk in client.completions.create(prompt=prompts, stream=True, **asked):
            for choice in chunk.choices:
                found.setdefault(choice.index, []).append((choice.model_extra or {}).get("prompt_token_ids"))
        assert found == {index: [ids[index], *[None] * (len(found[index]) - 1)] for index in range(2)}


def test_response_without_the_oldest_items(server: ConchServer) -> None:
    def say(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    items = [say(role, f"How can you be {index}") for index in range(20) for role in ("user", "assistant")]
    items.append(say("user", "Where is it?"))
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        asked = partial(client.responses.create, model="llama", temperature=0, extra_body=IGNORE_EOS)
        members: dict[str, Any] = {"instructions": "Be kind.", "max_output_tokens": 20}
        shortened = asked(input=items, truncation="auto", **members)  # type: ignore[arg-type]
        assert shortened.truncation == "auto" and shortened.usage is not None
        assert shortened.usage.input_tokens + 20 <= 128

        def fits(start: int) -> bool:
            with suppress(openai.BadRequestError):
                kept.append(asked(input=items[start:], truncation="disabled", **members))  # type: ignore[arg-type]
            return bool(kept)

        # No more than necessary.
        kept: list[Any] = []
        assert 24 < next(start for start in range(0, len(items), 2) if fits(start)) < len(items) - 1
        assert kept[0].output_text == shortened.output_text
        assert kept[0].usage.input_tokens == shortened.usage.input_tokens
        # All responses are stored with all items.
        again = asked(input="And now?", previous_response_id=shortened.id, truncation="auto", **members)
        assert len(client.responses.input_items.list(again.id, limit=100).data) == len(items) + 2
        for members in ({"truncation": "disabled"}, {}):
            with pytest.raises(openai.BadRequestError) as caught:
                asked(input=items, **members)  # type: ignore[arg-type]
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as caught:
            asked(input="How can you be " * 200, truncation="auto")
        assert caught.value.code == "context_length_exceeded"


def test_cached_prefixes_are_shared_only_with_the_same_salt(server: ConchServer) -> None:
    text = "Where is the nearest library? " * 6
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1, "priority": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "priority": 2},
    }
    for number, (path, body) in enumerate(bodies.items()):
        for salt, is_cached in ((f"a{number}", False), (f"b{number}", False), (f"a{number}", True)):
            _, _, reply = post(server, path, {"model": "llama", "cache_salt": salt, **body})
            usage = reply["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
            assert bool(cached) == is_cached, (path, salt)
        status, _, reply = post(server, path, {"model": "llama", "cache_salt": "", **body})
        assert status == 400 and "'cache_salt' has 0 characters" in reply["error"]["message"]


@pytest.mark.parametrize("begun", [False, True])
def test_structured_answers_follow_the_reasoning_in_each_api(server: ConchServer, begun: bool) -> None:
    first = len(train_tokenizer(every_byte=True))
    ends = {str(first): 99, str(first + 1): 100}
    endless = {str(first): 99 if not begun else 0, str(first + 1): -100}
    schema = {
        "type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False
    }  # fmt: skip
    common = {"model": "thinker", "temperature": 0, "chat_template_kwargs": {"begun": begun}}
    chat = {**common, "messages": MESSAGES, "max_tokens": 80, "logit_bias": ends}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:

        def ask(**members: Any) -> Any:
            _, _, reply = post(server, "/v1/chat/completions", {**chat, **members})
            return reply["choices"][0]

        found = ask(**structured)
        assert json.loads(found["message"]["content"]) == {"ok": True}
        assert found["finish_reason"] == "stop"
        # Free reasoning that does not end: no part of it is content.
        free = ask(**structured, logit_bias=endless)
        assert (free["message"]["content"], free["finish_reason"]) == ("", "length")
        assert len(free["message"]["reasoning_content"]) > 10
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert json.loads(ask(**structured, **off)["message"]["content"]) == {"ok": True}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            tool = {**TOOL["function"], "parameters": schema}
            call = ask(tools=[{"type": "function", "function": tool}], tool_choice=choice)["message"]["tool_calls"][0]
            assert json.loads(call["function"]["arguments"]) == {"ok": True}
            thoughts = ask(tools=[TOOL], tool_choice=choice, logit_bias=endless)["message"]["reasoning_content"]
            assert thoughts == free["message"]["reasoning_content"]
        chunks = client.chat.completions.create(**chat_arguments(chat, structured), stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert json.loads(text) == {"ok": True}
        response = client.responses.create(
            model="thinker", input="How can you be", temperature=0, max_output_tokens=80,
            text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
            extra_body={"chat_template_kwargs": {"begun": begun}},
        )  # fmt: skip
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert json.loads(response.output_text) == {"ok": True}
    body = {
        "model": "thinker", "messages": MESSAGES, "max_tokens": 80, "temperature": 0,
        "thinking": {"type": "disabled"}, "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }  # fmt: skip
    _, _, message = post(server, "/v1/messages", body)
    assert json.loads(message["content"][0]["text"]) == {"ok": True}


@pytest.mark.parametrize("strict", [True, False])
def test_calls_of_strict_tools_follow_the_schema_if_the_model_begins_them(server: ConchServer, strict: bool) -> None:
    """The mark of calls is the likeliest token, followed by the syntax of a short call where that is allowed."""
    tokenizer = train_tokenizer(every_byte=True)
    mark = len(tokenizer)
    likely, unlikely = ([id for text in texts for id in tokenizer(text)["input_ids"]] for texts in ('":}w', "["))
    biases = {mark: 100, **dict.fromkeys((mark + 1, *likely), 50), **dict.fromkeys(unlikely, -50)}
    schema = {
        "type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False
    }  # fmt: skip
    tool = {"type": "function", "function": {**TOOL["function"], "parameters": schema, "strict": strict}}
    body = {"tools": [TOOL | {"function": {**TOOL["function"], "name": "note"}}, tool], "max_tokens": 70}
    _, reply = chat(server, temperature=0, logit_bias={str(id): bias for id, bias in biases.items()}, **body)
    message = reply["choices"][0]["message"]
    assert message["content"] in (None, "")
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if not strict:
        assert not calls
        return
    assert len(calls) > 1
    for call in calls[:-1]:  # the last one may be cut
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"ok": True})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_schema_of_a_strict_tool_that_is_not_supported_is_refused(server: ConchServer, path: str) -> None:
    """The other APIs pass strict tools on, too."""
    schema = {"type": "object", "not": {"required": ["place"]}}
    function = {"name": "weather", "strict": True}
    tools = {
        "/v1/chat/completions": {"type": "function", "function": {**function, "parameters": schema}},
        "/v1/responses": {"type": "function", **function, "parameters": schema},
        "/v1/messages": {**function, "input_schema": schema},
    }
    text = {"input": "How"} if path == "/v1/responses" else {"messages": MESSAGES}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "llama", limit: 1, "tools": [tools[path]], **text}
    status, _, reply = post(server, path, body)
    assert status == 400, reply
    assert "keyword 'not' is not supported" in reply["error"]["message"]
    assert reply["error"].get("param", "tools") == "tools"
    body["tools"] = [{**tools[path], "strict": False} if "function" not in tools[path] else TOOL]
    assert post(server, path, body)[0] == 200


def chat_arguments(chat: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of OpenAI's client for a body, whose extensions it does not know."""
    extra = {"chat_template_kwargs": chat["chat_template_kwargs"]}
    return {**{name: value for name, value in chat.items() if name not in extra}, **more, "extra_body": extra}


def test_prompts_may_be_token_ids(server: ConchServer) -> None:
    texts = ["How can you be", "The sea is"]
    ids = [train_tokenizer(every_byte=True)(text)["input_ids"] for text in texts]
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        asked = partial(client.completions.create, model="llama", max_tokens=8, temperature=0, extra_body=IGNORE_EOS)
        expected = asked(prompt=texts)
        several, echoed = asked(prompt=ids), asked(prompt=ids[0], echo=True)
        assert [choice.text for choice in several.choices] == [choice.text for choice in expected.choices]
        assert several.usage.prompt_tokens == expected.usage.prompt_tokens
        assert asked(prompt=ids[0]).choices[0].text == expected.choices[0].text
        assert echoed.choices[0].text == texts[0] + expected.choices[0].text
        with pytest.raises(openai.BadRequestError, match="vocabulary") as caught:
            asked(prompt=[[1], [1_000_000]])
        assert caught.value.param == "prompt"


def test_completion_between_a_prompt_and_a_suffix(server: ConchServer) -> None:
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", *FIM]})
    prefix, suffix, middle = FIM
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        asked = partial(client.completions.create, model="llama", max_tokens=8, temperature=0, extra_body=IGNORE_EOS)
        for prompt in ("How can you", ""):
            between = asked(prompt=prompt, suffix=" the sea.", echo=True)
            ids = tokenizer(f"{prefix}{prompt}{suffix} the sea.{middle}")["input_ids"]
            expected = asked(prompt=ids)
            assert between.choices[0].text == prompt + expected.choices[0].text
            assert between.usage == expected.usage
        stopped = asked(prompt="How", suffix="?", logit_bias={str(tokenizer.convert_tokens_to_ids(middle)): 100})
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
        with pytest.raises(openai.BadRequestError) as caught:
            asked(prompt="How", suffix="?", echo=True, logprobs=1)
        assert caught.value.param == "echo"
        with pytest.raises(openai.BadRequestError) as caught:
            asked(prompt="How can you be", suffix="?", extra_body={"truncate_prompt_tokens": 2})
        assert "cannot be truncated" in caught.value.message


def test_engine_without_log_probabilities_of_prompts_refuses_echo_with_logprobs(server: ConchServer) -> None:
    body = {"model": "llama", "prompt": "How", "echo": True, "logprobs": 1}
    _, _, reply = post(server, "/v1/completions", body)
    assert reply["error"]["param"] == "echo"
    assert "log-probabilities of the prompt" in reply["error"]["message"]


def test_prompt_over_the_context_has_its_code(server: ConchServer) -> None:
    status, reply = chat(server, messages=[{"role": "user", "content": "How can you be " * 200}])
    error = reply["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
