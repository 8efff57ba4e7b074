"""A model version from its files to its workers, with processes that answer as the test says."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conch.config import reading, render
from conch.config.complete import LOADS_ADAPTERS
from conch.config.pbtxt import parse
from conch.core.errors import ConchError, internal, unavailable
from conch.options.settings import Settings
from conch.repository import model_files
from conch.repository.fingerprint import take_external
from conch.repository.model_files import ModelFiles, describe
from conch.server.caching.cache import NoEntries
from conch.server.caching.local import LocalCache
from conch.server.execution import starting
from conch.server.execution.remote.executor import RemoteExecutor
from conch.server.execution.starting import WorkerServices
from conch.server.model import Model
from conch.server.models.states import ModelState, ModelTable, State, VersionState
from conch.server.models.version_loader import VersionLoader
from conch.telemetry.metrics import FIRST_RESPONSE_BUCKETS, MetricsConfig, Registry
from conch.telemetry.statistics import LATENCY_BUCKETS
from conch.workers.host.liveness import Verdict
from tests.unit.server.fakes import FakeWorker
from tests.unit.server.loads import CONFIG, until


class FakeProcess(FakeWorker):
    """Answers what it is asked; ``failure`` is raised by ``start``, ``held`` lets it wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []
        self.init: dict[str, Any] = {}
        self.killed = False
        self.failure: ConchError | None = None
        self.dependencies: list[tuple[str, str]] = []
        self.held: asyncio.Event | None = None
        self.pid = os.getpid()

    def start(self, init: dict[str, Any], *, python: str, environment: dict[str, str]) -> None:
        self.init = init

    async def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(header["op"])
        if header["op"] == "complete":
            completed = parse(CONFIG, "x")
            completed.max_batch_size = 4
            return {"op": "completed", "config": render.to_json(completed)}
        if self.held is not None:
            await self.held.wait()
        if self.failure is not None:
            raise self.failure
        facts = {"engine": "swan 1.0", "threads": "2"}
        return {"op": "ready", "slots": 0, "runs_with": facts, "dependencies": self.dependencies}

    def kill(self) -> None:
        self.killed = True
        self.alive = False

    async def stop(self, seconds: float = 0.0) -> None:
        await super().stop(seconds)


class SharedCache:
    """A cache that outlives its versions; notes what each version is known by."""

    lasting = True

    def __init__(self) -> None:
        self.known: list[bytes] = []

    def scope(self, model: str, version: int, identity: bytes) -> NoEntries:
        self.known.append(identity)
        return NoEntries()


class FakeTemplates:
    """Forks workers, and notes those that are discarded."""

    def __init__(self) -> None:
        self.discarded = 0

    def kind_of(self, *arguments: object) -> object:
        return self

    async def fork(self, *arguments: object) -> FakeTemplates:
        return self

    def take(self) -> None: ...

    def discard(self) -> None:
        self.discarded += 1


class Bench:
    """A loader of the model in ``directory``, and the processes that it has made."""

    def __init__(
        self,
        directory: Path,
        text: str,
        prepare: Callable[[FakeProcess], None] = lambda process: None,
        cache: SharedCache | LocalCache | None = None,
        settings: Settings | None = None,
        templates: FakeTemplates | None = None,
    ) -> None:
        self.directory = directory / "m"
        (self.directory / "1").mkdir(parents=True)
        (self.directory / "config.pbtxt").write_text('name: "m" ' + text)
        self.processes: list[FakeProcess] = []
        self.prepare = prepare
        self.table = ModelTable()
        registry = Registry(MetricsConfig(histogram_latencies=True), cpu=False, gpu=False)
        self.loader = VersionLoader(
            settings or Settings(),
            (),
            self.table,
            registry.statistics,
            WorkerServices(self.make, templates),  # type: ignore[arg-type]
            cache,  # type: ignore[arg-type]
        )

    def make(self, name: str, spawn: object = None) -> FakeProcess:
        process = FakeProcess(name)
        self.processes.append(process)
        self.prepare(process)
        return process

    @property
    def files(self) -> ModelFiles:
        return describe("m", self.directory)

    async def load(self, steps: Mapping[str, str] | None = None) -> Model:
        return await self.loader.load(self.files, 1, self.loader.configure(self.files), steps or {}, lambda: None)

    def serve(self, model: Model) -> VersionState:
        """Let a model serve, as ``a``."""
        version_state = VersionState(State.READY, "", model)
        self.table.models["a"] = ModelState("a", {1: version_state})
        return version_state


