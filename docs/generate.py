"""Writes the tables of docs/ that follow from declarations (flags, metrics, differences from Triton) and the dashboard.

``make docs`` runs it; a test fails while a page is not what it would write. A page keeps its own text: only what
stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
DASHBOARD: Final = DOCS.parent / "deploy/monitoring/dashboard.json"
sys.path.insert(0, str(DOCS.parent))  # for the lists of differences, which belong to the tests

import click  # noqa: E402

from conch.backends.generation import features  # noqa: E402
from conch.cli import conch  # noqa: E402
from conch.deploy.dashboard import dashboard  # noqa: E402
from conch.deploy.ray.options import RayCommandOptions  # noqa: E402
from conch.frontends.http.openapi.document import OPERATIONS  # noqa: E402
from conch.measure.analyze.options import reading  # noqa: E402
from conch.measure.analyze.options.settings import OPTIONS as ANALYZE_OPTIONS  # noqa: E402
from conch.measure.perf.options import PerfOptions  # noqa: E402
from conch.measure.reports.report import Table  # noqa: E402
from conch.measure.reports.text import markdown_table  # noqa: E402
from conch.options.declaration import Option, by_section, options_of  # noqa: E402
from conch.options.settings import OPTIONS, RENAMED  # noqa: E402
from conch.telemetry import families, metrics, on_demand, traffic  # noqa: E402
from conch.telemetry.exposition import Metric  # noqa: E402
from tests.clients import record as clients  # noqa: E402
from tests.conformance import differences  # noqa: E402

_TABLE: Final = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
#: What would be a tag in Markdown: ``<name>`` and what belongs to it.
_FORM: Final = re.compile(r"(\S*<\S*[^\s,.;:])")
#: A text of ``--help``, and what click adds to it.
_EXTRA: Final = re.compile(r"(.*?)(?:\s*\[([^\[\]]*)\])?")
Row = Iterable[str]


def generated(page: str) -> str:
    """The text of a page with its tables as they should be; raises KeyError for an unknown table."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_TABLES[found[2]]()}\n{found[3]}", page)


def _table(heads: Row, rows: Iterable[Row]) -> str:
    return markdown_table(Table.of(list(heads), map(list, rows)))


def _flags() -> str:
    """A section for each section of flags."""
    return "\n".join(
        f"## {section}\n\n{_table(['flag', 'values', 'default', 'meaning'], map(_flag_row, options))}"
        for section, options in by_section(OPTIONS.values()).items()
        if not section.startswith("Accepted")
    )


def _flag_row(option: Option) -> Row:
    help = option.help.removesuffix(".").removesuffix("; repeatable")
    if option.no_effect:
        help += f"; no effect, {option.no_effect}"
    default = f"`{option.default_text}`" if option.default_text else ""
    return [f"`{option.flag}`", _values(option), default, _FORM.sub(r"`\1`", help)]


def _values(option: Option) -> str:
    if option.switch:
        return "none"
    if option.values.known:
        return ", ".join(f"`{value}`" for value in option.values.known)
    if option.range is not None:
        low, high, _ = option.range
        return f"from {low}" if high >= 2**31 - 1 else f"{low} to {high}"
    return "text, repeatable" if option.repeatable else "number" if option.kind is float else "text"


def _accepted_flags() -> str:
    return ", ".join(f"`{option.flag}`" for option in OPTIONS.values() if option.section.startswith("Accepted")) + ".\n"


def _renamed_flags() -> str:
    rows = ([f"`--{old}`", f"`--{flag}={template.format('…')}`"] for old, (flag, template, _) in RENAMED.items())
    return _table(["older name", "the same as"], rows)


def _analyze_options() -> str:
    """A row for each option of ``conch analyze``: its key in a file, its flags, and its meaning."""
    rows = ([option.section, f"`{option.name}`", *_flags_and_meaning(option)] for option in ANALYZE_OPTIONS.values())
    return _table(["group", "key", "flag", "meaning"], rows)


def _options_of(declaring: type) -> Callable[[], str]:
    """A row for each option of a command, by section."""

    def write() -> str:
        sections = by_section(options_of(declaring).values())
        rows = ([section, *_flags_and_meaning(option)] for section, options in sections.items() for option in options)
        return _table(["group", "flag", "meaning"], rows)

    return write


def _flags_and_meaning(option: Option) -> list[str]:
    short = [flag for flag in option.flags if not flag.startswith("--")]
    flags = f"`{', '.join([*short, option.flag])} {option.placeholder}`".replace(" `", "`")
    return [flags, _FORM.sub(r"`\1`", option.description.removesuffix("."))]


#: The pages of commands with so many options that they have tables of their own, with groups.
_ELSEWHERE: Final = {
    "conch serve": "[flags.md](flags.md)",
    "conch perf": "[perf.md](perf.md)",
    "conch analyze profile": "[analyze_settings.md](analyze_settings.md)",
    "conch deploy ray": "[ray.md](ray.md)",
}


