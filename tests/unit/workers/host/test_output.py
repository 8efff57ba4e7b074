"""The lines of a worker's output, from a pipe."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator

import pytest

from conch.workers.host.spawn import WorkerOutput


class Pipe:
    def __init__(self) -> None:
        self.readable, self.writable = os.pipe()
        self.lines: list[str] = []
        self.output = WorkerOutput(self.readable, self.lines.append)

    def write(self, data: bytes) -> None:
        os.write(self.writable, data)

    @property
    def unread(self) -> bool:
        return bool(select.select([self.readable], [], [], 0)[0])

    def end(self) -> None:
        if self.writable >= 0:
            os.close(self.writable)
            self.writable = -1


@pytest.fixture
async def pipe() -> Iterator[Pipe]:  # type: ignore[misc]
    pipe = Pipe()
    yield pipe
    pipe.output.close()
    pipe.end()


async def lines(pipe: Pipe, count: int) -> list[str]:
    async with asyncio.timeout(30):
        while len(pipe.lines) < count:
            await asyncio.sleep(0)
    return pipe.lines


async def test_lines_are_passed_on_as_they_end(pipe: Pipe) -> None:
    pipe.write(b"one\ntw")
    assert await lines(pipe, 1) == ["one"]
    pipe.write("o é\n\n \nthree\n".encode())
    assert await lines(pipe, 3) == ["one", "two é", "three"]


async def test_of_a_progress_bar_the_last_state_is_passed_on(pipe: Pipe) -> None:
    pipe.write(b"\r  0%|    |\r 50%|##  |\r100%|####|\nwindows\r\n")
    assert await lines(pipe, 2) == ["100%|####|", "windows"]


async def test_a_line_that_does_not_end_is_passed_on_in_pieces(pipe: Pipe) -> None:
    for _ in range(3):
        pipe.write(b"x" * 30_000)
        while pipe.unread:
            await asyncio.sleep(0)
    assert [set(line) for line in await lines(pipe, 1)] == [{"x"}]


async def test_what_is_left_when_the_worker_ends_is_passed_on(pipe: Pipe) -> None:
    pipe.write(b"Fatal Python error\n" * 3000 + b"the end \xff")
    pipe.output.close()
    assert (len(pipe.lines), pipe.lines[-1]) == (3001, "the end �")
    with pytest.raises(OSError):
        os.fstat(pipe.readable)


async def test_nothing_is_watched_when_no_writer_is_left(pipe: Pipe) -> None:
    pipe.write(b"last\n")
    pipe.end()
    assert await lines(pipe, 1) == ["last"]
    async with asyncio.timeout(30):
        with pytest.raises(OSError):
            while os.fstat(pipe.readable):
                await asyncio.sleep(0)


async def test_a_child_that_keeps_writing_does_not_keep_the_output_open(pipe: Pipe) -> None:
    pipe.write(b"child\n")
    pipe.output.close()  # while the writing end is still open
    assert pipe.lines == ["child"]
