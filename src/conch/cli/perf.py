"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer, or compares two (``--against``)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.interrupting import INTERRUPTED
from conch.cli.options import command_of, hidden_option
from conch.core.errors import invalid, unsupported
from conch.measure.perf.options import PerfOptions

if TYPE_CHECKING:
    from conch.measure.perf.against import ComparedRound, Comparison
    from conch.measure.perf.measured import Measured
    from conch.measure.perf.plan import PerfPlan


@dataclass(frozen=True, slots=True)
class Against:
    """The flags: the other server, the other model (empty for the same), and the number of rounds."""

    url: str
    model: str
    rounds: int

    def __bool__(self) -> bool:
        return bool(self.url or self.model)

    def plan(self, plan: PerfPlan, prefix: str) -> tuple[PerfPlan, str]:
        """Return the plan of the other side, and its path prefix; everything else is as for the first side."""
        from conch.measure.perf.plan import read_address

        model = self.model or plan.model
        if not self.url:
            return replace(plan, model=model), prefix
        scheme = self.url.partition("://")[0] if "://" in self.url else ""
        protocol = "grpc" if scheme.startswith("grpc") else plan.protocol
        if scheme.startswith("http") and protocol == "grpc":
            protocol = "http"
        if "openai" in (plan.protocol, protocol) and protocol != plan.protocol:
            raise invalid(f"--against {self.url}: OpenAI's API is compared with OpenAI's API only")
        read, other = read_address(self.url, protocol)
        encrypted = read.encrypted if scheme else plan.address.encrypted
        address = replace(plan.address, host=read.host, port=read.port, encrypted=encrypted)
        return replace(plan, model=model, address=address, protocol=protocol), other


def run_against(
    plan: PerfPlan, prefix: str, against: Against, json_file: Path | None, html: Path | None, console: Any
) -> int:
    """Compare at every level, show and write the ratios; returns the exit status."""
    from conch.measure.perf.against import compare
    from conch.measure.perf.report import comparison as shown
    from conch.measure.perf.report.files import write_all
    from conch.measure.perf.run import Measurement
    from conch.measure.reports.terminal import show

    a = replace(plan, trials=1, runs=1, sender_limit=False)
    b, other = against.plan(a, prefix)
    compared: list[Comparison] = []
    try:
        with Measurement(a, prefix) as first, Measurement(b, other) as second:
            console.print(
                f"A: {shown.side(a, first.sent)}\nB: {shown.side(b, second.sent)}", highlight=False, markup=False
            )
            for level in first.levels():
                heading = f"{'rate' if plan.rates is not None else 'concurrency'} {level:g}"
                with console.status(f"{heading}: round 1 of {against.rounds}") as status:
                    comparison = compare(
                        level, partial(first.measure, level), partial(second.measure, level), against.rounds,
                        partial(_show_progress, status, heading, against.rounds),
                    )  # fmt: skip
                compared.append(comparison)
                console.print()
                show(console, shown.level_section(comparison, open_load=plan.rates is not None))
                if comparison.stopped or comparison.ended:
                    break
    finally:
        write_all(_writers(json_file, html, a, b, compared))
    if any(comparison.stopped for comparison in compared):
        return INTERRUPTED
    return 0 if all(comparison.whole for comparison in compared) else 1


