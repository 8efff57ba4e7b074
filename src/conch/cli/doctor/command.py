"""``conch doctor``: what this machine and this environment have, and what would be faster with what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from conch.cli.doctor.advice import Advice
    from conch.cli.doctor.facts import Facts, PackageFact


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def doctor_command(as_json: bool) -> None:
    """Show versions, engines, GPUs, processor, memory, limits and ports, and what would be faster with what."""
    from conch.cli.doctor.advice import advice
    from conch.cli.doctor.examine import examine

    facts = examine()
    advised = advice(facts)
    if as_json:
        click.echo(json.dumps({**asdict(facts), "advice": [asdict(item) for item in advised]}, indent=2))
    else:
        for line in lines(facts, advised):
            click.echo(line)


def lines(facts: Facts, suggestions: Iterable[Advice]) -> Iterator[str]:
    """The report, a fact on each line."""
    yield from _section("Versions", [
        ("conch", facts.conch), ("Triton's protocol", facts.protocol), ("Python", facts.python),
        ("system", facts.platform), ("event loop", "uvloop" if facts.uvloop else "asyncio"),
    ])  # fmt: skip
    rows = _section(
        "Engines and extras", [(package.name, _version(package), package.purpose) for package in facts.packages]
    )
    commands = ["", *(f"    -> {package.install}" if package.install else "" for package in facts.packages), ""]
    yield from (line for row, command in zip(rows, commands, strict=True) for line in (row, command) if line)
    yield ""
    gpus = [(gpu.name, f"{_size(gpu.memory)}, driver {gpu.driver}") for gpu in facts.gpus.found]
    yield from _section("GPUs", gpus or [("NVIDIA", facts.gpus.note)])
    processor = facts.processor
    features = ", ".join(f"{name}" if there else f"no {name}" for name, there in processor.features.items())
    yield from _section("Processor", [
        (processor.maker, processor.name), ("features", features),
        ("cores", f"{processor.usable} of {processor.cores} may be used"),
    ])  # fmt: skip
    memory, limits = facts.memory, facts.limits
    yield from _section("Memory and limits", [
        ("memory", _free(memory.available, memory.total)),
        ("control group", f"at most {_size(memory.limit)}" if memory.limit else "sets no limit"),
        ("/dev/shm", _free(memory.shm_free, memory.shm_total) if memory.shm_total else "not there"),
        ("memfd", "there" if memory.memfd else "not there"),
        ("open files", _range(limits.nofile)), ("locked memory", _range(limits.memlock, bytes_=True)),
    ])  # fmt: skip
    yield from _section(
        "Ports",
        [
            (f"{port.port}", f"{port.service}: " + (f"taken by {port.taken_by}" if port.taken_by else "free"))
            for port in facts.ports
        ],
    )
    cache = facts.cache
    held = f"{cache.models} models, {_size(cache.size)}, {_size(cache.free)} free" + (
        ", offline" if cache.offline else ""
    )
    yield from _section("Hub's cache", [("folder", cache.path), ("holds", held)])
    yield "What would help"
    advised = [line for item in suggestions for line in (f"  {item.reason}", f"    -> {item.action}")]
    yield from advised or ["  nothing that is known here"]


def _section(title: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield title
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""


def _version(package: PackageFact) -> str:
    return f"{package.version} ({package.detail})" if package.detail else package.version or "-"


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 or not size else f"{size / 2**20:.0f} MiB"


def _free(free: int, total: int) -> str:
    return f"{_size(free)} of {_size(total)} free"


def _range(limit: tuple[int, int], *, bytes_: bool = False) -> str:
    soft, hard = ("unlimited" if bound < 0 else _size(bound) if bytes_ else str(bound) for bound in limit)
    return f"{soft}, at most {hard}"
