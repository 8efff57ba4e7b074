"""Windows of streams: whatever the sizes of its messages are, a client may always send the next one."""

from __future__ import annotations

import pytest

from conch.http2 import STREAM_WINDOW
from tests.unit.frontends.grpc.conftest import text_request


@pytest.mark.parametrize(
    "sizes",
    [
        (100_000, 200_000),
        (120_000, 250_000),
        *((STREAM_WINDOW - less,) for less in range(64, 80)),
        (100_000, 100_000, 230_000, 131_000, 262_000),
    ],
)
def test_stream_continues_whatever_the_sizes_of_its_messages_are(stub, sizes):
    call = stub.ModelStreamInfer(iter([text_request("echo", "x" * size) for size in sizes]), timeout=60)
    assert [len(answer.infer_response.raw_output_contents[0]) - 4 for answer in call] == list(sizes)
