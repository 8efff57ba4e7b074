"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.grouped import GroupedCommand
from conch.cli.perf_options import OPTIONS, not_taken

if TYPE_CHECKING:
    from conch.perf.measured import Measured

#: What shells say of a program that Ctrl+C has ended.
_INTERRUPTED: Final = 130


@click.command("perf", cls=GroupedCommand, params=[*OPTIONS, *not_taken()], context_settings={"max_content_width": 120})
def perf_command(
    csv: Path | None,
    json_file: Path | None,
    verbose: int,
    against: str,
    against_model: str,
    rounds: int,
    **given: Any,
) -> int:
    """Send requests to a model, and show how many it answers and how long they take.

    Measures in windows until three in a row agree.  Latency is from the moment at which a request should have started.
    """
    from conch.cli import terminal
    from conch.cli.perf_against import Against, run_against
    from conch.cli.perf_plan import plan_of
    from conch.perf.report import files
    from conch.perf.report import terminal as shown
    from conch.perf.run import Measurement

    plan, prefix = plan_of(**given)
    console = terminal.console()
    # What is registered with a server is unregistered, however this ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if other := Against(against, against_model, rounds):
        return run_against(plan, prefix, other, json_file, console)
    measured: list[Measured] = []
    try:
        with Measurement(plan, prefix) as measurement:
            console.print(shown.opening(measurement), highlight=False)
            for level in measurement.levels():
                with shown.LiveLine(console, plan, level, each=bool(verbose)) as line:
                    result = measurement.measure(level, line.on_window)
                measured.append(result)
                console.print(shown.details(plan, result), highlight=False)
                if result.stopped or result.gone or not result.figures.requests:
                    break  # levels that come after it would be answered no better
    finally:  # what there is, is shown and written, whatever went wrong
        if len(measured) > 1:
            console.print(shown.summary(plan, measured))
        for file, write in ((csv, files.csv), (json_file, files.json)):
            if file is not None and measured:
                file.write_text(write(plan, measured), encoding="utf-8")
    if any(one.stopped for one in measured):
        return _INTERRUPTED
    return 0 if all(one.whole for one in measured) else 1
