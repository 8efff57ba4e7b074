"""``conch perf``: measures a server, with the flags of NVIDIA's perf_analyzer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.grouped import GroupedCommand, GroupedOption
from conch.cli.options import FiniteRange
from conch.cli.status import INTERRUPTED

if TYPE_CHECKING:
    from conch.measure.perf.measured import Measured

FILE: Final = click.Path(dir_okay=False, path_type=Path)
_READ: Final = click.Path(dir_okay=False, exists=True)

#: The longest that anything is waited for (s).
_DAY: Final = 86_400


_GENERAL = partial(GroupedOption, group="Model and server")
_LOAD = partial(GroupedOption, group="Load")
_WINDOWS = partial(GroupedOption, group="Measuring")
_DATA = partial(GroupedOption, group="Data")
_TEXT = partial(GroupedOption, group="Models that write text")
_SEQUENCES = partial(GroupedOption, group="Sequences")
_AGAINST = partial(GroupedOption, group="Comparing two servers")
_TLS = partial(GroupedOption, group="TLS")
_OUTPUT = partial(GroupedOption, group="Output")

OPTIONS: Final = [
    _GENERAL(["-m", "--model-name", "model"], required=True, metavar="MODEL", help="Model to measure."),
    _GENERAL(["-x", "--model-version", "version"], default="", metavar="N",
             help="Model version (default: the server's choice)."),
    _GENERAL(["-u", "--url"], default="", metavar="URL",
             help="Server address, host:port (default: localhost and Triton's port); https:// for TLS."),
    _GENERAL(["-i", "--protocol"], type=click.Choice(["http", "grpc", "openai"], case_sensitive=False), default="http",
             metavar="NAME", help="Protocol: http (default), grpc or openai."),
    _GENERAL(["-b", "--batch-size"], type=click.IntRange(1), default=1, metavar="N",
             help="Inferences per request (default: 1)."),
    _GENERAL(["--streaming"], is_flag=True,
             help="grpc: use ModelStreamInfer, one call per caller; openai: request a stream."),
    _GENERAL(["-H", "--header", "headers"], multiple=True, metavar="NAME:VALUE",
             help="Request header, or metadata over grpc; repeatable."),
    _GENERAL(["--request-parameter", "parameters"], multiple=True, metavar="NAME:VALUE[:TYPE]",
             help="Request parameter, such as max_tokens:64; TYPE is int, float, bool or string."),
    _GENERAL(["--grpc-compression-algorithm", "encoding"], type=click.Choice(["none", "gzip", "deflate"]),
             default="none", metavar="NAME", help="Compress requests over grpc: none (default), gzip or deflate."),
    _GENERAL(["--shared-memory"], type=click.Choice(["none", "system", "cuda"]), default="none", metavar="NAME",
             help="Pass tensors through system shared memory, to a server on this machine (default: none)."),
    _GENERAL(["--output-shared-memory-size", "output_size"], type=click.IntRange(1), default=100 * 1024,
             metavar="BYTES", help="Size of the region for an output of texts or variable shape (default: 102400)."),
    _GENERAL(["--bls-composing-models", "composing"], default="", metavar="NAME[:N],…",
             help="Models that this model calls; their statistics are shown, too."),
    _GENERAL(["--timeout"], type=FiniteRange(0.001, _DAY), default=600.0, metavar="S",
             help="Request timeout in seconds (default: 600)."),
    _LOAD(["--concurrency-range"], metavar="A:B:S",
          help="Concurrency: start, start:end or start:end:step (default: 1); end 0 continues up to -l."),
    _LOAD(["--request-rate-range"], metavar="A:B:S",
          help="Requests per second, sent without waiting for earlier responses."),
    _LOAD(["--request-distribution"], type=click.Choice(["constant", "poisson"]), default="constant", metavar="NAME",
          help="Intervals between requests: constant (default) or poisson."),
    _LOAD(["--request-intervals"], type=_READ, metavar="FILE",
          help="File with the intervals, in microseconds, one per line; it is repeated."),
    _LOAD(["--max-threads", "max_calls"], type=click.IntRange(1), default=256, metavar="N",
          help="Maximum in-flight requests with request rates; waiting counts as latency (default: 256)."),
    _LOAD(["-l", "--latency-threshold"], type=FiniteRange(0), default=0.0, metavar="MS",
          help="Stop after the first level with a higher latency."),
    _LOAD(["--binary-search"], is_flag=True,
          help="Search the highest level within -l by bisection, to the precision of the step."),
    _LOAD(["-a", "--async", "asynchronous"], is_flag=True, expose_value=False,
          help="No effect: requests never block a thread."),
    _LOAD(["--sync", "synchronous"], is_flag=True, expose_value=False,
         help="No effect: requests never block a thread."),
    _LOAD(["--processes"], type=click.IntRange(0, 256), default=0, metavar="N",
          help="FiniteRange of sending processes (default: chosen by concurrency)."),
    _WINDOWS(["-p", "--measurement-interval"], type=click.IntRange(50, 1000 * _DAY), default=5000, metavar="MS",
             help="Window length in milliseconds (default: 5000)."),
    _WINDOWS(["--measurement-mode"], type=click.Choice(["time_windows", "count_windows"]), default="time_windows",
             metavar="NAME", help="time_windows (default), or count_windows, which end after a number of requests."),
    _WINDOWS(["--measurement-request-count"], type=click.IntRange(1), default=50, metavar="N",
             help="Requests per count window (default: 50)."),
    _WINDOWS(["--request-count"], type=click.IntRange(0), default=0, metavar="N",
             help="Send this many requests at each level, as one window."),
    _WINDOWS(["--warmup-request-count"], type=click.IntRange(0), default=0, metavar="N",
             help="Length of the warm-up in requests, instead of seconds."),
    _WINDOWS(["--warm-up"], type=FiniteRange(0, _DAY), default=1.0, metavar="S",
             help="Length of the warm-up before each run, in seconds (default: 1)."),
    _WINDOWS(["--runs"], type=click.IntRange(1), default=1, metavar="N",
             help="FiniteRange of runs of each level; several give a 95 % range (default: 1)."),
    _WINDOWS(["-s", "--stability-percentage"], type=FiniteRange(0.1, 999), default=10.0, metavar="N",
             help="Maximum deviation of three consecutive windows from their mean, in percent (default: 10)."),
    _WINDOWS(["-r", "--max-trials"], type=click.IntRange(1), default=10, metavar="N",
             help="Maximum number of windows (default: 10)."),
    _WINDOWS(["--percentile"], type=click.IntRange(1, 99), default=None, metavar="N",
             help="Latency percentile for stability and -l (default: the average)."),
    _WINDOWS(["--sender-limit/--no-sender-limit"], default=True,
             help="Measure the limit of the sending processes first; takes 0.4 s."),
    _WINDOWS(["--collect-metrics"], is_flag=True, help="Collect the server's CPU and GPU metrics."),
    _WINDOWS(["--metrics-url"], default="", metavar="URL",
             help="Metrics address (default: the server's host, port 8002, /metrics)."),
    _WINDOWS(["--metrics-interval"], type=click.IntRange(50, 1000 * _DAY), default=1000, metavar="MS",
             help="Interval between metrics requests, in milliseconds (default: 1000)."),
    _DATA(["--input-data"], multiple=True, metavar="WHAT",
          help="natural (default), random (perf_analyzer's default), zero, a folder with a file for each input, or JSON"
          " files (repeat the flag)."),
    _DATA(["--expect"], default="", metavar="BxN:W,…",
          help="Natural texts: batch x tokens, with weights, as for conch convert (default: 1 x 10 to 256)."),
    _DATA(["--shape", "shapes"], multiple=True, metavar="NAME:D,D",
          help="Shape of an input with variable dimensions, without the batch dimension."),
    _DATA(["--string-data"], default=None, metavar="TEXT", help="Text of all string inputs."),
    _DATA(["--string-length"], type=click.IntRange(1), default=None, metavar="N",
          help="Length of random texts (random: 128)."),
    _DATA(["--input-tensor-format"], type=click.Choice(["binary", "json"]), default="binary", metavar="NAME",
          help="Input format over HTTP: binary (default) or json."),
    _DATA(["--output-tensor-format"], type=click.Choice(["binary", "json"]), default="binary", metavar="NAME",
          help="Output format over HTTP: binary (default) or json."),
    _TEXT(["--endpoint"], default="", metavar="PATH",
          help="infer (default), generate or generate_stream; openai: a path (default: v1/chat/completions)."),
    _TEXT(["--slo"], default=None, metavar="ttft:MS,itl:MS",
          help="Count the requests within this TTFT and inter-token latency."),
    _AGAINST(["--against"], metavar="URL", default="",
             help="Compare this server with that of -u, in alternation; shows ratios with 95 % ranges."),
    _AGAINST(["--against-model"], metavar="MODEL", default="", help="Model on the other server (default: the same)."),
    _AGAINST(["--rounds"], type=click.IntRange(1), default=5, metavar="N",
             help="FiniteRange of rounds A, B, B, A, of one window each (default: 5)."),
    _SEQUENCES(["--sequence-length"], type=click.IntRange(1), default=None, metavar="N",
               help="Requests per sequence (default: as in the data, or 20)."),
    _SEQUENCES(["--sequence-length-variation"], type=FiniteRange(0, 100), default=20.0, metavar="N",
               help="Variation of the sequence length, in percent (default: 20)."),
    _SEQUENCES(["--sequence-id-range"], default=None, metavar="A:B",
         help="Correlation IDs from A up to, not including, B (default: from 1)."),
    _SEQUENCES(["--num-of-sequences"], type=click.IntRange(1), default=None, metavar="N",
               help="Concurrent sequences with request rates (default: 4); otherwise one per caller."),
    _SEQUENCES(["--serial-sequences"], is_flag=True, expose_value=False,
               help="No effect: a sequence has one request in flight."),
    _TLS(["--ssl-grpc-use-ssl"], is_flag=False, flag_value="true", default="false", metavar="BOOL",
         help="Use TLS over grpc; -u https://… does so for both protocols."),
    _TLS(["--ssl-grpc-root-certifications-file", "grpc_authorities"], type=_READ, metavar="FILE",
         help="CA certificates (PEM) over grpc."),
    _TLS(["--ssl-grpc-certificate-chain-file", "grpc_certificate"], type=_READ, metavar="FILE",
         help="Client certificate (PEM) over grpc."),
    _TLS(["--ssl-grpc-private-key-file", "grpc_key"], type=_READ, metavar="FILE",
         help="Client private key (PEM) over grpc."),
    _TLS(["--ssl-https-ca-certificates-file", "https_authorities"], type=_READ, metavar="FILE",
         help="CA certificates (PEM) over HTTP."),
    _TLS(["--ssl-https-client-certificate-file", "https_certificate"], type=_READ, metavar="FILE",
         help="Client certificate (PEM) over HTTP."),
    _TLS(["--ssl-https-private-key-file", "https_key"], type=_READ, metavar="FILE",
         help="Client private key (PEM) over HTTP."),
    _TLS(["--ssl-https-verify-peer", "verified"], type=click.IntRange(0, 1), default=1, metavar="0|1",
         help="Verify the server certificate over HTTP (default: 1)."),
    _TLS(["--ssl-https-verify-host", "named"], type=click.IntRange(0, 2), default=2, metavar="0|2",
         help="Verify the host name in the certificate (default: 2)."),
    _TLS(["--ssl-https-client-certificate-type"], type=click.Choice(["PEM"]), default="PEM", expose_value=False,
         metavar="PEM", help="Format of the client certificate."),
    _TLS(["--ssl-https-private-key-type"], type=click.Choice(["PEM"]), default="PEM", expose_value=False,
         metavar="PEM", help="Format of the private key."),
    _OUTPUT(["-v", "--verbose"], count=True, help="Print a line for each window."),
    _OUTPUT(["--breakdown", "breaks_down"], is_flag=True,
            help="Show the time a request spends in each stage, from the client to the server and back."),
    _OUTPUT(["-f", "--latency-report-file", "csv"], type=FILE, metavar="FILE",
            help="Write a CSV file with perf_analyzer's columns."),
    _OUTPUT(["--verbose-csv"], is_flag=True, help="Write additional columns to the CSV file, as perf_analyzer does."),
    _OUTPUT(["--json", "json_file"], type=FILE, metavar="FILE", help="Write all figures as JSON."),
    _OUTPUT(["--jsonl"], type=FILE, metavar="FILE", help="Write a line of JSON for each completed request."),
    _OUTPUT(["--html"], type=FILE, metavar="FILE",
            help="Write a report with charts as a self-contained HTML file."),
]  # fmt: skip

_TRACE: Final = "tracing is set at the server: curl SERVER/v2/trace/setting -d '{…}'"
_IN_PROCESS: Final = "there is no server within the process here: start one, and give its address with -u"
_PERIODIC: Final = "levels are measured one after the other: use --concurrency-range start:end:step"
#: perf_analyzer's flags that are not taken, and what to do instead.
REFUSED: Final[Mapping[str, str]] = {
    "--model-signature-name": "it is for TensorFlow Serving, whose protocol is not spoken here",
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
    "tfserving": "TensorFlow Serving's protocol is not spoken here",
    "torchserve": "TorchServe's protocol is not spoken here",
    "triton_c_api": _IN_PROCESS,
    "openai": "use -i openai",
}


def not_taken() -> Iterator[click.Option]:
    """Options that only say why they are refused; whether they have a value does not matter then.

    ``--service-kind triton`` is what there is.
    """
    for flag in REFUSED:
        yield click.Option(
            [flag, f"_refused_{flag.strip('-').replace('-', '_')}"], hidden=True, expose_value=False, is_flag=False,
            flag_value="", callback=_refuse,
        )  # fmt: skip
    yield click.Option(["--service-kind"], hidden=True, expose_value=False, callback=_check_kind)


def _refuse(context: click.Context, option: click.Parameter, value: Any) -> None:
    from conch.core.errors import unsupported

    if value is not None:
        raise unsupported(f"{option.opts[0]} is not supported: {REFUSED[option.opts[0]]}")


def _check_kind(context: click.Context, option: click.Parameter, value: str | None) -> None:
    from conch.core.errors import unsupported

    if value not in (None, "triton"):
        raise unsupported(f"--service-kind {value} is not supported: {_KINDS.get(str(value), 'there is triton')}")


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
    **options: Any,
) -> int:
    """Send requests to a model, and show how many it answers and how long they take.

    Measures in windows until three in a row agree.  Latency is from the moment at which a request should have started.
    """
    from conch.cli import terminal
    from conch.cli.perf_against import Against, run_against
    from conch.cli.perf_plan import plan_of
    from conch.core.errors import invalid
    from conch.measure.perf.breakdown import breakdown
    from conch.measure.perf.report import terminal as shown
    from conch.measure.perf.report.command import command_line
    from conch.measure.perf.report.outputs import OutputFiles, Outputs
    from conch.measure.perf.run import Measurement

    plan, prefix = plan_of(**options)
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
            reader = measurement.stage_reader(options["metrics_url"])
            for level in measurement.levels():
                before = reader.read() if breaks_down else None
                with shown.LiveLine(console, plan, level, print_windows=bool(verbose)) as line:
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
    if any(measurement.stopped for measurement in measured):
        return INTERRUPTED
    return 0 if all(measurement.whole for measurement in measured) else 1
