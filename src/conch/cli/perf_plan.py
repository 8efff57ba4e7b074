"""Makes a plan from the flags of ``conch perf``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from conch.core.errors import invalid, unsupported
from conch.measure.perf.figures import Objective
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.options import PerfOptions
from conch.measure.perf.plan import MOST_CALLERS, Levels, PerfPlan, SequenceOptions, read_address
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import parse_mix


def plan_of(options: PerfOptions) -> tuple[PerfPlan, str]:
    """Return the plan for the flags, and the path prefix. Raises INVALID_ARG for contradictory flags."""
    loads = (options.concurrency_range, options.request_rate_range, options.request_intervals)
    if sum(load is not None for load in loads) > 1:
        raise invalid("--concurrency-range, --request-rate-range and --request-intervals are mutually exclusive")
    if options.max_calls > MOST_CALLERS:
        raise invalid(f"--max-threads {options.max_calls}: at most {MOST_CALLERS:,} requests can run at a time")
    texts = [("-m", options.model), ("-x", options.version), ("-u", options.url), ("--endpoint", options.endpoint)]
    texts += [("--string-data", options.string_data or ""), *(("-H", header) for header in options.headers)]
    _check_texts([*texts, *(("--request-parameter", parameter) for parameter in options.parameters)])
    if not options.model:
        raise invalid("-m: the model's name is missing")
    if options.version and not options.version.isdecimal():
        raise invalid(f"-x {options.version}: expected a version number")
    if options.shared_memory == "cuda":
        raise unsupported("--shared-memory cuda is not supported: use --shared-memory system")
    address, prefix = read_address(options.url or "localhost", options.protocol)
    intervals = _intervals(options.request_intervals) if options.request_intervals else ()
    counted = options.measurement_mode == "count_windows"
    callers = "1" if options.concurrency_range is None else options.concurrency_range
    metrics_url = options.metrics_url or f"http://{replace(address, port=8002).shown}/metrics"
    plan = PerfPlan(
        address=_with_tls(address, options),
        protocol=options.protocol,
        concurrency=Levels.parse("--concurrency-range", callers, callers=True),
        rates=_rates(options.request_rate_range, intervals),
        distribution="given" if intervals else "poisson" if options.request_distribution == "poisson" else "constant",
        intervals=intervals,
        latency_limit=options.latency_threshold / 1000,
        interval=options.measurement_interval / 1000,
        requests=options.request_count or (options.measurement_request_count if counted else 0),
        total_requests=options.request_count,
        warm_up_requests=options.warmup_request_count,
        warm_up=0.0 if options.request_count or options.warmup_request_count else options.warm_up,
        share=options.stability_percentage / 100,
        percentile=options.percentile or 0.0,
        trials=1 if options.request_count else options.max_trials,
        binary=options.input_tensor_format == "binary",
        binary_output=options.output_tensor_format == "binary",
        endpoint=options.endpoint or ("v1/chat/completions" if options.protocol == "openai" else "infer"),
        parameters=dict(_parameter(parameter) for parameter in options.parameters),
        objective=Objective.parse(options.slo) if options.slo is not None else None,
        metrics_url=metrics_url if options.collect_metrics else "",
        metrics_interval=options.metrics_interval / 1000,
        headers=dict(_pair("-H", header) for header in options.headers),
        encoding="" if options.encoding == "none" else options.encoding,
        shared_memory=options.shared_memory == "system",
        composing=_models(options.composing),
        sequences=_sequences(options),
        data=DataOptions(
            (options.input_data or ("natural",))[0], dict(_shape(shape) for shape in options.shapes),
            options.string_data, options.string_length or 0,
            more=tuple(options.input_data[1:]), mix=parse_mix(options.expect),
        ),
        model=options.model, version=options.version, batch_size=options.batch_size, streaming=options.streaming,
        max_calls=options.max_calls, timeout=options.timeout, binary_search=options.binary_search,
        processes=options.processes, runs=options.runs, sender_limit=options.sender_limit,
        output_size=options.output_size,
    )  # fmt: skip
    return plan, prefix


def _check_texts(texts: Sequence[tuple[str, str]]) -> None:
    """Raise INVALID_ARG for texts that no protocol can transmit."""
    for flag, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid(f"{flag} {text}: is not UTF-8") from None


def _rates(text: str | None, intervals: Sequence[int]) -> Levels | None:
    if intervals:
        rate = float(f"{len(intervals) * 1e9 / sum(intervals):.6g}")
        return Levels(rate, rate, 1)
    return Levels.parse("--request-rate-range", text) if text is not None else None


def _intervals(file: Path) -> list[int]:
    """Return the intervals in a file (ns)."""
    intervals = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            intervals.append(int(float(line) * 1000))
        except (ValueError, OverflowError):
            raise invalid(
                f"--request-intervals {file}, line {number}: '{line}' is not a number of microseconds"
            ) from None
        if intervals[-1] < 0:
            raise invalid(f"--request-intervals {file}, line {number}: '{line}' is negative")
    if not sum(intervals):
        raise invalid(f"--request-intervals {file}: it contains no intervals")
    return intervals


def _with_tls(address: Address, options: PerfOptions) -> Address:
    if options.ssl_grpc_use_ssl.lower() not in ("true", "false", "1", "0"):
        raise invalid(f"--ssl-grpc-use-ssl {options.ssl_grpc_use_ssl}: expected true or false")
    grpc = options.protocol == "grpc"
    files = (
        (options.grpc_authorities, options.grpc_certificate, options.grpc_key)
        if grpc
        else (options.https_authorities, options.https_certificate, options.https_key)
    )
    encrypted = address.encrypted or (grpc and options.ssl_grpc_use_ssl.lower() in ("true", "1"))
    if any(files) and not encrypted:
        how = "--ssl-grpc-use-ssl" if grpc else f"-u https://{address.shown}"
        raise invalid(f"certificates require TLS, which this connection does not use: add {how}")
    authorities, certificate, key = (str(file or "") for file in files)
    return replace(
        address, encrypted=encrypted, verified=grpc or bool(options.verified), named=grpc or bool(options.named),
        authorities=authorities, certificate=certificate, key=key,
    )  # fmt: skip


def _sequences(options: PerfOptions) -> SequenceOptions | None:
    """Return the sequence options; None without such flags, in which case stateful models get the defaults."""
    length, ids, number = options.sequence_length, options.sequence_id_range, options.num_of_sequences
    if length is None and ids is None and number is None:
        return None
    first, last = SequenceOptions.ids(ids) if ids else (1, 0)
    return SequenceOptions(length or 0, options.sequence_length_variation / 100, number or 4, first, last)


def _models(text: str) -> dict[str, str]:
    """Parse names and versions in ``a:3,b``."""
    versions = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = part.partition(":")
        if version and not version.isdecimal():
            raise invalid(f"--bls-composing-models {text}: '{version}' is not a version")
        versions[name] = version
    return versions


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(character in text for character in "\r\n\0"):
        raise invalid(f"{flag} {text}: expected name:value")
    return name.strip(), value.strip()


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_TYPES: Final[Mapping[str, Callable[[str], Any]]] = {
    "int": int, "uint": int, "float": float, "double": float, "bool": _truth, "string": str,
}  # fmt: skip


def _parameter(text: str) -> tuple[str, Any]:
    """Parse ``name:value:type``, or ``name:value`` with a value in JSON or, failing that, a text."""
    name, value = _pair("--request-parameter", text)
    plain, _, kind = value.rpartition(":")
    if kind in _TYPES and plain:
        try:
            return name, _TYPES[kind](plain)
        except ValueError:
            raise invalid(f"--request-parameter {text}: '{plain}' is not of type {kind}") from None
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    try:
        return name, tuple(int(dim) for dim in dims.split(","))
    except ValueError:
        raise invalid(f"--shape {text}: expected input:dimension,dimension, as in input_ids:128") from None
