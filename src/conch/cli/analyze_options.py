"""The options of ``conch analyze profile`` on the command line, made of their declarations; and its help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

import click

from conch.analyze.options.reading import flag_of
from conch.analyze.options.settings import OPTIONS


class ProfileCommand(click.Command):
    """A command whose help shows the common options, and names the others."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options from a file"):
            formatter.write_dl(
                [
                    (
                        "-f, --config-file FILE",
                        "YAML file with model analyzer's keys; command-line options take precedence.",
                    )
                ]
            )
        for group, names in _by_group(common=True):
            with formatter.section(group):
                formatter.write_dl([_record(name) for name in names])
        with formatter.section("Afterwards"):
            formatter.write_dl(
                [("--apply", "Write the best configuration into the repository, if it is better than the default.")]
            )
        formatter.write("\n")
        for group, names in _by_group(common=False):
            text = f"{group}: {', '.join(map(flag_of, names))}"
            formatter.write(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n")
        formatter.write("\nconch analyze profile --help-all describes them all.\n")


def _by_group(common: bool | None) -> Iterator[tuple[str, list[str]]]:
    """The options by their groups: those that are common, the others, or all (None)."""
    chosen = [name for name, one in OPTIONS.items() if common is None or one.metadata["common"] == common]
    for group, names in groupby(chosen, key=lambda name: str(OPTIONS[name].metadata["group"])):
        yield group, list(names)


def _record(name: str) -> tuple[str, str]:
    metadata = OPTIONS[name].metadata
    short = [flag for flag in metadata["flags"] if not flag.startswith("--")]
    return f"{', '.join([*short, flag_of(name)])} {metadata['metavar']}".rstrip(), metadata["help"]


def help_all(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    formatter = context.make_formatter()
    for group, names in _by_group(common=None):
        with formatter.section(group):
            formatter.write_dl([_record(name) for name in names])
    click.echo(formatter.getvalue().strip())
    context.exit()


def click_option(name: str) -> click.Option:
    """The flags of an option: its name, and the others that it goes by; one of a truth value has none."""
    one = OPTIONS[name]
    flags = [*one.metadata["flags"], f"--{name.replace('_', '-')}"]
    if one.default is False:
        return click.Option([name, *dict.fromkeys(flags)], is_flag=True)
    return click.Option([name, *dict.fromkeys(flags)], multiple=one.metadata["several"])


def foreign_option(name: str) -> click.Option:
    """A flag of model analyzer's that is answered with the reason why it has no effect, or is refused."""
    bare = name in (
        "collect_cpu_metrics",
        "dcgm_disable",
        "skip_detailed_reports",
        "always_report_gpu_metrics",
        "perf_output",
        "use_concurrency_formula",
        "concurrency_sweep_disable",
    )
    return click.Option([name, f"--{name.replace('_', '-')}"], hidden=True, is_flag=bare)
