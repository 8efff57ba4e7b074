"""Builds the traffic of a plan: the payloads, their destination and the reader of their responses.

Only this module distinguishes protocols and endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from conch.core.errors import ConchError, invalid, unsupported
from conch.core.inference import TensorSpec
from conch.measure.perf.inputs.data import Sample, SampleSet, in_batches
from conch.measure.perf.inputs.files import samples
from conch.measure.perf.inputs.specs import ModelSpec, check_batch_size, check_shapes
from conch.measure.perf.plan import PerfPlan, SequenceOptions
from conch.measure.perf.requests.encoding import (
    MODEL_INFER,
    MODEL_STREAM_INFER,
    RequestForm,
    generate_request,
    infer_message,
    infer_request,
    openai_request,
    stream_message,
)
from conch.measure.perf.requests.payload import Payload, SequencePlan
from conch.measure.perf.requests.shared_memory import MemoryLayout
from conch.measure.perf.senders.channels.grpc import Rpc
from conch.measure.perf.senders.channels.http import read_generate, read_openai
from conch.measure.perf.senders.generator import Traffic
from conch.wire.json.outgoing import output_data, read_response

_GENERATE: Final = ("generate", "generate_stream")
#: The name of the text input for the OpenAI API.
_PROMPT: Final = "prompt"
#: Size of the length that precedes each element of a BYTES tensor (bytes).
_LENGTH_SIZE: Final = 4
#: Length of the start of a numbered text (bytes): the number, a space, and characters that JSON does not escape.
_BEGINNING: Final = 11
#: Default length of sequences, as in perf_analyzer.
_SEQUENCE_LENGTH: Final = 20


def traffic_of(plan: PerfPlan, model: ModelSpec, prefix: str, memory: MemoryLayout | None = None) -> Traffic:
    """Return the traffic of a plan; tensors are placed in ``memory`` if it is given.

    Raises INVALID_ARG or UNSUPPORTED for data that the model or the endpoint does not accept.
    """
    sequences = plan.sequences is not None or model.stateful
    form = RequestForm(
        plan.address.shown, prefix, plan.headers, plan.parameters, sequences, plan.binary, plan.binary_output, memory,
        plan.encoding,
    )  # fmt: skip
    if plan.protocol == "openai":
        prompts = _prompts(plan)
        payloads = [
            openai_request(plan.model, prompt, form, plan.endpoint, streaming=plan.streaming)
            for prompt in prompts.bodies
        ]
        payloads = _numbered(payloads, prompts.beginnings)
        return Traffic(plan.address, payloads, read=read_openai, timeout=plan.timeout, sent=prompts.sent)
    check_shapes(model, plan.data.shapes)
    check_batch_size(model, plan.batch_size, f"-b {plan.batch_size}")
    if plan.data.mix and plan.batch_size > 1:
        raise invalid(f"-b {plan.batch_size}: --expect determines the number of inferences per request")
    sample_set = samples(model, plan.data)
    batches = sample_set.batches(plan.batch_size)
    largest = max(map(len, batches))
    beginnings = [_beginning(batch[0], sample_set.numbered) for batch in batches] if sample_set.numbered else []
    if plan.endpoint in _GENERATE:
        _check_generate(plan, sample_set, largest)
        generate = [generate_request(model, sample, form, plan.endpoint) for [sample] in batches]
        generate = _numbered(generate, beginnings)
        return Traffic(plan.address, generate, read=read_generate, timeout=plan.timeout, sent=sample_set.sent)
    if plan.endpoint != "infer":
        raise invalid(f"--endpoint {plan.endpoint}: expected infer, generate or generate_stream")
    _check_infer(plan, model, largest, sequences=sequences)
    kind: Literal["http", "grpc"] = "grpc" if plan.protocol == "grpc" else "http"
    judge = ExpectedOutputs(_expected(sample_set.expected, plan.batch_size), kind) if sample_set.expected else None
    followers = _sequences(plan, sample_set) if sequences else None
    if kind == "http":
        requests = _numbered([infer_request(model, batch, form) for batch in batches], beginnings)
        return Traffic(
            plan.address, requests, judge=judge, sequences=followers, timeout=plan.timeout, sent=sample_set.sent
        )
    prepare, path = (stream_message, MODEL_STREAM_INFER) if plan.streaming else (infer_message, MODEL_INFER)
    messages = _numbered([prepare(model, batch, form) for batch in batches], beginnings)
    return Traffic(
        plan.address, messages, Rpc(path, plan.headers, plan.encoding), plan.streaming, model.decoupled,
        judge=judge, sequences=followers, timeout=plan.timeout, sent=sample_set.sent,
    )  # fmt: skip


def _beginning(sample: Sample, name: str) -> bytes:
    """Return the first characters of the first text of an input."""
    return sample[name].data[_LENGTH_SIZE:][:_BEGINNING]


def _numbered(payloads: list[Payload], beginnings: Sequence[bytes]) -> list[Payload]:
    """Return the payloads with the positions of their texts' numbers, where a payload contains them uncompressed."""
    if not beginnings:
        return payloads
    return [
        replace(payload, number_at=payload.data.find(beginning))
        for payload, beginning in zip(payloads, beginnings, strict=True)
    ]


