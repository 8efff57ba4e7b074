"""Memory regions: both sides of one in this process, joined by the descriptor alone."""

from __future__ import annotations

import os

import pytest

from conch.core.errors import ConchError
from conch.workers.child import memory
from conch.workers.child.memory import Region, RegionMap, RegionPool

MIB = 1 << 20


def announce(region: Region, regions: RegionMap) -> None:
    regions.add(region.id, region.size, os.dup(region.fd))


def test_reader_sees_what_the_owner_writes_and_the_other_way_round() -> None:
    pool, regions = RegionPool(), RegionMap()
    region = pool.take(100_000)
    announce(region, regions)
    region.map[:5] = b"hello"
    assert regions.get(region.id)[:5] == b"hello"
    regions.get(region.id)[:5] = b"HELLO"
    assert region.map[:5] == b"HELLO"


def test_region_is_not_reused_before_the_reader_gives_it_back() -> None:
    pool = RegionPool()
    first = pool.take(100_000)
    assert pool.take(100_000).id != first.id
    pool.release([first.id])
    assert pool.take(99_000).id == first.id


def test_only_new_regions_are_announced_and_only_once() -> None:
    pool = RegionPool()
    region = pool.take(1000)
    assert pool.has_changes
    assert pool.take_changes() == ([region], [])
    pool.release([region.id])
    pool.take(1000)
    assert not pool.has_changes
    assert pool.take_changes() == ([], [])


def test_regions_that_nobody_has_needed_for_a_while_are_dropped() -> None:
    pool = RegionPool()
    lent, free = pool.take(100_000), pool.take(200_000)
    pool.take_changes()
    pool.release([free.id])
    pool.trim()
    assert pool.take_changes() == ([], [free.id])
    assert pool.size == lent.size
    pool.release([lent.id])
    pool.trim()
    assert pool.size == 0


def test_smallest_fitting_region_is_taken() -> None:
    pool = RegionPool()
    large, small = pool.take(3 * MIB), pool.take(2 * MIB)
    pool.release([large.id, small.id])
    assert pool.take(2 * MIB).id == small.id


def test_small_tensor_does_not_take_a_region_much_larger_than_itself() -> None:
    pool = RegionPool()
    large = pool.take(32 * MIB)
    pool.release([large.id])
    assert pool.take(100_000).id != large.id


def test_oldest_free_regions_are_dropped_beyond_the_idle_limit() -> None:
    pool = RegionPool(idle_limit=4 * MIB)
    regions = [pool.take(2 * MIB) for _ in range(3)]
    pool.take_changes()
    pool.release([region.id for region in regions])
    assert list(pool.free) == [regions[1].id, regions[2].id]
    assert pool.take_changes() == ([], [regions[0].id])
    with pytest.raises(OSError):
        os.fstat(regions[0].fd)


def test_region_beyond_the_idle_limit_is_not_kept_at_all() -> None:
    pool = RegionPool(idle_limit=MIB)
    region = pool.take(2 * MIB)
    pool.release([region.id])
    assert not pool.free


def test_release_of_a_region_that_is_not_lent_is_an_error() -> None:
    pool = RegionPool()
    region = pool.take(10)
    pool.release([region.id])
    with pytest.raises(ConchError, match="is not lent"):
        pool.release([region.id])


def test_closing_the_pool_closes_every_descriptor() -> None:
    pool = RegionPool()
    lent, free = pool.take(10), pool.take(10)
    pool.release([free.id])
    pool.close()
    for region in (lent, free):
        with pytest.raises(OSError):
            os.fstat(region.fd)


def test_view_of_a_closed_region_stays_valid() -> None:
    pool = RegionPool()
    region = pool.take(10)
    view = memoryview(region.map)
    pool.close()
    view[0] = 7
    assert view[0] == 7


def test_region_smaller_than_announced_is_refused_and_its_descriptor_closed() -> None:
    region, regions = RegionPool().take(1000), RegionMap()
    fd = os.dup(region.fd)
    with pytest.raises(ConchError, match="smaller than"):
        regions.add(1, region.size + 1, fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_forgotten_region_is_unknown() -> None:
    region, regions = RegionPool().take(1000), RegionMap()
    announce(region, regions)
    regions.forget(region.id)
    with pytest.raises(ConchError, match="unknown"):
        regions.get(region.id)
    with pytest.raises(ConchError, match="unknown"):
        regions.forget(region.id)


def test_without_memfd_an_unlinked_file_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.os, "memfd_create")
    pool, regions = RegionPool(), RegionMap()
    region = pool.take(1000)
    announce(region, regions)
    region.map[:2] = b"ok"
    assert regions.get(region.id)[:2] == b"ok"
    assert os.fstat(region.fd).st_nlink == 0
