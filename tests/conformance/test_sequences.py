"""How conch and Triton batch the requests of sequences: batches, rows, and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.conformance.raw import post, tensor
from tests.conftest import Server

Background = Callable[..., Future[Any]]
FIRST, LAST, ONLY = {"sequence_start": True}, {"sequence_end": True}, {"sequence_start": True, "sequence_end": True}


def send(server: Server, model: str, sequence: int | str, **parameters: Any) -> Any:
    """Return the rows of the batch in which a request ran, or its error."""
    body = {
        "inputs": [tensor("NUMBER", "INT32", [0], [1, 1])],
        "parameters": {"sequence_id": sequence, **parameters},
    }
    reply = post(server.http, f"/v2/models/{model}/infer", body)
    answer = reply.json()
    return answer["error"] if "error" in answer else json.loads(answer["outputs"][0]["data"][0])


def row(sequence: int, flags: int = 0) -> list[Any]:
    return [sequence, flags, 7 if flags & 1 else 3, 1.5 if flags & 2 else 0.5, sequence]


NULL = [0, 0, 3, 0.5]


class TestDirect:
    MODEL = "rows_direct"

    def test_a_sequence_keeps_its_row_and_others_are_filled_up(self, server: Server) -> None:
        assert send(server, self.MODEL, 1, **FIRST) == [row(1, 1)]
        assert send(server, self.MODEL, 2, **FIRST) == [NULL, row(2, 1)]
        assert send(server, self.MODEL, 2) == [NULL, row(2)]
        assert send(server, self.MODEL, 1, **LAST) == [row(1, 2)]
        assert send(server, self.MODEL, 3, **ONLY) == [row(3, 3)]
        assert send(server, self.MODEL, 2, **LAST) == [NULL, row(2, 2)]

    def test_sequence_that_starts_again_keeps_its_row(self, server: Server) -> None:
        send(server, self.MODEL, 1, **FIRST)
        send(server, self.MODEL, 2, **FIRST)
        assert send(server, self.MODEL, 2, **FIRST) == [NULL, row(2, 1)]
        assert send(server, self.MODEL, 2, **LAST) == [NULL, row(2, 2)]
        assert send(server, self.MODEL, 1, **LAST) == [row(1, 2)]


@pytest.mark.parametrize("model", ["rows_direct", "rows_oldest"])
class TestBoth:
    def test_sequence_without_a_slot_waits_for_one(self, server: Server, background: Background, model: str) -> None:
        for sequence in (1, 2, 3):
            send(server, model, sequence, **FIRST)
        fourth = background(send, server, model, 4, **ONLY)
        late = background(send, server, model, 5, timeout=100_000, **FIRST)
        assert late.result() == "timeout of the corresponding sequence has been expired"
        assert not fourth.done()
        send(server, model, 1, **LAST)
        assert row(4, 3) in fourth.result()
        for sequence in (2, 3):
            send(server, model, sequence, **LAST)

    def test_number_that_is_too_large_comes_cut(self, server: Server, model: str) -> None:
        assert send(server, model, 2**33 + 5, **ONLY) == [[2**33 + 5, 3, 7, 1.5, 5]]


def test_oldest_has_no_rows_to_fill_up(server: Server) -> None:
    for sequence in (1, 2):
        assert send(server, "rows_oldest", sequence, **FIRST) == [row(sequence, 1)]
    for sequence in (2, 1):
        assert send(server, "rows_oldest", sequence, **LAST) == [row(sequence, 2)]


def test_sequences_go_through_ensembles(server: Server) -> None:
    def ask(number: int, **parameters: Any) -> Any:
        body = {"inputs": [tensor("NUMBER", "INT32", [number], [1, 1])], "parameters": {"sequence_id": 8, **parameters}}
        answer = post(server.http, "/v2/models/accumulate_chain/infer", body).json()
        return answer["error"] if "error" in answer else answer["outputs"][0]["data"]

    assert ask(5, **FIRST) == [5]
    assert ask(6, **LAST) == [11]
    assert ask(7) == (
        "in ensemble 'accumulate_chain', inference request for sequence 8 to model 'accumulate' must specify the START "
        "flag on the first request of the sequence"
    )
