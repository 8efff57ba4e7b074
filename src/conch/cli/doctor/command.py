"""``conch doctor``: reports the machine and the environment, and suggests improvements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from conch.measure.reports.report import CodeBlock, Paragraph, Properties, Section, Table
from conch.measure.reports.text import json_text

if TYPE_CHECKING:
    from conch.cli.doctor.examine import Advice, Facts, PackageFact


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def doctor_command(as_json: bool) -> None:
    """Show versions, engines, GPUs, processor, memory, limits and ports, with advice on performance."""
    from conch.cli.doctor.examine import advice, examine
    from conch.measure.reports import terminal
    from conch.measure.reports.terminal import show

    facts = examine()
    advised = advice(facts)
    if as_json:
        document = {**asdict(facts), "advice": [asdict(item) for item in advised]}
        click.echo(json_text(document), nl=False)
    else:
        show(terminal.console(), *sections(facts, advised))


def sections(facts: Facts, suggestions: Sequence[Advice]) -> Iterator[Section]:
    """Yield the report, one fact per line."""
    yield _facts("Versions", [
        ("conch", facts.conch), ("Triton's protocol", facts.protocol), ("Python", facts.python),
        ("system", facts.platform), ("event loop", "uvloop" if facts.uvloop else "asyncio"),
    ])  # fmt: skip
    rows = [(package.name, _version(package), package.purpose) for package in facts.packages]
    yield Section("Engines and extras", [Table.of(["", "", ""], rows), *_commands(facts.packages)])
    gpus = [(gpu.name, f"{_size(gpu.memory)}, driver {gpu.driver}") for gpu in facts.gpus.devices]
    yield _facts("GPUs", gpus or [("NVIDIA", facts.gpus.note)])
    processor = facts.processor
    features = ", ".join(f"{name}" if present else f"no {name}" for name, present in processor.features.items())
    yield _facts("Processor", [
        (processor.maker, processor.name), ("features", features),
        ("cores", f"{processor.usable} of {processor.cores} may be used"),
    ])  # fmt: skip
    memory, limits = facts.memory, facts.limits
    yield _facts("Memory and limits", [
        ("memory", _free(memory.available, memory.total)),
        ("control group", f"at most {_size(memory.limit)}" if memory.limit else "sets no limit"),
        ("/dev/shm", _free(memory.shm_free, memory.shm_total) if memory.shm_total else "not there"),
        ("memfd", "there" if memory.memfd else "not there"),
        ("open files", _range(limits.nofile)), ("locked memory", _range(limits.memlock, bytes_=True)),
    ])  # fmt: skip
    yield _facts(
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
    yield _facts("Hub's cache", [("folder", cache.path), ("holds", held)])
    advised = [CodeBlock(item.action, item.reason) for item in suggestions]
    yield Section("What would help", advised or [Paragraph("no suggestions")])


def _facts(title: str, items: Sequence[tuple[str, str]]) -> Section:
    return Section(title, [Properties(items)])


def _commands(packages: Iterable[PackageFact]) -> Iterator[CodeBlock]:
    """Yield the commands that install missing or outdated packages, each with the names of these packages."""
    names: dict[str, list[str]] = {}
    for package in packages:
        if package.install:
            names.setdefault(package.install, []).append(package.name)
    if names:
        text = "\n".join(f"{command}  # {', '.join(packages)}" for command, packages in names.items())
        yield CodeBlock(text, "To install the others:")


def _version(package: PackageFact) -> str:
    return f"{package.version} ({package.detail})" if package.detail else package.version or "-"


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 or not size else f"{size / 2**20:.0f} MiB"


def _free(free: int, total: int) -> str:
    return f"{_size(free)} of {_size(total)} free"


def _range(limit: tuple[int, int], *, bytes_: bool = False) -> str:
    soft, hard = ("unlimited" if bound < 0 else _size(bound) if bytes_ else str(bound) for bound in limit)
    return f"{soft}, at most {hard}"
