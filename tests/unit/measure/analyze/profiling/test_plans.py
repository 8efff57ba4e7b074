"""How models are asked: flags of conch perf in the settings of an analysis."""

from __future__ import annotations

from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.measure.analyze.options.settings import AnalyzeSettings, ModelSettings
from conch.measure.analyze.profiling.measurement import at_load, plan_of
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import Shape

HERE = Address("localhost", 8001)


def test_flags_are_those_of_conch_perf_and_a_models_own_come_first() -> None:
    settings = AnalyzeSettings(
        perf_analyzer_flags={"measurement-interval": "500", "shape": ["x:3,4", "y:1"], "s": 20},
        profile_models=(ModelSettings(name="m", perf_flags={"--string_data": "hello", "p": 900}, batch_sizes=(4,)),),
    )

    plan = plan_of(settings, "m", HERE)

    assert (plan.interval, plan.share, plan.batch_size, plan.protocol) == (0.9, 0.2, 4, "grpc")
    assert plan.data.shapes == {"x": (3, 4), "y": (1,)}
    assert plan.data.string_data == "hello"


def test_texts_are_natural_ones_of_a_mix_that_can_be_given() -> None:
    assert plan_of(AnalyzeSettings(), "m", HERE).data == DataOptions("natural")
    given = AnalyzeSettings(perf_analyzer_flags={"expect": "1x16:3,2x64"})
    assert plan_of(given, "m", HERE).data.mix == {Shape(1, 16): 0.75, Shape(2, 64): 0.25}


def test_a_load_is_callers_or_a_rate() -> None:
    plan = plan_of(AnalyzeSettings(), "m", HERE)

    assert list(at_load(plan, 16, rate=False).concurrency) == [16]
    assert list(at_load(plan, 50, rate=True).rates or ()) == [50]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"perf_analyzer_flags": {"shapes": "x:1"}}, "did you mean 'shape"),
        ({"perf_analyzer_flags": {"url": "x"}}, "an analysis has no flag 'url'"),
        ({"perf_analyzer_flags": {"shape": "x:a"}}, "input:dimension,dimension"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConchError, match=told):
        plan_of(AnalyzeSettings(**settings), "m", HERE)
