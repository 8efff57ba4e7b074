"""Header blocks that are far larger when decoded, or never end: the connection ends, and the server continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from conch.http2 import frames
from tests.conformance.raw import get
from tests.conftest import Server, Start
from tests.hostile.raw_http import connect
from tests.models import build

#: A literal that is added to HPACK's table: ``x`` with 4000 bytes.
_ENTRY: Final = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000


def _headers(block: bytes, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, 1, block)


def _continued(block: bytes, count: int) -> bytes:
    return _headers(b"\x83", 0) + frames.frame(frames.CONTINUATION, 0, 1, block) * count


FLOODS: Final[Mapping[str, bytes]] = {
    "one large entry, named 12,000 times": _headers(_ENTRY + b"\xbe" * 12_000),
    "96 MB in one block of many frames": _headers(_ENTRY, 0)
    + frames.frame(frames.CONTINUATION, 0, 1, b"\xbe" * 12_000) * 2
    + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\xbe"),
    "empty CONTINUATION frames": _continued(b"", 200_000),
    "CONTINUATION frames of one byte": _continued(b"\x83", 200_000),
    "large CONTINUATION frames": _continued(b"\0\x01a\x01b" * 3000, 500),
    "an integer without an end": _headers(b"\x7f" + b"\xff" * 100),
    "an index beyond the table": _headers(b"\xff\xff\xff\xff\x0f"),
    "a string longer than the block": _headers(b"\x40\x01x\x7f\xff\xff\xff\x07"),
    "a table of 4 GiB": _headers(b"\x3f\xe1\xff\xff\xff\x0f"),
    "Huffman code that ends in the middle": _headers(b"\x40\x81\x00\x81\x00"),
}


@pytest.fixture(scope="module")
def server(server_kind: str, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("headers")
    with start(build(folder / "models", "add_sub"), log=folder / f"{server_kind}.log") as server:
        yield server


@pytest.mark.parametrize("name", FLOODS)
def test_header_block_that_is_a_bomb_ends_the_connection(server: Server, server_kind: str, name: str) -> None:
    with connect(server.grpc) as connection:
        try:
            connection.sendall(frames.PREFACE + frames.settings({}) + FLOODS[name])
            # The real Triton resets the stream if it can, or continues to read.
            while server_kind == "conch" and connection.recv(1 << 16):
                pass
        except ConnectionError:
            pass
    assert get(server.http, "/v2/models/add_sub").status == 200
