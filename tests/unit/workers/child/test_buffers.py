"""Channel buffers: both sides of one in this process, joined by the descriptor alone."""

from __future__ import annotations

import os

import pytest

from conch.core.errors import ConchError
from conch.workers.child.buffers import BufferMap, BufferPool, ChannelBuffer

MIB = 1 << 20


def announce(buffer: ChannelBuffer, buffers: BufferMap) -> None:
    buffers.add(buffer.id, buffer.size, os.dup(buffer.fd))


def test_reader_sees_what_the_owner_writes_and_the_other_way_round() -> None:
    pool, buffers = BufferPool(), BufferMap()
    buffer = pool.take(100_000)
    announce(buffer, buffers)
    buffer.map[:5] = b"hello"
    assert buffers.get(buffer.id)[:5] == b"hello"
    buffers.get(buffer.id)[:5] = b"HELLO"
    assert buffer.map[:5] == b"HELLO"


def test_buffer_is_not_reused_before_the_reader_gives_it_back() -> None:
    pool = BufferPool()
    first = pool.take(100_000)
    assert pool.take(100_000).id != first.id
    pool.release([first.id])
    assert pool.take(99_000).id == first.id


def test_only_new_buffers_are_announced_and_only_once() -> None:
    pool = BufferPool()
    buffer = pool.take(1000)
    assert pool.has_changes
    assert pool.take_changes() == ([buffer], [])
    pool.release([buffer.id])
    pool.take(1000)
    assert not pool.has_changes
    assert pool.take_changes() == ([], [])


def test_buffers_that_were_not_needed_for_a_while_are_dropped() -> None:
    pool = BufferPool()
    lent, free = pool.take(100_000), pool.take(200_000)
    pool.take_changes()
    pool.release([free.id])
    pool.trim()
    assert pool.take_changes() == ([], [free.id])
    assert pool.size == lent.size
    pool.release([lent.id])
    pool.trim()
    assert pool.size == 0


def test_smallest_fitting_buffer_is_taken() -> None:
    pool = BufferPool()
    large, small = pool.take(3 * MIB), pool.take(2 * MIB)
    pool.release([large.id, small.id])
    assert pool.take(2 * MIB).id == small.id


def test_small_tensor_does_not_take_a_buffer_much_larger_than_itself() -> None:
    pool = BufferPool()
    large = pool.take(32 * MIB)
    pool.release([large.id])
    assert pool.take(100_000).id != large.id


def test_oldest_free_buffers_are_dropped_beyond_the_idle_limit() -> None:
    pool = BufferPool(idle_limit=4 * MIB)
    buffers = [pool.take(2 * MIB) for _ in range(3)]
    pool.take_changes()
    pool.release([buffer.id for buffer in buffers])
    assert list(pool.free) == [buffers[1].id, buffers[2].id]
    assert pool.take_changes() == ([], [buffers[0].id])
    with pytest.raises(OSError):
        os.fstat(buffers[0].fd)


def test_buffer_beyond_the_idle_limit_is_not_kept_at_all() -> None:
    pool = BufferPool(idle_limit=MIB)
    buffer = pool.take(2 * MIB)
    pool.release([buffer.id])
    assert not pool.free


def test_release_of_a_buffer_that_is_not_lent_is_an_error() -> None:
    pool = BufferPool()
    buffer = pool.take(10)
    pool.release([buffer.id])
    with pytest.raises(ConchError, match="is not lent"):
        pool.release([buffer.id])


def test_closing_the_pool_closes_every_descriptor() -> None:
    pool = BufferPool()
    lent, free = pool.take(10), pool.take(10)
    pool.release([free.id])
    pool.close()
    for buffer in (lent, free):
        with pytest.raises(OSError):
            os.fstat(buffer.fd)


def test_view_of_a_closed_buffer_stays_valid() -> None:
    pool = BufferPool()
    buffer = pool.take(10)
    view = memoryview(buffer.map)
    pool.close()
    view[0] = 7
    assert view[0] == 7


def test_buffer_smaller_than_announced_is_refused_and_its_descriptor_closed() -> None:
    buffer, buffers = BufferPool().take(1000), BufferMap()
    fd = os.dup(buffer.fd)
    with pytest.raises(ConchError, match="smaller than"):
        buffers.add(1, buffer.size + 1, fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_forgotten_buffer_is_unknown() -> None:
    buffer, buffers = BufferPool().take(1000), BufferMap()
    announce(buffer, buffers)
    buffers.forget(buffer.id)
    with pytest.raises(ConchError, match="unknown"):
        buffers.get(buffer.id)
    with pytest.raises(ConchError, match="unknown"):
        buffers.forget(buffer.id)


def test_without_memfd_an_unlinked_file_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pool, buffers = BufferPool(), BufferMap()
    buffer = pool.take(1000)
    announce(buffer, buffers)
    buffer.map[:2] = b"ok"
    assert buffers.get(buffer.id)[:2] == b"ok"
    assert os.fstat(buffer.fd).st_nlink == 0
