"""``conch convert``: from a checkpoint to the fastest form of it that still answers the same, ready to be served."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from conch.cli import completion
from conch.cli.many import ManyValues
from conch.options.declaration import Values

if TYPE_CHECKING:
    from rich.console import Console

    from conch.checkpoints.manifest import Manifest
    from conch.convert.run import ConvertedModel

_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command("convert", cls=ManyValues, context_settings={"max_content_width": 120})
@click.option("-m", "--model", default="", metavar="MODEL", help="A Hub id, or a folder with a checkpoint.",
              shell_complete=completion.checkpoints)  # fmt: skip
@click.option(
    "-o", "--output", default=Path("models"), type=_FOLDER, metavar="DIR", help="Model repository (default: models)."
)
@click.option("--name", default="", metavar="NAME", help="The model's name there (default: the checkpoint's).")
@click.option(
    "--task",
    default="",
    metavar="TASK",
    shell_complete=completion.tasks,
    help="A task of transformers.pipeline (default: found from the files).",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME…",
    shell_complete=completion.completer(Values(known=("torch", "onnx", "openvino", "tensorrt"))),
    help="torch onnx openvino tensorrt (default: all but the last); for language models openvino, with or without "
    "torch (default: openvino).",
)
@click.option(
    "--quantize",
    multiple=True,
    metavar="NAME…",
    shell_complete=completion.completer(
        Values(known=("int8", "int8-static", "int4", "int4-awq", "bf16", "fp16", "none"))
    ),
    help="int8 int8-static bf16 fp16 none (default: int8); for language models int8 int4 int4-awq fp16 none "
    "(default: int8 int4).",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    type=int,
    metavar="N…",
    help="Batch sizes to measure (default: 1 8 32; for language models 1 8).",
)
@click.option(
    "--seq-len",
    "sequence_lengths",
    multiple=True,
    type=int,
    metavar="N…",
    help="Lengths to measure, in tokens (default: 16 128 384; for language models 128 512).",
)
@click.option("--data", type=_FILE, metavar="FILE", help="Texts to compare on: .txt .jsonl .csv (default: built in).")
@click.option("--layout", type=click.Choice(["huggingface", "triton"]), default="huggingface", metavar="NAME",
              help="huggingface (default), or triton: three models; not for language models.")  # fmt: skip
@click.option("--force", is_flag=True, help="Let refused variants serve; this is recorded.")
@click.option("--keep", type=click.Choice(["auto", "all"]), default="all", metavar="auto|all",
              help="Write all variants that may serve (default), or only what serves.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a model of that name.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Cores to use (default: all).")
@click.option(
    "--seconds", type=click.FloatRange(0), default=40.0, metavar="N", help="Time for all measurements (default: 40)."
)
@click.option(
    "--expect",
    default="",
    metavar="BxN:W,…",
    help="Requests to choose for: batch x tokens, each with its weight (default: all that is measured, equally).",
)
@click.option("--revision", default="", metavar="NAME", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code from the checkpoint.")
@click.option("--markdown", type=_FILE, metavar="FILE", help="Write the report there, too.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write the page with charts there, too.")
@click.option(
    "--report",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Show the report of a converted model again, and write it to --html and --markdown; converts nothing.",
)
@click.option("--verbose", is_flag=True, help="Print all figures of each shape.")
def convert_command(
    model: str,
    output: Path,
    report: Path | None,
    markdown: Path | None,
    html: Path | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Export, optimise and quantise a model, compare and measure what came out, and write what may serve.

    The fastest variant that agrees with the checkpoint becomes "auto".
    """
    from conch.convert.publish import written_manifest
    from conch.measure.reports import terminal
    from conch.measure.reports.files import check_files, check_reports

    if report is not None:
        _require_alone(click.get_current_context())
    elif not model:
        raise click.UsageError("Missing option '-m' / '--model' (or --report, for a model that is converted already).")
    check_reports({"--html": html})
    check_files({"--markdown": markdown})
    if report is not None:
        manifest, lines = written_manifest(report), list[str]()
    else:
        converted = _convert(model, output, **options)
        manifest, lines = converted.manifest, list(_next_steps(converted))
    _write(manifest, markdown, html)
    _print_manifest(terminal.console(), manifest, lines, verbose)
    return 0


#: The options that belong to a report.
_OF_REPORTS: Final = ("report", "markdown", "html", "verbose")


def _require_alone(context: click.Context) -> None:
    """Refuse options of a conversion beside ``--report``."""
    extra = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name not in _OF_REPORTS
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if extra:
        raise click.UsageError(f"--report converts nothing, so it cannot be used with {', '.join(extra)}.")


def _convert(model: str, output: Path, **options: Any) -> ConvertedModel:
    """Convert, and print each step."""
    from rich.markup import escape

    from conch.convert.plan import Plan
    from conch.convert.run import convert
    from conch.measure.reports import terminal

    precisions = options.pop("quantize")
    quantize = tuple(precision for precision in precisions if precision != "none") if precisions else None
    plan = Plan(model, output, quantize=quantize, **options)
    console = terminal.console(stderr=True)
    start = time.monotonic()

    def progress(step: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {escape(step)}", highlight=False, soft_wrap=True)

    converted = convert(plan, progress)
    progress("done")
    return converted


def _write(manifest: Manifest, markdown_file: Path | None, html: Path | None) -> None:
    """Write the report to the files that were asked for."""
    from conch.convert.report.page import report
    from conch.convert.report.table import short_report
    from conch.measure.reports.files import write_report
    from conch.measure.reports.text import markdown

    if markdown_file is not None:
        markdown_file.write_text(markdown(short_report(manifest)), encoding="utf-8")
    if html is not None:
        write_report(report(manifest), html)


def _next_steps(converted: ConvertedModel) -> Iterator[str]:
    """What was written, and what to do with it."""
    for folder in converted.folders:
        yield f"wrote {folder}"
    yield f"conch serve --model-repository={converted.folders[0].parent}"


def _print_manifest(console: Console, manifest: Manifest, lines: Iterable[str], verbose: bool) -> None:
    """Print the table, the warnings, and ``lines``."""
    from conch.convert.report.table import log_lines, summary
    from conch.measure.reports.terminal import show

    def print_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for line in log_lines(manifest) if verbose else ():
        print_line(line)
    show(console, *summary(manifest))
    for line in lines:
        print_line(line)
