"""Which models are loaded again whose files are the same."""

from __future__ import annotations

from conch.errors import ConchError, invalid, unavailable
from conch.repository.errors import NotFoundError, PollError
from conch.server.polling import Retries


def lost(name: str) -> ConchError:
    return PollError.of(name, unavailable("the store is away"), passing=True)


def looks_until_due(retries: Retries) -> int:
    return next(count for count in range(1, 100) if retries.due())


def test_what_could_not_be_downloaded_is_tried_again_less_and_less_often() -> None:
    retries = Retries()
    counts = []
    for _ in range(8):
        retries.note(["m"], {"m": lost("m")})
        counts.append(looks_until_due(retries))
    assert counts == [1, 2, 4, 8, 16, 32, 32, 32]
    retries.note(["m"], {})
    assert not any(retries.due() for _ in range(40))
    retries.note(["m"], {"m": lost("m")})
    assert retries.due() == ["m"]
    assert not any(retries.due() for _ in range(40))  # it is being loaded


def test_what_is_broken_or_gone_is_not_tried_again() -> None:
    retries = Retries()
    retries.note(["broken", "absent", "gone"], {
        "broken": PollError.of("broken", invalid("no configuration")),
        "absent": NotFoundError("absent"),
        "gone": lost("gone"),
    })  # fmt: skip
    retries.forget("gone")
    assert not any(retries.due() for _ in range(40))


def test_what_failed_beside_it_is_tried_again_when_it_is_there() -> None:
    retries = Retries()
    retries.note(["step", "ensemble", "fine"], {"step": lost("step"), "ensemble": invalid("no step")})
    assert retries.due() == ["step"]
    retries.note(["step"], {"step": lost("step")})
    assert [retries.due(), retries.due()] == [[], ["step"]]
    retries.note(["step"], {})
    assert retries.due() == ["ensemble"]
    retries.note(["ensemble"], {"ensemble": invalid("no step")})
    assert not any(retries.due() for _ in range(40))
