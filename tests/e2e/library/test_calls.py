"""Every call means the same in the process and over the network: one suite for servers and clients."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conch
from conch import Code, ConchError, InferenceService, Server
from tests.e2e.library.conftest import HangingLoads
from tests.events import Events, eventually
from tests.models import write
from tests.refusals import refused

ROWS = {"INPUT0": list(range(16)), "INPUT1": np.ones(16, np.int32)}
NUMBERS = {
    "BOOL": [True, False], "UINT8": [0, 255], "UINT16": [1, 2], "UINT32": [1, 2**32 - 1], "UINT64": [1, 2**64 - 1],
    "INT8": [-1, 2], "INT16": [-1, 2], "INT32": [-1, 2], "INT64": [-(2**63), 2],
    "FP16": [0.5, -2.0], "FP32": [0.1, 2.0], "FP64": [0.1, 2.0], "BF16": [1.5, -2.0],
}  # fmt: skip
TYPES = {"BF16": np.float32, "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def test_lists_and_arrays_go_in_and_arrays_come_out(service: InferenceService) -> None:
    result = service.infer("add_sub", ROWS, request_id="seven", version=1)
    assert (result.model_name, result.model_version, result.id) == ("add_sub", "1", "seven")
    assert list(result.outputs) == ["OUTPUT0", "OUTPUT1"]
    assert result["OUTPUT0"].dtype == np.int32
    assert result["OUTPUT0"].tolist() == list(range(1, 17))
    result["OUTPUT1"][:] = 0  # the caller's own
    with pytest.raises(KeyError, match="no output 'OUTPUT2': the response has OUTPUT0, OUTPUT1"):
        result["OUTPUT2"]


def test_outputs_that_were_not_asked_for_stay_away(service: InferenceService) -> None:
    assert list(service.infer("add_sub", ROWS, outputs=["OUTPUT1"]).outputs) == ["OUTPUT1"]
    error = refused(service.infer, "add_sub", ROWS, outputs=["OUT"])
    assert (error.code, "OUT" in error.message) == (Code.INVALID_ARG, True)


def test_every_datatype_goes_in_and_comes_out(service: InferenceService) -> None:
    result = service.infer("types", {f"IN_{name}": values for name, values in NUMBERS.items()})
    for name, values in NUMBERS.items():
        array = result[f"OUT_{name}"]
        assert array.dtype == (TYPES.get(name) or np.dtype(name.lower())), name
        assert array.tolist() == np.array(values, array.dtype).tolist(), name


def test_bytes_come_as_bytes_whatever_they_hold(service: InferenceService) -> None:
    for texts in (["ä", "b"], [b"\xff\xfe", b""], []):
        array = service.infer("types", {"IN_BYTES": texts})["OUT_BYTES"]
        assert array.dtype == np.object_
        assert array.tolist() == [text.encode() if isinstance(text, str) else text for text in texts]
    result = service.infer("types", {"IN_BYTES": ["ä", "b"], "IN_INT8": [1]})
    assert result.texts("OUT_BYTES") == ["ä", "b"]
    assert refused(result.texts, "OUT_INT8").code is Code.INVALID_ARG
    assert refused(service.infer("types", {"IN_BYTES": [b"\xff"]}).texts, "OUT_BYTES").code is Code.INVALID_ARG


def test_request_arrives_as_it_was_made(service: InferenceService) -> None:
    parameters: dict[str, Any] = {"flag": True, "count": 3, "scale": 0.5, "word": "ü"}
    inputs = {"INPUT": "anything"}
    result = service.infer("echo_request", inputs, request_id="id", parameters=parameters)
    seen = json.loads(result.texts("REQUEST")[0])
    assert seen["id"] == "id"
    assert {name: seen["parameters"][name] for name in parameters} == parameters
    error = refused(service.infer, "echo_request", inputs, parameters={"priority": 1})
    assert (error.code, "'priority' cannot be a parameter" in error.message) == (Code.INVALID_ARG, True)


@pytest.mark.parametrize(
    ("model", "inputs", "code", "words"),
    [
        ("nobody", {}, Code.NOT_FOUND, "'nobody' is not found"),
        ("add_sub", {"INPUT0": [1]}, Code.INVALID_ARG, "input 'INPUT0' of model 'add_sub' has the shape [16]; got [1]"),
        ("add_sub", {"INPUT0": range(16)}, Code.INVALID_ARG, "missing required input(s) ['INPUT1']"),
        ("add_sub", {"INPUT": 1}, Code.INVALID_ARG, "no input 'INPUT'"),
        ("repeat", {"IN": [1]}, Code.UNSUPPORTED, "use infer_stream"),
        ("identity_batched", {"INPUT": [[1.0]] * 9}, Code.INVALID_ARG, "batch-size must be <= 8"),
    ],
)
def test_request_that_is_wrong_is_refused_with_its_code(
    service: InferenceService, model: str, inputs: dict[str, Any], code: Code, words: str
) -> None:
    error = refused(service.infer, model, inputs)
    assert error.code is code
    assert words in error.message


def test_failure_of_a_model_has_the_model_s_code(service: InferenceService, events: Events) -> None:
    inputs = {"EVENTS": str(events.folder), "NAME": "fail-1"}
    events.set("fail-1.go")
    error = refused(service.infer, "gate", inputs)
    assert (error.code, error.message) == (Code.NOT_FOUND, "fail-1")
    events.set("raise.go")
    error = refused(service.infer, "gate", inputs | {"NAME": "raise"})
    assert (error.code, "told to raise" in error.message) == (Code.INTERNAL, True)


def test_responses_of_a_decoupled_model_come_as_they_are_sent(service: InferenceService) -> None:
    with service.infer_stream("repeat", {"IN": [4, 5, 6]}) as stream:
        assert [(int(event["OUT"][0]), int(event["IDX"][0])) for event in stream] == [(4, 0), (5, 1), (6, 2)]
        assert list(stream) == []
    assert [
        list(infer_event.outputs) for infer_event in service.infer_stream("repeat", {"IN": [4]}, outputs=["IDX"])
    ] == [["IDX"]]


def test_model_that_is_not_decoupled_has_a_stream_of_one_response(service: InferenceService) -> None:
    assert [infer_event["OUTPUT0"].tolist() for infer_event in service.infer_stream("add_sub", ROWS)] == [
        list(range(1, 17))
    ]


@pytest.mark.parametrize("sender", [False, True])
def test_response_without_outputs_is_a_response(service: InferenceService, sender: bool) -> None:
    assert service.infer("hollow", {"SENDER": [sender]}).outputs == {}
    with service.infer_stream("hollow", {"SENDER": [sender]}) as stream:
        assert [result.outputs for result in stream] == [{}]


def test_error_ends_a_stream(service: InferenceService, request: pytest.FixtureRequest) -> None:
    stream = service.infer_stream("repeat", {"IN": [4, -1, 6]})
    assert next(stream)["OUT"].tolist() == [4]
    error = refused(next, stream)
    code = Code.UNKNOWN if "http" in request.node.name else Code.INVALID_ARG  # events carry messages alone
    assert (error.code, error.message) == (code, "negative")


def test_closed_stream_cancels_its_request(service: InferenceService, server: Server) -> None:
    eventually(lambda: running(server, "repeat") == 0, "the end of other requests")
    with service.infer_stream("repeat", {"IN": list(range(1000)), "DELAY": [20] * 1000}) as stream:
        assert next(stream)["IDX"].tolist() == [0]
        assert running(server, "repeat") == 1
    eventually(lambda: running(server, "repeat") == 0, "the end of the request")


def test_stream_that_is_not_kept_cancels_its_request(service: InferenceService, server: Server) -> None:
    stream = service.infer_stream("repeat", {"IN": list(range(1000)), "DELAY": [20] * 1000})
    assert next(stream)["IDX"].tolist() == [0]
    del stream
    eventually(lambda: running(server, "repeat") == 0, "the end of the request")


def test_closing_a_stream_wakes_the_thread_that_waits_for_it(service: InferenceService) -> None:
    stream = service.infer_stream("repeat", {"IN": [1, 2], "DELAY": [0, 10_000]})
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, stream, "closed")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        stream.close()
        assert waiting.result() == "closed"


def test_threads_that_share_a_stream_in_the_process_all_come_to_its_end(server: Server) -> None:
    stream = server.infer_stream("repeat", {"IN": list(range(20)), "DELAY": [5] * 20})
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda _: [int(event["IDX"][0]) for event in stream], range(3), timeout=30))
    assert sorted(index for part in parts for index in part) == list(range(20))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"timeout": float("nan")}, "timeout must be a positive"),
        ({"priority": -1}, "priority must be an int from 0"),
        ({"priority": 2**64}, "priority must be an int from 0"),
        ({"sequence_id": -1}, "sequence_id must be a text, or an int from 0"),
        ({"sequence_id": "\ud800"}, "sequence_id cannot be written in UTF-8"),
        ({"request_id": "\ud800"}, "request_id cannot be written in UTF-8"),
        ({"parameters": {"a": 2**63}}, "parameter 'a' is out of the range of INT64"),
        ({"parameters": {"a": "\ud800"}}, "parameter 'a' cannot be written in UTF-8"),
    ],
)
def test_what_a_protocol_could_not_carry_is_refused_by_all(
    service: InferenceService, options: dict[str, Any], words: str
) -> None:
    for call in (service.infer, service.infer_stream):
        error = refused(call, "add_sub", ROWS, **options)
        assert (error.code, words in error.message) == (Code.INVALID_ARG, True), error.message


def running(server: Server, model: str) -> int:
    """The requests that the model has under way."""
    return server.in_flight([model])


def test_answer_that_does_not_come_in_time_is_cancelled(
    service: InferenceService, server: Server, events: Events
) -> None:
    inputs = {"EVENTS": str(events.folder), "NAME": "late"}
    for seconds in (0.3, 3.0, 30.0):  # a busy machine may not start it in time
        error = refused(service.infer, "gate", inputs, timeout=seconds)
        assert (error.code, error.message) == (Code.UNAVAILABLE, f"no response from model 'gate' within {seconds:g} s")
        if events.happened("late.started"):
            break
    events.wait("late.cancelled")
    for seconds in (0.5, 5.0, 50.0):  # nor send the first response
        with suppress(ConchError):
            stream = service.infer_stream("repeat", {"IN": [1, 2], "DELAY": [0, int(6000 * seconds)]}, timeout=seconds)
            assert next(stream)["OUT"].tolist() == [1]
            break
    assert refused(next, stream).message == f"no response from model 'repeat' within {seconds:g} s"


def test_calls_of_several_threads_share_batches(service: InferenceService) -> None:
    texts = [f"text {number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda text: service.infer("shout", {"text_input": text}), texts))
    assert [result.text for result in results] == [text.upper() for text in texts]
    assert max(int(result["ROWS"][0, 0]) for result in results) > 1


def test_text_goes_in_and_text_comes_out(service: InferenceService) -> None:
    assert service.generate("shout", "hello").text == "HELLO"
    assert service.generate("shout", {"text_input": ["a", "b"]}).texts() == ["A", "B"]
    result = service.generate("shout", {"text_input": ["a", "b"]})
    assert refused(lambda: result.text).message == "the response of model 'shout' has 2 texts: read them with texts()"
    assert service.generate("generate", "said once").texts("TEXT") == ["said once"]


def test_text_is_written_piece_by_piece(service: InferenceService) -> None:
    pieces = list(service.generate_stream("generate", "again", times=3, request_id="r"))
    assert [piece.texts() for piece in pieces] == [["again"]] * 3
    assert [piece["COUNT"].tolist() for piece in pieces] == [[0], [1], [2]]
    assert refused(service.generate, "generate", "x", times=2).code is Code.UNSUPPORTED
    assert refused(service.generate, "generate", "x", PROMPT="y").message == "'PROMPT' is given twice"
    assert "pass its inputs by name" in refused(service.generate, "add_sub", "text").message


def test_server_and_models_describe_themselves(service: InferenceService, server: Server) -> None:
    assert service.live()
    assert service.ready()
    assert service.ready("add_sub", 1)
    assert not service.ready("add_sub", "2")
    assert not service.ready("nobody")
    metadata = service.metadata()
    assert metadata == {name: server.metadata()[name] for name in metadata}  # gRPC's message has no conch_version
    assert metadata["name"] == "triton"
    for model in ("add_sub", "identity_batched", "shout"):
        assert service.metadata(model) == server.metadata(model)
        assert service.config(model) == server.config(model)
    assert service.models() == server.models()
    assert {"name": "add_sub", "version": "1", "state": "READY"} in service.models()
    assert refused(service.config, "nobody").code is Code.NOT_FOUND
    assert refused(service.metadata, "add_sub", "one").code is Code.INVALID_ARG


def test_statistics_count_requests(service: InferenceService, server: Server) -> None:
    before = service.statistics("add_sub", 1)[0]["inference_count"]
    service.infer("add_sub", ROWS)
    [entry] = service.statistics("add_sub")
    assert entry["inference_count"] == before + 1
    assert entry["inference_stats"] == server.statistics("add_sub")[0]["inference_stats"]
    assert {row["name"] for row in service.statistics()} >= {"add_sub", "repeat"}


def test_models_are_loaded_and_unloaded(service: InferenceService, folder: Path) -> None:
    source = (folder / "shout" / "1" / "model.py").read_bytes()
    config = service.config("shout") | {"name": "whisper", "max_batch_size": 3, "dynamic_batching": {}}
    service.load("whisper", config, {"1/model.py": source.replace(b"upper", b"lower")})
    assert service.config("whisper")["max_batch_size"] == 3
    assert service.generate("whisper", "Hello").text == "hello"
    service.unload("whisper")
    eventually(lambda: not service.ready("whisper"), "the unloading")
    error = refused(service.generate, "whisper", "Hello")
    assert error.code in (Code.NOT_FOUND, Code.UNAVAILABLE)
    assert refused(service.load, "nobody").code is not Code.UNKNOWN


def test_server_in_the_process_says_why_a_model_is_not_loaded(server: Server) -> None:
    for model, config, words in (
        ("nope", None, "not found in any model repository"),
        ("add_sub", "{", "Invalid config"),
    ):
        error = refused(server.load, model, config)
        assert (error.code, words in error.message) == (Code.INTERNAL, True), error.message


def test_version_is_a_number(service: InferenceService) -> None:
    error = refused(service.infer, "add_sub", ROWS, version="latest")
    assert (error.code, "version must be a number" in error.message) == (Code.INVALID_ARG, True)


def test_client_of_a_server_that_does_not_exist() -> None:
    for url in ("127.0.0.1:1", "http://127.0.0.1:1"):
        with conch.Client(url) as client:
            assert not client.live()
            assert not client.ready("add_sub")
            assert refused(client.infer, "add_sub", ROWS).code is Code.UNAVAILABLE
        assert refused(client.metadata).code is Code.UNAVAILABLE
    for url in ("ftp://a", "grpc://a/b", "http://", "a:b", "http://[::1"):
        assert refused(conch.Client, url).code is Code.INVALID_ARG


WAITING = """
import os
import time

