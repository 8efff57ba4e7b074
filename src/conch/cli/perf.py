"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.interrupting import INTERRUPTED
from conch.cli.options import command_of, hidden_option
from conch.measure.perf.options import PerfOptions

if TYPE_CHECKING:
    from conch.measure.perf.measured import Measured

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
    "-t": "perf_analyzer has dropped it: use --concurrency-range N",
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
    from conch.core.errors import unsupported

    if value is not None:
        raise unsupported(f"{option.opts[0]} is not supported: {REFUSED[option.opts[0]]}")


def _check_kind(context: click.Context, option: click.Parameter, value: str | None) -> None:
    from conch.core.errors import unsupported

    if value not in (None, "triton"):
        raise unsupported(f"--service-kind {value} is not supported: {_KINDS.get(str(value), 'there is triton')}")


def perf(options: PerfOptions) -> int:
    """Measure the throughput and latency of a model by sending requests.

    Measures in windows until three in a row agree. Latency is from the moment at which a request should have started.
    """
    from conch.cli.perf_against import Against, run_against
    from conch.cli.perf_plan import plan_of
    from conch.core.errors import invalid
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
