"""The flags of ``conch perf``: what they mean in the plan, what is refused and what was probably meant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import pytest

from conch.cli import main
from conch.cli.perf import REFUSED, Against, perf_command
from conch.cli.perf_plan import plan_of
from conch.core.errors import ConchError
from conch.measure.perf.options import PerfOptions
from conch.measure.perf.plan import PerfPlan, SequenceOptions


def _plan(*flags: str) -> PerfPlan:
    return plan_of(PerfOptions(**perf_command.make_context("perf", ["-m", "m", *flags]).params))[0]


def test_every_flag_is_declared_once_and_in_a_group() -> None:
    flags = Counter(flag for param in perf_command.params if isinstance(param, click.Option) for flag in param.opts)
    assert [flag for flag, count in flags.items() if count > 1] == []
    shown = perf_command.get_help(click.Context(perf_command))
    assert "\nModel and server:\n" in shown and "--trace-file" not in shown


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_are_not_taken_say_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([flag], [flag, "value"]):
        assert main(["perf", "-m", "m", *given]) == 1
        assert capsys.readouterr().err.strip() == f"{flag} is not supported: {REFUSED[flag]}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--concurency-range", "1"], "did you mean '--concurrency-range'?"),
        (["--string-dat", "x"], "did you mean '--string-data'?"),
        (["--service-kind", "tfserving"], "TensorFlow Serving's protocol is not supported"),
        (["--shared-memory", "cuda"], "use --shared-memory system"),
        (["--concurrency-range", "1", "--request-rate-range", "1"], "are mutually exclusive"),
        (["--concurrency-range", "2:1"], "the end is below the start"),
        (["--concurrency-range", "1:0"], "--latency-threshold"),
        (["--request-parameter", "n:x:int"], "'x' is not of type int"),
        (["--ssl-https-ca-certificates-file", __file__], "add -u https://localhost:8000"),
        (["-i", "grpc", "--ssl-grpc-root-certifications-file", __file__], "add --ssl-grpc-use-ssl"),
        (["--sequence-id-range", "5:5"], "up to 5 has no id"),
        (["--request-intervals", "/nowhere"], "does not exist"),
        (["--concurrency-range", "0.5"], "the number of callers must be a whole number, at most 50,000"),
        (["--concurrency-range", "999999999"], "must be a whole number, at most 50,000"),
        (["--concurrency-range", ""], "--concurrency-range : expected start"),
        (["--request-rate-range", ""], "--request-rate-range : expected start"),
        (["--max-threads", "1000000"], "at most 50,000 requests"),
        (["--warm-up", "nan"], "nan is not a number in the range"),
        (["--timeout", "inf"], "not in the range"),
        (["-p", "99999999999999"], "not in the range"),
        (["-H", "a:b\r\nc:d"], "expected name:value"),
        (["--string-data", "\udcff"], "is not UTF-8"),
        (["--slo", ""], "--slo : expected"),
        (["-u", "host:²"], "expected host:port"),
        (["-u", "::1"], "expected host:port, with brackets around an IPv6 address"),
        (["-u", "http://me@host:8000"], "expected host:port"),
        (["-m", ""], "-m: the model's name is missing"),
        (["-x", "abc"], "-x abc: expected a version number"),
        (["--against", "host", "--breakdown"], "--breakdown describes one server"),
    ],
)
def test_what_is_wrong_is_said(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "-m", "m", "-u", "localhost", *flags]) == 1
    assert said in capsys.readouterr().err


def test_flags_that_change_nothing_are_taken() -> None:
    assert _plan("-a", "--sync", "--async", "--serial-sequences", "--service-kind", "triton") == _plan()


def test_windows_of_requests_and_numbers_of_requests() -> None:
    assert _plan("--measurement-request-count", "9").requests == 0
    counted = _plan("--measurement-mode", "count_windows", "--measurement-request-count", "9")
    assert (counted.requests, counted.total_requests, counted.trials) == (9, 0, 10)
    limited = _plan("--request-count", "9", "--warmup-request-count", "3")
    assert (limited.requests, limited.total_requests, limited.trials) == (9, 9, 1)
    assert (limited.warm_up, limited.warm_up_requests) == (0, 3)


def test_intervals_of_a_file_are_microseconds(tmp_path: Path) -> None:
    file = tmp_path / "intervals"
    file.write_text("1000\n\n3000.5\n")
    plan = _plan("--request-intervals", str(file))
    assert plan.intervals == [1_000_000, 3_000_500] and plan.rates is not None
    assert plan.rates.first == pytest.approx(2e9 / 4_000_500, rel=1e-4)
    for text, said in (("1\nx\n", "line 2: 'x' is not a number"), ("", "no intervals"), ("-1", "is negative")):
        file.write_text(text)
        with pytest.raises(ConchError, match=said):
            _plan("--request-intervals", str(file))


def test_parameters_have_types() -> None:
    names = ("--request-parameter",) * 4
    texts = ("a:1:int", "b:true:bool", "c:x:y", "d:[1]")
    plan = _plan(*(part for pair in zip(names, texts, strict=True) for part in pair))
    assert plan.parameters == {"a": 1, "b": True, "c": "x:y", "d": [1]}


def test_sequences_are_as_the_flags_say() -> None:
    assert _plan().sequences is None
    plan = _plan("--sequence-length", "7", "--sequence-id-range", "3:9", "--sequence-length-variation", "0")
    assert plan.sequences == SequenceOptions(7, 0.0, 4, 3, 9)
    rates = _plan("--num-of-sequences", "6", "--request-rate-range", "10")
    assert rates.callers == 6 and rates.sequences is not None


def test_certificates_are_those_of_the_protocol() -> None:
    file = __file__
    grpc = _plan("-i", "grpc", "--ssl-grpc-use-ssl", "--ssl-grpc-root-certifications-file", file).address
    assert grpc.encrypted and grpc.authorities == file and grpc.port == 8001
    https = _plan("-u", "https://host", "--ssl-https-verify-host", "0", "--ssl-https-verify-peer", "1").address
    assert https.encrypted and https.verified and not https.named
    assert not _plan("--ssl-grpc-use-ssl", "true").address.encrypted


def test_models_that_are_called_have_versions() -> None:
    assert _plan("--bls-composing-models", "a:3, b").composing == {"a": "3", "b": ""}


def test_the_other_side_is_encrypted_as_the_first_one_is_unless_it_says() -> None:
    encrypted = _plan("-i", "grpc", "--ssl-grpc-use-ssl")
    assert Against("host:9", "", 5).plan(encrypted, "")[0].address.encrypted
    assert not Against("http://host:9", "", 5).plan(_plan("-u", "https://host"), "")[0].address.encrypted
