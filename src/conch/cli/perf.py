"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conch.cli.grouped import GroupedCommand
from conch.cli.perf_options import OPTIONS, not_taken
from conch.cli.status import INTERRUPTED

if TYPE_CHECKING:
    from conch.perf.measured import Measured


@click.command("perf", cls=GroupedCommand, params=[*OPTIONS, *not_taken()], context_settings={"max_content_width": 120})
def perf_command(
    csv: Path | None,
    verbose_csv: bool,
    json_file: Path | None,
    jsonl: Path | None,
    html: Path | None,
    verbose: int,
    against: str,
    against_model: str,
    rounds: int,
    breaks_down: bool,
    **given: Any,
) -> int:
    """Send requests to a model, and show how many it answers and how long they take.

    Measures in windows until three in a row agree.  Latency is from the moment at which a request should have started.
    """
    from conch.cli import terminal
    from conch.cli.perf_against import Against, run_against
    from conch.cli.perf_plan import plan_of
    from conch.errors import invalid
    from conch.perf.breakdown import breakdown
    from conch.perf.report import terminal as shown
    from conch.perf.report.command import command_line
    from conch.perf.report.outputs import OutputFiles, Outputs
    from conch.perf.run import Measurement

    plan, prefix = plan_of(**given)
    console = terminal.console()
    files = OutputFiles(csv, json_file, jsonl, html, verbose_csv)
    # What is registered with a server is unregistered, however this ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if other := Against(against, against_model, rounds):
        if breaks_down:
            raise invalid("--breakdown is of one server: leave it out with --against")
        files.check(compares=True)
        return run_against(plan, prefix, other, json_file, html, console)
    outputs = Outputs(files, plan)
    measured: list[Measured] = []
    opening = ""
    try:
        with Measurement(outputs.plan, prefix) as measurement:
            opening = shown.opening(measurement)
            console.print(opening, highlight=False, markup=False)
            reader = measurement.stage_reader(given["metrics_url"])
            for level in measurement.levels():
                before = reader.read() if breaks_down else None
                with shown.LiveLine(console, plan, level, each=bool(verbose)) as line:
                    result = measurement.measure(
                        level, line.on_window, on_collected=partial(outputs.on_collected, level)
                    )
                measured.append(outputs.take(result))
                console.print(shown.details(plan, measured[-1], console.width), highlight=False)
                if before is not None:
                    stretches = breakdown(result, plan.model, plan.protocol, reader.read().since(before))
                    console.print(shown.stretches(stretches, shown.level_of(plan, level)))
                if result.stopped or result.gone or not result.figures.requests:
                    break  # levels that come after it would be answered no better
    finally:  # what there is, is shown and written, whatever went wrong
        if len(measured) > 1:
            console.print(shown.summary(plan, measured, console.width))
        outputs.write(opening, command_line(sys.argv), measured)
    if any(one.stopped for one in measured):
        return INTERRUPTED
    return 0 if all(one.whole for one in measured) else 1
