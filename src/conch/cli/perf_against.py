"""``conch perf --against``: compares two servers or two models alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.cli.interrupting import INTERRUPTED

if TYPE_CHECKING:
    from conch.measure.perf.against import ComparedRound, Comparison
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
        from conch.core.errors import invalid
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
    import sys

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
