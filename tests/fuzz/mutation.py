"""Makes inputs from others: what a generator of random numbers decides, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from tests.fuzz.target import Target

_NUMBERS: Final = (
    b"0",
    b"-1",
    b"1",
    b"65536",
    b"2147483648",
    b"-9223372036854775808",
    b"18446744073709551616",
    b"1e400",
)
_BYTES: Final = (b"\0", b"\xff", b"\x80", b"\xff" * 4, b"\0" * 8, b"\xed\xa0\x80", b"\xe2\x80\xae", b"\xff" * 8)


def inputs(target: Target, random: Random) -> Iterator[bytes]:
    """The seeds of a target, and then variations of them without end."""
    yield b""
    yield from target.seeds
    while True:
        data = random.choice(target.seeds)
        for _ in range(random.choice((1, 1, 2, 3, 5, 8))):
            data = _changed(data, target, random)
        yield data[: target.most]


#: Values of every type, also as items and members, and a text that is nested deeply.
_VALUES: Final = (
    None, True, -1, 2**70, 1.5, "", "a", [], {}, [[]], [{}], ["a"], {"a": []}, {"type": {}}, "[" * 300 + "]" * 300,
)  # fmt: skip


def replacements(document: Any) -> Iterator[Any]:
    """Yield the JSON document with each of its values replaced by values of every type, one at a time."""
    yield from _VALUES
    if type(document) is dict:
        for name, value in document.items():
            yield from ({**document, name: other} for other in replacements(value))
    elif type(document) is list:
        for index, value in enumerate(document):
            yield from ([*document[:index], other, *document[index + 1 :]] for other in replacements(value))


def _changed(data: bytes, target: Target, random: Random) -> bytes:
    at = random.randint(0, len(data))
    length = random.choice((1, 1, 2, 4, 8, 32))
    match random.randrange(8):
        case 0:
            return data[:at] + random.randbytes(length) + data[at + length :]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[at : at + length] * random.choice((2, 3, 50)) + data[at + length :]
        case 4:
            other = random.choice(target.seeds)
            return data[:at] + other[random.randint(0, len(other)) :]
        case 5:
            return data[:at] + random.choice((*_NUMBERS, *_BYTES)) + data[at:]
        case _:
            token = random.choice(target.tokens) if target.tokens else random.randbytes(1)
            return data[:at] + token + data[at + random.choice((0, len(token))) :]