def _writers(
    json_file: Path | None, html: Path | None, a: PerfPlan, b: PerfPlan, compared: Sequence[Comparison]
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Return the writer of each file; empty without levels."""
    from conch.measure.perf.report.comparison import comparison_json, comparison_report
    from conch.measure.perf.report.files import command_line
    from conch.measure.reports.files import write_report, write_whole

    if json_file is not None and compared:
        yield json_file, lambda: write_whole(json_file, comparison_json(a, b, compared).encode())
    if html is not None and compared:
        yield html, lambda: write_report(comparison_report(a, b, command_line(sys.argv), compared), html)


def _show_progress(status: Any, heading: str, total: int, rounds: Sequence[ComparedRound]) -> None:
    disturbed = sum(measured_round.disturbed for measured_round in rounds)
    status.update(f"{heading}: {len(rounds)} of {total} rounds, {disturbed} of them disturbed")


_TRACE: Final = "tracing is set at the server: curl SERVER/v2/trace/setting -d '{…}'"
_IN_PROCESS: Final = "conch perf has no in-process server: start a server and pass its address with -u"
_PERIODIC: Final = "levels are measured one after the other: use --concurrency-range start:end:step"
#: Unsupported flags of perf_analyzer, with the alternatives.
REFUSED: Final[Mapping[str, str]] = {
    "--model-signature-name": "it is for TensorFlow Serving, whose protocol is not supported",
    "--triton-server-directory": _IN_PROCESS,
    "--model-repository": _IN_PROCESS,
    "--trace-file": _TRACE,
    "--trace-level": _TRACE,
    "--trace-rate": _TRACE,
    "--trace-count": _TRACE,
    "--log-frequency": _TRACE,
    "--periodic-concurrency-range": _PERIODIC,
    "--request-period": _PERIODIC,
    "--profile-export-file": "write a line for each request with --jsonl",
    "--version": "use conch --version",
    "-t": "perf_analyzer no longer has it: use --concurrency-range N",
    "-c": "perf_analyzer has dropped it: use --concurrency-range 1:N",
    "-d": "perf_analyzer has dropped it: use --concurrency-range 1:0 with -l",
    "-z": "perf_analyzer has dropped it: use --input-data zero",
    "--data-directory": "perf_analyzer has dropped it: use --input-data DIR",
}
_KINDS: Final = {
    "tfserving": "TensorFlow Serving's protocol is not supported",
    "torchserve": "TorchServe's protocol is not supported",
    "triton_c_api": _IN_PROCESS,
    "openai": "use -i openai",
}


def _refuse(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:
        raise unsupported(f"{option.opts[0]} is not supported: {REFUSED[option.opts[0]]}")


def _check_kind(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value not in (None, "triton"):
        raise unsupported(f"--service-kind {value} is not supported: {_KINDS.get(str(value), 'use triton')}")


def perf(options: PerfOptions) -> int:
    """Measure the throughput and latency of a model by sending requests.

    Measures in windows until three in a row agree. Latency is measured from the time at which a request should have
    started.
    """
    from conch.cli.perf_plan import plan_of
    from conch.measure.perf.breakdown import breakdown
    from conch.measure.perf.report import terminal as shown
    from conch.measure.perf.report.files import OutputFiles, Outputs, command_line
    from conch.measure.perf.report.page import level_table
    from conch.measure.perf.run import Measurement
    from conch.measure.reports import terminal
    from conch.measure.reports.terminal import show

    plan, prefix = plan_of(options)
    console = terminal.console()
    files = OutputFiles(options.csv, options.json_file, options.jsonl, options.html, options.verbose_csv)
    # Shared memory is unregistered from the server in any case.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if other := Against(options.against, options.against_model, options.rounds):
        if options.breaks_down:
            raise invalid("--breakdown describes one server, so it cannot be combined with --against")
        files.check(compares=True)
        return run_against(plan, prefix, other, options.json_file, options.html, console)
    outputs = Outputs(files, plan)
    measured: list[Measured] = []
    opening = ""
    try:
        with Measurement(outputs.plan, prefix) as measurement:
            opening = shown.opening(measurement)
            console.print(opening, highlight=False, markup=False)
            reader = measurement.stage_reader(options.metrics_url)
            for level in measurement.levels():
                before = reader.read() if options.breaks_down else None
                with shown.LiveLine(console, plan, level, print_windows=options.verbose) as line:
                    result = measurement.measure(
                        level, line.on_window, on_collected=partial(outputs.on_collected, level)
                    )
                measured.append(outputs.take(result))
                console.print()
                show(console, shown.level_section(plan, measured[-1]))
                if before is not None:
                    steps = breakdown(result, plan.model, plan.protocol, reader.read().since(before))
                    show(console, shown.breakdown_table(steps, shown.level_of(plan, level)))
                if result.stopped or result.gone or not result.figures.requests:
                    break  # later levels would not get better responses
    finally:  # the results so far are shown and written in any case
        if len(measured) > 1:
            console.print()
            show(console, level_table(plan, measured))
        outputs.write(opening, command_line(sys.argv), measured)
    if any(measurement.stopped for measurement in measured):
        return INTERRUPTED
    return 0 if all(measurement.whole for measurement in measured) else 1


#: ``--service-kind triton`` is accepted: it is the only kind.
perf_command = command_of(
    "perf", PerfOptions, perf,
    params=[*(hidden_option(flag, _refuse) for flag in REFUSED), hidden_option("--service-kind", _check_kind)],
)  # fmt: skip
