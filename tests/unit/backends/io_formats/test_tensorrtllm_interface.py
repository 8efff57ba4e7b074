"""Requests of token ids, on an engine without a network: what their tensors mean, and which responses they get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import DTYPES, Request
from conch.backends.generation.engine import Progress
from conch.backends.generation.sampling import Limits
from conch.backends.io_formats.tensorrtllm import TokenInterface
from conch.backends.io_formats.tensorrtllm_tensors import StopWords
from conch.core.errors import ConchError
from conch.core.sampling.parameters import SamplingParams
from conch.core.tensors import WireTensor, pack_bytes
from tests.unit.backends.generation.fake_engine import FakeEngine
from tests.unit.backends.generation.running import RunningService

FLOATS = {"temperature", "runtime_top_p", "runtime_top_p_decay", "len_penalty", "repetition_penalty",
          "presence_penalty", "frequency_penalty", "embedding_bias", "prompt_embedding_table"}  # fmt: skip


def tensor(name: str, value: Any) -> WireTensor:
    if isinstance(value, str):
        return WireTensor(name, "BYTES", (1, 1), pack_bytes([value.encode()]))
    kind = "FP32" if name in FLOATS else "UINT64" if name in ("random_seed", "lora_task_id") else "INT32"
    if isinstance(value, bool):
        kind, value = "BOOL", [[value]]
    elif isinstance(value, int | float):
        value = [value]  # as a scalar with ``reshape: { shape: [ ] }`` arrives
    array = np.array(value, DTYPES[kind])
    return WireTensor(name, kind, array.shape, array.tobytes())


def request(ids: Any = "abc", *, id: str = "", batched: bool = True, **values: Any) -> Request:
    rows = [list(ids.encode())] if isinstance(ids, str) else ids
    inputs = {"input_ids": rows, "request_output_len": [[3]] * len(rows), **values}
    tensors = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return Request(tensors, frozenset(), id=id, batched=batched)


class Alphabets(FakeEngine):
    """Begins again after the last letter, where it is ``endless``."""

    endless = False

    def step(self) -> list[Progress]:
        steps = super().step()
        if self.endless:
            for _, tokens in self.running.values():
                tokens[-1] = ord("a") - 1 if tokens[-1] == ord("y") else tokens[-1]
        return steps


class Worker(RunningService):
    """A service with the I/O format of token ids."""

    engine: Alphabets

    def __init__(self, *, decoupled: bool = True, **settings: Any) -> None:
        engine = Alphabets()
        self.interface = TokenInterface(Limits(engine), decoupled, **{"max_beam_width": 4, **settings})
        super().__init__(engine, self.interface, lambda result: result.outputs)

    def ask(self, ids: Any = "abc", **values: Any) -> int:
        return self.submit(request(ids, **values))

    def finish(self) -> Worker:
        super().finish()
        self.service.stop()
        return self


def texts(output: dict[str, Any]) -> list[list[str]]:
    """The ids of each row and sequence as text, cut to their length."""
    ids, lengths = output["output_ids"], output["sequence_length"]
    assert ids.shape[:2] == lengths.shape
    return [
        [bytes(one[:n].tolist()).decode() for one, n in zip(line, lengths_of, strict=True)]
        for line, lengths_of in zip(ids, lengths, strict=True)
    ]


@pytest.fixture
def worker() -> Iterator[Worker]:
    yield Worker()


def test_an_answer_in_one_piece_has_the_prompt_before_it(worker: Worker) -> None:
    worker.ask("abc", input_lengths=[3])
    [output] = worker.run().outputs()
    assert texts(output) == [["abcdef"]]
    assert output["batch_index"].tolist() == output["sequence_index"].tolist() == [[0]]
    assert "cum_log_probs" not in output


@pytest.mark.parametrize(
    ("setting", "wish", "text"), [(False, True, "def"), (True, None, "def"), (True, False, "abcdef")]
)
def test_the_prompt_is_left_out_by_request_or_else_by_parameter(setting: bool, wish: bool | None, text: str) -> None:
    worker = Worker(exclude_input=setting)
    worker.ask(exclude_input_in_output=wish)
    assert texts(worker.run().outputs()[0]) == [[text]]


def test_a_prompt_is_as_long_as_its_length_says(worker: Worker) -> None:
    worker.ask([[97, 98, 0, 0]], input_lengths=[[2]])
    assert texts(worker.run().outputs()[0]) == [["abcde"]]


def test_a_stream_has_the_new_tokens_and_nothing_else(worker: Worker) -> None:
    worker.ask(streaming=True)
    assert [texts(output) for output in worker.run().outputs()] == [[["d"]], [["e"]], [["f"]]]


def test_what_ends_a_sequence_is_not_part_of_it(worker: Worker) -> None:
    worker.ask("xy", streaming=True, request_output_len=[[9]])
    worker.ask("xy", request_output_len=[[9]])
    worker.run()
    assert [texts(output) for output in worker.outputs(1)] == [[["z"]], [[""]]]
    assert [texts(output) for output in worker.outputs(2)] == [[["xyz"]]]


def test_a_stop_word_ends_its_sequence_and_stays(worker: Worker) -> None:
    words = [[[*b"fxcd", 101], [2, 5, -1, -1, -1]]]  # "fx" and "cde", of which "c" is in the prompt
    worker.ask(stop_words_list=words, request_output_len=[[9]])
    worker.ask(stop_words_list=[[[*b"efg"], [2, 3, -1]]], request_output_len=[[9]])
    worker.ask(stop_words_list=np.zeros((1, 2, 0)), request_output_len=[[9]])
    worker.ask(stop_words_list=[[[0], [-1]]], request_output_len=[[2]])
    worker.run()
    assert [texts(worker.outputs(serial)[0]) for serial in (1, 2, 3, 4)] == [
        [["abcdefghijkl"]],
        [["abcdef"]],
        [["abcdefghijkl"]],
        [["abcde"]],
    ]
    assert not worker.engine.running


def test_rows_are_requests_of_their_own(worker: Worker) -> None:
    rows = [[97, 98], [109, 0], [120, 121]]
    worker.ask(rows, input_lengths=[2, 1, 2], request_output_len=[[2], [1], [9]], streaming=True)
    made: dict[int, str] = {}
    for output in worker.run().outputs():
        assert output["output_ids"].shape[:2] == (1, 1)
        row = int(output["batch_index"][0, 0])
        made[row] = made.get(row, "") + texts(output)[0][0]
    assert made == {0: "cd", 1: "n", 2: "z"}


def test_rows_of_a_model_that_is_not_decoupled_come_together() -> None:
    worker = Worker(decoupled=False)
    worker.ask([[97, 98], [109, 0]], input_lengths=[2, 1], request_output_len=[[2], [1]], pad_id=[7, 8])
    [output] = worker.run().outputs()
    assert texts(output) == [["abcd"], ["mn"]]
    assert output["output_ids"][1, 0].tolist() == [*b"mn", 8, 8]
    assert output["batch_index"].tolist() == [[0], [1]]


@pytest.mark.parametrize("decoupled", [True, False])
def test_beams_are_sequences_of_one_row(decoupled: bool) -> None:
    worker = Worker(decoupled=decoupled, normalize=False)
    worker.ask(beam_width=3, temperature=1.0, return_log_probs=True, streaming=True if decoupled else None)
    worker.ask(beam_width=3, num_return_sequences=2, return_log_probs=True)
    worker.run()
    [output] = worker.outputs(1)
    assert texts(output) == [["def" if decoupled else "abcdef"] * 3]
    assert output["cum_log_probs"].tolist() == [[-1.0, -2.0, -3.0]]
    assert texts(worker.outputs(2)[0]) == [["abcdef"] * 2]


def test_the_score_of_a_beam_is_by_its_length() -> None:
    worker = Worker()
    worker.ask(beam_width=2, len_penalty=2.0, return_log_probs=True)
    assert worker.run().outputs()[0]["cum_log_probs"].tolist() == [[pytest.approx(-1 / 9), pytest.approx(-2 / 9)]]


def test_samples_have_responses_of_their_own() -> None:
    worker = Worker()
    worker.ask(num_return_sequences=3, runtime_top_k=5)
    outputs = worker.run().outputs()
    assert sorted(output["sequence_index"].item() for output in outputs) == [0, 1, 2]
    together = Worker(decoupled=False)
    together.ask(num_return_sequences=3, runtime_top_k=5)
    assert texts(together.run().outputs()[0]) == [["abcdef"] * 3]


def test_log_probabilities_are_those_of_the_new_tokens(worker: Worker) -> None:
    worker.ask("xy", return_log_probs=True, request_output_len=[[9]])
    worker.ask("abc", return_log_probs=True, streaming=True)
    worker.run()
    [output] = worker.outputs(1)
    assert output["output_log_probs"].tolist() == [[[-0.5]]]
    assert output["cum_log_probs"].tolist() == [[-0.5]]
    assert [one["output_log_probs"].tolist() for one in worker.outputs(2)] == [[[[-0.5]]]] * 3
    assert [one["cum_log_probs"].item() for one in worker.outputs(2)] == [-0.5, -1.0, -1.5]


def test_an_old_configuration_has_zeros_unless_requested() -> None:
    worker = Worker(padded=frozenset({"cum_log_probs", "output_log_probs", "context_logits", "generation_logits"}))
    worker.ask()
    [output] = worker.run().outputs()
    assert {name: output[name].shape for name in ("cum_log_probs", "context_logits", "generation_logits")} == {
        "cum_log_probs": (1, 1),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
    }


def test_without_a_batch_dimension_there_is_none_in_the_answer() -> None:
    worker = Worker(batched=False)
    inputs = {"input_ids": [97, 98], "request_output_len": [2]}
    made = Request({name: tensor(name, value) for name, value in inputs.items()}, frozenset(), batched=False)
    worker.submit(made)
    [output] = worker.run().outputs()
    assert output["output_ids"].tolist() == [list(b"abcd")]
    assert output["sequence_length"].tolist() == [4]


def test_a_stop_request_ends_those_of_its_id_with_what_they_have() -> None:
    worker = Worker()
    worker.engine.context = 10**9
    worker.engine.endless = True
    worker.ask("a", id="one", request_output_len=[[10**8]], streaming=True)
    worker.ask("c", id="one", request_output_len=[[10**8]])
    worker.ask("b", id="two")
    worker.service.start()
    while len(worker.answers.get(1, ())) < 3:
        worker.take()
    worker.ask([[1]], id="one", stop=True)
    worker.ask("a", id="one", request_output_len=[[4]])
    worker.finish()
    made = "".join(texts(output)[0][0] for output in worker.outputs(1))
    assert made.startswith("bcd")
    [stopped] = worker.outputs(2)
    assert texts(stopped)[0][0].startswith("cde")
    assert texts(worker.outputs(3)[0]) == [["bcde"]]
    assert worker.outputs(4) == [{}]
    assert texts(worker.outputs(5)[0]) == [["abcde"]]
    assert not worker.engine.running


def test_a_stop_request_ends_what_has_not_begun() -> None:
    worker = Worker()
    worker.ask("a", id="one", request_output_len=[[9]])
    worker.ask([[1]], id="one", stop=True)
    assert texts(worker.run().outputs(1)[0]) == [["a"]]


def sampling(**values: Any) -> SamplingParams:
    [(_, read)] = Worker().interface.response_builder(request(**values)).prompts
    return read


@pytest.mark.parametrize(
    ("values", "temperature", "top_k", "top_p"),
    [
        ({}, 0, 0, 1),
        ({"temperature": 0.7}, 0, 0, 1),
        ({"runtime_top_k": 1, "runtime_top_p": 0.5}, 0, 0, 1),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, 0, 0, 1),
        ({"runtime_top_k": 20, "runtime_top_p": 1.0}, 1, 20, 1),
        ({"runtime_top_p": 0.5, "temperature": 0.25}, 0.25, 0, 0.5),
        ({"runtime_top_k": 20, "temperature": 0.0}, 0, 0, 1),
        ({"runtime_top_k": 20, "beam_width": 2}, 0, 0, 1),
    ],
)
def test_without_top_k_and_top_p_decoding_is_greedy(
    values: dict[str, Any], temperature: float, top_k: int, top_p: float
) -> None:
    read = sampling(**values)
    assert (read.temperature, read.top_k, read.top_p) == (temperature, top_k, top_p)


def test_every_value_gets_where_it_belongs() -> None:
    read = sampling(
        runtime_top_k=4, random_seed=7, min_length=2, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, end_id=3, pad_id=2, bad_words_list=[[[5, 6, 7], [1, 3, -1]]],
        embedding_bias=[[0.0, 0.0, 2.5]], return_log_probs=True,
        guided_decoding_guide_type="regex", guided_decoding_guide="a+",
    )  # fmt: skip
    assert (read.max_tokens, read.min_tokens, read.seed, read.end_id) == (3, 2, 7, 3)
    assert (read.repetition_penalty, read.presence_penalty, read.frequency_penalty) == (1.5, 0.5, -0.5)
    assert read.bad_words_token_ids == ((5,), (6, 7))
    assert read.logit_bias == {2: 2.5}
    assert read.logprobs == 0
    assert read.structured_outputs is not None
    assert (read.structured_outputs.kind, read.structured_outputs.text) == ("regex", "a+")
    assert sampling(end_id=-1).ignore_eos


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"request_output_len": None}, "INVALID_ARG", "input 'request_output_len' is missing"),
        ({"request_output_len": [[0]]}, "INVALID_ARG", "input 'request_output_len' is 0; it must be"),
        ({"runtime_top_p": 1.5}, "INVALID_ARG", "input 'runtime_top_p' is 1.5; it must be"),
        ({"input_lengths": [4]}, "INVALID_ARG", "input 'input_lengths' is 4 in row 0, where 'input_ids' has 3"),
        ({"ids": [[300]]}, "INVALID_ARG", "input has token id 300; the vocabulary"),
        ({"end_id": 300}, "INVALID_ARG", "input 'end_id' has token id 300"),
        ({"beam_width": 5}, "INVALID_ARG", "input 'beam_width' is 5, but parameter 'max_beam_width' is 4"),
        ({"beam_width": 2, "num_return_sequences": 3}, "INVALID_ARG", "input 'num_return_sequences' is 3"),
        ({"stop_words_list": [[[1, 2], [2, 1]]]}, "INVALID_ARG", "input 'stop_words_list' ends a word at 1"),
        ({"stop_words_list": [[1, 2, 3]]}, "INVALID_ARG", "input 'stop_words_list' must have a row of token ids"),
        ({"bad_words_list": [[[999], [1]]]}, "INVALID_ARG", "input 'bad_words_list' has token id 999"),
        ({"stop": True}, "INVALID_ARG", "A request id must be provided for request cancellation"),
        ({"return_context_logits": True}, "UNSUPPORTED", "input 'return_context_logits' is true, but context logits"),
        ({"prompt_embedding_table": [[[0.5]]]}, "UNSUPPORTED", "input 'prompt_embedding_table' is given, but prompt"),
        ({"draft_input_ids": [[5]]}, "UNSUPPORTED", "input 'draft_input_ids' is given, but draft tokens in a request"),
        ({"runtime_top_p_decay": 0.5}, "UNSUPPORTED", "input 'runtime_top_p_decay' is not supported: leave it out"),
        ({"lora_task_id": 5}, "INVALID_ARG", "LoRA 5 is not supported, the model has: red"),
        ({"guided_decoding_guide_type": "sql"}, "INVALID_ARG", "input 'guided_decoding_guide_type' is 'sql'"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_at_once(values: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        Worker().ask(**values)
    assert caught.value.message.startswith(message)
    assert caught.value.code.name == code


def test_what_asks_for_nothing_is_accepted(worker: Worker) -> None:
    worker.ask(
        decoder_input_ids=[[0]], decoder_input_lengths=[1], draft_input_ids=np.zeros((1, 0)), runtime_top_p_decay=1.0,
        return_context_logits=False, bad_words_list=np.zeros((1, 2, 0)), embedding_bias=np.zeros((1, 0)),
    )  # fmt: skip
    assert texts(worker.run().outputs()[0]) == [["abcdef"]]


def test_streams_need_a_decoupled_model() -> None:
    with pytest.raises(ConchError, match="Streaming is only supported if model is deployed using decoupled mode"):
        Worker(decoupled=False).ask(streaming=True)


def test_a_word_is_found_where_it_ends() -> None:
    words = StopWords([[1, 2], [3]])
    assert [words.end(tokens) for tokens in ([1], [2], [5, 1, 2], [3], [3, 4])] == [False, False, True, True, False]
