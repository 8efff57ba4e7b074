"""The in-flight batcher's family of models, as its templates have it, over a checkpoint in place of an engine."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conformance.raw import get, post, tensor
from tests.events import eventually
from tests.models import HERE, build, write
from tests.servers import ConchServer

pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILY = HERE / "inflight_batcher" / "current"
#: The body of the published walkthrough.
TOWER = {"text_input": "What is the height of Eiffel Tower?", "max_tokens": 30, "bad_words": [""], "stop_words": [""],
         "top_k": 10, "top_p": 1, "end_id": 3, "pad_id": 2}  # fmt: skip
PROMPT = "I am going to the"
#: More tokens than a test waits for.
LONG = 6000


def fill(text: str, **values: str) -> str:
    """A template with what is known filled in; everything else stays a placeholder."""
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def values_of(checkpoint: Path, **changed: str) -> dict[str, str]:
    return {
        "triton_max_batch_size": "8", "decoupled_mode": "true", "max_queue_delay_microseconds": "0",
        "max_queue_size": "0", "logits_datatype": "TYPE_FP32", "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1", "bls_instance_count": "1", "tokenizer_dir": str(checkpoint),
        "engine_dir": str(checkpoint), "max_beam_width": "4", "batching_strategy": "inflight_fused_batching", **changed,
    }  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    from tests.checkpoints import train_tokenizer, write_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG + 100}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    """The family; ``plain_…`` are the same but not decoupled, ``old_…`` as before release 0.8."""
    folder = tmp_path_factory.mktemp("family")
    repository = build(folder / "models", group="inflight_batcher/current")
    for config in repository.glob("*/config.pbtxt"):
        config.write_text(fill(config.read_text(), **values_of(checkpoint, accumulate_tokens="false")))
    for name in ("ensemble", "tensorrt_llm"):
        text = fill((FAMILY / name / "config.pbtxt").read_text(), **values_of(checkpoint, decoupled_mode="false"))
        text = text.replace(f'name: "{name}"', f'name: "plain_{name}"', 1).replace(
            'model_name: "tensorrt_llm"', 'model_name: "plain_tensorrt_llm"'
        )
        (write(repository, f"plain_{name}", text) / "1").mkdir()
    bls = fill(
        (FAMILY / "tensorrt_llm_bls" / "config.pbtxt").read_text(), **values_of(checkpoint, accumulate_tokens="true")
    )
    code = {"1/model.py": (FAMILY / "tensorrt_llm_bls" / "1" / "model.py").read_text()}
    write(repository, "accumulating", bls.replace("tensorrt_llm_bls", "accumulating", 1), code)
    build_old(repository, checkpoint)
    with ConchServer(repository, log=folder / "server.log") as server:
        yield server


def build_old(repository: Path, checkpoint: Path) -> None:
    """The family of old: the programs are the same, and the engine is compiled."""
    build(repository, group="inflight_batcher/old")
    version = repository / "old_tensorrt_llm" / "1"
    (version / "llama_float16_tp1_rank0.engine").touch()
    (version / "config.json").write_text('{"builder_config": {"name": "llama"}}')
    (version / "llama").symlink_to(checkpoint)
    for name in ("preprocessing", "postprocessing"):
        shutil.copy(FAMILY / name / "1" / "model.py", repository / f"old_{name}" / "1")
    for config in repository.glob("old_*/config.pbtxt"):
        config.write_text(fill(config.read_text(), tokenizer_dir=str(checkpoint), engine_dir=str(version)))


class Reference:
    """What transformers itself says, greedily."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)

    def tokens(self, prompt: str, count: int) -> list[int]:
        ids = self.tokenizer(prompt, return_tensors="pt")
        made = self.model.generate(**ids, max_new_tokens=count, do_sample=False)
        new: list[int] = made[0, ids["input_ids"].shape[1] :].tolist()
        return new[: new.index(0)] if 0 in new else new

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def generate(server: ConchServer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = post(server.http, f"/v2/models/{model}/generate", body)
    assert reply.status == 200, reply.body
    document: dict[str, Any] = reply.json()
    return document


def stream(server: ConchServer, model: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = requests.post(f"http://{server.http}/v2/models/{model}/generate_stream", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


ENSEMBLES = ("ensemble", "plain_ensemble", "old_ensemble")
MODELS = (*ENSEMBLES, "tensorrt_llm_bls")


@pytest.mark.parametrize("model", ["ensemble", "plain_ensemble", "old_ensemble"])
def test_the_request_of_the_walkthrough(server: ConchServer, model: str) -> None:
    reply = generate(server, f"{model}/versions/1", TOWER)
    assert (reply["model_name"], reply["model_version"]) == (model, "1")
    assert reply["text_output"].startswith("What is the height of ")
    assert len(reply["text_output"]) > len(TOWER["text_input"])  # type: ignore[arg-type]


@pytest.mark.parametrize("model", MODELS)
def test_words_may_be_empty_and_scalar(server: ConchServer, reference: Reference, model: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    if model == "old_ensemble":
        body["end_id"] = 0
    assert generate(server, model, body)["text_output"] == PROMPT + reference.text(reference.tokens(PROMPT, 20))


@pytest.mark.parametrize("model", MODELS)
def test_a_key_that_no_input_has_is_a_parameter(server: ConchServer, model: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 64, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    expected = generate(server, model, body)["text_output"]
    assert generate(server, model, {**body, "logits_post_processor_name": "lmfe"})["text_output"] == expected


@pytest.mark.parametrize("model", MODELS)
def test_words_may_be_lists_and_numbers_whole(server: ConchServer, model: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 30, "bad_words": ["now", "process"], "stop_words": [""], "top_k": 20,
            "top_p": 1, "end_id": 3, "pad_id": 2}  # fmt: skip
    assert isinstance(generate(server, model, body)["text_output"], str)


@pytest.mark.parametrize("model", MODELS)
def test_a_stop_word_ends_the_text_and_a_bad_word_is_not_in_it(
    server: ConchServer, reference: Reference, model: str
) -> None:
    tokens = reference.tokens(PROMPT, 20)
    third = reference.text(tokens[2:3])
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ["", third], "end_id": 0}
    assert generate(server, model, body)["text_output"] == PROMPT + reference.text(tokens[:3])
    first = reference.text(tokens[:1])
    without = generate(server, model, {**body, "stop_words": "", "bad_words": [first]})["text_output"]
    assert not without.removeprefix(PROMPT).startswith(first)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_stream_is_the_text_in_pieces(server: ConchServer, reference: Reference, model: str) -> None:
    events = stream(server, model, {"text_input": PROMPT, "max_tokens": 12, "stream": True, "end_id": 0})
    tokens = reference.tokens(PROMPT, 12)
    assert "".join(event["text_output"] for event in events) == reference.text(tokens)
    assert len(events) in (len(tokens), len(tokens) + 1)
    [whole] = stream(server, model, {"text_input": PROMPT, "max_tokens": 12, "end_id": 0})
    assert whole["text_output"] == PROMPT + reference.text(tokens)


def test_tokens_may_be_accumulated(server: ConchServer, reference: Reference) -> None:
    events = stream(server, "accumulating", {"text_input": PROMPT, "max_tokens": 6, "stream": True, "end_id": -1})
    texts = [event["text_output"] for event in events]
    assert len(texts) == 6
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_extras_come_on_request(server: ConchServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 5, "end_id": -1, "exclude_input_in_output": True}
    assert "cum_log_probs" not in generate(server, "ensemble", body)
    reply = generate(server, "ensemble", {**body, "return_log_probs": True})
    assert len(reply["output_log_probs"]) == 5
    assert reply["cum_log_probs"] == pytest.approx(sum(reply["output_log_probs"]), abs=1e-4)
    assert PROMPT not in reply["text_output"]
    beams = generate(server, "ensemble", {**body, "beam_width": 3, "return_log_probs": True})
    assert len(beams["text_output"]) == len(beams["cum_log_probs"]) == 3
    assert beams["cum_log_probs"] == sorted(beams["cum_log_probs"], reverse=True)


def test_a_seed_repeats_a_sample(server: ConchServer) -> None:
    body = {**TOWER, "end_id": -1, "random_seed": 7}
    assert generate(server, "ensemble", body)["text_output"] == generate(server, "ensemble", body)["text_output"]
    assert generate(server, "ensemble", {**body, "random_seed": 8}) != generate(server, "ensemble", body)


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("ensemble", {"max_tokens": 0}, "input 'request_output_len' is 0"),
        ("ensemble", {"return_context_logits": True}, "input 'return_context_logits' is true, but context logits"),
        ("ensemble", {"beam_width": 9}, "input 'beam_width' is 9, but parameter 'max_beam_width' is 4"),
        ("plain_ensemble", {"stream": True}, "Streaming is only supported if model is deployed using decoupled mode."),
        ("tensorrt_llm_bls", {"max_tokens": 0}, "max_tokens must be a single value > 0"),
        ("ensemble", {"max_tokens": 10_000}, "together more than the context of the model"),
    ],
)
def test_what_is_wrong_is_said(server: ConchServer, model: str, body: dict[str, Any], message: str) -> None:
    reply = post(server.http, f"/v2/models/{model}/generate", {"text_input": PROMPT, "max_tokens": 3, **body})
    assert reply.status >= 400
    assert message in reply.error


@pytest.mark.parametrize("model", ["plain_ensemble", "old_ensemble"])
def test_infer_with_a_batch(server: ConchServer, reference: Reference, model: str) -> None:
    texts = [PROMPT, "How can you", "Where"]
    kind = "UINT32" if model == "old_ensemble" else "INT32"
    inputs = [
        tensor("text_input", "BYTES", texts, [3, 1]),
        tensor("max_tokens", kind, [4] * 3, [3, 1]),
        tensor("end_id", kind, [0] * 3, [3, 1]),
        *(tensor(name, "BYTES", [""] * 3, [3, 1]) for name in ("bad_words", "stop_words")),
    ]
    reply = post(server.http, f"/v2/models/{model}/infer", {"inputs": inputs, "outputs": [{"name": "text_output"}]})
    assert reply.status == 200, reply.body
    [output] = reply.json()["outputs"]
    expected = [text + reference.text(reference.tokens(text, 4)) for text in texts]
    if model == "old_ensemble":  # without lengths: what fills the shorter rows up is decoded as well
        assert all(given.startswith(text) for given, text in zip(output["data"], texts, strict=True))
    else:
        assert output["data"] == expected


class Stream:
    """A gRPC stream of responses, and the calls that go with it."""

    def __init__(self, server: ConchServer) -> None:
        self.answers: Queue[Any] = Queue()
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self.answers.put(error or result))

    def ask(self, model: str, *, id: str = "", **values: Any) -> None:
        inputs = []
        for name, value in values.items():
            array = value if isinstance(value, np.ndarray) else np.array(value)
            kind = {"U": "BYTES", "O": "BYTES", "b": "BOOL", "f": "FP32"}.get(array.dtype.kind, "INT32")
            array = array.astype({"BYTES": np.object_, "BOOL": bool, "FP32": np.float32}.get(kind, np.int32))
            inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        self.client.async_stream_infer(model, inputs, request_id=id, enable_empty_final_response=True)

    def next(self) -> tuple[Any, bool]:
        """The next response, and whether it is the last one of its request."""
        result = self.answers.get(timeout=60)
        if isinstance(result, InferenceServerException):
            raise result
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def rest(self) -> list[Any]:
        results = []
        while True:
            result, final = self.next()
            if result.get_response().outputs:
                results.append(result)
            if final:
                return results

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


@pytest.fixture
def grpc_stream(server: ConchServer) -> Iterator[Stream]:
    made = Stream(server)
    yield made
    made.close()


def running(server: ConchServer) -> float:
    page = requests.get(f"http://{server.metrics}/metrics", timeout=60).text
    line = next(
        line for line in page.splitlines() if line.startswith("vllm:num_requests_running") and '"tensorrt_llm"' in line
    )
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_decoupled_stream_over_grpc(grpc_stream: Stream, reference: Reference, model: str) -> None:
    grpc_stream.ask(
        model, text_input=np.array([[PROMPT]], object), max_tokens=[[8]], stream=[[True]], beam_width=[[1]],
        temperature=[[1.0]], stop_words=np.array([["", "zzz"]], object), bad_words=np.array([[""]], object),
    )  # fmt: skip
    results = grpc_stream.rest()
    text = b"".join(result.as_numpy("text_output").reshape(-1)[0] for result in results).decode()
    assert text == reference.text(reference.tokens(PROMPT, 8))


def test_tokens_stream_as_they_are_made(grpc_stream: Stream, reference: Reference) -> None:
    ids = reference.tokenizer(PROMPT)["input_ids"]
    grpc_stream.ask(
        "tensorrt_llm", id="1", input_ids=[ids], input_lengths=[[len(ids)]], request_output_len=[[6]],
        streaming=[[True]], end_id=[[-1]],
    )  # fmt: skip
    results = grpc_stream.rest()
    assert [result.as_numpy("output_ids").shape for result in results] == [(1, 1, 1)] * 6
    assert [result.as_numpy("sequence_length").tolist() for result in results] == [[[1]]] * 6
    tokens = [int(result.as_numpy("output_ids").item()) for result in results]
    expected = reference.tokens(PROMPT, 6)
    assert tokens[: len(expected)] == expected


def test_rows_of_one_request_have_responses_of_their_own(grpc_stream: Stream, reference: Reference) -> None:
    prompts = [reference.tokenizer(text)["input_ids"] for text in (PROMPT, "Where")]
    width = max(map(len, prompts))
    grpc_stream.ask(
        "tensorrt_llm", input_ids=[ids + [0] * (width - len(ids)) for ids in prompts],
        input_lengths=[[len(ids)] for ids in prompts], request_output_len=[[5], [3]], end_id=[[0], [0]],
        exclude_input_in_output=[[True], [True]],
    )  # fmt: skip
    made = {
        int(result.as_numpy("batch_index").item()): result.as_numpy("output_ids").ravel().tolist()
        for result in grpc_stream.rest()
    }
    assert made == {0: reference.tokens(PROMPT, 5), 1: reference.tokens("Where", 3)}


def test_a_stop_request_ends_a_stream(server: ConchServer, grpc_stream: Stream) -> None:
    grpc_stream.ask(
        "tensorrt_llm", id="a", input_ids=[[5, 6]], input_lengths=[[2]], request_output_len=[[LONG]],
        streaming=[[True]], end_id=[[-1]],
    )  # fmt: skip
    for _ in range(3):
        _, final = grpc_stream.next()
        assert not final
    other = Stream(server)
    other.ask("tensorrt_llm", id="a", input_ids=[[0]], input_lengths=[[1]], request_output_len=[[1]], stop=[[True]])
    assert other.rest() == []
    other.close()
    assert len(grpc_stream.rest()) < LONG - 3
    eventually(lambda: running(server) == 0, "an empty batch")


def test_a_stop_request_needs_an_id(grpc_stream: Stream) -> None:
    grpc_stream.ask("tensorrt_llm", input_ids=[[0]], input_lengths=[[1]], request_output_len=[[1]], stop=[[True]])
    with pytest.raises(InferenceServerException, match="A request id must be provided for request cancellation"):
        grpc_stream.next()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
def test_a_client_that_leaves_frees_its_place(server: ConchServer, model: str) -> None:
    leaving = Stream(server)
    if model == "tensorrt_llm":
        asked: dict[str, Any] = {
            "input_ids": [[5, 6]],
            "input_lengths": [[2]],
            "request_output_len": [[LONG]],
            "streaming": [[True]],
        }
    else:
        asked = {"text_input": np.array([[PROMPT]], object), "max_tokens": [[LONG]], "stream": [[True]]}
    leaving.ask(model, end_id=[[-1]], **asked)
    _, final = leaving.next()
    assert not final
    leaving.close(cancel=True)
    eventually(lambda: running(server) == 0, "an empty batch", 30)


def test_clients_share_the_batch(server: ConchServer, reference: Reference) -> None:
    prompts = [PROMPT, "How can you", "Where is", "A program takes"] * 3
    expected = [text + reference.text(reference.tokens(text, 16)) for text in prompts]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        body = {"text_input": prompts[number], "max_tokens": 16, "end_id": 0}
        answers[number] = generate(server, "tensorrt_llm_bls" if number % 3 == 0 else "ensemble", body)["text_output"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(len(prompts))] == expected


def test_what_is_not_understood_is_named_once(server: ConchServer) -> None:
    log = Path(str(server.log)).read_text()
    assert log.count("model 'old_tensorrt_llm': parameters without effect: max_num_tokns") == 1
    assert "model 'tensorrt_llm': parameters without effect" not in log


def test_a_template_that_is_not_filled_in_is_refused_by_name(tmp_path: Path, stack: ExitStack) -> None:
    repository = build(tmp_path / "models", "tensorrt_llm", group="inflight_batcher/current")
    log = tmp_path / "log"
    server = stack.enter_context(ConchServer(repository, "--exit-on-error=false", log=log, wait=False))
    said = "${triton_max_batch_size} of the template still needs a value, and so do ${decoupled_mode}, "
    eventually(lambda: said in log.read_text(), "the reason in the log", 60)
    eventually(lambda: get(server.http, "/v2/health/live").status == 200, "a server that lives", 60)
