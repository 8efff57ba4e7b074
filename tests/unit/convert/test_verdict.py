"""Which variant serves."""

from __future__ import annotations

from dataclasses import replace

from conch.checkpoints.manifest import Latency, Manifest, Source, Variant
from conch.convert.verdict import choose, fastest


def test_fastest_is_chosen() -> None:
    assert fastest({"a": 1.0, "b": 3.0, "c": 2.0}) == "b"
    assert fastest({}) == ""


def manifest(busy: bool) -> Manifest:
    def variant(name: str, median: float) -> Variant:
        latency = Latency(1, 16, median, 0, median, median, median, median, median, runs=9, busy=busy)
        return Variant(name, name.partition("-")[0], "fp32", latency=(latency,), passed=True)

    variants = (variant("torch-fp32", 4), variant("openvino-fp32", 2))
    return Manifest(Source("m"), "fill-mask", variants, "", {}, machine={"others": 0.46})


def test_choice_from_figures_of_a_busy_machine_is_never_silent() -> None:
    engines = frozenset({"torch", "openvino"})

    chosen = choose(manifest(busy=True), engines, force=False, advice="")

    assert chosen.auto == "openvino-fp32"
    assert chosen.warnings == (
        "the machine was busy (other processes used 46% of the cores): 2 of 2 latencies are not reliable, and a "
        "variant other than 'openvino-fp32' may be the fastest; convert again when it is idle",
    )
    assert choose(manifest(busy=False), engines, force=False, advice="").warnings == ()


def test_a_speed_up_that_others_disturbed_is_no_reason() -> None:
    engines = frozenset({"torch", "openvino"})

    assert choose(manifest(busy=False), engines, force=False, advice="").choice == (
        "'openvino-fp32' is 2.00x as fast as torch-fp32 over all shapes; next is 'torch-fp32' with 1.00x",
    )
    assert choose(manifest(busy=True), engines, force=False, advice="").choice == (
        "'openvino-fp32' was the fastest over all shapes, but other processes used the machine, so the factor "
        "is unknown",
    )


def test_what_disturbed_is_named() -> None:
    machine = {"others": 0.05, "stolen": 0.04, "throttled": 0.3}

    chosen = choose(replace(manifest(busy=True), machine=machine), frozenset({"openvino"}), force=False, advice="")

    assert "other processes used 5% of the cores, 4% went to other guests of the host (steal)" in chosen.warnings[0]
    assert "the CPU quota was used up for 30% of the time" in chosen.warnings[0]
