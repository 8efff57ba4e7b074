"""The ledger of models' memory, with processes that have what the test says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from conch.config.pbtxt import parse
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError
from conch.machine.memory import FreeMemory, ProcessMemory, ProcessReader
from conch.repository.model_files import ModelFiles
from conch.server.model import Model
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import ModelState, ModelTable, State, VersionState
from conch.telemetry.memory import ModelMemory
from conch.telemetry.statistics import ModelStatistics
from tests.unit.server.fakes import FakeWorker
from tests.unit.server.loads import FakeExecutor, until

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
TENSORS = 'input [{name: "x" data_type: TYPE_FP32 dims: [1]}] output [{name: "y" data_type: TYPE_FP32 dims: [1]}] '


@dataclass
class FakeReader(ProcessReader):
    """Tells what the test says of processes, by pid."""

    host: dict[int, ProcessMemory] = field(default_factory=dict)
    gpus: dict[int, int] = field(default_factory=dict)
    failure: Exception | None = None

    def read(self, groups: Iterable[Iterable[int]]) -> list[ProcessMemory]:
        if self.failure is not None:
            raise self.failure
        return [self.host.get(next(iter(group), 0), ProcessMemory()) for group in groups]

    def gpu_free(self) -> dict[int, int]:
        return self.gpus


def _worker(pid: int, shared: int = 0) -> FakeWorker:
    worker = FakeWorker()
    worker.pid, worker.shared_bytes = pid, shared
    return worker


def _config(backend: str, kind: str = "KIND_CPU", count: int = 1) -> ModelConfig:
    return parse(f'name: "m" backend: "{backend}" {TENSORS} instance_group [{{kind: {kind} count: {count}}}]', "m")


def _files(folder: Path, weights: int) -> ModelFiles:
    (folder / "1").mkdir()
    with (folder / "1" / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return ModelFiles("m", folder, ModelConfig(), versions=(1,))


def _loaded(table: ModelTable, *workers: FakeWorker, backend: str = "python") -> Model:
    executor = FakeExecutor()
    executor.processes = workers  # type: ignore[assignment]
    model = Model(_config(backend), 1, executor, ModelStatistics("m", 1), {})
    table.models["m"] = ModelState("m", {1: VersionState(State.READY, "", model)})
    return model


def _free(available: int, *, limited: bool = False) -> Callable[[], FreeMemory]:
    return lambda: FreeMemory(24 * GIBIBYTE, available, limited)


async def test_a_loaded_model_is_measured_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = ModelTable()
    reader = FakeReader(host={5: ProcessMemory(400 * MEBIBYTE, 30 * MEBIBYTE)})
    ledger = MemoryLedger(table, reader=reader)
    model = _loaded(table, _worker(5, 20 * MEBIBYTE))
    with caplog.at_level(logging.INFO, "conch"):
        await ledger.note_load(model, _files(tmp_path, MEBIBYTE))
    assert "'m' version 1 uses 400 MiB (including weights 1 MiB): workers 380 MiB, shared regions 20 MiB" in caplog.text
    assert ledger.used("m") == ledger.used() == model.statistics.memory
    assert ledger.used("other") == ModelMemory()


async def test_a_model_that_cannot_be_measured_counts_as_expected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ModelTable()
    reader = FakeReader(host={5: ProcessMemory(70 * MEBIBYTE)}, failure=RuntimeError("can't start new thread"))
    ledger = MemoryLedger(table, reader=reader)
    files = _files(tmp_path, MEBIBYTE)
    model = _loaded(table, _worker(5))
    await ledger.note_load(model, files)
    assert "failed to measure the memory of 'm' version 1" in caplog.text and "can't start new thread" in caplog.text
    assert ledger.used("m") == await ledger.expected(files, [1], _config("python"))
    reader.failure = None
    await ledger.measure()
    assert ledger.used("m").workers == 70 * MEBIBYTE


async def test_figures_stay_where_they_cannot_be_refreshed(caplog: pytest.LogCaptureFixture) -> None:
    table = ModelTable()
    ledger = MemoryLedger(table, reader=FakeReader(failure=RuntimeError("can't start new thread")))
    model = _loaded(table, _worker(5))
    model.statistics.memory = ModelMemory(workers=MEBIBYTE)
    ledger.refresh()
    await until(lambda: "failed to measure the memory of the loaded models" in caplog.text)
    assert ledger.used("m").workers == MEBIBYTE


async def test_what_a_model_took_is_what_it_will_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = ModelTable()
    reader = FakeReader(host={5: ProcessMemory(70 * MEBIBYTE)})
    ledger = MemoryLedger(table, reader=reader)
    files = _files(tmp_path, 0)
    before = await ledger.expected(files, [1], _config("python"))
    model = _loaded(table, _worker(5))
    await ledger.note_end(model)
    with caplog.at_level(logging.INFO, "conch"):
        ledger.note_ended(model)
    assert "'m' version 1 gave back 70 MiB: workers 70 MiB" in caplog.text
    assert (await ledger.expected(files, [1], _config("python"))).host == 70 * MEBIBYTE != before.host


async def test_an_estimate_counts_workers_and_weights(tmp_path: Path) -> None:
    ledger = MemoryLedger(ModelTable())
    files = _files(tmp_path, GIBIBYTE)
    one = await ledger.expected(files, [1], _config("huggingface", count=3))
    assert GIBIBYTE < one.workers < 1.5 * GIBIBYTE
    three = await ledger.expected(files, [1], _config("python", count=3))
    assert three.workers > 3 * GIBIBYTE
    on_gpu = await ledger.expected(
        files,
        [1],
        parse('name: "m" backend: "huggingface" instance_group [{kind: KIND_GPU count: 1 gpus: [0, 1]}]', "m"),
    )
    assert on_gpu.gpus == {0: GIBIBYTE, 1: GIBIBYTE}
    assert on_gpu.host < GIBIBYTE


async def test_workers_are_estimated_by_those_of_the_same_backend(tmp_path: Path) -> None:
    """Workers that were forked from one template share its libraries, so each has much less than the first guess."""
    table = ModelTable()
    both = {5: ProcessMemory(280 * MEBIBYTE)}
    ledger = MemoryLedger(table, reader=FakeReader(host=both))
    model = _loaded(table, _worker(5), _worker(6), backend="huggingface")
    await ledger.note_load(model, _files(tmp_path, 80 * MEBIBYTE))
    (tmp_path / "other").mkdir()
    other = replace(_files(tmp_path / "other", 10 * MEBIBYTE), name="n")
    assert (await ledger.expected(other, [1], _config("huggingface"))).workers == (60 + 10) * MEBIBYTE
    guess = await MemoryLedger(ModelTable()).expected(other, [1], _config("huggingface"))
    assert guess.workers > (60 + 10) * MEBIBYTE
    # A Python model has in common with another only what all have.
    assert (await ledger.expected(other, [1], _config("python"))).workers == (32 + 10) * MEBIBYTE


async def test_weights_larger_than_the_memory_left_are_refused_with_the_sum(tmp_path: Path) -> None:
    table = ModelTable()
    ledger = MemoryLedger(table, read_free=_free(12 * GIBIBYTE))
    with pytest.raises(ConchError) as refused:
        await ledger.check(_files(tmp_path, 20 * GIBIBYTE), 1, _config("huggingface"))
    assert refused.value.code is Code.UNAVAILABLE
    assert refused.value.message == (
        "model 'm' version 1 does not fit into memory: its weights (model.safetensors) take at least 20.0 GiB, and the "
        "machine has 12.0 GiB left of 24.0 GiB; unload other models, or start the server with "
        "--check-memory-on-load=false to try it anyway"
    )


async def test_a_control_group_is_named_and_what_other_models_use(tmp_path: Path) -> None:
    table = ModelTable()
    _loaded(table).statistics.memory = ModelMemory(workers=70 * MEBIBYTE)
    ledger = MemoryLedger(table, read_free=_free(GIBIBYTE, limited=True))
    with pytest.raises(ConchError, match=r"control group has 1024 MiB left .*, 1 loaded models use 70 MiB"):
        await ledger.check(_files(tmp_path, 2 * GIBIBYTE), 1, _config("openvino"))


@pytest.mark.parametrize(
    ("backend", "weights", "checks"),
    [
        ("huggingface", 11 * GIBIBYTE, True),  # fits
        ("huggingface", 20 * GIBIBYTE, False),  # is to be tried
        ("python", 20 * GIBIBYTE, True),  # reads its files as it likes
        ("huggingface", 0, True),
    ],
)
async def test_what_may_fit_is_not_refused(tmp_path: Path, backend: str, weights: int, checks: bool) -> None:
    ledger = MemoryLedger(ModelTable(), checks=checks, read_free=_free(12 * GIBIBYTE))
    await ledger.check(_files(tmp_path, weights), 1, _config(backend, count=4))


async def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path: Path) -> None:
    def unknown() -> FreeMemory:
        raise OSError

    await MemoryLedger(ModelTable(), read_free=unknown).check(
        _files(tmp_path, 99 * GIBIBYTE), 1, _config("huggingface")
    )


async def test_weights_larger_than_the_gpu_are_refused(tmp_path: Path) -> None:
    config = parse('name: "m" backend: "huggingface" instance_group [{kind: KIND_GPU count: 1 gpus: [0]}]', "m")
    files = _files(tmp_path, 20 * GIBIBYTE)
    ledger = MemoryLedger(ModelTable(), reader=FakeReader(gpus={0: 8 * GIBIBYTE}), read_free=_free(GIBIBYTE))
    with pytest.raises(ConchError, match="the GPU has 8192 MiB left"):
        await ledger.check(files, 1, config)
    half = MemoryLedger(ModelTable(), reader=FakeReader(gpus={0: 11 * GIBIBYTE}), read_free=_free(GIBIBYTE))
    await half.check(files, 1, config)  # in 16 bits it may fit
