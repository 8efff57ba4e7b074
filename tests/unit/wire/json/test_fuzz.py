"""Whatever arrives, the answer is a request or a :class:`ConchError`."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conch.core.errors import ConchError
from conch.core.inference import InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import ELEMENT_SIZE
from conch.core.validation import validate_request
from conch.wire.json import control
from conch.wire.json.generate import decode_generate, encode_generate
from conch.wire.json.infer import MAX_INPUT_SIZE, decode_infer, encode_infer, parse_header_length

DATATYPES = [*ELEMENT_SIZE, "BYTES"]
SIGNATURES = [
    ModelSignature(
        "m", 1, batch, {spec.name: spec for spec in specs}, {"OUT": TensorSpec("OUT", "FP32", (-1,))}, by_row=by_row
    )
    for batch, by_row in ((0, False), (4, False), (4, True))
    for specs in (
        [TensorSpec("IN", "FP32", (-1,), optional=True), TensorSpec("B", "BYTES", (1,), reshape=(), optional=True)],
        *([TensorSpec("IN", datatype, (2, -1))] for datatype in DATATYPES),
    )
]

numbers = st.integers(-3, 3) | st.integers(-(2**70), 2**70) | st.floats()
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(good, good, good, values)


def members(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return mostly(st.fixed_dictionaries({}, optional=fields))


tensor_parameters = members(
    binary_data_size=mostly(st.integers(0, 40)),
    binary_data=mostly(st.booleans()),
    classification=mostly(st.integers(0, 5)),
    shared_memory_region=mostly(st.text(max_size=2)),
)
tensors = members(
    name=mostly(st.sampled_from(["IN", "B", "OUT"])),
    datatype=mostly(st.sampled_from(DATATYPES)),
    shape=mostly(st.lists(mostly(st.integers(0, 3)), max_size=3)),
    data=mostly(st.lists(numbers | st.text(max_size=3) | st.lists(numbers, max_size=2), max_size=9)),
    parameters=tensor_parameters,
)
requests = members(
    id=mostly(st.text(max_size=3)),
    parameters=members(sequence_id=values, timeout=values, binary_data_output=mostly(st.booleans()), other=values),
    inputs=mostly(st.lists(tensors, max_size=3)),
    outputs=mostly(st.lists(tensors, max_size=2)),
)


def try_infer(signature: ModelSignature, body: bytes, header: bytes | None) -> None:
    with contextlib.suppress(ConchError):
        length = parse_header_length(header, len(body))
        request, plan = decode_infer(body, length, signature, lambda response: None)
        validate_request(signature, request)
        encode_infer(request, InferResponse(list(request.inputs.values())), plan, lambda name: ["a"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SIGNATURES), st.binary(max_size=200), st.none() | st.integers(-1, 210))
def test_any_bytes_as_infer_body(signature: ModelSignature, body: bytes, length: int | None) -> None:
    try_infer(signature, body, None if length is None else str(length).encode())


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(SIGNATURES), requests, st.binary(max_size=40), st.booleans())
def test_any_document_as_infer_body(signature: ModelSignature, document: Any, data: bytes, framed: bool) -> None:
    header = json.dumps(document).encode()
    try_infer(signature, header + data, str(len(header)).encode() if framed else None)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SIGNATURES), st.text('[]{}":,\\u0dNa1.eE- \n', max_size=60) | st.binary(max_size=60))
def test_text_that_looks_like_json(signature: ModelSignature, body: str | bytes) -> None:
    try_infer(signature, body.encode() if isinstance(body, str) else body, None)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SIGNATURES),
    members(IN=values, B=values, id=values, x=values, parameters=members(IN=values, B=values, x=values)),
)
def test_any_document_as_generate_body(signature: ModelSignature, document: Any) -> None:
    with contextlib.suppress(ConchError):
        [request], layout = decode_generate(signature, json.dumps(document).encode(), False, MAX_INPUT_SIZE)
        assert layout is not None
        validate_request(signature, request)
        encode_generate(request, InferResponse(list(request.inputs.values())), layout)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([control.read_index, control.read_load, control.read_unload, control.read_log_settings]),
    st.binary(max_size=50)
    | st.builds(
        lambda document: json.dumps(document).encode(),
        members(
            ready=values,
            parameters=st.dictionaries(st.sampled_from(["config", "file:a", "unload_dependents"]), values),
            log_info=values,
            log_format=values,
            log_verbose_level=values,
        ),
    ),
)
def test_any_control_body(read: Any, body: bytes) -> None:
    with contextlib.suppress(ConchError):
        read(body)
