"""From a plan to what is sent: the payloads, where they go and how their answers are read.

Chosen here, once, for every protocol and endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.errors import invalid, unsupported
from conch.perf.calls import Payload
from conch.perf.channels.events import read_generate, read_openai
from conch.perf.generator import Traffic
from conch.perf.inputs.data import in_batches, samples
from conch.perf.inputs.specs import ModelSpec, check_batch_size, check_shapes
from conch.perf.plan import PerfPlan
from conch.perf.requests import MODEL_INFER, generate_request, grpc_message, http_request, openai_request

_GENERATE: Final = ("generate", "generate_stream")
#: What is asked of OpenAI's API where nothing is given.
_PROMPT: Final = "Tell me something about the sea."


def traffic_of(plan: PerfPlan, model: ModelSpec, prefix: str) -> Traffic:
    """What a plan sends; raises INVALID_ARG or UNSUPPORTED for what the model or the endpoint does not take."""
    where, timeout = plan.address, plan.timeout
    if plan.protocol == "openai":
        return Traffic(where, _openai(plan, prefix), read=read_openai, timeout=timeout)
    check_shapes(model, plan.data.shapes)
    check_batch_size(model, plan.batch_size)
    found = samples(model, plan.data)
    host = f"{where.host}:{where.port}"
    if plan.endpoint in _GENERATE:
        if plan.protocol == "grpc" or plan.batch_size > 1:
            raise invalid(f"--endpoint {plan.endpoint} is for one inference a request, over HTTP")
        generate = [
            generate_request(model, sample, host, plan.headers, plan.parameters, plan.endpoint, prefix)
            for sample in found
        ]
        return Traffic(where, generate, read=read_generate, timeout=timeout)
    batches = in_batches(found, plan.batch_size)
    if plan.protocol == "grpc":
        return Traffic(where, [grpc_message(model, batch) for batch in batches], MODEL_INFER, timeout=timeout)
    if model.decoupled:
        raise unsupported(
            f"model '{model.name}' is decoupled, which infer over HTTP does not allow: use --endpoint generate_stream"
        )
    requests = [http_request(model, one, host, plan.headers, binary=plan.binary, prefix=prefix) for one in batches]
    return Traffic(where, requests, timeout=timeout)


def _openai(plan: PerfPlan, prefix: str) -> list[Payload]:
    given = _prompts(plan)
    host = f"{plan.address.host}:{plan.address.port}"
    return [
        openai_request(
            plan.model, one, host, plan.headers, plan.parameters, plan.endpoint, streaming=plan.streaming, prefix=prefix
        )
        for one in given
    ]


def _prompts(plan: PerfPlan) -> list[Mapping[str, Any] | str]:
    """Bodies or prompts: ``payload`` of the entries of a JSON file as genai-perf writes them, the lines of a text file,
    the text of the command line."""
    if plan.data.source in ("random", "zero"):
        return [plan.data.string_data if plan.data.string_data is not None else _PROMPT]
    file = Path(plan.data.source)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"--input-data {file}: {error}") from None
    if file.suffix != ".json":
        return [line for line in text.splitlines() if line.strip()] or [_PROMPT]
    try:
        entries = json.loads(text)["data"]
        return [one for entry in entries for one in entry["payload"]]
    except (ValueError, KeyError, TypeError):
        raise invalid(f'--input-data {file}: expected {{"data": [{{"payload": [{{...}}]}}, ...]}}') from None
