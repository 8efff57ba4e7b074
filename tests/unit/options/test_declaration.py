"""Options are declared once; the command line, its help and its completion follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from conch.cli.options import command_of
from conch.options.declaration import ExistingFile, File, Range, Values, option, options_of


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The options of the command below."""

    model: str = option("", "What", "Model to measure.", flags=("-m", "--model-name"), metavar="MODEL", common=True)
    engine: Annotated[str, Values(known=("torch", "vllm"))] = option("", "What", "Engine.")
    protocol: Literal["http", "grpc"] = option("http", "What", "Protocol.", common=True)
    batch_size: Annotated[int, Range(1, 64)] = option(8, "How", "Inferences per request.")
    timeout: Annotated[float, Range(0, above=True)] = option(1.5, "How", "Seconds; the default is 1.5.")
    headers: tuple[str, ...] = option((), "How", "Request header.", flags=("--header",))
    tls: str = option("false", "How", "Encrypt.", bare="true", metavar="BOOL")
    verify: bool = option(True, "How", "Verify.", flags=("--verify/--no-verify",))
    html: File | None = option(None, "Results", "Report.")
    data: ExistingFile | None = option(None, "What", "Texts.")


@pytest.fixture
def given() -> list[Measured]:
    """The options of each run of the command."""
    return []


@pytest.fixture
def command(given: list[Measured]) -> click.Command:
    def run(options: Measured) -> None:
        """Measure a model."""
        given.append(options)

    return command_of("measure", Measured, run)


def test_an_option_has_its_default(command: click.Command, given: list[Measured]) -> None:
    assert CliRunner().invoke(command, []).exit_code == 0
    assert given == [Measured()]


def test_a_value_has_the_type_that_is_declared(command: click.Command, given: list[Measured]) -> None:
    line = (
        "-m a --protocol GRPC --batch-size 2 --timeout 3 --header x --header y --tls --no-verify --html p --engine new"
    )
    assert CliRunner().invoke(command, line.split()).exit_code == 0
    assert given == [
        Measured(
            model="a", protocol="grpc", batch_size=2, timeout=3.0, headers=("x", "y"), tls="true", verify=False,
            html=Path("p"), engine="new",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--batch-size 65", "Invalid value for '--batch-size': 65 is not in the range 1<=x<=64."),
        ("--timeout 0", "Invalid value for '--timeout': 0.0 is not in the range x>0."),
        ("--timeout inf", "Invalid value for '--timeout': inf is not a number in the range x>0."),
        ("--timeout nan", "Invalid value for '--timeout': nan is not a number in the range x>0."),
        ("--protocol ftp", "Invalid value for '--protocol': 'ftp' is not one of 'http', 'grpc'."),
        ("--data missing.txt", "Invalid value for '--data': File 'missing.txt' does not exist."),
        ("--model a", "No such option '--model'"),
    ],
)
def test_a_value_that_is_not_declared_is_refused(line: str, message: str, command: click.Command) -> None:
    assert message in CliRunner().invoke(command, line.split()).output


def test_help_describes_common_options_and_names_the_others(command: click.Command) -> None:
    common = CliRunner().invoke(command, ["--help"]).output
    assert "-m, --model-name MODEL" in common
    assert "--protocol http|grpc" in common
    assert "Protocol (default: http)." in common
    assert "What: engine, data\nHow: batch-size, timeout, header, tls, verify\nResults: html\n" in common
    described = CliRunner().invoke(command, ["--help-all"]).output
    assert "Inferences per request (default: 8)." in described
    assert "Seconds; the default is 1.5.\n" in described
    assert "--html FILE" in described


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--protocol", "g"], ["grpc"]),
        (["--engine", ""], ["torch", "vllm"]),
        (["--html", "x"], ["x"]),
        (["--model-name", "x"], []),
    ],
)
def test_values_are_completed(words: list[str], offered: list[str], command: click.Command) -> None:
    *before, typed = words
    items = ShellComplete(command, {}, "measure", "_MEASURE_COMPLETE").get_completions(before, typed)
    assert [item.value for item in items] == offered


def test_an_option_knows_how_it_is_written() -> None:
    options = options_of(Measured)
    assert [options[name].flag for name in ("model", "batch_size", "headers")] == [
        "--model-name", "--batch-size", "--header",
    ]  # fmt: skip
    assert (options["headers"].repeatable, options["verify"].switch, options["html"].default_text) == (True, True, "")