def _check_generate(plan: PerfPlan, sample_set: SampleSet, largest: int) -> None:
    name = f"--endpoint {plan.endpoint}"
    if plan.protocol == "grpc" or largest > 1:
        raise invalid(f"{name} supports only HTTP, with one inference per request")
    if sample_set.expected:
        raise invalid(f"{name}: validation_data is only for infer, because texts are not compared")
    if plan.shared_memory or plan.sequences is not None:
        raise invalid(f"{name} supports neither shared memory nor sequences")


def _check_infer(plan: PerfPlan, model: ModelSpec, largest: int, *, sequences: bool) -> None:
    if plan.streaming and plan.protocol == "http":
        raise invalid("--streaming is for -i grpc and -i openai; over HTTP, --endpoint generate_stream streams")
    if model.decoupled and not plan.streaming:
        raise unsupported(
            f"model '{model.name}' is decoupled: a request may get any number of responses, so use -i grpc --streaming,"
            " or --endpoint generate_stream over HTTP"
        )
    if sequences and largest > 1:
        raise invalid(f"{largest} inferences in a request, but each request of a sequence is one inference")
    if plan.encoding and (plan.streaming or sequences):
        raise invalid("--grpc-compression-algorithm cannot be combined with --streaming or sequences")


def _expected(expected: Sequence[Expected], batch_size: int) -> list[Expected]:
    """Return the expected outputs of each request; an output that one sample of a batch lacks is not compared."""
    return [
        {
            name: b"".join(outputs[name] for outputs in batch)
            for name in batch[0]
            if all(name in outputs for outputs in batch)
        }
        for batch in in_batches(expected, batch_size)
    ]


def _sequences(plan: PerfPlan, sample_set: SampleSet) -> SequencePlan:
    """Return the plan of the sequences; raises INVALID_ARG if there are fewer correlation IDs than sequences."""
    options = plan.sequences or SequenceOptions()
    length = options.length
    if not length and plan.data.made_up:
        length = _SEQUENCE_LENGTH
    if options.last and options.last - options.first < plan.callers:
        raise invalid(
            f"--sequence-id-range {options.first}:{options.last}: {plan.callers} sequences at a time need as many ids"
        )
    if options.last and plan.rates is None and not plan.concurrency.last:
        raise invalid("--sequence-id-range with an end requires --concurrency-range with an end")
    form: Literal["json", "grpc"] = "grpc" if plan.protocol == "grpc" else "json"
    return SequencePlan(sample_set.streams, form, length, options.variation, options.first, options.last)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts or request bodies for the OpenAI API, a description of them, and the starts of numbered texts."""

    bodies: Sequence[Mapping[str, Any] | str]
    sent: str
    beginnings: Sequence[bytes] = ()


def _prompts(plan: PerfPlan) -> _Prompts:
    """Return generated prompts, the ``payload`` objects of a genai-perf JSON file, or the lines of a text file."""
    if plan.data.made_up:
        model = ModelSpec(plan.model, "", {_PROMPT: TensorSpec(_PROMPT, "BYTES", (1,))}, 0, decoupled=False)
        sample_set = samples(model, plan.data)
        texts = [sample[_PROMPT].data[_LENGTH_SIZE:].decode() for sample in sample_set.samples]
        beginnings = [_beginning(sample, _PROMPT) for sample in sample_set.samples] if sample_set.numbered else []
        sent = sample_set.sent if plan.endpoint.endswith("embeddings") else sample_set.sent.replace("texts", "prompts")
        return _Prompts(texts, sent, beginnings)
    file = Path(plan.data.source)
    sent = f"the data of {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"--input-data {file}: {error}") from None
    if file.suffix != ".json":
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise invalid(f"--input-data {file}: it contains no prompts")
        return _Prompts(lines, sent)
    try:
        entries = json.loads(text)["data"]
        bodies = [payload for entry in entries for payload in entry["payload"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        bodies = []
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise invalid(f'--input-data {file}: expected {{"data": [{{"payload": [{{...}}]}}, ...]}}')
    return _Prompts(bodies, sent)


# Channels call it after the end of a request has been timed.


#: The expected outputs of a payload, by name, in wire format.
Expected = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ExpectedOutputs:
    """The validator; ``expected`` is by payload number, and ``form`` the protocol of the responses."""

    expected: Sequence[Expected]
    form: Literal["http", "grpc"]

    def __call__(self, payload: int, response: bytes, json_size: int) -> str:
        """Return the difference of a response from the expected one, empty if none; other outputs are ignored.

        ``response`` is a ``ModelInferResponse``, or an HTTP body whose first ``json_size`` bytes are JSON (0: all).
        """
        expected = self.expected[payload]
        if not expected:
            return ""
        try:
            outputs = _of_http(response, json_size) if self.form == "http" else _of_grpc(response)
        except (ValueError, KeyError, TypeError, ConchError) as error:
            return f"the response cannot be read: {error}"
        for name, right in expected.items():
            if name not in outputs:
                return f"output '{name}' is not in the response"
            if outputs[name] != right:
                return f"output '{name}' differs from validation_data"
        return ""


def _of_http(body: bytes, json_size: int) -> dict[str, bytes]:
    _, outputs = read_response(body, json_size or None)
    sent = (output for output in outputs if output.data is not None or output.values is not None)
    return {output.name: bytes(output_data(output)) for output in sent}


def _of_grpc(message: bytes) -> dict[str, bytes]:
    from conch.core.protocol import grpc_service

    response = grpc_service.ModelInferResponse.FromString(message)
    return {output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=False)}
