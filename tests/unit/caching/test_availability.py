"""When a cache that does not answer is tried again."""

from conch.caching.availability import PAUSES, Availability


def test_cache_that_does_not_answer_is_tried_less_and_less_often() -> None:
    cache, now = Availability(), 100.0
    assert cache.failed(now)
    for pause in (*PAUSES, PAUSES[-1]):
        assert not cache.should_try(now + pause - 0.1)
        now += pause
        assert cache.should_try(now) and not cache.should_try(now)
        assert not cache.failed(now)
    assert cache.should_try(now + PAUSES[-1])
    cache.answered()
    assert cache.up and not cache.should_try(now + 1000)
    assert cache.pause == PAUSES[0]


def test_calls_that_began_earlier_do_not_put_the_next_attempt_off() -> None:
    cache = Availability()
    assert cache.failed(100.0)
    assert not cache.failed(100.9)
    assert cache.should_try(101.0)
