"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from conch.perf.measured import Measured
    from conch.perf.plan import PerfPlan, Protocol

#: What shells say of a program that Ctrl+C has ended.
_INTERRUPTED: Final = 130
_FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command("perf", context_settings={"max_content_width": 120})
@click.option("-m", "--model-name", "model", required=True, metavar="MODEL", help="The model to ask.")
@click.option(
    "-x", "--model-version", "version", default="", metavar="N", help="Its version (default: the server's choice)."
)
@click.option(
    "-u", "--url", default="", metavar="URL", help="host:port of the server (default: localhost and Triton's port)."
)
@click.option("-i", "--protocol", type=click.Choice(["http", "grpc", "openai"], case_sensitive=False),
              default="http", metavar="NAME", help="http (default), grpc or openai.")  # fmt: skip
@click.option(
    "-b", "--batch-size", type=click.IntRange(1), default=1, metavar="N", help="Inferences in a request (default: 1)."
)
@click.option(
    "--concurrency-range", metavar="A:B:S", help="Callers at a time: start, start:end or start:end:step (default: 1)."
)
@click.option(
    "--request-rate-range", metavar="A:B:S", help="Requests a second instead, whether or not those before are answered."
)
@click.option("--request-distribution", type=click.Choice(["constant", "poisson"]), default="constant", metavar="NAME",
              help="constant (default) or poisson distances between them.")  # fmt: skip
@click.option("--max-threads", "max_calls", type=click.IntRange(1), default=256, metavar="N",
              help="Requests at a time for rates; more wait, and their wait counts (default: 256).")  # fmt: skip
@click.option(
    "-p",
    "--measurement-interval",
    type=click.IntRange(50),
    default=5000,
    metavar="MS",
    help="Length of a window (default: 5000).",
)
@click.option("-s", "--stability-percentage", type=click.FloatRange(0.1, 999), default=10.0, metavar="N",
              help="How far three windows in a row may be from their mean (default: 10).")  # fmt: skip
@click.option(
    "-r", "--max-trials", type=click.IntRange(1), default=10, metavar="N", help="Windows at most (default: 10)."
)
@click.option(
    "--percentile",
    type=click.IntRange(1, 99),
    default=None,
    metavar="N",
    help="The latency that has to be stable (default: the average).",
)
@click.option(
    "--input-data",
    default="random",
    metavar="WHAT",
    help="random (default), zero, a JSON file, or a folder with a file for each input.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME:D,D",
    help="Dimensions of an input that has variable ones, without the batch.",
)
@click.option("--string-data", default=None, metavar="TEXT", help="Every text.")
@click.option(
    "--string-length", type=click.IntRange(1), default=128, metavar="N", help="Length of random texts (default: 128)."
)
@click.option("--input-tensor-format", "tensor_format", type=click.Choice(["binary", "json"]), default="binary",
              metavar="NAME", help="binary (default) or json, over HTTP.")  # fmt: skip
@click.option(
    "--endpoint",
    default="",
    metavar="PATH",
    help="infer (default), generate or generate_stream; of openai v1/chat/completions (default) or another.",
)
@click.option("--streaming", is_flag=True, help="Ask openai for a stream.")
@click.option(
    "--request-parameter",
    "parameters",
    multiple=True,
    metavar="NAME:VALUE",
    help="A member of requests for text, as max_tokens:64; the value is JSON or a text.",
)
@click.option("--slo", default="", metavar="ttft:MS,itl:MS",
              help="Count the requests whose first token and distances keep this.")  # fmt: skip
@click.option("-H", "headers", multiple=True, metavar="NAME:VALUE", help="A header of HTTP requests.")
@click.option(
    "-f",
    "--latency-report-file",
    "csv",
    type=_FILE,
    metavar="FILE",
    help="Write a CSV file, in perf_analyzer's columns.",
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write all figures as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=600.0,
    metavar="S",
    help="How long a request may take (default: 600).",
)
@click.option("--collect-metrics", is_flag=True, help="Read the server's metrics of its processor and its GPUs.")
@click.option("--metrics-url", default="", metavar="URL",
              help="Where they are (default: the server's host, port 8002, /metrics).")  # fmt: skip
@click.option("--metrics-interval", type=click.IntRange(50), default=1000, metavar="MS",
              help="How often they are read (default: 1000).")  # fmt: skip
