"""What is expected to be asked for, and what it takes."""

from __future__ import annotations

import pytest

from conch.checkpoints.manifest import Latency
from conch.convert.verdict import check_mix, cost_of, expected_speed_up, milliseconds, served
from conch.core.errors import ConchError
from conch.measure.texts.shapes import Shape, parse_mix


def latencies(*medians: float) -> list[Latency]:
    shapes = [(1, 16), (1, 128), (8, 16), (8, 128)]
    return [Latency(*shape, 0, 0, 0, 0, ms, 0, 0, runs=9) for shape, ms in zip(shapes, medians, strict=True)]


def test_weights_are_shares_of_all() -> None:
    assert parse_mix("1x16:9, 8x128:1") == {Shape(1, 16): 0.9, Shape(8, 128): 0.1}
    assert parse_mix("1x16,8x128") == {Shape(1, 16): 0.5, Shape(8, 128): 0.5}
    assert parse_mix("") == {}


@pytest.mark.parametrize("text", ["16", "1x16:", "0x16", "1x16:0", "1x16;8x128", "1x16:-1"])
def test_what_is_no_mix_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ConchError, match=r"--expect .*: (expected batch x tokens with a weight|at least one weight must be)"
    ):
        parse_mix(text)


def test_shape_that_nothing_is_known_about_is_refused_with_the_flag_to_add() -> None:
    with pytest.raises(ConchError, match=r"--expect 64x16 is outside .* add --batch-size 64"):
        check_mix(parse_mix("64x16"), [Shape(1, 16), Shape(8, 128)])
    check_mix(parse_mix("4x100"), [Shape(1, 16), Shape(8, 128)])


def test_request_of_more_tokens_than_the_server_runs_at_once_is_several_runs() -> None:
    assert list(served(Shape(32, 128))) == [Shape(8, 128)] * 4
    assert milliseconds(cost_of(latencies(1, 2, 3, 10)), Shape(32, 128)) == pytest.approx(40)


def test_which_is_faster_depends_on_what_is_expected() -> None:
    small, large = cost_of(latencies(1, 10, 10, 80)), cost_of(latencies(2, 10, 10, 40))

    assert expected_speed_up(small, large, parse_mix("1x16")) == pytest.approx(2)
    assert expected_speed_up(small, large, parse_mix("8x128")) == pytest.approx(0.5)
    assert expected_speed_up(small, large, parse_mix("1x16:0.99,8x128:0.01")) == pytest.approx(2.38 / 1.79)
