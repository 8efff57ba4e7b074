"""The cache in memory: bounded by bytes, the entry used last stays longest."""

import pytest

from conch.core.errors import ConchError
from conch.core.tensors import WireTensor
from conch.options.triton_values import Setting
from conch.server.caching.cache import CachedResponse, kept
from conch.server.caching.chosen import make_cache
from conch.server.caching.local import LocalCache


def entry(size: int) -> CachedResponse:
    return CachedResponse((), {}, size)


def test_entry_that_was_used_longest_ago_makes_room() -> None:
    cache = LocalCache(300)
    scope = cache.scope("m", 1, b"")
    for key in (b"a", b"b", b"c"):
        assert scope.insert(key, entry(100))
    assert scope.find(b"a")
    assert scope.insert(b"d", entry(150))
    assert [bool(scope.find(key)) for key in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    assert (cache.used, cache.evictions, cache.hits, cache.lookups) == (250, 2, 3, 5)


def test_response_that_is_there_already_stays() -> None:
    cache = LocalCache(300)
    scope = cache.scope("m", 1, b"")
    first = entry(10)
    assert scope.insert(b"a", first)
    assert not scope.insert(b"a", entry(20))
    assert scope.find(b"a") is first and cache.used == 10


def test_response_larger_than_the_cache_drives_nothing_out(caplog: pytest.LogCaptureFixture) -> None:
    cache = LocalCache(300)
    scope = cache.scope("m", 1, b"")
    scope.insert(b"a", entry(10))
    for _ in range(2):
        scope.insert(b"b", entry(301))
    assert scope.find(b"a") and not scope.find(b"b")
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to insert key [62] into response cache: Requested byte_size: 301 is greater than total cache size: "
        "300 (responses of 'm' version 1)"
    ]


def test_version_that_ended_gives_its_memory_back_and_keeps_no_more() -> None:
    cache = LocalCache(300)
    old, new = cache.scope("m", 1, b""), cache.scope("m", 1, b"")
    old.insert(b"a", entry(100))
    new.insert(b"a", entry(50))
    old.forget()
    old.insert(b"b", entry(100))
    assert not old.find(b"a") and new.find(b"a") and cache.used == 50 and len(cache) == 1


def test_bytes_of_a_larger_frame_are_not_held() -> None:
    frame = bytearray(b"abcdefgh")
    found = kept([WireTensor("y", "UINT8", (2,), memoryview(frame)[2:4])], {"n": 1})
    frame[2:4] = b"xx"
    assert found.outputs[0].data == b"cd"
    assert found.size > 800 and found.response().parameters == {"n": 1}


def test_metrics_say_how_full_the_cache_is() -> None:
    cache = LocalCache(200)
    cache.scope("m", 1, b"").insert(b"a", entry(50))
    numbers = {metric.name: sample.value for metric, (sample,) in cache.families()}
    assert numbers["nv_cache_util"] == 0.25 and numbers["nv_cache_num_entries"] == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ([("local", "sizes", "3")], r"Failed to initialize LocalCache: config didn't contain a valid 'size' field\."),
        ([("local", "size", "abc")], "'size' is 'abc'; it must be a number of bytes"),
        ([("local", "size", "0")], "'size' is '0'"),
        ([("local", "size", "9" * 18)], "1 to the machine's memory"),
        ([("local", "size", "1"), ("local", "mode", "x")], "it has no setting 'mode', only 'size'"),
        ([("local", "size", "1"), ("redis", "host", "x")],
         "found multiple cache configurations, but only a single cache is currently supported"),
        ([("nonesuch", "a", "b")], "unable to find cache 'nonesuch'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(settings: list[tuple[str, str, str]], error: str) -> None:
    with pytest.raises(ConchError, match=error):
        make_cache(Setting(*setting) for setting in settings)


def test_last_of_two_sizes_holds() -> None:
    cache = make_cache([Setting("local", "size", "1000"), Setting("local", "size", "2000")])
    assert isinstance(cache, LocalCache) and cache.size == 2000
    assert make_cache([]) is None