async def test_worker_that_completed_the_configuration_becomes_the_first_instance(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CONFIG + "instance_group [{count: 2 kind: KIND_CPU}]")
    model = await bench.load()
    assert model.config.max_batch_size == 4
    assert sorted(process.asked for process in bench.processes) == [["complete", "start"], ["start"]]
    assert [process.name for process in bench.processes] == ["m_0_0", "m_0_1"]
    assert model.ready


async def test_first_responses_are_timed_for_decoupled_models_in_the_buckets_of_their_configuration(
    tmp_path: Path,
) -> None:
    decoupled = CONFIG + "model_transaction_policy { decoupled: true } "
    buckets = """model_metrics { metric_control {
        metric_identifier { family: "nv_inference_first_response_histogram_ms" }
        histogram_options { buckets: [ 20, 10 ] }
    } metric_control {
        metric_identifier { family: "conch_inference_request_histogram_ms" }
        histogram_options { buckets: [ 7 ] }
    } }"""
    models = [
        await Bench(tmp_path / place, text).load()
        for place, text in [("usual", decoupled), ("own", decoupled + buckets), ("other", CONFIG)]
    ]
    usual, own, other = (model.statistics.first_response for model in models)
    whole = models[0].statistics.latencies, models[1].statistics.latencies, models[2].statistics.latencies
    assert [latencies and latencies.request.bounds for latencies in whole] == [LATENCY_BUCKETS, (7,), LATENCY_BUCKETS]
    assert usual is not None and usual.bounds == FIRST_RESPONSE_BUCKETS
    assert own is not None and own.bounds == (10, 20)
    assert other is None


@pytest.mark.parametrize(
    ("limited", "before", "after", "can"),
    [
        (True, "", "rate_limiter { priority: 2 }", False),
        (True, "rate_limiter { priority: 2 }", "", False),
        (True, "rate_limiter { priority: 2 }", "rate_limiter { priority: 3 }", True),
        (False, "", "rate_limiter { priority: 2 }", True),
    ],
)
async def test_version_gets_other_instances_unless_the_rate_limiter_begins_or_ends_to_count_them(
    tmp_path: Path, limited: bool, before: str, after: str, can: bool
) -> None:
    settings = Settings(rate_limit="execution_count" if limited else "off")
    bench = Bench(tmp_path, f"{CONFIG} instance_group {{ count: 1 {before} }}", settings=settings)
    model = await bench.load()
    text = f'name: "m" {CONFIG} instance_group {{ count: 2 {after} }}'
    (bench.directory / "config.pbtxt").write_text(text)
    assert bench.loader.can_rescale(model, bench.loader.configure(bench.files)) is can
    await model.stop(0)


async def test_each_instance_says_what_it_runs_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "conch")
    model = await Bench(tmp_path, CONFIG + "instance_group [{count: 2 kind: KIND_CPU}]").load()
    facts = "engine swan 1.0, threads 2, device CPU, max batch size 4"
    assert [line for line in caplog.messages if line.startswith("instance ")] == [
        f"instance m_0_0 of 'm' version 1: {facts}",
        f"instance m_0_1 of 'm' version 1: {facts}",
    ]
    assert model.statistics.snapshot()["runs_with"] == {
        "engine": "swan 1.0", "threads": "2", "device": "CPU", "max_batch_size": "4",
    }  # fmt: skip


async def test_stalled_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "CHECK_SECONDS", 0.0)
    held = asyncio.Event()

    def stall(process: FakeProcess) -> None:
        process.held = held

    bench = Bench(tmp_path, CONFIG, stall)
    stalled: list[bool] = []
    configuration = bench.loader.configure(bench.files)
    load = bench.loader.load(bench.files, 1, configuration, {}, lambda: stalled.append(True))
    loading = asyncio.create_task(load)
    await until(lambda: bench.processes and "start" in bench.processes[0].asked)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not stalled
    bench.processes[0].verdict = Verdict(idle=starting.STALLED_SECONDS)
    await until(lambda: stalled)
    held.set()
    await loading


async def test_load_that_takes_long_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "conch")
    monkeypatch.setattr(starting, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(starting, "CHECK_SECONDS", 0.0)
    leave = asyncio.Event()
    loading = asyncio.create_task(Bench(tmp_path, CONFIG, lambda process: setattr(process, "held", leave)).load())
    await until(lambda: any("still loading 'm' version 1 after 0 s" in line for line in caplog.messages))
    leave.set()
    await loading
    said = len(caplog.messages)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(caplog.messages) == said


async def test_instance_that_cannot_start_takes_the_others_with_it(tmp_path: Path) -> None:
    def fail_second(process: FakeProcess) -> None:
        process.failure = internal("no memory") if process.name == "m_0_1" else None

    bench = Bench(tmp_path, CONFIG + "instance_group [{count: 3 kind: KIND_CPU}]", fail_second)
    with pytest.raises(ConchError, match="no memory"):
        await bench.load()
    assert [process.stopped or process.killed for process in bench.processes] == [True] * 3


async def test_worker_is_killed_when_the_load_is_cancelled_while_it_starts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CONFIG, lambda process: setattr(process, "held", asyncio.Event()))
    loading = asyncio.create_task(bench.load())
    await until(lambda: bench.processes and "start" in bench.processes[0].asked)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert bench.processes[0].killed


