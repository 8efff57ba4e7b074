"""Measurements over HTTP of a server whose behaviour is known: connections, errors, answers in pieces."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from conch.cli import main
from conch.core.errors import ConchError
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import Levels, PerfPlan, SequenceOptions
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.http import read_generate
from conch.measure.perf.senders.records import Outcome
from tests.unit.measure.perf.known_server import KnownServer, running


def _measure(address: Address, level: float = 1, **given: object) -> Measured:
    fields = {"warm_up": 0.0, "requests": 12, "total_requests": 12, "trials": 1} | given
    with Measurement(PerfPlan("known", address, **fields)) as measurement:  # type: ignore[arg-type]
        return measurement.measure(level)


def _of(server: KnownServer) -> Address:
    return Address("127.0.0.1", server.port)


@pytest.mark.parametrize("rates", [None, pytest.param(Levels(200, 200, 1), marks=pytest.mark.long)])
def test_requests_travel_over_tls(certificate: Path, rates: Levels | None) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with running(KnownServer(), "127.0.0.1", tls) as server:
        address = Address("localhost", server.port, encrypted=True, authorities=str(certificate))
        assert _measure(address, 200 if rates else 2, rates=rates).figures.requests == 12
        unnamed = Address("127.0.0.1", server.port, encrypted=True, named=False, authorities=str(certificate))
        assert _measure(unnamed).figures.requests == 12
        assert _measure(Address("127.0.0.1", server.port, encrypted=True, verified=False)).figures.requests == 12
        with pytest.raises(ConchError, match="its certificate is not accepted"):
            _measure(Address("localhost", server.port, encrypted=True))
    with pytest.raises(ConchError, match="cannot be used as CA certificates"):
        _measure(Address("localhost", 1, encrypted=True, authorities="/dev/null"))


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("rates", [None, pytest.param(Levels(200, 200, 1), marks=pytest.mark.long)])
def test_requests_travel_over_ipv6(rates: Levels | None) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with running(KnownServer(), "::1") as server:
        assert _measure(Address("::1", server.port), 200 if rates else 2, rates=rates).figures.requests == 12


@pytest.mark.parametrize("endpoint", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_text_of_an_error_is_kept(endpoint: str, chunked: bool) -> None:
    with running(KnownServer(fails=1, chunked=chunked)) as server:
        measured = _measure(_of(server), endpoint=endpoint)
    assert measured.errors == {"it is the turn of an error": 12}


def test_an_answer_in_one_piece_has_no_distances() -> None:
    with running(KnownServer(answer=b'{"text_output":"one two three"}')) as server:
        generation = _measure(_of(server), endpoint="generate").generation
    assert generation is not None and generation.requests == 12 and generation.tokens > 0
    assert generation.ttft is not None and generation.itl is None


@pytest.mark.parametrize("binary", [False, True])
def test_a_wrong_answer_is_a_failed_request(binary: bool, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    values = [{"IN": [1, 2, 3, 4]}, {"IN": [5, 6, 7, 8]}]
    right = [{"OUT": [1, 2, 3, 4]}, {"OUT": [1, 2, 3, 5]}]
    file.write_text(json.dumps({"data": values, "validation_data": right}))
    output = {"name": "OUT", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    with running(KnownServer(answer=json.dumps({"outputs": [output]}).encode())) as server:
        measured = _measure(_of(server), data=DataOptions(str(file)), binary_output=binary)
    assert measured.figures.failures == {Outcome.WRONG: 6} and measured.figures.requests == 6


def test_each_caller_sends_a_sequence_after_another() -> None:
    with running(KnownServer()) as server:
        options = SequenceOptions(4, 0.0, last=3)
        measured = _measure(_of(server), 2, sequences=options, data=DataOptions("zero"), rates=None)
        bodies = list(server.bodies)
    assert measured.figures.requests == 12
    found: dict[int, str] = {}
    for body in bodies:
        parameters = json.loads(body[: body.index(b"}}") + 2 + body[body.index(b"}}") + 2 :].index(b"}}") + 2])[
            "parameters"
        ]
        mark = ("S" if parameters["sequence_start"] else "") + ("E" if parameters["sequence_end"] else "") or "."
        found[parameters["sequence_id"]] = found.get(parameters["sequence_id"], "") + mark
    assert found.keys() == {1, 2} and set("".join(found.values()).replace("S..E", "").replace("S.E", "")) <= {"S", "E"}
    with running(KnownServer()) as server, pytest.raises(ConchError, match="3 sequences at a time need as many ids"):
        _measure(_of(server), 3, sequences=options, concurrency=Levels(3, 3, 1))


def test_the_command_shows_each_window_when_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    with running(KnownServer()) as server:
        flags = ["-m", "known", "-u", f"127.0.0.1:{server.port}", "--request-count", "5", "--no-sender-limit"]
        assert main(["perf", *flags, "-v", "--concurrency-range", "1:2"]) == 0
    shown = capsys.readouterr().out
    assert "concurrency 1: window 1 of at most 1: " in shown and "concurrency 2: window 1 of at most 1: " in shown
    assert len(server.bodies) == 10


def test_a_number_of_requests_is_sent_and_no_more() -> None:
    with running(KnownServer(service=0.01)) as server:
        measured = _measure(_of(server), 3, warm_up_requests=5, keep_records=True)
    assert len(server.bodies) == 17 and measured.figures.requests == 12 and measured.stable
    assert measured.figures.seconds >= 0.04  # four rounds of three callers
    # The window ends with the last of them, not when somebody looks.
    assert measured.records is not None
    assert measured.records.spans[0][1] == measured.records.records["end"].max()


def test_processes_without_callers_keep_no_requests() -> None:
    with running(KnownServer()) as server:
        measured = _measure(_of(server), 1, processes=2, warm_up_requests=3)
    assert measured.figures.requests == 12 and len(server.bodies) == 15


def test_ctrl_c_between_runs_keeps_those_before() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    plan = PerfPlan("known", Address("127.0.0.1", 1), requests=5, total_requests=5, trials=1, warm_up=0.0, runs=2)
    with running(KnownServer()) as server, Measurement(replace(plan, address=_of(server))) as measurement:
        measured = measurement.measure(1, before_rest=interrupt)
    assert measured.stopped and measured.figures.requests == 5


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (b'{"model_name":"m","model_version":"1","text_output":"word"}', True),
        (b'{"model_name":"m","model_version":"1","text_output":""}', False),
        (b'{"model_name":"m","model_version":"1","sequence_id":7,"sequence_end":false,"ids":[]}', False),
        (b'{"model_name":"m","model_version":"1","ids":[3,4]}', True),
        (b'{"model_name":"m","model_version":"1","id":0}', False),
        (b'{"model_name":"m","model_version":"1","number":0}', True),
    ],
)
def test_an_event_without_output_is_no_token(event: bytes, text: bool) -> None:
    assert read_generate(event).text is text
