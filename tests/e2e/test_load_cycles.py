"""Models are loaded, asked and unloaded again and again: nothing of them stays. The long form is a benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.load_cycles import CycledServer, Kept, growth

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CycledServer]:
    with CycledServer(tmp_path_factory.mktemp("cycles")) as server:
        yield server


@pytest.mark.parametrize(("model", "cycles"), [("echo", 20), ("uploaded", 10), ("encoder", 2), ("writer", 2)])
def test_nothing_stays_of_a_model_that_was_unloaded(server: CycledServer, model: str, cycles: int) -> None:
    seen = [server.cycle(model) for _ in range(cycles)]
    # So few cycles tell of descriptors and files; what the allocator keeps of the first ones is not yet behind it.
    assert growth(seen).problems(allowed=0.1) == []
    assert server.metrics_of(model) == []


def test_growth_is_seen() -> None:
    flat = [Kept(100 << 20, 16, 8, 0)] * 50
    assert growth(flat).problems(0.02) == []
    leaking = [Kept((100 << 20) + number * (100 << 10), 16 + number // 10, 8, 0) for number in range(50)]
    assert growth(leaking).problems(0.02) == ["17 descriptors became 20", "the resident size grew by 3.5%"]
