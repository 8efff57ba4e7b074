"""How answers of each server read."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.generation.answer import Answer, Events, read
from benchmarks.generation.dialects import Conch, Dialect, Llama, OpenAI, Triton
from benchmarks.generation.trace import Ask


def response(*parts: str, status: str = "200 OK") -> bytes:
    """A chunked one, a chunk for each of ``parts``."""
    chunks = "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in parts)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_may_be_torn_anywhere(size: int) -> None:
    stream = b'data: {"a": 1}\n\n: nothing\n\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'
    events = Events()
    found = [event for at in range(0, len(stream), size) for event in events.add(stream[at : at + size])]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


DIALECTS: list[tuple[Dialect, list[str], int | None]] = [
    (Conch("m"), ['{"text_output": "a"}', '{"text_output": "bc"}', '{"text_output": ""}'], None),
    (
        Conch("m", counted=True),
        ['{"text_output": "a", "num_output_tokens": 1}', '{"text_output": ["bc"], "num_output_tokens": [2]}'],
        3,
    ),
    (
        OpenAI("m"),
        [
            '{"choices": [{"text": "a"}]}',
            '{"choices": [{"text": "bc"}]}',
            '{"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}',
            "[DONE]",
        ],
        3,
    ),
    (Llama("m"), ['{"content": "a"}', '{"content": "bc"}', '{"content": "", "stop": true, "tokens_predicted": 3}'], 3),
]


@pytest.mark.parametrize(("dialect", "events", "counted"), DIALECTS)
def test_text_comes_with_its_moment(dialect: Dialect, events: list[str], counted: int | None) -> None:
    answer = Answer(dialect.streams)
    for moment, byte in enumerate(response(*(f"data: {event}\n\n" for event in events))):
        answer.add(bytes([byte]), moment)
    record = read(answer, dialect, due=0, tokens=3, arrival=False)
    assert record.text == "abc"
    assert record.counted == counted
    assert len(record.times) == 2
    assert 0 < record.times[0] < record.times[1] < record.end


def test_an_answer_that_is_not_streamed_comes_at_its_end() -> None:
    answer = Answer(Triton.streams)
    answer.add(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"text": "', 5)
    answer.add(b'abc"}', 9)
    record = read(answer, Triton("m"), due=1, tokens=3, arrival=True)
    assert (record.text, record.times, record.end) == ("abc", [9], 9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (response('{"error": "no such model"}', status="404 Not Found"), "HTTP 404.*no such model"),
        (response('data: {"error": "out of memory"}\n\n'), "out of memory"),
        (response(), "without text"),
        (response("data: {}\n\n")[:-5], "hung up after 1 events"),
    ],
)
def test_an_answer_that_is_an_error_is_refused(data: bytes, message: str) -> None:
    answer = Answer(True)
    answer.add(data, 0)
    with pytest.raises(RuntimeError, match=message):
        read(answer, Llama("m"), due=0, tokens=3, arrival=False)


@pytest.mark.parametrize("dialect", [Conch("m"), OpenAI("m"), Llama("m"), Triton("m")])
def test_a_request_says_how_many_tokens_it_wants(dialect: Dialect) -> None:
    body: dict[str, Any] = dialect.body(Ask("Hello", 7))
    assert 7 in body.values()
    assert "Hello" in body.values()
    assert f"POST {dialect.path} HTTP/1.1\r\nHost: a:1\r\n".encode() in dialect.request("a:1", Ask("Hello", 7))
