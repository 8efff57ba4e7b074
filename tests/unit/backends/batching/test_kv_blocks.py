from __future__ import annotations

from conch.backends.batching.kv_blocks import KvBlocks


def test_slot_grows_by_whole_blocks_until_the_cache_is_full() -> None:
    cache = KvBlocks(3, 4)
    assert cache.reserve(0, 5)
    assert len(cache.blocks(0)) == 2
    assert cache.reserve(0, 8)
    assert cache.free == 1
    assert not cache.reserve(1, 5)
    assert cache.blocks(1) == []
    assert cache.reserve(1, 4)
    assert cache.free == 0


def test_full_blocks_are_shared_and_the_last_one_is_copied() -> None:
    cache = KvBlocks(4, 4)
    cache.reserve(0, 8)
    shared, copied = cache.share(0, 1, 6)
    assert shared
    assert copied == (cache.blocks(0)[1], cache.blocks(1)[1])
    assert cache.blocks(1)[0] == cache.blocks(0)[0]
    assert cache.free == 1
    assert cache.share(0, 2, 8) == (True, None)
    assert cache.free == 1


def test_share_without_room_for_the_copy_changes_nothing() -> None:
    cache = KvBlocks(1, 4)
    cache.reserve(0, 3)
    assert cache.share(0, 1, 3) == (False, None)
    assert (cache.blocks(1), cache.free) == ([], 0)


def test_shared_block_is_free_after_its_last_slot() -> None:
    cache = KvBlocks(2, 4)
    cache.reserve(0, 8)
    cache.share(0, 1, 4)
    cache.truncate(0, 0)
    assert cache.free == 1
    cache.truncate(1, 0)
    assert cache.free == 2


def test_truncated_slot_keeps_the_block_that_its_tokens_end_in() -> None:
    cache = KvBlocks(4, 4)
    cache.reserve(0, 16)
    cache.truncate(0, 5)
    assert len(cache.blocks(0)) == 2
    assert cache.free == 2


def test_blocks_of_retained_slots_are_not_pinned_unless_a_running_slot_shares_them() -> None:
    cache = KvBlocks(4, 4)
    cache.reserve(0, 12)
    cache.share(0, 1, 4)
    cache.retain(0)
    assert (cache.pinned, cache.free) == (1, 1)
    assert cache.unpinned(0, 12) == 2
    cache.truncate(0, 8)
    assert (cache.pinned, cache.free) == (1, 2)
    cache.resume(0)
    assert cache.pinned == 2
    cache.truncate(0, 0)
    cache.truncate(1, 0)
    assert (cache.pinned, cache.free) == (0, 4)