@click.option("--sender-limit/--no-sender-limit", default=True,
              help="First measure, in 0.4 s, what the senders can do with as many callers.")  # fmt: skip
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Measure each level so often, and show the 95 % range over the runs (default: 1).",
)
@click.option("--warm-up", type=click.FloatRange(0), default=1.0, metavar="S",
              help="Seconds of load before each run that do not count (default: 1).")  # fmt: skip
@click.option(
    "--processes", type=click.IntRange(0), default=0, metavar="N", help="Processes that send (default: by the callers)."
)
def perf_command(csv: Path | None, json_file: Path | None, **given: Any) -> int:
    """Send requests to a model, and show how many it answers and how long they take.

    Measures in windows until three in a row agree.  Latency is from the moment at which a request should have started.
    """
    from conch.cli import terminal
    from conch.perf.report import files
    from conch.perf.report import terminal as shown
    from conch.perf.run import Measurement

    plan, prefix = _plan(**given)
    console = terminal.console()
    measured: list[Measured] = []
    try:
        with Measurement(plan, prefix) as measurement:
            console.print(shown.opening(measurement), highlight=False)
            for level in measurement.levels():
                with shown.LiveLine(console, plan, level) as line:
                    result = measurement.measure(level, line.on_window)
                measured.append(result)
                console.print(shown.details(plan, result), highlight=False)
                if result.stopped or result.gone:
                    break
    finally:  # what there is, is shown and written, whatever went wrong
        if len(measured) > 1:
            console.print(shown.summary(plan, measured))
        for file, write in ((csv, files.csv), (json_file, files.json)):
            if file is not None and measured:
                file.write_text(write(plan, measured), encoding="utf-8")
    if any(one.stopped for one in measured):
        return _INTERRUPTED
    return 0 if all(one.whole for one in measured) else 1


def _plan(
    *,
    url: str, protocol: Protocol, concurrency_range: str | None, request_rate_range: str | None,
    request_distribution: str,
    measurement_interval: int, stability_percentage: float, max_trials: int, percentile: int | None, input_data: str,
    shapes: tuple[str, ...], string_data: str | None, string_length: int, tensor_format: str, headers: tuple[str, ...],
    endpoint: str, parameters: tuple[str, ...], slo: str, collect_metrics: bool, metrics_url: str,
    metrics_interval: int, **given: Any,
) -> tuple[PerfPlan, str]:  # fmt: skip
    """The plan that the flags mean, and the path before all paths."""
    from conch.errors import invalid
    from conch.perf.generation import Objective
    from conch.perf.inputs.data import DataOptions
    from conch.perf.plan import Levels, PerfPlan, read_address

    if concurrency_range and request_rate_range:
        raise invalid("--concurrency-range and --request-rate-range exclude each other")
    address, prefix = read_address(url or "localhost", protocol)
    plan = PerfPlan(
        address=address,
        protocol=protocol,
        concurrency=Levels.parse("--concurrency-range", concurrency_range or "1"),
        rates=Levels.parse("--request-rate-range", request_rate_range) if request_rate_range else None,
        distribution="poisson" if request_distribution == "poisson" else "constant",
        interval=measurement_interval / 1000,
        share=stability_percentage / 100,
        percentile=percentile or 0.0,
        trials=max_trials,
        binary=tensor_format == "binary",
        endpoint=endpoint or ("v1/chat/completions" if protocol == "openai" else "infer"),
        parameters={
            name: _json_or_text(value) for name, value in (_pair("--request-parameter", one) for one in parameters)
        },
        objective=Objective.parse(slo) if slo else None,
        metrics_url=(metrics_url or f"http://{address.host}:8002/metrics") if collect_metrics else "",
        metrics_interval=metrics_interval / 1000,
        headers=dict(_pair("-H", one) for one in headers),
        data=DataOptions(input_data, dict(_shape(one) for one in shapes), string_data, string_length),
        **given,
    )
    return plan, prefix


def _pair(flag: str, text: str) -> tuple[str, str]:
    from conch.errors import invalid

    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise invalid(f"{flag} {text}: expected name:value")
    return name.strip(), value.strip()


def _json_or_text(value: str) -> Any:
    import json

    try:
        return json.loads(value)
    except ValueError:
        return value


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    from conch.errors import invalid

    name, _, dims = text.rpartition(":")
    try:
        return name, tuple(int(dim) for dim in dims.split(","))
    except ValueError:
        raise invalid(f"--shape {text}: expected input:dimension,dimension, as in input_ids:128") from None
