"""Requests of all kinds at once, drawn at random: each gets what it would get alone, and nothing stays behind."""

from __future__ import annotations

import http.client
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.checkpoints import END, TEXT, train_tokenizer, write_checkpoint
from tests.conformance.raw import get, post
from tests.events import eventually
from tests.servers import ConchServer

WORDS = [*TEXT.split(), "naïve", "🙂", "東京"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One that has all bytes, so that what is drawn at random has many parts of characters."""
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.pad_token = END
    return tokenizer


@pytest.fixture(scope="module")
def server(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    """A tiny Llama with a KV cache that does not hold everything."""
    folder = tmp_path_factory.mktemp("repository")
    sizes = {"intermediate_size": 64, "max_position_embeddings": 512}
    write_checkpoint(folder / "llama" / "1", LlamaConfig, sizes, tokenizer, seed=5)
    (folder / "llama" / "config.pbtxt").write_text(
        'backend: "huggingface"\nparameters { key: "kv_cache_tokens" value { string_value: "2000" } }\n'
    )
    with ConchServer(folder, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


Body = dict[str, Any]
Check = Callable[[Body, Body], None]


def sampling(**values: Any) -> Body:
    return {"sampling_parameters": json.dumps(values)}


def text_fits(pattern: str) -> Check:
    def check(body: Body, reply: Body) -> None:
        assert re.fullmatch(pattern, reply["text_output"], re.DOTALL), (body, reply)

    return check


def anything(body: Body, reply: Body) -> None:
    pass


def logprobs_are_aligned(body: Body, reply: Body) -> None:
    listed = json.loads(reply["logprobs"])
    tokens = reply["token_ids"] if isinstance(reply["token_ids"], list) else [reply["token_ids"]]
    assert [int(next(iter(one))) for one in listed] == tokens
    assert len(tokens) == reply["num_output_tokens"]


def kinds(chance: random.Random, count: int) -> list[tuple[Body, Check]]:
    """One request of each kind, of ``count`` tokens at most, and what is to be true of its reply."""
    seed = chance.randrange(2**64)
    returned = chance.randint(2, 4)
    ask = {"max_tokens": count}
    return [
        (sampling(**ask), anything),
        (sampling(**ask, ignore_eos=True), anything),
        (sampling(**ask, min_tokens=count // 2), anything),
        (sampling(**ask, stop=[chance.choice("aeiou"), "station"], include_stop_str_in_output=True), anything),
        (sampling(**ask, temperature=0.9, seed=seed), anything),
        (sampling(**ask, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=seed), anything),
        (sampling(**ask, temperature=1, n=returned, seed=seed), anything),
        (sampling(**ask, beam_width=returned, n=chance.randint(1, returned)), anything),
        (sampling(**ask, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.5), anything),
        (sampling(**ask, bad_words=["the", "station", "e"], logit_bias={"5": 3, "300": -100}), anything),
        (sampling(**ask, stop_token_ids=[chance.randrange(256)], end_id=chance.randrange(256)), anything),
        ({**sampling(**ask, logprobs=chance.randint(0, 5)), "return_logprobs": True}, logprobs_are_aligned),
        (sampling(max_tokens=60, structured_outputs={"choice": ["yes", "no", "🙂"]}), text_fits("yes|no|🙂")),
        (sampling(max_tokens=60, structured_outputs={"regex": "[a-f]{3}-[0-9]{4}"}), text_fits("[a-f]{3}-[0-9]{4}")),
        (
            sampling(
                max_tokens=100, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                temperature=0.5, seed=seed,
            ),
            text_fits(r'\s*\{\s*"a"\s*:.*|.{90,}'),
        ),
    ]  # fmt: skip


def generate(server: ConchServer, body: Body) -> Body:
    reply = post(server.http, "/v2/models/llama/generate", body)
    assert reply.status == 200, (body, reply.body)
    answer: Body = reply.json()
    return answer


def streamed(server: ConchServer, body: Body) -> list[Body]:
    reply = post(server.http, "/v2/models/llama/generate_stream", {**body, "stream": True})
    assert reply.status == 200, (body, reply.body)
    return [json.loads(event.removeprefix("data: ")) for event in reply.body.decode().split("\n\n") if event]


def leave(server: ConchServer, body: Body, lines: int) -> None:
    host, port = server.http.split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("POST", "/v2/models/llama/generate_stream", json.dumps({**body, "stream": True}))
        if lines:
            response = connection.getresponse()
            for _ in range(lines):
                response.readline()


def texts(reply: Body) -> list[str]:
    found: str | list[str] = reply["text_output"]
    return [found] if isinstance(found, str) else found


def generation(server: ConchServer) -> Body:
    found: Body = get(server.http, "/v2/models/llama/stats").json()["model_stats"][0].get("generation", {})
    return found


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_is_asked_at_once_is_as_if_it_were_asked_alone(
    server: ConchServer, tokenizer: PreTrainedTokenizerFast, count: int
) -> None:
    chance = random.Random(11)
    asked: list[tuple[Body, Check, str]] = []
    for _ in range(count):
        body, check = chance.choice(kinds(chance, chance.randint(1, 40)))
        body |= {
            "text_input": " ".join(chance.choices(WORDS, k=chance.randint(1, 40))),
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
            "return_finish_reason": True,
            "return_token_ids": True,
        }
        asked.append((body, check, chance.choice(["leave", "whole", "whole", "stream", "stream"])))

    def ask(one: tuple[Body, Check, str]) -> Body | list[Body] | None:
        body, _, way = one
        if way == "leave":
            leave(server, body, chance.randrange(8))
            return None
        return generate(server, body) if way == "whole" else streamed(server, body)

    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(ask, asked))
    eventually(lambda: not any(generation(server)[key] for key in ("running", "waiting", "kv_cache_tokens")), "idle")
    wrong = Counter[str]()
    for (body, check, way), reply in zip(asked, replies, strict=True):
        if way == "leave":
            continue
        alone = generate(server, body)
        check(body, alone)
        if alone["finish_reason"] == "length":
            ids = alone["token_ids"] if isinstance(alone["token_ids"], list) else [alone["token_ids"]]
            assert alone["text_output"] == tokenizer.decode(ids, skip_special_tokens=True)
        if isinstance(reply, list):
            joined = ["".join(parts) for parts in zip(*(texts(event) for event in reply), strict=True)]
            same = joined == texts(alone)
        else:
            # Log-probabilities may differ in their last digits.
            same = {**reply, "logprobs": ""} == {**alone, "logprobs": ""}
        wrong[body["sampling_parameters"]] += not same
    assert +wrong == Counter()
    ended = get(server.http, "/v2/models/llama/stats").json()["model_stats"][0]
    assert ended["generation"]["finished"]["error"] == 0


#: A grammar with so many optional parts that too many may come next.
_PARTS = [f"p{index}" for index in range(6000)]
PARTS = "\n".join([f"start: {'? '.join(_PARTS)}?", *(f'{part}: "a" "b"' for part in _PARTS)])
REFUSED: list[tuple[Body, str]] = [
    ({"json": {"allOf": [{"anyOf": [{"const": 1}] * 3}] * 20}}, "schema too large"),
    (
        {"json": {"type": "object", "minProperties": 3}},
        "keyword 'minProperties' above 1 requires the same number of names in",
    ),
    ({"json": {"not": {"type": "null"}}}, "keyword 'not' is not supported in JSON schemas"),
    ({"json": {"enum": []}}, "Unsatisfiable schema: anyOf is empty"),
    ({"grammar": PARTS}, "its structure is too complex: too many of its parts can follow at one position"),
    ({"regex": "(" * 70 + "a" + ")" * 70}, "is nested deeper than 64 levels"),
]


def test_structures_that_explode_are_refused_beside_streams_that_continue(server: ConchServer) -> None:
    def stream(seed: int) -> int:
        options = sampling(max_tokens=100, seed=seed, ignore_eos=True, temperature=1)
        body = {"text_input": "How can", "stream": True, "return_num_output_tokens": True, **options}
        reply = post(server.http, "/v2/models/llama/generate_stream", body)
        events = [json.loads(event.removeprefix("data: ")) for event in reply.body.decode().split("\n\n") if event]
        return sum(int(event["num_output_tokens"]) for event in events)

    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(stream, seed) for seed in range(16)]
        for structure, message in REFUSED:
            body = {"text_input": "How can", **sampling(max_tokens=20, structured_outputs=structure)}
            reply = post(server.http, "/v2/models/llama/generate", body)
            assert (reply.status, message in reply.error) == (400, True), reply.error
        assert [stream.result() for stream in streams] == [100] * 16
