"""Requests of a worker, on an engine without a network: every one ends once, in one frame a step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from queue import Queue
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import DTYPES, Request, Result, Strings, wire_tensor
from conch.backends.generation.sampling import Defaults, Limits
from conch.backends.generation.service import BROKEN, ResponseBuilder
from conch.backends.io_formats.text import OUTPUTS, TextInterface
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.core.errors import Code, ConchError
from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.output.formats import OutputFormat
from tests.unit.backends.generation.fake_engine import ByteTokenizer, FakeEngine
from tests.unit.backends.generation.running import RunningService

_NAMES = frozenset(spec.name for spec in OUTPUTS) - {"tokens"}


class Worker(RunningService):
    """A service with the I/O format ``text``."""

    def __init__(
        self, engine: FakeEngine, *, reserve: bool = False, compile_seconds: float = 30, **interface: Any
    ) -> None:
        settings = {"decoupled": True, **interface}
        self.interface = TextInterface(ByteTokenizer(), Defaults(max_tokens=30), Limits(engine), **settings)
        super().__init__(engine, self.interface, _shown, reserve=reserve, compile_seconds=compile_seconds)

    def ask(self, text: str = "abc", *, priority: int = 0, deadline: int = 0, **values: Any) -> int:
        inputs = {"text_input": None if "messages" in values and not text else text, **values}
        tensors = {name: _tensor(name, value) for name, value in inputs.items() if value is not None}
        return self.submit(Request(tensors, _NAMES, batched=False), priority=priority, deadline=deadline)

    def text(self, serial: int) -> str:
        return "".join(one["outputs"]["text_output"][0] for one in self.answers[serial])


def _tensor(name: str, value: Any) -> WireTensor:
    if isinstance(value, str):
        return WireTensor(name, "BYTES", (1,), pack_bytes([value.encode()]))
    if isinstance(value, list):
        return WireTensor(name, "BYTES", (len(value),), pack_bytes([one.encode() for one in value]))
    datatype = "BOOL" if isinstance(value, bool) else "FP32" if isinstance(value, float) else "INT32"
    return WireTensor(name, datatype, (1,), np.array([value], DTYPES[datatype]).tobytes())


def _shown(result: Result) -> dict[str, list[Any]]:
    datatypes = {spec.name: spec.datatype for spec in OUTPUTS}
    for name, value in result.outputs.items():
        wire_tensor(name, datatypes[name], value)  # of the right type
    return {
        name: list(value.elements) if isinstance(value, Strings) else value.tolist()
        for name, value in result.outputs.items()
    }


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(FakeEngine())
    yield made
    if made.started:
        made.service.stop()
        assert made.engine.closed or made.engine.broken


def test_an_answer_in_one_piece_has_the_prompt_before_it(worker: Worker) -> None:
    serial = worker.ask("abc", max_tokens=3)
    assert worker.run().text(serial) == "abcdef"
    assert [one["final"] for one in worker.answers[serial]] == [True]


def test_the_prompt_is_left_out_on_request(worker: Worker) -> None:
    assert worker.ask("abc", max_tokens=3, exclude_input_in_output=True) == 1
    assert worker.run().text(1) == "def"


def test_tokens_of_prompts_need_no_engine(worker: Worker) -> None:
    def tokens(**inputs: WireTensor) -> dict[str, Any]:
        serial = worker.submit(Request(inputs, frozenset({"tokens"}), batched=False))
        worker.run() if not worker.started else worker.finish()
        [document] = worker.outputs(serial)[0]["tokens"]
        read: dict[str, Any] = json.loads(document)
        return read

    text = tokens(text_input=_tensor("text_input", "abc"))
    assert (text["ids"], text["texts"], text["max_length"]) == ([*b"abc"], ["a", "b", "c"], worker.engine.context)
    chat = tokens(messages=_tensor("messages", '[{"role": "user", "content": "hi"}]'))
    assert chat["ids"] == [*b"<user>hi"]
    ids = WireTensor("token_ids", "INT32", (2,), np.array([*b"hi"], np.int32).tobytes())
    assert tokens(token_ids=ids)["decoded"] == "hi"
    assert not worker.engine.running


def test_model_without_fill_in_the_middle_refuses_a_suffix(worker: Worker) -> None:
    with pytest.raises(ConchError) as caught:
        worker.ask("abc", suffix="def")
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED, "suffix")


def _ids(*ids: int) -> WireTensor:
    return WireTensor("token_ids", "INT32", (len(ids),), np.array(ids, np.int32).tobytes())


def test_prompt_may_be_token_ids(worker: Worker) -> None:
    inputs = {"token_ids": _ids(*b"abc"), "max_tokens": _tensor("max_tokens", 3)}
    serial = worker.submit(Request(inputs, _NAMES, batched=False))
    assert worker.run().text(serial) == "abcdef"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_ids": _ids()}, "'token_ids' is empty"),
        ({"token_ids": _ids(3, 1_000_000)}, "input 'token_ids' has token id 1000000"),
        ({"token_ids": _ids(3, -1)}, "input 'token_ids' has token id -1"),
        ({"token_ids": _ids(3), "messages": _tensor("messages", "[]")}, "not both"),
    ],
)
def test_token_ids_that_are_no_prompt_are_refused(worker: Worker, inputs: dict[str, WireTensor], message: str) -> None:
    with pytest.raises(ConchError, match=message) as caught:
        worker.submit(Request(inputs, _NAMES, batched=False))
    assert caught.value.param == "token_ids"


def test_options_of_tokens_alone_are_refused_for_generation(worker: Worker) -> None:
    with pytest.raises(ConchError, match="'add_special_tokens' applies only"):
        worker.submit(
            Request({"text_input": _tensor("text_input", "a")}, _NAMES, parameters={"add_special_tokens": False})
        )


def test_a_stream_has_a_response_for_each_step(worker: Worker) -> None:
    worker.ask("abc", max_tokens=3, stream=True, return_finish_reason=True, return_num_output_tokens=True)
    outputs = [one["outputs"] for one in worker.run().answers[1]]
    assert [output["text_output"] for output in outputs] == [["d"], ["e"], ["f"]]
    assert [output["finish_reason"] for output in outputs] == [[""], [""], ["length"]]
    assert [output["num_output_tokens"] for output in outputs] == [[1], [1], [1]]


def test_what_ends_a_text_is_not_part_of_it(worker: Worker) -> None:
    worker.ask("xw", return_finish_reason=True, return_token_ids=True, exclude_input_in_output=True)
    outputs = worker.run().answers[1][0]["outputs"]
    assert outputs["text_output"] == ["xyz"]
    assert outputs["finish_reason"] == ["stop"]
    assert outputs["token_ids"] == [*b"xyz", 0]


def test_a_stop_string_over_several_tokens_ends_its_sequence(worker: Worker) -> None:
    worker.ask("a", stop_words=["def", ""], stream=True, return_finish_reason=True)
    worker.ask("m", max_tokens=2)
    worker.run()
    assert worker.text(1) == "bc"
    assert worker.answers[1][-1]["outputs"]["finish_reason"] == ["stop"]
    assert worker.text(2) == "mno"
    assert not worker.engine.running


@pytest.mark.parametrize(
    "stopping", [{"stop": ["gh"]}, {"stop": ["d", "k"], "min_tokens": 4}, {"stop": ["gh"], "n": 2}]
)
def test_a_stop_string_in_a_step_of_several_tokens_ends_its_sequence_there(stopping: dict[str, Any]) -> None:
    outputs = []
    for step_tokens in (1, 3, 30):
        worker = Worker(FakeEngine())
        worker.engine.step_tokens = step_tokens
        wishes = {f"return_{name}": True for name in ("finish_reason", "token_ids", "num_output_tokens", "logprobs")}
        asked = {"sampling_parameters": json.dumps({"logprobs": 1, **stopping}), "return_cumulative_logprob": True}
        worker.ask("abc", exclude_input_in_output=True, **wishes, **asked)
        outputs.append(worker.run().outputs())
        assert not worker.engine.running
        worker.service.stop()
    assert outputs[0] == outputs[1] == outputs[2]
    [output] = outputs[0]
    assert bytes(output["token_ids"]) in (b"defgh", b"defghijk", b"defghdefgh")
    assert output["cumulative_logprob"] == [-0.5 * count for count in output["num_output_tokens"]]


def test_everything_that_can_be_asked_for(worker: Worker) -> None:
    wishes = {
        f"return_{name}": True
        for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    }
    worker.ask("abc", max_tokens=2, sampling_parameters=json.dumps({"logprobs": 2}), **wishes)
    outputs = worker.run().answers[1][0]["outputs"]
    assert outputs["num_input_tokens"] == [3]
    assert outputs["num_output_tokens"] == [2]
    assert outputs["cumulative_logprob"] == [-1.0]
    first, second = json.loads(outputs["logprobs"][0])
    assert list(first) == ["100", "65"]
    assert first["100"] == {"logprob": -0.5, "rank": 1, "decoded_token": "d"}
    assert second["65"] == {"logprob": -2.0, "rank": 2, "decoded_token": "A"}


def test_log_probabilities_of_the_prompt_are_sent_once(worker: Worker) -> None:
    sampling = json.dumps({"prompt_logprobs": 1, "n": 2, "temperature": 1})
    worker.ask("abc", max_tokens=2, stream=True, exclude_input_in_output=True, sampling_parameters=sampling)
    first, *others = [answer["outputs"] for answer in worker.run().answers[1]]
    [text] = first["prompt_logprobs"]
    assert first["prompt_tokens"] == ["a", "b", "c"]
    assert json.loads(text) == [
        None,
        *(
            {
                str(ord(letter)): {"logprob": -1.5, "rank": 2, "decoded_token": letter},
                "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            }
            for letter in "bc"
        ),
    ]
    assert others and not any("prompt_logprobs" in outputs for outputs in others)


def test_samples_and_beams_are_elements(worker: Worker) -> None:
    worker.ask("a", sampling_parameters=json.dumps({"n": 3, "max_tokens": 2}), exclude_input_in_output=True)
    worker.ask("b", beam_width=3, max_tokens=2, sampling_parameters=json.dumps({"n": 2}), return_finish_reason=True)
    worker.run()
    assert worker.answers[1][0]["outputs"]["text_output"] == ["bc"] * 3
    assert worker.answers[2][0]["outputs"]["text_output"] == ["bcd"] * 2
    assert worker.answers[2][0]["outputs"]["finish_reason"] == ["length"] * 2


def test_a_conversation_goes_through_the_template(worker: Worker) -> None:
    messages = json.dumps([{"role": "user", "content": "a"}])
    worker.ask(None, messages=messages, max_tokens=2, return_num_input_tokens=True)  # type: ignore[arg-type]
    outputs = worker.run().answers[1][0]["outputs"]
    assert outputs["text_output"] == ["bc"]
    assert outputs["num_input_tokens"] == [len("<user>a")]


def test_a_cancelled_request_leaves_the_batch_and_nobody_else(worker: Worker) -> None:
    worker.engine.context = 1000
    worker.ask("a", max_tokens=25, stream=True)
    worker.ask("b", max_tokens=5)
    worker.service.cancel(1)
    worker.service.cancel(77)
    worker.run()
    (answer,) = worker.answers[1]
    assert answer["final"]
    assert answer["error"].code is Code.CANCELLED
    assert worker.text(2) == "bcdefg"
    assert worker.loads[-1]["running"] == worker.loads[-1]["used"] == 0
    ended = [reason for load in worker.loads for one in load["ended"] for reason in one[0]]
    assert sorted(ended) == ["abort", "length"]


def test_room_is_kept_for_all_that_a_request_may_become() -> None:
    worker = Worker(FakeEngine(cache_tokens=20), reserve=True)
    for _ in range(6):
        worker.ask("abc", max_tokens=5)
    worker.run()
    assert worker.engine.most == 2
    assert [worker.text(serial) for serial in range(1, 7)] == ["abcdefgh"] * 6
    worker.service.stop()


def test_the_important_go_first_where_room_is_short() -> None:
    worker = Worker(FakeEngine(cache_tokens=8), reserve=True)
    for priority in (3, 1, 2):
        worker.ask("abc", max_tokens=5, priority=priority)
    assert worker.run().done == [2, 3, 1]
    worker.service.stop()


def test_stop_strings_wait_for_the_least_number_of_tokens(worker: Worker) -> None:
    asked = {"stop": ["d", "ij"], "min_tokens": 5, "max_tokens": 20}
    worker.ask("abc", sampling_parameters=json.dumps(asked), return_num_output_tokens=True)
    worker.run()
    assert worker.text(1) == "abcdefgh"


def test_a_request_that_does_not_begin_in_time_is_refused() -> None:
    worker = Worker(FakeEngine(cache_tokens=8), reserve=True)
    worker.ask("abc", max_tokens=5, deadline=monotonic_ns() + 10**12)
    worker.ask("abc", max_tokens=5, deadline=1)
    worker.run()
    assert worker.text(1) == "abcdefgh"
    assert worker.answers[2][0]["error"].status == "Unavailable: Request timeout expired"
    worker.service.stop()


def test_what_the_engine_refuses_fails_alone(worker: Worker) -> None:
    worker.ask("a", sampling_parameters=json.dumps({"structured_outputs": {"regex": "bad"}, "max_tokens": 2}))
    worker.ask("a", max_tokens=2)
    worker.run()
    assert worker.answers[1][0]["error"].message == "the structure does not compile"
    assert worker.text(2) == "abc"


def structured(worker: Worker, text: str, *, deadline: int = 0) -> int:
    options = json.dumps({"structured_outputs": {"regex": text}, "max_tokens": 2})
    return worker.ask("a", sampling_parameters=options, deadline=deadline)


def test_others_generate_while_a_structure_is_compiled(worker: Worker) -> None:
    slow = structured(worker, "slow")
    behind = structured(worker, "quick")
    other = worker.ask("a", max_tokens=2)
    worker.start()
    while other not in worker.answers:
        worker.take()
    assert worker.text(other) == "abc" and not worker.engine.compiled[1:]
    worker.engine.go_on.set()
    worker.finish()
    assert worker.engine.compiled == [None, "SLOW", "QUICK"]
    assert worker.text(slow) == worker.text(behind) == "abc"


def test_request_that_is_cancelled_while_its_structure_is_compiled_never_reaches_the_engine(worker: Worker) -> None:
    slow = structured(worker, "slow")
    worker.start()
    worker.service.cancel(slow)
    worker.finish()
    assert worker.answers[slow][0]["error"].code is Code.CANCELLED
    worker.engine.go_on.set()
    structured(worker, "next")
    worker.finish()
    assert worker.engine.compiled == ["NEXT"]


def test_request_whose_structure_is_not_compiled_in_time_is_refused_at_its_deadline(worker: Worker) -> None:
    slow = structured(worker, "slow", deadline=monotonic_ns() + 10**8)
    worker.start()
    while slow not in worker.answers:
        worker.take()
    assert worker.answers[slow][0]["error"].status == "Unavailable: Request timeout expired"
    worker.engine.go_on.set()


def test_what_the_engine_cannot_take_fails_alone(worker: Worker) -> None:
    worker.ask("a", sampling_parameters=json.dumps({"structured_outputs": {"regex": "raises"}, "max_tokens": 2}))
    worker.ask("a", max_tokens=2)
    worker.run()
    assert worker.answers[1][0]["error"].message == "TypeError: incompatible arguments"
    assert worker.text(2) == "abc"


class Faulty:
    """A builder like another's, whose responses are not."""

    def __init__(self, builder: ResponseBuilder, responses: Callable[[bool], list[Result]]) -> None:
        self.prompts, self.ends_id, self.media = builder.prompts, builder.ends_id, builder.media
        self.add, self.responses = builder.add, responses


