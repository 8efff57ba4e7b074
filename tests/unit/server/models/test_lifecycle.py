"""Loads, reloads and unloads that meet each other, with a loader that waits and fails when the test says."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, internal, unsupported
from conch.core.inference import InferResponse
from conch.machine.memory import ProcessMemory, ProcessReader
from conch.repository.model_files import ModelFiles
from conch.repository.override import Override
from conch.server.model import Model
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import UNLOADED, ModelTable, State
from tests.unit.fake_clock import settle
from tests.unit.server.loads import CONFIG, House, stopped, until

#: A configuration that a client brings.
BROUGHT = json.dumps({
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
})  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_load_that_fails_leaves_the_old_version_serving(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    old = house.table.find("m")
    house.write("m", content="changed")
    house.loader.failures["m:1"] = [internal("broken")]
    with pytest.raises(
        ConchError, match="load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: broken;"
    ):
        await house.lifecycle.load("m")
    assert house.table.find("m") is old
    assert house.states("m") == {1: (State.READY, "")} and stopped(old) == []


async def test_load_that_fails_says_why_in_the_index(house: House) -> None:
    house.write("m")
    house.loader.failures["m:1"] = [internal("broken")]
    with pytest.raises(ConchError):
        await house.lifecycle.load("m")
    assert house.states("m") == {1: (State.UNAVAILABLE, "Internal: broken")}


async def test_load_that_fails_tells_clients_less_than_the_operator(house: House) -> None:
    reason = "checkpoint /srv/models/m/1 needs torch"
    house.write("m")
    house.loader.failures["m:1"] = [unsupported(f"{reason}: pip install -c /srv/c.txt torch", public=reason)]
    with pytest.raises(ConchError) as raised:
        await house.lifecycle.load("m")
    failed = "load failed for model 'm': version 1 is at UNAVAILABLE state: Unsupported: checkpoint "
    assert raised.value.message == f"{failed}/srv/models/m/1 needs torch: pip install -c /srv/c.txt torch;\n"
    assert raised.value.public == f"{failed}m/1 needs torch;\n"
    assert house.states("m") == {1: (State.UNAVAILABLE, f"Unsupported: {reason}")}


async def test_versions_are_swapped_in_all_or_none(house: House) -> None:
    house.write("m", CONFIG + "version_policy {all {}}", versions=(1, 2))
    house.loader.failures["m:2"] = [internal("broken")]
    with pytest.raises(ConchError):
        await house.lifecycle.load("m")
    (first,) = house.loader.made
    assert len(stopped(first)) == 1
    assert house.states("m") == {2: (State.UNAVAILABLE, "Internal: broken")}


async def test_load_is_tried_again_as_often_as_was_asked(tmp_path: Path) -> None:
    house = House(tmp_path, retries=2)
    house.write("m")
    house.loader.failures["m:1"] = [internal("once"), internal("twice")]
    await house.lifecycle.load("m")
    assert house.states("m") == {1: (State.READY, "")}


async def test_version_that_cannot_be_measured_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Reader(ProcessReader):
        def read(self, groups: Iterable[Iterable[int]]) -> list[ProcessMemory]:
            raise OSError("Too many open files")

    house = House(tmp_path, ledger=MemoryLedger(ModelTable(), reader=Reader()))
    house.write("m")
    await house.lifecycle.load("m")
    assert house.states("m") == {1: (State.READY, "")}
    assert "Traceback" in caplog.text and "failed to measure the memory of 'm' version 1" in caplog.text


async def test_version_that_is_unloaded_while_it_is_measured_does_not_stay_behind(tmp_path: Path) -> None:
    measuring = asyncio.Event()

    class Ledger(MemoryLedger):
        async def note_load(self, model: Model, files: ModelFiles) -> None:
            measuring.set()
            await asyncio.Event().wait()

    house = House(tmp_path, ledger=Ledger(ModelTable()))
    house.write("m")
    load = asyncio.create_task(house.lifecycle.load("m"))
    await measuring.wait()
    await house.lifecycle.unload("m")
    with pytest.raises(ConchError, match="unloaded during the load"):
        await load
    (started,) = house.loader.made
    assert len(stopped(started)) == 1


async def test_model_is_loaded_again_when_its_checkpoint_elsewhere_has_changed(house: House, tmp_path: Path) -> None:
    checkpoint = tmp_path / "elsewhere"
    checkpoint.mkdir()
    house.loader.external["m"] = checkpoint
    house.write("m")
    await house.lifecycle.load("m")
    await house.lifecycle.load("m")
    assert len(house.loader.made) == 1
    (checkpoint / "model.safetensors").write_text("retrained")
    await house.lifecycle.load("m")
    assert house.loader.made[1:] == [house.table.find("m")]
    (checkpoint / "model.safetensors").write_text("retrained again")
    house.write("m", CONFIG + "instance_group [{count: 2 kind: KIND_CPU}]")
    await house.lifecycle.load("m")
    assert house.loader.made[2:] == [house.table.find("m")] and not house.loader.rescaled


async def test_error_that_is_a_bug_fails_the_load_and_nothing_else(house: House) -> None:
    house.write("m")
    house.loader.failures["m:1"] = [RuntimeError("a bug")]
    with pytest.raises(ConchError, match=r"RuntimeError\('a bug'\)"):
        await house.lifecycle.load("m")
    await house.lifecycle.load("m")
    assert house.states("m") == {1: (State.READY, "")}


async def test_error_that_is_a_bug_does_not_end_the_loads_of_other_models(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.write("bad")
    house.write("good")
    configure = house.loader.configure

    def broken(files: ModelFiles) -> ModelConfig:
        if files.name == "bad":
            raise RuntimeError("a bug")
        return configure(files)

    monkeypatch.setattr(house.loader, "configure", broken)
    failed = await house.lifecycle.load_all(["bad", "good"])
    assert {name: error.message for name, error in failed.items()} == {
        "bad": "load failed for model 'bad': RuntimeError('a bug')"
    }
    assert house.states("good") == {1: (State.READY, "")}


async def test_replaced_version_ends_after_its_last_request(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    old = house.table.find("m")
    answers = house.submit(old)
    house.write("m", content="changed")
    await house.lifecycle.load("m")
    assert house.table.find("m") is not old
    for _ in range(20):
        await asyncio.sleep(0)
    assert stopped(old) == []
    old.executor.requests[0].respond(InferResponse())  # type: ignore[attr-defined]
    await until(lambda: stopped(old))
    assert answers.finals == 1


async def test_version_is_told_at_once_that_it_gets_no_further_requests(house: House) -> None:
    house.write("a")
    await house.lifecycle.load("a")
    house.write("a", content="changed")
    await house.lifecycle.load("a")
    old, new = house.loader.made
    assert (old.executor.retired, new.executor.retired) == (True, False)  # type: ignore[attr-defined]
    await house.lifecycle.unload("a")
    assert new.executor.retired  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", ["its measurement", "its end"])
async def test_version_is_unloaded_although_something_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async def fail(*arguments: object) -> None:
        raise OSError("Too many open files")

    ledger = MemoryLedger(ModelTable())
    house = House(tmp_path, ledger=ledger)
    house.write("m")
    await house.lifecycle.load("m")
    model = house.table.find("m")
    if fails == "its measurement":
        monkeypatch.setattr(ledger, "note_end", fail)
    else:
        monkeypatch.setattr(model, "stop", fail)
    await house.lifecycle.unload("m")
    await house.lifecycle.versions.wait("m")
    assert house.states("m") == {1: (State.UNAVAILABLE, UNLOADED)}
    assert b'model="m"' not in house.registry.render()
    assert fails == "its end" or stopped(model) == [None]
    assert "Too many open files" in caplog.text


async def test_unload_waits_for_requests_before_the_version_is_unavailable(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    model = house.table.find("m")
    house.submit(model)
    await house.lifecycle.unload("m")
    assert house.states("m") == {1: (State.UNLOADING, "")}
    with pytest.raises(ConchError, match="has no available versions"):
        house.table.find("m")
    model.executor.requests[0].respond(InferResponse())  # type: ignore[attr-defined]
    await until(lambda: house.states("m") == {1: (State.UNAVAILABLE, UNLOADED)})
    assert len(stopped(model)) == 1


async def test_model_that_has_not_changed_is_not_loaded_again(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    await house.lifecycle.load("m")
    assert house.loader.log == ["load m:1", "loaded m:1"]


async def test_change_of_instances_rescales_the_version_that_runs(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    model = house.table.find("m")
    house.write("m", CONFIG + "instance_group [{count: 2}]")
    await house.lifecycle.load("m")
    assert [rescaled for rescaled, _ in house.loader.rescaled] == [model]
    assert house.table.find("m") is model and len(house.loader.made) == 1


async def test_version_is_replaced_when_the_rate_limiter_begins_to_count_its_instances(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    house.loader.limited = True
    house.write("m", CONFIG + "instance_group [{rate_limiter {resources [{name: 'R' count: 1}]}}]")
    await house.lifecycle.load("m")
    assert not house.loader.rescaled
    assert house.table.find("m") is house.loader.made[1]


async def test_loads_of_a_model_exclude_each_other(house: House) -> None:
    house.write("m")
    house.loader.held["m"] = asyncio.Event()
    first = asyncio.create_task(house.lifecycle.load("m"))
    await until(lambda: house.loader.in_flight)
    house.write("m", content="changed")
    second = asyncio.create_task(house.lifecycle.load("m"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert house.loader.log == ["load m:1"]
    house.loader.held["m"].set()
    await asyncio.gather(first, second)
    assert house.loader.most_under_way == 1


async def test_unload_cancels_the_loads_that_are_in_progress_or_wait(house: House) -> None:
    house.write("m")
    house.loader.held["m"] = asyncio.Event()
    loads = [asyncio.create_task(house.lifecycle.load("m")) for _ in range(2)]
    await until(lambda: house.loader.in_flight)
    await house.lifecycle.unload("m")
    for load in loads:
        with pytest.raises(
            ConchError, match="load failed for model 'm': the model was unloaded during the load"
        ) as raised:
            await load
        assert raised.value.code is Code.UNAVAILABLE
    assert house.states("m") == {1: (State.UNAVAILABLE, UNLOADED)} and not house.loader.made
    house.loader.held["m"].set()
    await house.lifecycle.load("m")
    assert house.states("m") == {1: (State.READY, "")}


async def test_member_that_fails_after_the_load_of_its_ensemble_was_cancelled_reaches_no_exception_handler(
    house: House,
) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context["message"]))
    house.write("m")
    house.write_ensemble("e", "m")
    house.loader.held["m"] = asyncio.Event()
    house.loader.failures["m:1"] = [internal("no")]
    load = asyncio.create_task(house.lifecycle.load("e"))
    await until(lambda: house.loader.in_flight)
    await house.lifecycle.unload("e")
    with pytest.raises(ConchError, match="the model was unloaded during the load"):
        await load
    del load
    house.loader.held["m"].set()
    await until(lambda: house.states("m") == {1: (State.UNAVAILABLE, "Internal: no")})
    await settle()
    gc.collect()
    assert not unhandled


async def test_unload_during_a_reload_ends_the_old_version_too(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    old = house.table.find("m")
    house.write("m", content="changed")
    house.loader.held["m"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("m"))
    await until(lambda: house.loader.in_flight)
    await house.lifecycle.unload("m")
    with pytest.raises(ConchError, match="unloaded during the load"):
        await loading
    await until(lambda: house.states("m") == {1: (State.UNAVAILABLE, UNLOADED)})
    assert len(stopped(old)) == 1


async def test_versions_that_had_loaded_end_when_their_load_is_cancelled(house: House) -> None:
    house.write("m", CONFIG + "version_policy {all {}}", versions=(1, 2))
    house.loader.held["m:2"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("m"))
    await until(lambda: house.loader.made and house.loader.in_flight == 1)
    await house.lifecycle.unload("m")
    assert [stopped(model) for model in house.loader.made] == [[0]]
    with pytest.raises(ConchError, match="unloaded during the load"):
        await loading


async def test_stalled_load_leaves_its_place(tmp_path: Path) -> None:
    house = House(tmp_path, parallel_loads=1)
    house.loader.stalled = {"a"}
    for name in ("a", "b", "c"):
        house.write(name)
    house.loader.held["a"] = asyncio.Event()
    house.loader.held["b"] = asyncio.Event()
    loading = [asyncio.create_task(house.lifecycle.load("a"))]
    await until(lambda: house.loader.in_flight == 1)
    loading += [asyncio.create_task(house.lifecycle.load(name)) for name in ("b", "c")]
    await until(lambda: house.loader.in_flight == 2)
    house.loader.held["b"].set()
    await loading[1]
    await loading[2]
    assert not loading[0].done() and house.loader.most_under_way == 2
    house.loader.held["a"].set()
    await loading[0]


async def test_load_that_a_model_requests_needs_no_load_slot(tmp_path: Path) -> None:
    house = House(tmp_path, parallel_loads=1)
    for name in ("a", "b"):
        house.write(name)
    house.write_ensemble("e", "b")
    house.loader.held["a"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("a"))
    await until(lambda: house.loader.in_flight == 1)
    await house.lifecycle.load("e", by_model=True)
    assert house.states("e") == house.states("b") == {1: (State.READY, "")} and not loading.done()
    house.loader.held["a"].set()
    await loading


async def test_other_models_load_side_by_side_up_to_the_limit(tmp_path: Path) -> None:
    house = House(tmp_path, parallel_loads=2)
    gate = asyncio.Event()
    for name in ("a", "b", "c"):
        house.write(name)
        house.loader.held[name] = gate
    loading = asyncio.create_task(house.lifecycle.load_all(["a", "b", "c"]))
    await until(lambda: house.loader.in_flight == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert house.loader.in_flight == 2
    gate.set()
    assert await loading == {}
    assert house.loader.most_under_way == 2


async def test_client_that_hangs_up_during_its_load_does_not_undo_it(house: House) -> None:
    house.write("m")
    house.loader.held["m"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("m"))
    await until(lambda: house.loader.in_flight)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    house.loader.held["m"].set()
    await until(lambda: house.states("m") == {1: (State.READY, "")})
    await house.lifecycle.unload("m")  # its lock is free


async def test_members_are_loaded_once_and_before_their_ensembles(house: House) -> None:
    house.write("a")
    house.write("b")
    house.write_ensemble("both", "a", "b")
    house.write_ensemble("alone", "a")
    assert await house.lifecycle.load_all(["both", "alone"]) == {}
    assert house.loader.log.index("loaded a:1") < house.loader.log.index("ensemble alone of a")
    assert house.loader.log.index("loaded b:1") < house.loader.log.index("ensemble both of a,b")
    assert house.loader.log.count("load a:1") == 1


async def test_ensemble_whose_files_change_while_its_steps_load_is_loaded_again(house: House) -> None:
    house.write("a")
    house.write("b")
    house.write_ensemble("e", "a")
    house.loader.held["a"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("e"))
    await until(lambda: "load a:1" in house.loader.log)
    house.write_ensemble("e", "a", "b")
    house.loader.held["a"].set()
    await loading
    await house.lifecycle.load("e")
    assert house.loader.log[-1] == "ensemble e of a,b"


async def test_each_model_is_announced_as_soon_as_it_serves(house: House) -> None:
    house.write("a")
    house.write("b")
    house.write_ensemble("all", "a", "b")
    held = house.loader.held["b"] = asyncio.Event()
    announced: list[list[str]] = []
    house.table.on_ready = lambda: announced.append(sorted(house.table.serving_names()))
    load = asyncio.create_task(house.lifecycle.load("all"))
    await until(lambda: announced)
    assert announced == [["a"]]
    held.set()
    await load
    assert announced == [["a"], ["a", "b"], ["a", "all", "b"]]


async def test_member_keeps_what_a_load_of_its_own_brought_until_its_directory_changes(house: House) -> None:
    house.write("m")
    house.write_ensemble("e", "m")
    await house.lifecycle.load("m", Override(BROUGHT))
    model = house.table.find("m")
    assert model.config.max_batch_size == 4

    await house.lifecycle.load("e")
    assert house.table.find("m") is model

    house.write("m", content="changed")
    await house.lifecycle.load("e")
    assert house.table.find("m").config.max_batch_size == 0


async def test_member_whose_files_a_client_brought_is_kept_for_its_ensemble(house: House) -> None:
    house.write("m")
    house.write_ensemble("e", "m")
    await house.lifecycle.load("m", Override(BROUGHT, {"1/model.py": b""}))
    model = house.table.find("m")

    await house.lifecycle.load("e")
    assert house.table.find("m") is model

    await house.lifecycle.load("m")
    assert house.table.find("m") is not model


async def test_ensembles_serve_again_when_all_of_their_members_are_back(house: House) -> None:
    for name in ("a", "b"):
        house.write(name)
    house.write_ensemble("inner", "a", "b")
    house.write_ensemble("outer", "inner")
    await house.lifecycle.load("outer")
    for name in ("a", "b"):
        await house.lifecycle.unload(name)
    await house.lifecycle.load("a")
    assert not any(house.table.models[name].ready_versions() for name in ("inner", "outer"))
    house.write("b", content="changed")
    await house.lifecycle.load("b")
    assert all(house.states(name) == {1: (State.READY, "")} for name in ("inner", "outer"))


async def test_ensembles_serve_again_though_the_client_that_loaded_a_step_has_disconnected(house: House) -> None:
    house.write("a")
    house.write_ensemble("both", "a")
    await house.lifecycle.load("both")
    await house.lifecycle.unload("a")
    assert not house.table.models["both"].ready_versions()
    house.loader.held["a"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("a"))
    await until(lambda: house.loader.in_flight)
    loading.cancel()
    house.loader.held["a"].set()
    await until(lambda: house.table.models["both"].ready_versions() == [1])


async def test_ensembles_serve_again_though_the_load_of_several_models_was_cancelled(house: House) -> None:
    house.write("a")
    house.write_ensemble("both", "a")
    await house.lifecycle.load("both")
    await house.lifecycle.unload("a")
    house.loader.held["a"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load_all(["a"]))
    await until(lambda: house.loader.in_flight)
    loading.cancel()
    house.loader.held["a"].set()
    await until(lambda: house.table.models["both"].ready_versions() == [1])


async def test_ensemble_that_was_unloaded_stays_so_when_its_member_is_loaded(house: House) -> None:
    house.write("m")
    house.write_ensemble("first", "m")
    house.write_ensemble("second", "m")
    await house.lifecycle.load_all(["first", "second"])
    await house.lifecycle.unload("first")
    await house.lifecycle.unload("m")
    await house.lifecycle.unload("second")
    await house.lifecycle.load("m")
    assert not any(house.table.models[name].ready_versions() for name in ("first", "second"))


async def test_ensembles_in_a_circle_are_refused_rather_than_waited_for(house: House) -> None:
    house.write_ensemble("x", "y")
    house.write_ensemble("y", "x")
    failed = await house.lifecycle.load_all(["x", "y"])
    assert {name: error.message for name, error in failed.items()} == {
        "x": "load failed for model 'x': circular dependency between ensembles: x -> ... -> y -> x\n",
        "y": "load failed for model 'y': circular dependency between ensembles: y -> ... -> x -> y\n",
    }


async def test_every_ensemble_of_a_circle_is_refused_for_the_circle(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.write_ensemble("x", "y")
    house.write_ensemble("y", "z")
    house.write_ensemble("z", "x")
    with pytest.raises(ConchError, match=r"circular dependency between ensembles: x -> \.\.\. -> z -> x"):
        await house.lifecycle.load("x")
    assert [message for message in caplog.messages if "circular" in message] == [
        "Invalid argument: circular dependency between ensembles: z -> ... -> y -> z",
        "Invalid argument: circular dependency between ensembles: y -> ... -> x -> y",
        "Invalid argument: circular dependency between ensembles: x -> ... -> z -> x",
    ]


async def test_ensemble_says_that_its_member_has_no_version(house: House) -> None:
    house.write("m", CONFIG + "version_policy { specific { versions: 3 } }")
    house.write_ensemble("around", "m")
    reason = "at least one version must be available under the version policy of model 'm'"
    with pytest.raises(ConchError, match=f"Model 'm' loading failed with error: {reason}\n$"):
        await house.lifecycle.load("around")
    house.write("m")
    await house.lifecycle.load("around")
    assert house.table.models["m"].reason == ""


async def test_unload_with_dependents_keeps_members_that_somebody_asked_for(house: House) -> None:
    for name in ("asked", "needed"):
        house.write(name)
    house.write_ensemble("e", "asked", "needed")
    await house.lifecycle.load("asked")
    await house.lifecycle.load("e")
    await house.lifecycle.unload("e", dependents=True)
    await until(lambda: house.states("needed") == {1: (State.UNAVAILABLE, UNLOADED)})
    assert house.states("asked") == {1: (State.READY, "")}


async def test_unload_with_dependents_keeps_the_members_of_an_ensemble_that_is_loaded_in_between(house: House) -> None:
    for name in ("early", "late"):
        house.write(name)
    house.write("slow")
    house.write_ensemble("e", "early", "late")
    house.write_ensemble("f", "early", "late", "slow")
    await house.lifecycle.load("e")
    model = house.table.find("e")
    house.submit(model)
    await house.lifecycle.unload("e", dependents=True)
    house.loader.held["slow"] = asyncio.Event()
    loading = asyncio.create_task(house.lifecycle.load("f"))
    await until(lambda: "load slow:1" in house.loader.log)  # the other members have been found to be loaded
    model.executor.requests[0].respond(InferResponse())  # type: ignore[attr-defined]
    await until(lambda: house.states("e") == {1: (State.UNAVAILABLE, UNLOADED)})
    await settle()
    house.loader.held["slow"].set()
    await loading
    assert all(house.states(name) == {1: (State.READY, "")} for name in ("early", "late", "f"))


async def test_end_of_the_server_stops_by_force_what_does_not_end(house: House) -> None:
    house.write("m")
    await house.lifecycle.load("m")
    model = house.table.find("m")
    house.submit(model)
    await house.lifecycle.unload("m")
    assert await house.lifecycle.versions.finish(0.0) is False
    assert stopped(model) == [0]


async def test_load_in_progress_is_cancelled_when_the_server_stops(house: House) -> None:
    house.write("m")
    house.loader.held["m"] = asyncio.Event()
    load = asyncio.ensure_future(house.lifecycle.load("m"))
    await until(lambda: house.loader.in_flight)
    await house.lifecycle.close()
    assert house.loader.in_flight == 0
    with pytest.raises(ConchError, match="load failed for model 'm': the server is stopping"):
        await load
    with pytest.raises(ConchError, match="the server is stopping and loads no models"):
        await house.lifecycle.load("m")


async def test_load_that_is_not_awaited_is_cancelled_as_well(house: House) -> None:
    house.write("m")
    house.loader.held["m"] = asyncio.Event()
    load = asyncio.ensure_future(house.lifecycle.load("m"))
    await until(lambda: house.loader.in_flight)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert house.loader.in_flight == 1
    await house.lifecycle.close()
    assert house.loader.in_flight == 0
