"""From the flags of ``conch perf`` to its plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from conch.core.errors import invalid, unsupported
from conch.measure.perf.figures import Objective
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.plan import MOST_CALLERS, Levels, PerfPlan, Protocol, SequenceOptions, read_address
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import parse_mix

_TLS: Final = (
    "ssl_grpc_use_ssl", "grpc_authorities", "grpc_certificate", "grpc_key", "https_authorities", "https_certificate",
    "https_key", "verified", "named",
)  # fmt: skip
_SEQUENCES: Final = ("sequence_length", "sequence_length_variation", "sequence_id_range", "num_of_sequences")


def plan_of(
    *,
    url: str, protocol: Protocol, concurrency_range: str | None,
    request_rate_range: str | None, request_distribution: str, request_intervals: str | None, latency_threshold: float,
    measurement_interval: int, measurement_mode: str, measurement_request_count: int, request_count: int,
    warmup_request_count: int, stability_percentage: float, max_trials: int, percentile: int | None,
    input_data: Sequence[str], expect: str, shapes: Sequence[str], string_data: str | None, string_length: int | None,
    input_tensor_format: str, output_tensor_format: str, headers: Sequence[str], parameters: Sequence[str],
    encoding: str, shared_memory: str, composing: str, endpoint: str, slo: str | None, warm_up: float,
    collect_metrics: bool, metrics_url: str, metrics_interval: int, **options: Any,
) -> tuple[PerfPlan, str]:  # fmt: skip
    """The plan that the flags mean, and the path before all paths.  Raises INVALID_ARG for what contradicts itself."""
    loads = (concurrency_range, request_rate_range, request_intervals)
    if sum(load is not None for load in loads) > 1:
        raise invalid("--concurrency-range, --request-rate-range and --request-intervals exclude one another")
    if options["max_calls"] > MOST_CALLERS:
        raise invalid(f"--max-threads {options['max_calls']}: at most {MOST_CALLERS:,} requests can run at a time")
    texts = [("-m", options["model"]), ("-x", options["version"]), ("-u", url), ("--endpoint", endpoint)]
    texts += [("--string-data", string_data or ""), *(("-H", header) for header in headers)]
    _check_texts([*texts, *(("--request-parameter", parameter) for parameter in parameters)])
    if not options["model"]:
        raise invalid("-m: the name of a model is missing")
    if options["version"] and not options["version"].isdecimal():
        raise invalid(f"-x {options['version']}: expected the number of a version")
    if shared_memory == "cuda":
        raise unsupported("--shared-memory cuda is not supported: use --shared-memory system")
    tls = {name: options.pop(name) for name in _TLS}
    sequences = {name: options.pop(name) for name in _SEQUENCES}
    address, prefix = read_address(url or "localhost", protocol)
    intervals = _intervals(Path(request_intervals)) if request_intervals else ()
    counted = measurement_mode == "count_windows"
    callers = "1" if concurrency_range is None else concurrency_range
    plan = PerfPlan(
        address=_with_tls(address, protocol, **tls),
        protocol=protocol,
        concurrency=Levels.parse("--concurrency-range", callers, callers=True),
        rates=_rates(request_rate_range, intervals),
        distribution="given" if intervals else "poisson" if request_distribution == "poisson" else "constant",
        intervals=intervals,
        latency_limit=latency_threshold / 1000,
        interval=measurement_interval / 1000,
        requests=request_count or (measurement_request_count if counted else 0),
        total_requests=request_count,
        warm_up_requests=warmup_request_count,
        warm_up=0.0 if request_count or warmup_request_count else warm_up,
        share=stability_percentage / 100,
        percentile=percentile or 0.0,
        trials=1 if request_count else max_trials,
        binary=input_tensor_format == "binary",
        binary_output=output_tensor_format == "binary",
        endpoint=endpoint or ("v1/chat/completions" if protocol == "openai" else "infer"),
        parameters=dict(_parameter(parameter) for parameter in parameters),
        objective=Objective.parse(slo) if slo is not None else None,
        metrics_url=(metrics_url or f"http://{replace(address, port=8002).shown}/metrics") if collect_metrics else "",
        metrics_interval=metrics_interval / 1000,
        headers=dict(_pair("-H", header) for header in headers),
        encoding="" if encoding == "none" else encoding,
        shared_memory=shared_memory == "system",
        composing=_models(composing),
        sequences=_sequences(**sequences),
        data=DataOptions(
            (input_data or ("natural",))[0], dict(_shape(shape) for shape in shapes), string_data, string_length or 0,
            more=tuple(input_data[1:]), mix=parse_mix(expect),
        ),
        **options,
    )  # fmt: skip
    return plan, prefix


def _check_texts(texts: Sequence[tuple[str, str]]) -> None:
    """Raise INVALID_ARG for what a shell passed and no protocol can carry."""
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
    """The distances in a file (ns)."""
    intervals = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            intervals.append(int(float(line) * 1000))
        except (ValueError, OverflowError):
            raise invalid(f"--request-intervals {file}, line {number}: '{line}' is no number of microseconds") from None
        if intervals[-1] < 0:
            raise invalid(f"--request-intervals {file}, line {number}: '{line}' is below 0")
    if not sum(intervals):
        raise invalid(f"--request-intervals {file}: there are no distances in it")
    return intervals


def _with_tls(
    address: Address, protocol: Protocol, *, ssl_grpc_use_ssl: str, grpc_authorities: str | None,
    grpc_certificate: str | None, grpc_key: str | None, https_authorities: str | None, https_certificate: str | None,
    https_key: str | None, verified: int, named: int,
) -> Address:  # fmt: skip
    if ssl_grpc_use_ssl.lower() not in ("true", "false", "1", "0"):
        raise invalid(f"--ssl-grpc-use-ssl {ssl_grpc_use_ssl}: expected true or false")
    grpc = protocol == "grpc"
    files = (
        (grpc_authorities, grpc_certificate, grpc_key) if grpc else (https_authorities, https_certificate, https_key)
    )
    encrypted = address.encrypted or (grpc and ssl_grpc_use_ssl.lower() in ("true", "1"))
    if any(files) and not encrypted:
        how = "--ssl-grpc-use-ssl" if grpc else f"-u https://{address.shown}"
        raise invalid(f"certificates are for TLS, and this connection has none: add {how}")
    authorities, certificate, key = (file or "" for file in files)
    return replace(
        address, encrypted=encrypted, verified=grpc or bool(verified), named=grpc or bool(named),
        authorities=authorities, certificate=certificate, key=key,
    )  # fmt: skip


def _sequences(
    *, sequence_length: int | None, sequence_length_variation: float, sequence_id_range: str | None,
    num_of_sequences: int | None,
) -> SequenceOptions | None:  # fmt: skip
    """How sequences are, None where no flag speaks of them: stateful models get the usual ones."""
    if sequence_length is None and sequence_id_range is None and num_of_sequences is None:
        return None
    first, last = SequenceOptions.ids(sequence_id_range) if sequence_id_range else (1, 0)
    return SequenceOptions(sequence_length or 0, sequence_length_variation / 100, num_of_sequences or 4, first, last)


def _models(text: str) -> dict[str, str]:
    """Names and versions in ``a:3,b``."""
    versions = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = part.partition(":")
        if version and not version.isdecimal():
            raise invalid(f"--bls-composing-models {text}: '{version}' is no version")
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
    """``name:value:type``, or ``name:value`` with JSON or else a text for the value."""
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