def unsendable(final: bool) -> list[Result]:
    return [Result({"text_output": np.zeros(1, np.float32)})]


def raises(final: bool) -> list[Result]:
    raise ValueError("a library's, about this text")


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (raises, "ValueError: a library's, about this text"),
        (unsendable, "output 'text_output' must be given strings"),
        (lambda final: [], "a request has ended without a response"),
    ],
    ids=["raises", "unsendable", "none"],
)
def test_request_whose_response_cannot_be_made_fails_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, responses: Callable[[bool], list[Result]], message: str
) -> None:
    made = TextInterface.response_builder
    with monkeypatch.context() as patch:
        patch.setattr(TextInterface, "response_builder", lambda self, request: Faulty(made(self, request), responses))
        worker.ask("a", max_tokens=2)
    worker.ask("a", max_tokens=2)
    worker.run()
    (answer,) = worker.answers[1]
    assert (answer["error"].message, answer["final"]) == (message, True)
    assert worker.text(2) == "abc"
    assert worker.loads[-1]["running"] == 0


@pytest.mark.parametrize(("content", "marked"), [("<think>", True), ("<think>b", False)])
def test_reasoning_that_the_prompt_begins_is_marked_in_the_text(content: str, marked: bool) -> None:
    worker = Worker(FakeEngine(), output_format=OutputFormat("hermes", ("<think>", "</think>")))
    worker.interface.tokenizer.template = ChatTemplate({"default": "a{{ messages[0].content }}\n"}, {}, "a test")
    messages = json.dumps([{"role": "user", "content": content}])
    worker.ask("", messages=messages, max_tokens=2, include_marks=True)
    assert worker.run().text(1).startswith("<think>") is marked


