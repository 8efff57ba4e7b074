"""Sequences: their order, their ids, and how requests say them."""

from __future__ import annotations

import json

import pytest
from tritonclient.grpc import service_pb2

from conch.measure.perf.requests.payload import Payload, SequencePlan, SequenceSource, grpc_fields, json_fields

PAYLOADS = [Payload(json_fields(0), fields_at=0) for _ in range(5)]


def _take(turns: SequenceSource, slot: int) -> tuple[int, int, bool, bool]:
    number, payload = turns.take(slot, PAYLOADS)
    said = json.loads(b"{%b}" % payload.data)
    return number, said["sequence_id"], said["sequence_start"], said["sequence_end"]


def _ended(turns: SequenceSource, slot: int) -> None:
    turns.ended(slot, well=True, lost=False)


@pytest.mark.parametrize("identity", [1, 127, 128, 1 << 40, (1 << 63) - 1])
def test_both_protocols_say_the_same_in_as_many_bytes(identity: int) -> None:
    said = json.loads(b"{%b}" % json_fields(identity, start=True))
    assert said == {"sequence_id": identity, "sequence_start": True, "sequence_end": False}
    message = service_pb2.ModelInferRequest.FromString(grpc_fields(identity, end=True))
    parameters = message.parameters
    assert parameters["sequence_id"].int64_param == identity
    assert (parameters["sequence_start"].bool_param, parameters["sequence_end"].bool_param) == (False, True)
    assert len(json_fields(identity)) == len(json_fields(1, start=True, end=True))
    assert len(grpc_fields(identity)) == len(grpc_fields(1, start=True, end=True))


def test_streams_of_the_data_are_sequences_in_turn() -> None:
    turns = SequenceSource(SequencePlan([[0, 1, 2], [3]], "json"))
    seen = []
    for _ in range(5):
        seen.append(_take(turns, 0))
        _ended(turns, 0)
    assert seen == [(0, 1, True, False), (1, 1, False, False), (2, 1, False, True), (3, 2, True, True),
                    (0, 3, True, False)]  # fmt: skip


def test_lengths_vary_around_the_one_that_is_given() -> None:
    turns = SequenceSource(SequencePlan([[0]], "json", length=10, variation=0.2))
    lengths = [0]
    while len(lengths) <= 200:
        lengths[-1] += 1
        if _take(turns, 0)[3]:
            lengths.append(0)
        _ended(turns, 0)
    assert set(lengths[:-1]) == {8, 9, 10, 11, 12}


def test_ids_of_a_range_are_used_again_but_never_by_two_at_a_time() -> None:
    shares = [
        SequenceSource(SequencePlan([[0]], "json", length=3, variation=0, first=5, last=11), n, 2) for n in (0, 1)
    ]
    for turns in shares:
        _take(turns, 0)  # and never continues
    running = [[_take(turns, slot)[1] for slot in (1, 2) for turns in shares]]
    for _ in range(10):
        for slot in (1, 2):
            for turns in shares:
                while not _take(turns, slot)[3]:
                    _ended(turns, slot)
                _ended(turns, slot)
        running.append([_take(turns, slot)[1] for slot in (1, 2) for turns in shares])
    for ids in running:
        assert len(set(ids)) == 4 and set(ids) <= set(range(7, 11))


def test_a_sequence_that_failed_at_the_start_or_lost_its_connection_restarts() -> None:
    turns = SequenceSource(SequencePlan([[0, 1, 2]], "json"))
    assert _take(turns, 0)[1:3] == (1, True)
    turns.ended(0, well=False, lost=False)
    assert _take(turns, 0)[1:3] == (2, True)
    _ended(turns, 0)
    assert _take(turns, 0)[1:3] == (2, False)
    turns.ended(0, well=False, lost=False)
    assert _take(turns, 0)[1:] == (2, False, True)
    _ended(turns, 0)
    _take(turns, 0)
    turns.ended(0, well=False, lost=True)
    assert _take(turns, 0)[1:3] == (4, True)


def test_what_was_begun_can_be_ended_early() -> None:
    turns = SequenceSource(SequencePlan([[0, 1, 2]], "json"))
    assert not turns.finish(0)
    _take(turns, 0)
    _ended(turns, 0)
    assert turns.finish(0)
    assert _take(turns, 0)[3]
    _ended(turns, 0)
    assert not turns.finish(0)
