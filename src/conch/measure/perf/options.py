"""The options of ``conch perf``, with the flags of NVIDIA's perf_analyzer.

:mod:`conch.cli.perf_plan` makes a plan of them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Annotated, Final, Literal

from conch.options.declaration import ExistingFile, File, Range, option

Count = Annotated[int, Range(1)]
#: The longest time of an option (s).
_DAY: Final = 86_400

_GENERAL: Final = "Model and server"
_LOAD: Final = "Load"
_WINDOWS: Final = "Measuring"
_DATA: Final = "Data"
_TEXT: Final = "Text generation"
_SEQUENCES: Final = "Sequences"
_AGAINST: Final = "Comparing two servers"
_TLS: Final = "TLS"
_OUTPUT: Final = "Output"


@dataclass(frozen=True, kw_only=True)
class PerfOptions:
    """The options of one command line."""

    # fmt: off
    model: str = option(MISSING, _GENERAL, "Model to measure.", flags=("-m", "--model-name"), metavar="MODEL")
    version: str = option(
        "", _GENERAL, "Model version (default: the server's choice).", flags=("-x", "--model-version"), metavar="N"
    )
    url: str = option(
        "", _GENERAL, "Server address, host:port (default: localhost and Triton's port); https:// for TLS.",
        flags=("-u",), metavar="URL",
    )
    protocol: Literal["http", "grpc", "openai"] = option("http", _GENERAL, "Protocol.", flags=("-i",))
    batch_size: Count = option(1, _GENERAL, "Inferences per request.", flags=("-b",))
    streaming: bool = option(
        False, _GENERAL, "grpc: use ModelStreamInfer, one call per concurrent client; openai: request a stream."
    )
    headers: tuple[str, ...] = option(
        (), _GENERAL, "Request header, or metadata over grpc; repeatable.", flags=("-H", "--header"),
        metavar="NAME:VALUE",
    )
    parameters: tuple[str, ...] = option(
        (), _GENERAL, "Request parameter, such as max_tokens:64; TYPE is int, float, bool or string.",
        flags=("--request-parameter",), metavar="NAME:VALUE[:TYPE]",
    )
    encoding: Literal["none", "gzip", "deflate"] = option(
        "none", _GENERAL, "Compress requests over grpc.", flags=("--grpc-compression-algorithm",)
    )
    shared_memory: Literal["none", "system", "cuda"] = option(
        "none", _GENERAL, "Pass tensors through system shared memory, to a server on this machine."
    )
    output_size: Count = option(
        100 * 1024, _GENERAL, "Size of the region for an output of texts or variable shape.",
        flags=("--output-shared-memory-size",), metavar="BYTES",
    )
    composing: str = option(
        "", _GENERAL, "Models that this model calls, to show their statistics.",
        flags=("--bls-composing-models",), metavar="NAME[:N],…",
    )
    timeout: Annotated[float, Range(0.001, _DAY)] = option(600.0, _GENERAL, "Request timeout in seconds.", metavar="S")
    concurrency_range: str | None = option(
        None, _LOAD, "Concurrency: start, start:end or start:end:step (default: 1); end 0 continues up to -l.",
        metavar="A:B:S",
    )
    request_rate_range: str | None = option(
        None, _LOAD, "Requests per second, sent without waiting for earlier responses.", metavar="A:B:S"
    )
    request_distribution: Literal["constant", "poisson"] = option("constant", _LOAD, "Intervals between requests.")
    request_intervals: ExistingFile | None = option(
        None, _LOAD, "File with the intervals, in microseconds, one per line; it is repeated."
    )
    max_calls: Count = option(
        256, _LOAD, "Maximum in-flight requests with request rates; waiting counts as latency.",
        flags=("--max-threads",),
    )
    latency_threshold: Annotated[float, Range(0)] = option(
        0.0, _LOAD, "Stop after the first level with a higher latency (default: never).", flags=("-l",), metavar="MS"
    )
    binary_search: bool = option(
        False, _LOAD, "Search for the highest level within -l by bisection, to the precision of the step."
    )
    asynchronous: bool = option(
        False, _LOAD, "No effect: requests never block a thread.", flags=("-a", "--async", "--sync")
    )
    processes: Annotated[int, Range(0, 256)] = option(
        0, _LOAD, "Number of sending processes (default: chosen by concurrency)."
    )
    measurement_interval: Annotated[int, Range(50, 1000 * _DAY)] = option(
        5000, _WINDOWS, "Window length in milliseconds.", flags=("-p",), metavar="MS"
    )
    measurement_mode: Literal["time_windows", "count_windows"] = option(
        "time_windows", _WINDOWS, "Whether a window ends after a time or after a number of requests."
    )
    measurement_request_count: Count = option(50, _WINDOWS, "Requests per count window.")
    request_count: Annotated[int, Range(0)] = option(
        0, _WINDOWS, "Send this many requests at each level, as one window (default: no limit)."
    )
    warmup_request_count: Annotated[int, Range(0)] = option(
        0, _WINDOWS, "Length of the warm-up in requests (default: by time)."
    )
    warm_up: Annotated[float, Range(0, _DAY)] = option(
        1.0, _WINDOWS, "Length of the warm-up before each run, in seconds.", metavar="S"
    )
    runs: Count = option(1, _WINDOWS, "Number of runs of each level; several give a 95 % range.")
    stability_percentage: Annotated[float, Range(0.1, 999)] = option(
        10.0, _WINDOWS, "Maximum deviation of three consecutive windows from their mean, in percent.", flags=("-s",),
        metavar="N",
    )
    max_trials: Count = option(10, _WINDOWS, "Maximum number of windows.", flags=("-r",))
    percentile: Annotated[int, Range(1, 99)] | None = option(
        None, _WINDOWS, "Latency percentile for stability and -l (default: the average)."
    )
    sender_limit: bool = option(
        True, _WINDOWS, "Measure the limit of the sending processes first; takes 0.4 s.",
        flags=("--sender-limit/--no-sender-limit",),
    )
    collect_metrics: bool = option(False, _WINDOWS, "Collect the server's CPU and GPU metrics.")
    metrics_url: str = option(
        "", _WINDOWS, "Metrics address (default: the server's host, port 8002, /metrics).", metavar="URL"
    )
    metrics_interval: Annotated[int, Range(50, 1000 * _DAY)] = option(
        1000, _WINDOWS, "Interval between metrics requests, in milliseconds.", metavar="MS"
    )
    input_data: tuple[str, ...] = option(
        (), _DATA,
        "natural (default), random (perf_analyzer's default), zero, a folder with a file for each input, or JSON files"
        " (repeat the flag).",
        metavar="WHAT",
    )
    expect: str = option(
        "", _DATA, "Natural texts: batch x tokens, with weights, as for conch convert (default: 1 x 10 to 256).",
        metavar="BxN:W,…",
    )
    shapes: tuple[str, ...] = option(
        (), _DATA, "Shape of an input with variable dimensions, without the batch dimension.", flags=("--shape",),
        metavar="NAME:D,D",
    )
    string_data: str | None = option(None, _DATA, "Text of all string inputs.", metavar="TEXT")
    string_length: Count | None = option(None, _DATA, "Length of random texts (random: 128).")
    input_tensor_format: Literal["binary", "json"] = option("binary", _DATA, "Input format over HTTP.")
    output_tensor_format: Literal["binary", "json"] = option("binary", _DATA, "Output format over HTTP.")
    endpoint: str = option(
        "", _TEXT, "infer (default), generate or generate_stream; openai: a path (default: v1/chat/completions).",
        metavar="PATH",
    )
    slo: str | None = option(
        None, _TEXT, "Count the requests within this TTFT and inter-token latency.", metavar="ttft:MS,itl:MS"
    )
    against: str = option(
        "", _AGAINST, "Compare this server with that of -u, in alternation; shows ratios with 95 % ranges.",
        metavar="URL",
    )
    against_model: str = option("", _AGAINST, "Model on the other server (default: the same).", metavar="MODEL")
    rounds: Count = option(5, _AGAINST, "Number of rounds A, B, B, A, of one window each.")
    sequence_length: Count | None = option(None, _SEQUENCES, "Requests per sequence (default: as in the data, or 20).")
    sequence_length_variation: Annotated[float, Range(0, 100)] = option(
        20.0, _SEQUENCES, "Variation of the sequence length, in percent.", metavar="N"
    )
    sequence_id_range: str | None = option(
        None, _SEQUENCES, "Correlation IDs from A up to, not including, B (default: from 1).", metavar="A:B"
    )
    num_of_sequences: Count | None = option(
        None, _SEQUENCES, "Concurrent sequences with request rates (default: 4); otherwise one per concurrent client."
    )
    serial_sequences: bool = option(False, _SEQUENCES, "No effect: a sequence has one request in flight.")
    ssl_grpc_use_ssl: str = option(
        "false", _TLS, "Use TLS over grpc; -u https://… does so for both protocols.", metavar="BOOL", bare="true"
    )
    grpc_authorities: ExistingFile | None = option(
        None, _TLS, "CA certificates (PEM) over grpc.", flags=("--ssl-grpc-root-certifications-file",)
    )
    grpc_certificate: ExistingFile | None = option(
        None, _TLS, "Client certificate (PEM) over grpc.", flags=("--ssl-grpc-certificate-chain-file",)
    )
    grpc_key: ExistingFile | None = option(
        None, _TLS, "Client private key (PEM) over grpc.", flags=("--ssl-grpc-private-key-file",)
    )
    https_authorities: ExistingFile | None = option(
        None, _TLS, "CA certificates (PEM) over HTTP.", flags=("--ssl-https-ca-certificates-file",)
    )
    https_certificate: ExistingFile | None = option(
        None, _TLS, "Client certificate (PEM) over HTTP.", flags=("--ssl-https-client-certificate-file",)
    )
    https_key: ExistingFile | None = option(
        None, _TLS, "Client private key (PEM) over HTTP.", flags=("--ssl-https-private-key-file",)
    )
    verified: Annotated[int, Range(0, 1)] = option(
        1, _TLS, "Verify the server certificate over HTTP.", flags=("--ssl-https-verify-peer",), metavar="0|1"
    )
    named: Annotated[int, Range(0, 2)] = option(
        2, _TLS, "Verify the host name in the certificate.", flags=("--ssl-https-verify-host",), metavar="0|2"
    )
    ssl_https_client_certificate_type: Literal["PEM"] = option(
        "PEM", _TLS, "Format of the client certificate."
    )
    ssl_https_private_key_type: Literal["PEM"] = option("PEM", _TLS, "Format of the private key.")
    verbose: bool = option(False, _OUTPUT, "Print a line for each window.", flags=("-v",))
    breaks_down: bool = option(
        False, _OUTPUT, "Show the time a request spends in each stage, from the client to the server and back.",
        flags=("--breakdown",),
    )
    csv: File | None = option(
        None, _OUTPUT, "Write a CSV file with perf_analyzer's columns.", flags=("-f", "--latency-report-file")
    )
    verbose_csv: bool = option(False, _OUTPUT, "Write additional columns to the CSV file, as perf_analyzer does.")
    json_file: File | None = option(None, _OUTPUT, "Write all figures as JSON.", flags=("--json",))
    jsonl: File | None = option(None, _OUTPUT, "Write a line of JSON for each completed request.")
    html: File | None = option(None, _OUTPUT, "Write a report with charts as a self-contained HTML file.")
    # fmt: on
