"""When a service somewhere else that failed is used again."""

from conch.server.caching.redis import PAUSES, Availability


def test_service_that_stays_down_is_attempted_less_and_less_often() -> None:
    service, now = Availability(), 100.0
    service.failed(now)
    for number, pause in enumerate((0.0, *PAUSES, PAUSES[-1])):
        assert not service.should_attempt(now + pause - 0.1)
        now += pause
        assert service.should_attempt(now) and not service.should_attempt(now)
        assert service.attempt_failed(now) == (0.0 if number else PAUSES[0])
    assert service.should_attempt(now + PAUSES[-1])
    assert service.attempt_succeeded()
    assert service.up and not service.should_attempt(now + 1000)


def test_one_failure_is_not_told_when_the_attempt_after_it_succeeds() -> None:
    service = Availability()
    service.failed(100.0)
    assert not service.up and service.should_attempt(100.0)
    service.failed(100.1)  # a call that began before
    assert not service.attempt_succeeded() and service.up


def test_calls_that_began_earlier_do_not_put_the_next_attempt_off() -> None:
    service = Availability()
    service.failed(100.0)
    assert service.should_attempt(100.0) and service.attempt_failed(100.0)
    service.failed(100.9)
    assert service.should_attempt(101.0)