async def test_worker_that_is_forked_while_the_server_stops_is_discarded(tmp_path: Path) -> None:
    def stopping(process: FakeProcess) -> None:
        raise unavailable("the server is stopping")

    templates = FakeTemplates()
    with pytest.raises(ConchError, match="the server is stopping"):
        await Bench(tmp_path, CONFIG, stopping, templates=templates).load()
    assert templates.discarded == 1


async def test_configuration_that_cannot_run_here_ends_the_worker_that_completed_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CONFIG + "instance_group [{kind: KIND_GPU gpus: [0]}]")
    with pytest.raises(ConchError):
        await bench.load()
    assert all(process.killed for process in bench.processes)


class SlowDisk:
    """Blocks every read of a file through a module until the event loop continues: forever if the loop waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, file: str) -> None:
        self._released = threading.Event()
        self._file = file
        monkeypatch.setattr(module, "read_small", self._read)

    def _read(self, path: Path, most: int = reading.MOST_BYTES) -> bytes:
        assert path.name != self._file or self._released.wait(60)
        return reading.read_small(path, most)

    async def release(self) -> None:
        await asyncio.sleep(0)
        self._released.set()


async def test_event_loop_turns_while_a_label_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, CONFIG.replace("dims: [1]}] ", "dims: [1]}] ", 1).replace(
        'output [{name: "y"', 'output [{name: "y" label_filename: "labels.txt"'
    ))  # fmt: skip
    (bench.directory / "labels.txt").write_text("cat\ndog\n")
    disk = SlowDisk(monkeypatch, model_files, "labels.txt")
    loading = asyncio.create_task(bench.load())
    await disk.release()
    assert (await loading).labels("y") == ["cat", "dog"]


async def test_member_that_is_unloaded_while_labels_of_its_ensemble_are_read_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CONFIG.replace('backend: "python"', 'platform: "ensemble"').replace(
        'output [{name: "y"', 'output [{name: "y" label_filename: "labels.txt"'
    )
    steps = '{model_name: "a" model_version: -1 input_map {key: "x" value: "x"} output_map {key: "y" value: "y"}}'
    bench = Bench(tmp_path, f"{text} ensemble_scheduling {{step [{steps}]}}")
    (bench.directory / "labels.txt").write_text("cat\n")
    disk = SlowDisk(monkeypatch, model_files, "labels.txt")
    step = bench.serve(await Bench(tmp_path / "step", CONFIG).load())
    loading = asyncio.create_task(bench.load({"a": "a"}))
    await asyncio.sleep(0)
    step.make_unavailable("unloaded")
    await disk.release()
    with pytest.raises(ConchError, match="which has no loaded version"):
        await loading


async def test_event_loop_turns_while_warm_up_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = 'model_warmup [{name: "s" batch_size: 1 inputs {key: "x" value {data_type: TYPE_FP32 dims: [1] '
    bench = Bench(tmp_path, CONFIG + sample + 'input_data_file: "x.bin"}}}]')
    (bench.directory / "warmup").mkdir()
    (bench.directory / "warmup" / "x.bin").write_bytes(b"abcd")
    disk = SlowDisk(monkeypatch, starting, "x.bin")
    loading = asyncio.create_task(bench.load())
    await disk.release()
    await until(lambda: bench.processes[0].batches)
    (request,) = bench.processes[0].batches[0].requests
    assert request.inputs["x"].data == b"abcd"
    bench.processes[0].finish_batch()
    assert (await loading).ready


async def test_worker_is_told_which_model_it_runs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CONFIG + 'default_model_filename: "other.py"')
    await bench.load()
    init = bench.processes[0].init
    assert init["model"]["filename"] == "other.py" and init["model"]["version"] == "1"
    assert json.loads(init["config"])["name"] == "m"
    assert init["backend"] == "conch.backends.python.python_backend:PythonBackend"


def test_model_without_a_configuration_is_refused_where_nothing_is_completed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CONFIG)
    (bench.directory / "config.pbtxt").unlink()
    (bench.directory / "1" / "model.py").touch()
    assert bench.loader.configure(bench.files).backend == "python"
    nothing: Any = None
    as_written = VersionLoader(Settings(disable_auto_complete_config=True), (), nothing, nothing)
    path = bench.directory / "config.pbtxt"
    with pytest.raises(ConchError, match=f"^failed to open text file for read {path}: No such file or directory$"):
        as_written.configure(bench.files)


async def test_limit_of_an_ensemble_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduling = """ensemble_scheduling { max_inflight_requests: 3 step [{ model_name: "a" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }] }"""
    bench = Bench(tmp_path, CONFIG.replace('backend: "python"', 'platform: "ensemble"') + scheduling)
    bench.serve(await Bench(tmp_path / "step", CONFIG).load())
    with caplog.at_level(logging.INFO, logger="conch"):
        await bench.load({"a": "a"})
    assert "Ensemble model 'm' configured with max_inflight_requests: 3" in caplog.messages


CACHED = CONFIG + "response_cache { enable: true } "
REMOTE = """backend: "remote" response_cache { enable: true }
parameters { key: "url" value { string_value: "grpc://127.0.0.1:1" } }
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }"""


async def test_shared_cache_tells_versions_by_what_their_workers_read(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    cache = SharedCache()

    def prepare(process: FakeProcess) -> None:
        process.dependencies = [("path", str(weights))]

    bench = Bench(tmp_path, CACHED, prepare, cache)
    for content in ("old", "old", "new"):
        weights.write_text(content)
        await bench.load()
    first, second, third = cache.known
    assert first == second != third


async def test_version_has_the_stamps_of_what_its_workers_read_elsewhere(tmp_path: Path) -> None:
    weights, written = tmp_path / "weights", tmp_path / "written"
    weights.write_text("x")

    def prepare(process: FakeProcess) -> None:
        written.write_text("while the model is being loaded")
        os.utime(written, ns=(time.time_ns(), time.time_ns()))
        inside = ("path", str(bench.directory / "adapter"))
        process.dependencies = [("path", str(weights)), ("path", str(written)), inside, ("revision", "org/name@1")]

    bench = Bench(tmp_path, CONFIG, prepare)
    model = await bench.load()
    assert model.external == {**take_external([weights]), written: frozenset()}


@pytest.mark.parametrize(
    ("text", "dependencies", "reason"),
    [
        (CACHED, [("unknown", "'tokenizer' of model.json")], "'tokenizer' of model.json"),
        (CACHED, [("path", "/nonexistent")], "No such file or directory: /nonexistent"),
        (REMOTE, [], "what other servers run"),
    ],
)
async def test_version_that_depends_on_more_is_not_in_a_shared_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, dependencies: list[tuple[str, str]], reason: str
) -> None:
    def prepare(process: FakeProcess) -> None:
        process.dependencies = dependencies

    cache = SharedCache()
    model = await Bench(tmp_path, text, prepare, cache).load()
    assert not cache.known and model.cached_messages is None
    assert [message for message in caplog.messages if message.startswith("responses of")] == [
        "responses of 'm' version 1 are not stored in the response cache, because they depend on "
        f"something that is not in its keys: {reason}"
    ]
    await model.stop(0)


async def test_ensemble_of_a_model_into_which_clients_load_adapters_is_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduling = """ensemble_scheduling { step [{ model_name: "a" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }] }"""
    cache = LocalCache(1 << 20)
    bench = Bench(tmp_path, CACHED.replace('backend: "python"', 'platform: "ensemble"') + scheduling, cache=cache)
    step_model = await Bench(tmp_path / "step", CONFIG).load()
    step_model.set_runtime_facts({LOADS_ADAPTERS: "yes"})
    bench.serve(step_model)
    model = await bench.load({"a": "a"})
    assert model.cached_messages is None
    assert [message for message in caplog.messages if message.startswith("responses of")] == [
        "responses of 'm' version 1 are not stored in the response cache, because they depend on something that is "
        "not in its keys: LoRA adapters that clients load into 'm'"
    ]


async def test_servers_of_a_cached_remote_model_can_be_replaced(tmp_path: Path) -> None:
    model = await Bench(tmp_path, REMOTE, cache=SharedCache()).load()
    assert model.cache is not None and isinstance(model.executor, RemoteExecutor)
    model.executor.endpoints.update([])
    assert not model.ready
    await model.stop(0)


async def test_load_that_is_cancelled_after_its_workers_started_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()

    def read(*arguments: object, **options: object) -> None:
        reading.wait(60)

    monkeypatch.setattr("conch.server.models.version_loader.identity_of", read)
    bench = Bench(tmp_path, CACHED, cache=SharedCache())
    load = asyncio.create_task(bench.load())
    await until(lambda: bench.processes and "start" in bench.processes[0].asked)
    load.cancel()
    reading.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert not any(process.alive for process in bench.processes)