def _commands() -> str:
    """A section for each command, with its summary and its arguments and options."""
    sections = []
    for name, command in _leaves("conch", conch):
        context = click.Context(command, info_name=name)
        summary = (command.help or "").strip().partition("\n\n")[0].replace("\n", " ")
        if name in _ELSEWHERE:
            options = f"Its options are on {_ELSEWHERE[name]}.\n"
        else:
            records = (param.get_help_record(context) for param in command.params)
            rows = ([f"`{flags}`", _meaning(text)] for flags, text in filter(None, records))
            options = _table(["argument or option", "meaning"], rows)
        sections.append(f"## {name}\n\n{summary}\n\n{options}")
    return "\n".join(sections)


def _meaning(text: str) -> str:
    """Return the text of ``--help``, with its default and range in parentheses instead of brackets."""
    text, extra = _EXTRA.fullmatch(text.replace("<=2147483647", "").replace("\n", " ")).groups()  # type: ignore[union-attr]
    return " ".join(filter(None, (_FORM.sub(r"`\1`", text.removesuffix(".")), f"({extra})" if extra else "")))


def _leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that do something, by their names: groups are replaced by their members."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    for member in command.list_commands(context):
        found = command.get_command(context, member)
        assert found is not None
        yield from _leaves(f"{name} {member}", found)


def _analyze_unsupported(reasons: Mapping[str, str]) -> Callable[[], str]:
    return lambda: _table(["model analyzer's option", "why"], ([f"`{name}`", why] for name, why in reasons.items()))


def _metrics_of(*tables: Iterable[Metric]) -> Callable[[], str]:
    def write() -> str:
        rows = ([f"`{one.name}`", one.type, one.help.removesuffix(".")] for table in tables for one in table)
        return _table(["metric", "type", "meaning"], rows)

    return write


def _declared(module: Any) -> Iterator[Metric]:
    return (value for value in vars(module).values() if isinstance(value, Metric))


def _routes() -> str:
    """A section for each group of routes."""
    groups: dict[str, list[list[str]]] = {}
    for (method, path), operation in OPERATIONS.items():
        request = f"`{operation.request}`" if operation.request else ""
        groups.setdefault(operation.group, []).append([method, f"`{path}`", operation.summary, request])
    return "\n".join(
        f"## {group}\n\n{_table(['method', 'path', 'what it does', 'body'], rows)}" for group, rows in groups.items()
    )


def _differences() -> str:
    """A row for each answer that differs on purpose; cases with the same answer and reason share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for protocol, cases in (("HTTP", differences.HTTP), ("gRPC", differences.GRPC)):
        for name, difference in cases.items():
            answer = f"{protocol} {difference.code or difference.status or 'as Triton'}"
            rows.setdefault((answer, difference.reason), []).append(name)
    general = [[name, "", reason.removesuffix(".")] for name, reason in differences.GENERAL.items()]
    special = ([_some(cases), answer, reason] for (answer, reason), cases in rows.items())
    return _table(["case", "conch answers", "difference"], [*general, *special])


def _some(cases: list[str]) -> str:
    return "; ".join(cases[:3]) + (f"; {len(cases) - 3} more" if len(cases) > 3 else "")


_TABLES: Final[dict[str, Callable[[], str]]] = {
    "analyze options": _analyze_options,
    "analyze without effect": _analyze_unsupported(reading.NO_EFFECT),
    "analyze refused": _analyze_unsupported(reading.REFUSED),
    "perf options": _options_of(PerfOptions),
    "ray options": _options_of(RayCommandOptions),
    "flags": _flags,
    "commands": _commands,
    "accepted flags": _accepted_flags,
    "renamed flags": _renamed_flags,
    "requests": _metrics_of(families.COUNTS, families.DURATIONS, families.GAUGES),
    "summaries": _metrics_of(families.SUMMARIES, families.CACHE_SUMMARIES),
    "histograms": _metrics_of(families.HISTOGRAMS),
    "response cache": _metrics_of(families.CACHE),
    "memory": _metrics_of(families.MEMORY),
    "workers": _metrics_of(families.RESTARTS, families.WORKERS),
    "load on demand": _metrics_of(on_demand.OF_MODELS, _declared(on_demand)),
    "work": _metrics_of(families.WORK),
    "generation": _metrics_of(families.GENERATION),
    "traffic": _metrics_of([*_declared(traffic)]),
    "machine": _metrics_of([*_declared(metrics), *(metric for metric, _ in metrics.PINNED_MEMORY)]),
    "differences": _differences,
    "routes": _routes,
    "engines": lambda: _table(["feature", *(f"`{name}`" for name in features.ENGINE_FEATURES)], features.rows()),
    "clients": lambda: _table(["client", "language", "versions", "setting", "exercised"], clients.rows()),
}


def main() -> None:
    """Rewrite the pages whose tables have changed, and the dashboard, and name them."""
    wanted = {page: generated(page.read_text("utf-8")) for page in sorted(DOCS.glob("*.md"))}
    wanted[DASHBOARD] = dashboard()
    for file, text in wanted.items():
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            print(f"{file.relative_to(DOCS.parent)} is written anew")


if __name__ == "__main__":
    main()
