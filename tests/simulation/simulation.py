"""Runs a program on a server in a simulated environment, and reports the promises that it broke."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError
from conch.core.inference import InferResponse
from conch.frontends.budget import ByteBudget
from conch.library.app import Application
from conch.options.settings import Settings
from conch.options.triton_values import Resource, Setting
from conch.server.regions import SystemRegion
from conch.telemetry.exposition import label_text
from conch.telemetry.metrics import Registry
from tests.simulation import virtual_time
from tests.simulation.addresses import ADDRESSES
from tests.simulation.clients import Clients
from tests.simulation.kernel import SimulatedKernel
from tests.simulation.loop import NothingHappens, SimulatedLoop
from tests.simulation.models import SimulatedRepository
from tests.simulation.network import SimulatedNetwork
from tests.simulation.programs import Program
from tests.simulation.promises import Outcome, Promises
from tests.simulation.redis_server import RedisServer
from tests.simulation.remotes import RemoteServer
from tests.simulation.shared_memory import SIZE, ClientMemory
from tests.simulation.sockets import BlockingSockets
from tests.simulation.stores import SimulatedStore
from tests.simulation.substitutes import InjectedError, SimulatedMemory, substituted
from tests.simulation.workers import METRIC, SimulatedWorkers

#: The time within which everything must end (s, virtual): longer than all timeouts of a program together.
PATIENCE = 400.0
#: The time for which a request may wait although a worker could run it (s).
STRANDED_SECONDS = 4
#: Maximum number of callbacks of a program; a program with more is stuck in a loop.
MOST_CALLBACKS = 400_000


class Simulation:
    """One run of a program; ``trace`` collects the events as lines, unless it is None."""

    def __init__(self, program: Program, folder: Path, trace: list[str] | None = None) -> None:
        self.program = program
        self.trace = trace
        self.random = random.Random(program.schedule)
        self.clock = virtual_time.VirtualClock(1_000_000_000_000)
        self.loop = SimulatedLoop(self.clock, self.random, program.slowness)
        self.network = self.loop.network = SimulatedNetwork(self.loop)
        self.sockets = BlockingSockets(self.loop, self.network)
        self.workers = SimulatedWorkers(self)
        self.memory = SimulatedMemory()
        self.kernel = (
            SimulatedKernel(self.loop, self.workers, lambda what: self.promises.broken(what))
            if "descriptors" in program.features
            else None
        )
        self._folder = folder
        self.repository = SimulatedRepository(folder / "models")
        self.remotes = [RemoteServer(self.loop, self.network, address, self.repository) for address in ADDRESSES]
        self.redis = RedisServer(self.loop, self.network)
        self.store = SimulatedStore(folder / "models", self.loop.latency)
        self.promises = Promises(self.repository)
        self.promises.stable = program.stable
        self.promises.unlimited = program.unlimited
        self.promises.refuses_bodies = bool(program.settings["max_bytes_in_flight"])
        self._faults: dict[tuple[str, str], list[str]] = {}
        self._memory = ClientMemory()
        self._registered: set[str] = set()
        self._cached_executions = 0
        self._rested = False
        self._specs = {name: dict(spec) for name, spec in program.models.items()}
        self._tasks: set[asyncio.Task[None]] = set()
        self.application: Application
        self.registry: Registry
        self.budgets: list[ByteBudget] = []
        self._clients: Clients

    def run(self) -> list[str]:
        """Run the program to its end; returns the violations."""
        records = _Errors()
        virtual_time.use(self.clock)
        asyncio.set_event_loop(self.loop)
        try:
            with records.collected():
                for name, spec in self._specs.items():
                    self.repository.write(name, spec)
                self.loop.run_until_complete(self._main())
        except NothingHappens:
            self.promises.broken("a wait never ends: " + "; ".join(_stacks(self.loop)))
        except Exception:
            self.promises.broken("the program failed: " + traceback.format_exc())
        finally:
            virtual_time.use(None)
            asyncio.set_event_loop(None)
            self.loop.close()
            self._memory.remove()
        for failure in self.loop.failures:
            self.promises.broken(f"an exception reached the event loop: {failure}")
        for line in records.lines:
            self.promises.broken(f"an exception was logged: {line}")
        return self.promises.violations

    # The environment of the server

    def next_fault(self, model: str, during: str) -> str:
        faults = self._faults.get((model, during))
        return faults.pop(0) if faults else ""

    def executed(self, model: str, id: str) -> None:
        self._cached_executions += bool(self._specs[model].get("cache"))
        self.promises.executed(id)

    @property
    def looks_up(self) -> bool:
        """Whether every request to a model with a cache must be looked up in Redis."""
        patient = ("redis", "socket_timeout", "10000") in self.program.settings.get("cache_config", ())
        rewritten = any(what == "rewrite" for _, what, _ in self.program.steps)  # such models are not cached
        return patient and self.redis.reliable and not rewritten and not self.program.slowness

    # The program

    async def _main(self) -> None:
        self.application = Application(self._settings())
        await self.application.listen()
        self._clients = Clients(
            self.loop, self.network, self.application.server, self.application.addresses, self.promises, self._specs,
            self._memory, self.sockets,
        )  # fmt: skip
        await self.application.load_models()
        watching = self.loop.create_task(self._watch(), name="watch")
        for seconds, what, arguments in self.program.steps:
            await asyncio.sleep(seconds)
            self._note(f"{what} {arguments}")
            await self._do(what, arguments)
            if self.loop.callbacks > MOST_CALLBACKS:
                self.promises.broken("the server does not come to rest")
                break
        if not self.program.stop_midway:
            await self._come_to_rest()
        watching.cancel()
        await self._stop()

    async def _come_to_rest(self) -> None:
        """Wait for all requests, end all faults, and check that the server has recovered."""
        await self._quiet()
        self._faults.clear()
        self.loop.slow_calls.clear()
        self.loop.hangs.clear()
        self.store.heal()
        for remote in self.remotes:
            remote.heal()
        self.redis.heal()
        if self.kernel is not None:
            self.kernel.heal()
        self.memory.failures = 0
        core_server = self.application.server
        for worker in self.workers.alive:
            if worker.stalled:
                worker.kill()
        await asyncio.sleep(150.0)
        self.promises.check_rest(core_server)
        self._rested = True
        for name in self.promises.serving(core_server, self._specs):
            outcome = self._infer({"model": name, "value": 7, "milliseconds": 0, "count": 1, "timeout": 0})
            await self._quiet()
            self.promises.check_probe(outcome)
        if "metrics" in self.program.features:
            await asyncio.sleep(30.0)  # let the models end that a probe has evicted
            self._check_metrics()

    def _check_metrics(self) -> None:
        """Check that a model's metric has the sum of its workers' updates, and exists while any of them runs."""
        families = self.registry.custom.joined(iter(()))
        shown = {sample.labels: sample.value for _, samples in families for sample in samples}
        for name in self._specs:
            least, most = self.workers.least_value(name), self.workers.updates[name]
            value = shown.get(label_text({"model": name}))
            if (value is None) != (least is None) or not (least or 0) <= (value or 0) <= most:
                self.promises.broken(f"the metric of '{name}' is {value}, and should be from {least} to {most}")

    async def _quiet(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            done, pending = await asyncio.wait(list(self._tasks), timeout=PATIENCE)
            if not done:
                self.promises.broken(
                    f"after {PATIENCE:g} s still waiting: "
                    + "; ".join(f"{task.get_name()} {_stack(task)}" for task in pending)
                )
                for task in pending:
                    task.cancel()
                self._tasks.clear()

    async def _watch(self) -> None:
        """Check that no request waits while a worker of its model is idle and nothing else is busy."""
        since: dict[str, int] = {}
        while True:
            await asyncio.sleep(1.0)
            busy = self.loop.busy_threads or self.redis.stalled_until > self.clock.now_ns
            for outcome in self.promises.waiting():
                idle = self.workers.idle(outcome.arguments["model"]) and not busy
                since[outcome.id] = since.get(outcome.id, 0) + 1 if idle else 0
                if since[outcome.id] == STRANDED_SECONDS:
                    self.promises.broken(f"request {outcome.id} to '{outcome.arguments['model']}' is stranded")

    async def _stop(self) -> None:
        seconds = self.application.exit_seconds
        self.promises.stopping = True
        stopping = asyncio.create_task(self.application.stop(seconds), name="stop")
        done, _ = await asyncio.wait([stopping], timeout=PATIENCE)
        if not done:
            self.promises.broken(f"the server did not stop within {PATIENCE:g} s: {_stack(stopping)}")
            return
        try:
            in_time = stopping.result()
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.promises.broken(f"the server cannot stop: {error!r} in {Path(frame.filename).name}:{frame.lineno}")
            return
        if not in_time and self._rested and not self.program.slowness:
            self.promises.broken("the server did not stop in time, with no requests in flight")
        await self._quiet()
        self._clients.close()
        await asyncio.sleep(5.0 if in_time else 60.0)
        self.promises.check_end()
        for budget in self.budgets:
            if budget.used:
                self.promises.broken(f"{budget.used} bytes count as in flight after the end")
        if self.looks_up and self._cached_executions > self.redis.misses:
            self.promises.broken(
                f"{self._cached_executions} requests were executed after {self.redis.misses} lookups in Redis"
            )
        if in_time and self.program.settings["allow_client_shm"]:
            self.application.server.regions.unregister(SystemRegion)
            gc.collect()
            if self._memory.open_files:
                self.promises.broken("shared memory is still open after the end")
        try:
            self.registry.custom.hold_family(METRIC, "", "GAUGE")
        except ConchError:
            self.promises.broken("the family of models' metrics is there after the end")
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            self.promises.broken(f"a task is left after the end: {task.get_name()} {_stack(task)}")
        for line in (*self.loop.left(), *(self.kernel.left() if self.kernel is not None else ())):
            self.promises.broken(f"left after the end: {line}")
        for worker in self.workers.alive:
            self.promises.broken(f"the worker {worker.pid} of '{worker.model}' is left after the end")

    async def _do(self, what: str, arguments: dict[str, Any]) -> None:
        server = self.application.server
        match what:
            case "infer":
                self._infer(arguments)
            case "cancel":
                outcomes = self.promises.outcomes
                if len(outcomes) >= arguments["back"]:
                    self._cancel(outcomes[-arguments["back"]])
            case "hang_up":
                self._hang_up(arguments["via"], arguments["client"])
            case "break_off":
                self._clients.break_off()
            case "end_stream":
                self._clients.end_stream(arguments["client"])
            case "load":
                self._begin(self._load(arguments["model"]), f"load of {arguments['model']}")
            case "unload":
                self._begin(self._control(server.unload(arguments["model"])), f"unload of {arguments['model']}")
            case "rewrite":
                spec = self._specs[arguments["model"]]
                if arguments.get("instances"):
                    spec["instances"] = arguments["instances"]
                self.repository.write(arguments["model"], spec)
            case "fault":
                self._faults.setdefault((arguments["model"], arguments["during"]), []).extend(
                    [arguments["fault"]] * arguments.get("times", 1)
                )
            case "kill":
                workers = [worker for worker in self.workers.alive if worker.model == arguments["model"]]
                if workers:
                    self.random.choice(workers).kill()
            case "slow_disk":
                self.loop.slow_calls.extend([float(arguments["seconds"])] * arguments["calls"])
            case "descriptors" if self.kernel is not None:
                self.kernel.fail(arguments["after"], arguments["times"])
            case "template" if self.kernel is not None:
                self.kernel.template_faults.append(arguments["fault"])
            case "memory":
                self.memory.failures += arguments["readings"]
            case "store":
                self.store.hangs.extend([float(arguments["seconds"])] * arguments["calls"])
                self.store.failures += arguments["failures"]
            case "remote":
                self.remotes[arguments["server"]].fail(arguments["fault"], arguments["seconds"])
            case "register":
                self._begin(self._register(arguments["region"]), f"register {arguments['region']}")
            case "unregister":
                server.regions.unregister(SystemRegion, arguments["region"])
            case "redis":
                self.redis.fail(arguments["fault"], arguments["seconds"])
            case "index":
                self._begin(self._control(server.index()), "index")
            case "hang":
                self.loop.hangs[arguments["model"]] = float(arguments["seconds"])
                self.promises.hung.add(arguments["model"])
            case "quiet":
                await self._quiet()

    async def _load(self, name: str) -> None:
        newest = self.promises.newest(name)
        try:
            await self.application.server.load(name)
        except ConchError as error:
            self._note(f"load of {name} failed: {error}")
        else:
            self._note(f"loaded {name}")
            self.promises.loaded(name, newest)

    async def _register(self, region: str) -> None:
        try:
            await self.application.server.regions.register_system(region, self._memory.key, 0, SIZE)
        except ConchError as error:
            self._note(f"region {region} was not registered: {error}")
        if not any(what == "unregister" and given["region"] == region for _, what, given in self.program.steps):
            self._registered.add(region)

    async def _control(self, work: Any) -> None:
        try:
            await work
        except ConchError as error:
            self._note(f"failed: {error}")

    def _infer(self, arguments: dict[str, Any]) -> Outcome:
        outcome = self.promises.begin(arguments, self._specs)
        outcome.registered = arguments.get("region") in self._registered
        ended = self.loop.create_future()
        self._begin(_wait(ended), f"request {outcome.id}")

        def on_response(response: InferResponse) -> None:
            self._note(f"{outcome.id} {response.error or 'response'} {'final' if response.final else ''}")
            self.promises.responded(outcome, response)
            if response.final and not ended.done():
                ended.set_result(None)

        self._clients.send(outcome, on_response)
        return outcome

    def _cancel(self, outcome: Outcome) -> None:
        if not outcome.finals and self._clients.cancel(outcome):
            self._gave_up(outcome)

    def _hang_up(self, via: str, number: int) -> None:
        client = self._clients.hang_up(via, number)
        for outcome in self.promises.outcomes:
            if client is not None and outcome.client is client and not outcome.finals:
                self._gave_up(outcome)

    def _gave_up(self, outcome: Outcome) -> None:
        """Stop waiting for a request."""
        self.promises.gave_up(outcome)
        for task in self._tasks:
            if task.get_name() == f"request {outcome.id}":
                task.cancel()

    def _begin(self, work: Any, name: str) -> None:
        task = self.loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _settings(self) -> Settings:
        given = {"worker_template_secs": 0, **self.program.settings}
        for name, kind in (("cache_config", Setting), ("rate_limit_resource", Resource)):
            if name in given:
                given[name] = tuple(kind(*one) for one in given[name])
        if "load_model" in given:
            given["load_model"] = tuple(given["load_model"])
        stored = given.pop("stored", False)
        return Settings(
            model_repository=("s3://bucket/models" if stored else str(self.repository.path),),
            repository_cache_directory=str(self._folder / "cache"), check_memory_on_load=False,
            allow_metrics=False, allow_gpu_metrics=False, allow_cpu_metrics=False, http_port=0, grpc_port=0, **given,
        )  # fmt: skip

    def _note(self, line: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.clock.now_ns / 1e9 - 1000:12.6f} {line}")


async def _wait(future: asyncio.Future[None]) -> None:
    await future


class _Errors(logging.Handler):
    """Collects log records with tracebacks: unexpected exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] not in (None, InjectedError):
            frames = traceback.extract_tb(record.exc_info[2])
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            self.lines.append(f"{record.getMessage()}: {record.exc_info[1]!r} at {where}")

    @contextmanager
    def collected(self) -> Iterator[None]:
        logger = logging.getLogger("conch")
        before = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(before[0])
            logger.propagate = before[1]


def _stack(task: asyncio.Task[Any]) -> str:
    """Return the stack of a waiting task, innermost frame last."""
    places = []
    awaitable: Any = task.get_coro()
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None)
        if frame is None:
            break
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        awaitable = awaitable.cr_await
    return " > ".join(places)


def _stacks(loop: SimulatedLoop) -> list[str]:
    return [f"{task.get_name()} {_stack(task)}" for task in asyncio.all_tasks(loop)]


def simulate(program: Program, trace: list[str] | None = None) -> list[str]:
    """Run a program in a temporary folder; returns the violations."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="conch-simulation-", dir=parent))
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # caused by coroutines that a failed run left behind
    gc.disable()  # the time of collections is not part of the schedule
    try:
        simulation = Simulation(program, folder, trace)
        with substituted(simulation):
            violations = simulation.run()
            del simulation
            gc.collect(1)
        return violations
    finally:
        gc.enable()
        sys.unraisablehook = hook
        shutil.rmtree(folder, ignore_errors=True)
