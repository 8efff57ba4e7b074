"""What models see of a request's place in its sequence."""

from __future__ import annotations

import struct

import pytest

from conch.core.errors import ConchError
from conch.core.inference import InferRequest
from conch.core.tensors import WireTensor, pack_bytes
from conch.server.schedulers.sequences.inputs import ControlInputs, StateTensor
from tests.unit.server.schedulers.sequences.bench import CONTROLS, OLDEST, POLICY, Bench, batching


def request(flags: int = 0, sequence: int | str = 1) -> InferRequest:
    return InferRequest("m", {}, print, flags=flags, correlation_id=sequence)


def correlation(kind: str) -> str:
    return f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} }}'


@pytest.mark.parametrize(("flags", "start", "end"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
def test_flags_become_the_values_of_the_configuration(flags: int, start: int, end: int) -> None:
    tensors = ControlInputs(batching(CONTROLS), batched=True).of(request(flags))
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors] == [
        ("START", "INT32", (1, 1)), ("END", "FP32", (1, 1)), ("READY", "BOOL", (1, 1))
    ]  # fmt: skip
    assert [bytes(tensor.data) for tensor in tensors] == [struct.pack("<i", start), struct.pack("<f", end), b"\1"]


def test_model_without_batches_gets_one_dimension() -> None:
    assert [one.shape for one in ControlInputs(batching(CONTROLS), batched=False).of(request())] == [(1,)] * 3


def test_row_without_a_request_is_not_ready() -> None:
    tensors = ControlInputs(batching(CONTROLS + correlation("STRING")), batched=True).of_null
    assert [bytes(tensor.data) for tensor in tensors] == [bytes(4), bytes(4), b"\0", bytes(4)]


@pytest.mark.parametrize(
    ("kind", "sequence", "data"),
    [
        ("UINT64", 2**64 - 1, b"\xff" * 8),
        ("INT64", 5, struct.pack("<q", 5)),
        ("UINT32", 2**33 + 5, struct.pack("<I", 5)),
        ("INT32", 5, struct.pack("<i", 5)),
        ("STRING", "früh", pack_bytes(["früh".encode()])),
    ],
)
def test_id_has_the_datatype_that_the_model_wants(kind: str, sequence: int | str, data: bytes) -> None:
    (tensor,) = ControlInputs(batching(correlation(kind)), batched=True).of(request(0, sequence))
    assert (bytes(tensor.data), tensor.datatype) == (data, "BYTES" if kind == "STRING" else kind)


@pytest.mark.parametrize(("kind", "sequence", "given"), [("INT32", "a", "BYTES"), ("STRING", 1, "UINT64")])
def test_id_of_the_other_kind_is_refused(kind: str, sequence: int | str, given: str) -> None:
    with pytest.raises(ConchError) as refused:
        ControlInputs(batching(correlation(kind)), batched=True).check("m", request(0, sequence))
    expects = "BYTES" if kind == "STRING" else kind
    assert refused.value.message == (
        f"[request id: <id_unknown>] sequence batching control 'ID' data-type is '{given}', but model 'm' expects "
        f"'{expects}'"
    )


class TestStates:
    FIRST = WireTensor("IN", "INT32", (1, 1), b"\7\0\0\0")

    def bench(self, policy: object = OLDEST) -> Bench:
        return Bench(policy, states=(StateTensor("IN", "OUT", self.FIRST),))  # type: ignore[arg-type]

    def state(self, bench: Bench) -> bytes:
        bench.batch()
        return bytes(bench.running["i0"][0].inputs["IN"].data)

    def test_output_of_a_request_is_the_input_of_the_next(self) -> None:
        bench = self.bench()
        bench.add("a", 1, "s")
        assert self.state(bench) == b"\7\0\0\0"
        assert bench.running["i0"][0].outputs == ("OUT",)
        bench.finish(
            outputs=(WireTensor("OUT", "INT32", (1, 1), b"\x08\0\0\0"), WireTensor("y", "INT32", (1,), b"abcd"))
        )
        assert [tensor.name for tensor in bench.answers["a"].outputs] == ["y"]
        bench.add("b", 1)
        assert self.state(bench) == b"\x08\0\0\0"
        bench.finish()
        bench.add("c", 1)
        assert self.state(bench) == b"\x08\0\0\0", "what is not given stays"

    def test_sequence_that_starts_again_has_its_first_state(self) -> None:
        bench = self.bench()
        bench.add("a", 1, "s")
        bench.batch()
        bench.finish(outputs=(WireTensor("OUT", "INT32", (1, 1), b"\x08\0\0\0"),))
        bench.add("b", 1, "s")
        assert self.state(bench) == b"\7\0\0\0"

    def test_output_that_the_client_asks_for_reaches_it_too(self) -> None:
        bench = self.bench()
        bench.add("a", 1, "s").outputs = ("OUT",)
        bench.batch()
        bench.finish(outputs=(WireTensor("OUT", "INT32", (1, 1), b"\x08\0\0\0"),))
        assert [tensor.name for tensor in bench.answers["a"].outputs] == ["OUT"]

    def test_row_without_a_request_has_a_state_of_zeros(self) -> None:
        bench = self.bench(POLICY)
        bench.add("a", 1, "s")
        bench.add("b", 2, "s")
        bench.turn()
        bench.add("c", 2)
        bench.batch()
        assert bytes(bench.running["i0"][0].inputs["IN"].data) == bytes(4)
