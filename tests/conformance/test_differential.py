"""conch and the real Triton give the same responses to the same requests, except for the list in ``differences.py``."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

from tests.conformance.calls import call
from tests.conformance.differences import GRPC, HTTP, Difference
from tests.conformance.grpc_cases import GRPC_CASES
from tests.conformance.http_cases import HTTP_CASES
from tests.conformance.raw import Reply, send
from tests.conftest import Server

pytestmark = pytest.mark.oracle

#: Members of responses that always vary, with their replacements.
VARYING = {"version": r"2\.\d+\.\d+"}


@dataclass(frozen=True)
class Pair:
    """The two servers to compare."""

    conch: Server
    triton: Server


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.config.getoption("server") != "both":
        pytest.skip("comparing needs both servers (--server=both)")
    return Pair(request.getfixturevalue("conch"), request.getfixturevalue("triton"))


def test_every_difference_is_of_a_case() -> None:
    assert set(HTTP) <= set(HTTP_CASES)


@pytest.mark.parametrize("name", HTTP_CASES)
def test_http(name: str, pair: Pair) -> None:
    request = HTTP_CASES[name]
    difference = HTTP.get(name, Difference(""))
    actual = send(pair.conch.http, request)
    expected = send(pair.triton.http, request) if difference.ask_triton else None

    status = difference.status or (expected.status if expected else 0)
    assert actual.status == status, actual.body
    if actual.status >= 400 and request.method != "HEAD" and actual.body:
        assert actual.headers.get("content-type", "").startswith(("application/json", "text/event-stream"))
    if difference.error is not None:
        assert re.fullmatch(difference.error, actual.error), actual.error
        return
    if difference.status is not None:
        return
    assert expected is not None
    if expected.body and expected.status < 400:
        for header in ("content-type", "content-encoding", "inference-header-content-length"):
            assert actual.headers.get(header) == expected.headers.get(header), header
    assert comparable(actual) == comparable(expected)


def comparable(reply: Reply) -> Any:
    """Return a body in a comparable form: JSON as values with the order of keys."""
    body = decompressed(reply)
    if reply.headers.get("content-type", "").startswith("application/octet-stream"):
        length = int(reply.headers["inference-header-content-length"])
        return parsed(body[:length]), body[length:]
    if body[:1] in (b"{", b"["):
        return normalised(parsed(body))
    if body.startswith(b"data: "):
        return [normalised(parsed(event.removeprefix(b"data: "))) for event in body.split(b"\n\n") if event]
    return body


def decompressed(reply: Reply) -> bytes:
    match reply.headers.get("content-encoding"):
        case "gzip":
            return gzip.decompress(reply.body)
        case "deflate":
            return zlib.decompress(reply.body)
        case _:
            return reply.body


def parsed(text: bytes) -> Any:
    """Parse JSON with objects as lists of pairs, each key once; NaN becomes text, because it does not equal itself."""
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: list(dict(pairs).items()),
        parse_constant=str,
    )


def normalised(value: Any) -> Any:
    """Remove the parts that may vary: see ``GENERAL`` in ``differences.py``."""
    match value:
        case [("error", str(message))]:
            message = re.sub(r"(failed to parse the request JSON buffer): .*", r"\1", message)
            message = re.sub(
                r"Got input\(s\) \[([^]]*)\]", lambda found: "Got " + str(sorted(found[1].split(","))), message
            )
            return [("error", message)]
        case [("name", "triton"), ("version", version), *rest]:
            assert re.fullmatch(VARYING["version"], version)
            return [("name", "triton"), *without_extensions(rest)]
        case list():
            return [seen_by_model(item) if isinstance(item, tuple) else item for item in unordered(value)]
        case _:
            return value


def without_extensions(members: list[Any]) -> list[Any]:
    """Return the server's metadata without intended differences; ``test_control_plane.py`` checks those."""
    return [member for member in members if member[0] not in ("extensions", "conch_version")]


def unordered(value: Any) -> Any:
    """Sort every map by its keys."""
    match value:
        case (str(name), list(pairs)) if name in MAPS:
            return name, sorted(pairs, key=str)
        case tuple():
            return tuple(unordered(item) for item in value)
        case list():
            return [unordered(item) for item in value]
        case _:
            return value


#: Fields of a configuration that are maps; their order is arbitrary (a hash table).
MAPS = ("input_map", "output_map", "parameters", "metric_tags", "cc_model_filenames")


def seen_by_model(member: tuple[str, Any]) -> Any:
    """Sort the names of requested outputs, which a model receives in any order (``echo_request``)."""
    name, value = member
    if name == "REQUEST" and isinstance(value, str):
        seen = json.loads(value)
        return name, seen | {"outputs": sorted(seen["outputs"])}
    if name == "outputs" and isinstance(value, list):
        return name, sorted([sorted_names(pair) for pair in output] for output in value)
    return member


def sorted_names(pair: tuple[str, Any]) -> Any:
    name, value = pair
    if name == "data" and value and isinstance(value[0], str) and value[0].startswith('{"id":'):
        return name, [json.loads(text) | {"outputs": sorted(json.loads(text)["outputs"])} for text in value]
    return pair


def test_every_grpc_difference_is_of_a_case() -> None:
    assert set(GRPC) <= set(GRPC_CASES)


@pytest.mark.parametrize("name", GRPC_CASES)
def test_grpc(name: str, pair: Pair) -> None:
    case = GRPC_CASES[name]
    difference = GRPC.get(name, Difference(""))
    actual = call(pair.conch.grpc, case)
    expected = call(pair.triton.grpc, case) if difference.ask_triton else None
    if difference.code is not None:
        assert actual.code == difference.code, actual
        assert re.fullmatch(difference.error or "", actual.details), actual.details
        return
    assert expected is not None
    assert actual.code == expected.code, actual.details
    assert actual.details == expected.details
    answers, wanted = ([as_values(message) for message in outcome.messages] for outcome in (actual, expected))
    if name.startswith("stream: decoupled ensemble"):
        # In both servers, the end may come with the last response or after it, depending on timing.
        answers, wanted = without_end(answers), without_end(wanted)
    assert answers == wanted


def as_values(message: Any) -> Any:
    """Return a protobuf message as values, without the parts that may vary."""
    values = MessageToDict(message, preserving_proto_field_name=True)
    if isinstance(message, service_pb2.ServerMetadataResponse):
        assert re.fullmatch(VARYING["version"], values.pop("version"))
        del values["extensions"]
    contents = values.get("infer_response", values)
    if contents.get("model_name") == "echo_request":
        raw = message.raw_output_contents
        values["raw_output_contents"] = [json.loads(data[4:]) for data in raw]
    return values


def without_end(answers: list[Any]) -> list[Any]:
    """Return the responses of a stream without empty final responses and without final flags."""
    for answer in answers:
        answer["infer_response"]["parameters"].pop("triton_final_response", None)
    return [answer for answer in answers if answer["infer_response"].get("outputs")]