def test_a_conversation_without_text_is_refused(worker: Worker) -> None:
    worker.interface.tokenizer.template = ChatTemplate({"default": ""}, {}, "a test")
    with pytest.raises(ConchError, match="the chat template makes an empty text of 'messages'"):
        worker.ask("", messages='[{"role": "user", "content": "a"}]')


def test_a_broken_engine_fails_what_is_under_way_and_ends_the_worker(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Queue[int] = Queue()
    monkeypatch.setattr(os, "_exit", ended.put)
    worker.engine.broken = True
    worker.ask("a")
    worker.ask("b")
    worker.run()
    assert ended.get(timeout=60) == BROKEN
    assert [worker.answers[serial][0]["error"].message for serial in (1, 2)] == [
        "engine 'fake' failed: RuntimeError: no memory left"
    ] * 2
    (logged,) = worker.logged
    assert logged.startswith("engine 'fake' failed: RuntimeError: no memory left\nTraceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"text": ""}, "INVALID_ARG", "'text_input' is empty: there is nothing to continue"),
        ({"text": None}, "INVALID_ARG", "either 'text_input' or 'messages' must be given"),
        ({"text": "x" * 64}, "INVALID_ARG", "the prompt has 64 tokens, but the context of the model is 64"),
        ({"max_tokens": 62}, "INVALID_ARG", "the prompt has 3 tokens and max_tokens is 62: together more than"),
        ({"max_tokens": 0}, "INVALID_ARG", "sampling parameter 'max_tokens' is 0"),
        ({"stream": True, "exclude_input_in_output": False}, "INVALID_ARG", "When streaming, `exclude_input"),
        ({"messages": "[]"}, "INVALID_ARG", "either 'text_input' or 'messages' must be given, not both"),
        ({"sampling_parameters": "{"}, "INVALID_ARG", "input 'sampling_parameters' is not valid JSON"),
        ({"sampling_parameters": '{"lora_name": "blue"}'}, "INVALID_ARG", "LoRA blue is not supported, the model has:"),
        (
            {"sampling_parameters": '{"structured_outputs": {"grammar": "root ::= x"}}'},
            "UNSUPPORTED",
            "engine 'fake' does not have structured output by grammar",
        ),
        ({"text": "", "messages": "[" * 100_000}, "INVALID_ARG", "input 'messages' is nested too deeply"),
        ({"sampling_parameters": '{"min_tokens": 61}'}, "INVALID_ARG", "min_tokens is 61, but max_tokens is 30"),
        ({"sampling_parameters": '{"logit_bias": {"999": 1}}'}, "INVALID_ARG", "'logit_bias' has token id 999"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_at_once(worker: Worker, values: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        worker.ask(**values)
    assert caught.value.message.startswith(message)
    assert caught.value.code.name == code


def test_a_request_larger_than_the_cache_is_refused() -> None:
    worker = Worker(FakeEngine(cache_tokens=16))
    with pytest.raises(ConchError, match="the request needs 23 tokens of KV cache, but the model has 16 in all"):
        worker.ask("abc", max_tokens=20)


def test_a_prompt_that_is_too_long_may_be_cut() -> None:
    worker = Worker(FakeEngine(context=40), truncate=True)
    worker.ask("x" * 99 + "abc", return_num_input_tokens=True, exclude_input_in_output=True)
    worker.ask("x" * 99 + "abc", max_tokens=4, return_num_input_tokens=True, exclude_input_in_output=True)
    worker.run()
    first, second = (worker.answers[serial][0]["outputs"] for serial in (1, 2))
    assert (first["num_input_tokens"], len(first["text_output"][0])) == ([20], 20)
    assert (second["num_input_tokens"], second["text_output"]) == ([36], ["defg"])
    worker.service.stop()


def test_streams_need_a_decoupled_model() -> None:
    worker = Worker(FakeEngine(), decoupled=False)
    with pytest.raises(ConchError, match=r"Streaming is only supported in decoupled mode\."):
        worker.ask("abc", stream=True)