class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists({path!r}):
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""


REPLACED = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def test_load_has_the_timeout_of_its_call_and_continues(
    service: InferenceService, folder: Path, tmp_path: Path
) -> None:
    write(folder, "waiting", 'backend: "python"', {"1/model.py": WAITING.format(path=str(tmp_path / "go"))})
    error = refused(service.load, "waiting", timeout=0.1)
    assert (error.code, error.message) == (Code.UNAVAILABLE, "no response from the server within 0.1 s")
    (tmp_path / "go").touch()
    eventually(lambda: service.ready("waiting"), "the model's readiness")
    service.unload("waiting", timeout=30)


def test_unload_continues_after_the_timeout_of_its_call(
    service: InferenceService, folder: Path, hanging_loads: HangingLoads
) -> None:
    write(folder, "replaced", 'backend: "python"', {"1/model.py": REPLACED})
    service.load("replaced")
    write(folder, "replaced", 'backend: "python"', {"1/model.py": f"{REPLACED}# changed"})
    hanging_loads.hang = True
    with ThreadPoolExecutor(1) as threads:
        reload = threads.submit(refused, service.load, "replaced")
        assert hanging_loads.begun.wait(60)
        error = refused(service.unload, "replaced", timeout=0.1)
        assert (error.code, error.message) == (Code.UNAVAILABLE, "no response from the server within 0.1 s")
        assert service.ready("replaced")
        hanging_loads.may_end.set()
        assert "the model was unloaded during the load" in reload.result().message
    eventually(lambda: not service.ready("replaced"), "the unload")


@pytest.mark.parametrize("call", ["live", "metadata", "statistics", "models"])
def test_timeout_that_is_no_time_is_refused(service: InferenceService, call: str) -> None:
    assert refused(getattr(service, call), timeout=0).code is Code.INVALID_ARG
    assert getattr(service, call)(timeout=30)
