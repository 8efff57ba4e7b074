"""What becomes of the server when a candidate answers nothing; server and requests are fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.analyze.options.models import ModelSettings
from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.profiling import profile as profiling
from conch.analyze.profiling import search_run
from conch.analyze.profiling.profile import Profile
from conch.analyze.results import Point
from conch.analyze.search.overrides import merged
from conch.errors import internal
from conch.perf.senders.channels.connecting import Address
from tests.unit.analyze.configs import batching_model
from tests.unit.analyze.points import point


class FakeServer:
    """Notes what it is told; the model hangs with two instances."""

    address = Address("127.0.0.1", 9)

    def __init__(self) -> None:
        self.told: list[str] = []
        self.instances = 1

    def load(self, overrides: Any) -> Any:
        config = merged(batching_model(), overrides.get("m", {}))
        self.instances = config["instance_group"][0]["count"]
        self.told.append(f"load {self.instances}")
        return {"m": config}

    def restart(self) -> None:
        self.told.append("restart")

    def check(self) -> None:
        pass

    def complaints(self) -> str:
        return ""

    def close(self) -> None:
        self.told.append("close")


def test_a_server_is_started_anew_after_a_candidate_that_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()

    class FakeMeasurement:
        def __init__(self, plans: Any, *, rate: bool) -> None:
            pass

        def measure(self, load: float, hopeless: Callable[[Sequence[Point]], bool] | None = None) -> Point:
            if server.instances == 2:
                raise internal("model 'm' answered no request")
            return point(100.0 * server.instances, load=load)

        def close(self) -> None:
            server.told.append("no more requests")

    monkeypatch.setattr(profiling, "open_server", lambda *given: server)
    monkeypatch.setattr(profiling, "check_requests", lambda *given: None)
    monkeypatch.setattr(search_run, "CandidateMeasurement", FakeMeasurement)
    settings = AnalyzeSettings(
        model_repository=tmp_path, profile_models=(ModelSettings(name="m"),), run_config_search_mode="brute",
        run_config_search_max_instance_count=3, run_config_search_min_model_batch_size=8,
        run_config_search_max_model_batch_size=8, concurrency=(4,), export_path=tmp_path / "analysis",
    )  # fmt: skip
    watching = SimpleNamespace(
        say=lambda line: None, measuring=lambda *given: None, measured=lambda *given, before: None,
        failed=lambda *given, before: None,
    )  # fmt: skip

    with Profile(settings, watching) as profile:
        [outcome] = profile.run()

    errors = [one.error for one in outcome.results]
    assert sum(bool(error) for error in errors) == 1 and len(errors) == 3
    failed = server.told.index("load 2")
    assert server.told[failed + 1 : failed + 3] == ["no more requests", "restart"]
    assert server.told.count("restart") == 1
