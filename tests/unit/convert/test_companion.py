"""When a second variant is held for some shapes, and when it is not worth its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conch.checkpoints.manifest import Latency, Manifest, Source, Variant
from conch.convert.run import PossibleCompanion, candidates
from conch.measure.texts.shapes import parse_mix

ENGINES = frozenset({"openvino", "onnxruntime"})
SHAPES = ((1, 16), (1, 128), (8, 16), (8, 128))


def variant(name: str, *medians: float, passed: bool = True, **figures: Any) -> Variant:
    values = {"runs": 20, "spread": 0.05, **figures}
    latency = tuple(
        Latency(*shape, ms, 0, ms, ms, ms, ms, ms, **values) for shape, ms in zip(SHAPES, medians, strict=True)
    )
    return Variant(name, name.partition("-")[0], name.partition("-")[2], latency=latency, passed=passed)


def found(other: Variant, mix: str = "", auto: Variant | None = None) -> list[PossibleCompanion]:
    auto = auto or variant("openvino-int8", 2, 8, 8, 60)
    manifest = Manifest(Source("m"), "feature-extraction", (auto, other), auto.name, {})
    return candidates(manifest, ENGINES, parse_mix(mix))


def test_variant_that_is_much_faster_at_a_shape_is_worth_it() -> None:
    (one,) = found(variant("onnxruntime-int8", 1, 9, 8, 90))

    assert one.worth_it
    assert one.where == "1x16 (2.00x)"
    assert [gain.gain for gain in one.companion.gains] == [2, 0.889, 1, 0.667]
    # Twice as fast at one of four shapes that weigh the same.
    assert one.companion.overall == pytest.approx(2**0.25, abs=0.001)


def test_figure_that_a_busy_machine_kept_waiting_for_seconds_is_a_gain_of_nearly_nothing() -> None:
    (one,) = found(variant("onnxruntime-int8", 1, 20_000, 8, 90))

    assert [gain.gain for gain in one.companion.gains] == [2, 0.001, 1, 0.667]


def test_difference_within_the_quartiles_is_noise() -> None:
    assert found(variant("onnxruntime-int8", 1.7, 9, 9, 90))
    assert not found(variant("onnxruntime-int8", 1.7, 9, 9, 90, spread=0.3))


def test_small_difference_that_is_certain_is_too_little() -> None:
    assert not found(variant("onnxruntime-int8", 1.9, 8, 8, 58, spread=0.0))


@pytest.mark.parametrize("figures", [{"busy": True}, {"runs": 3}])
def test_figures_that_are_not_to_be_relied_on_choose_nothing(figures: dict[str, Any]) -> None:
    assert not found(variant("onnxruntime-int8", 1, 9, 9, 90, **figures))


def test_variant_that_was_refused_or_does_not_serve_is_no_candidate() -> None:
    assert not found(variant("onnxruntime-int8", 1, 1, 1, 1, passed=False))
    assert not found(replace(variant("torch-fp32", 1, 1, 1, 1)))


def test_what_is_expected_decides_whether_it_is_worth_it() -> None:
    other = variant("onnxruntime-int8", 1, 9, 9, 90)

    (often,), (seldom,) = found(other, "1x16"), found(other, "1x16:0.1,8x128:0.9")

    assert often.worth_it and often.companion.overall == pytest.approx(2)
    assert not seldom.worth_it
