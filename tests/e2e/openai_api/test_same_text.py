"""A conversation gives the same text in the APIs of OpenAI and Anthropic: that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from conch import __version__
from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.conformance.raw import get
from tests.servers import ConchServer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = "How can you be sure that the station is open"
TOKENS = 40
ROUTES = ("chat/completions", "responses", "messages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository") / "llama" / "1"
    tokenizer = train_tokenizer()
    tokenizer.chat_template = TEMPLATE
    write_checkpoint(folder, LlamaConfig, {"intermediate_size": 64, "max_position_embeddings": 512}, tokenizer, seed=5)
    return folder


@pytest.fixture(scope="module")
def text_server(folder: Path) -> Iterator[ConchServer]:
    with ConchServer(folder.parents[1], log=folder.parents[1] / "log") as server:
        yield server


@pytest.fixture(scope="module")
def gpt(text_server: ConchServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{text_server.http}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(text_server: ConchServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{text_server.http}", api_key="any", max_retries=0) as client:
        yield client


def conversation() -> list[dict[str, str]]:
    return [
        {"role": "user", "content": "I am going to the market"},
        {"role": "assistant", "content": "the station is open"},
        {"role": "user", "content": QUESTION},
    ]


def reference(folder: Path, prompt: str) -> str:
    """The greedy text of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def rendered(folder: Path, messages: list[dict[str, str]], **variables: Any) -> str:
    text: str = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **variables)
    return text


def test_greedy_text_is_the_same_everywhere(folder: Path, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    system = {"role": "system", "content": "the morning"}
    prompt = rendered(folder, [system, *conversation()], add_generation_prompt=True)
    wanted = reference(folder, prompt)
    messages: Any = conversation()
    chat = gpt.chat.completions.create(
        model="llama",
        messages=[system, *messages],
        max_tokens=TOKENS,
        temperature=0,  # type: ignore[list-item]
    )
    response = gpt.responses.create(
        model="llama", input=messages, instructions=system["content"], max_output_tokens=TOKENS, temperature=0
    )
    greedy: Any = {
        "model": "llama",
        "system": system["content"],
        "max_tokens": TOKENS,
        "extra_body": {"temperature": 0},
    }
    message = claude.messages.create(messages=messages, **greedy)
    assert chat.choices[0].message.content == wanted
    assert response.output_text == wanted
    assert "".join(block.text for block in message.content if block.type == "text") == wanted
    assert chat.usage and response.usage
    in_all = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert chat.usage.prompt_tokens == response.usage.input_tokens == in_all
    with claude.messages.stream(messages=messages, **greedy) as parts:
        assert parts.get_final_text() == wanted
    *_, completed = gpt.responses.create(
        model="llama", input=messages, instructions=system["content"], max_output_tokens=TOKENS, temperature=0,
        stream=True,
    )  # fmt: skip
    assert completed.response.output_text == wanted  # type: ignore[union-attr]


def test_model_tells_its_context(gpt: openai.OpenAI, text_server: ConchServer) -> None:
    assert gpt.models.retrieve("llama").to_dict()["max_model_len"] == 512
    assert [model.to_dict()["max_model_len"] for model in gpt.models.list()] == [512]
    assert get(text_server.http, "/version").json() == {"version": __version__}
    assert get(text_server.http, "/ping").status == 200


def test_last_message_of_the_assistant_is_continued(folder: Path, claude: anthropic.Anthropic) -> None:
    messages: Any = [*conversation(), {"role": "assistant", "content": "the market is"}]
    prompt = rendered(folder, messages, add_generation_prompt=False).rstrip("\n")
    message = claude.messages.create(model="llama", max_tokens=TOKENS, messages=messages, extra_body={"temperature": 0})
    assert message.content[0].text == reference(folder, prompt)  # type: ignore[union-attr]


def test_tokens_are_counted_without_generating_any(
    folder: Path, text_server: ConchServer, claude: anthropic.Anthropic
) -> None:
    def generated() -> float:
        lines = get(text_server.metrics, "/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    messages: Any = conversation()
    prompt = rendered(folder, messages, add_generation_prompt=True)
    wanted = len(AutoTokenizer.from_pretrained(folder)(prompt, add_special_tokens=False)["input_ids"])
    before = generated()
    assert claude.messages.count_tokens(model="llama", messages=messages).input_tokens == wanted
    # More than the context of the model.
    messages[0]["content"] *= 500
    assert claude.messages.count_tokens(model="llama", messages=messages).input_tokens > 512
    assert generated() == before


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_that_ends_a_message_is_named(folder: Path, claude: anthropic.Anthropic, stream: bool) -> None:
    messages: Any = conversation()
    wanted = reference(folder, rendered(folder, messages, add_generation_prompt=True))
    stop = wanted[10:13]
    asked: Any = {"model": "llama", "max_tokens": TOKENS, "messages": messages, "stop_sequences": ["none", stop]}
    asked["extra_body"] = {"temperature": 0}
    if stream:
        with claude.messages.stream(**asked) as parts:
            message: Any = parts.get_final_message()
    else:
        message = claude.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == wanted[: wanted.index(stop)]
