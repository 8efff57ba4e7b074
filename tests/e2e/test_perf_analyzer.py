"""The real perf_analyzer drives conch: protocols, sync and async, strings, zeros, shapes, streams."""

from __future__ import annotations

import re

import click
import pytest

from conch.cli.perf import perf_command
from tests.conftest import Server
from tests.oracle import OracleUnavailable, perf_analyzer

SHORT = ["-p", "500", "-s", "100000", "-r", "5", "--concurrency-range", "2"]
TEXT = ["-m", "identity_string", "--string-data", "some text"]

CASES: dict[str, list[str]] = {
    "http": TEXT,
    "http async": [*TEXT, "-a"],
    "grpc": [*TEXT, "-i", "grpc"],
    "grpc async": [*TEXT, "-i", "grpc", "-a"],
    "grpc streaming": [*TEXT, "-i", "grpc", "--streaming"],
    "batches": [*TEXT, "-b", "4"],
    "zeros": ["-m", "identity_batched", "--input-data", "zero", "--shape", "INPUT:16"],
    "random": ["-m", "identity_batched", "--shape", "INPUT:128", "-i", "grpc"],
    "fixed shapes": ["-m", "add_sub"],
    "ensemble": ["-m", "chain", "--shape", "X:8"],
    "decoupled": [
        "-m", "repeat", "-i", "grpc", "--streaming", "-a", "--shape", "IN:2", "--shape", "DELAY:2",
        "--input-data", "zero",
    ],
    "request rate": [*TEXT, "--request-rate-range", "50"],
}  # fmt: skip


def test_conch_perf_takes_every_flag_or_says_why_not() -> None:
    try:
        said = perf_analyzer("--help").stderr
    except OracleUnavailable as error:
        pytest.skip(f"perf_analyzer is not available here: {error}")
    synopsis = said[said.index("==== SYNOPSIS ====") : said.index("==== OPTIONS ====")]
    flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", synopsis))
    known = {flag for param in perf_command.params if isinstance(param, click.Option) for flag in param.opts}
    assert len(flags) > 60 and flags - known == set()


@pytest.mark.parametrize("name", CASES)
def test_perf_analyzer_runs(name: str, server: Server) -> None:
    arguments = CASES[name]
    address = server.grpc if "grpc" in arguments else server.http
    short = [a for a in SHORT if a not in ("--concurrency-range", "2")] if "request rate" in name else SHORT
    try:
        done = perf_analyzer(*arguments, *short, "-u", address, timeout=60)
    except OracleUnavailable as error:
        pytest.skip(f"perf_analyzer is not available here: {error}")
    output = done.stdout + done.stderr
    # With a few short trials the figures need not be stable; what counts is that requests were answered.
    assert "Throughput:" in output, output
    assert "error" not in done.stderr.lower().replace("failed to obtain stable measurement", ""), output
