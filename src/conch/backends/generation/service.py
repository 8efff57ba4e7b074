"""The service: a thread that runs an engine and adds and removes requests between its steps.

The threads that read the server's frames submit and cancel requests. The service's thread makes all calls to the engine
and sends the responses of all requests after each step, in one frame. If a step fails, all requests fail and the worker
exits; the server starts another worker.
"""

from __future__ import annotations

import heapq
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic_ns, sleep
from typing import Any, Final

from conch.backends.base.arrays import Request, Result, failure
from conch.backends.generation.adapters import CACHE_BYTES, MAX_RANK, AdapterStore, LoadedAdapter
from conch.backends.generation.compilation import COMPILE_SECONDS, Compilations
from conch.backends.generation.engine import EngineRequest, GenerationEngine, Progress
from conch.backends.generation.media import MediaItem
from conch.core.errors import ConchError, cancelled, error_text, internal, unavailable
from conch.core.sampling.parameters import SamplingParams
from conch.core.sampling.structures import Structure
from conch.workers.child.channel import Channel
from conch.workers.child.heartbeat import HEARTBEAT
from conch.workers.child.messages import log_frame
from conch.workers.child.packing import Packer


class ResponseBuilder(ABC):
    """Builds the responses of one request from its tokens.

    ``prompts`` are the prompts (token ids) with their sampling parameters. Each prompt has ``n`` completions, as its
    parameters specify; the completions of all prompts are numbered consecutively. Used by the service's thread.
    """

    prompts: Sequence[tuple[list[int], SamplingParams]]
    #: The images and recordings of each prompt.
    media: Sequence[MediaItem] = ()
    #: The id of other requests that this request ends; they return their tokens so far.
    ends_id: str = ""

    @abstractmethod
    def add(self, index: int, progress: Progress) -> str:
        """Add the result of a step to completion ``index``.

        Returns the finish reason (``stop``, ``length``), empty while the completion continues. A completion may end
        before the engine ends it.
        """

    @abstractmethod
    def responses(self, final: bool) -> Sequence[Result]:
        """Return the responses that are due after a step.

        ``final``: all completions have ended, or the request is ended early. The result then has at least one response.
        """


class ImmediateResponse(ResponseBuilder):
    """Builds the response of a request that needs no engine: its ``result``."""

    prompts = ()

    def __init__(self, result: Result, ends_id: str = "") -> None:
        self._result = result
        self.ends_id = ends_id

    def add(self, index: int, progress: Progress) -> str:
        raise NotImplementedError  # there is no completion

    def responses(self, final: bool) -> Sequence[Result]:
        return (self._result,)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that runs on the engine or waits for it.

    ``batch`` is the number of its execution. Lower values of ``priority`` run first; ``order`` is the position among
    requests of equal priority. The first token must arrive before ``deadline``, unless that is 0. Times are monotonic,
    in ns, and 0 for events that have not happened: the server received the request (``arrived``), the worker received
    it (``received``), it was added to the engine (``scheduled``), its first and last token arrived.
    """

    request: Request
    batch: int
    builder: ResponseBuilder
    arrived: int
    priority: int = 0
    deadline: int = 0
    order: int = 0
    received: int = field(default_factory=monotonic_ns)
    scheduled: int = 0
    first_token: int = 0
    last_token: int = 0
    generated_tokens: int = 0
    #: The completions that have not ended, by the id of their engine request.
    running: dict[int, set[int]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    #: The compiled form of ``structure``.
    compiled: Any = None
    #: The adapter that clients have loaded and this request uses.
    adapter: LoadedAdapter | None = None

    @property
    def finished(self) -> bool:
        return not self.running

    @property
    def structure(self) -> Structure | None:
        """The structure that the output must match, the same for all prompts of a request; None if there is none."""
        return next((sampling.structured_outputs for _, sampling in self.builder.prompts), None)

    @property
    def lora_name(self) -> str:
        """The LoRA adapter of a request, the same for all prompts; empty if there is none."""
        return next((sampling.lora_name for _, sampling in self.builder.prompts), "")

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.builder.prompts)

    @property
    def max_tokens(self) -> int:
        return max(sampling.max_tokens for _, sampling in self.builder.prompts)


class ProgressReport:
    """Collects the events since the last ``progress`` frame. Used by the service's thread.

    ``telemetry/statistics.py`` counts the ``load`` of the frame.
    """

    def __init__(self) -> None:
        #: Whether a frame is due, even if only to report that no request is in flight.
        self.changed = False
        self._responses: list[dict[str, Any]] = []
        self._done: list[tuple[int, tuple[int, int, int]]] = []
        self._generated = 0
        self._prompt = 0
        self._first: list[float] = []
        self._gaps: dict[int, int] = {}
        self._ended: list[tuple[Any, ...]] = []
        self._queries = self._hits = self._preemptions = 0

    def tokens(self, state: RequestState, fresh: int, now: int) -> None:
        """Count ``fresh`` new tokens of a request; ``now`` is the monotonic time (ns)."""
        self._generated += fresh
        if not state.first_token:
            state.first_token = now
            self._prompt += state.prompt_tokens
            self._first.append((now - state.arrived) / 1e9)
        elif now > state.last_token:
            gap = (now - state.last_token) // fresh
            self._gaps[gap] = self._gaps.get(gap, 0) + fresh
        state.last_token = now

    def respond(self, state: RequestState, packed: Mapping[str, Any], final: bool) -> None:
        """Add a response; ``packed`` is its description for a frame."""
        self.changed = True
        self._responses.append({"serial": state.request.serial, "final": final, **packed})

    def end(self, state: RequestState) -> None:
        """Count a completed request."""
        now = monotonic_ns()
        scheduled = state.scheduled or now
        first = state.first_token or now
        self._done.append((state.batch, (scheduled - state.received, now - scheduled, 0)))
        times = (now - state.arrived, scheduled - state.arrived, first - scheduled, now - first)
        if state.builder.prompts:
            self._ended.append(
                (
                    state.finish_reasons,
                    *(max(time, 0) / 1e9 for time in times),
                    state.prompt_tokens,
                    state.generated_tokens,
                    state.max_tokens,
                )
            )

    def frame(self, engine: GenerationEngine, waiting: int) -> dict[str, Any]:
        """Return the frame and start an empty one; ``waiting`` sequences have not been added to the engine yet."""
        usage = engine.usage()
        frame = {
            "op": "progress",
            "responses": self._responses,
            "done": self._done,
            "load": {
                "running": usage.running,
                "waiting": usage.waiting + waiting,
                "used": usage.used_tokens,
                "capacity": engine.cache_tokens,
                "bytes": engine.token_bytes * (engine.cache_tokens if engine.reserves_cache else usage.used_tokens),
                "prompt": self._prompt,
                "generated": self._generated,
                "preempted": usage.preemptions - self._preemptions,
                "queries": usage.prefix_queries - self._queries,
                "hits": usage.prefix_hits - self._hits,
                "first": self._first,
                "gaps": [(gap / 1e9, times) for gap, times in self._gaps.items()],
                "ended": self._ended,
            },
        }
        self._queries, self._hits, self._preemptions = usage.prefix_queries, usage.prefix_hits, usage.preemptions
        self.changed = False
        self._responses, self._done, self._first, self._gaps, self._ended = [], [], [], {}, []
        self._generated = self._prompt = 0
        return frame


#: Maximum delay of a step for the threads that read frames (ns).
MAX_WAIT_NS: Final = 10_000_000
#: Exit status of a worker with a broken engine.
BROKEN: Final = 70

Pack = Callable[[Request, Result | ConchError, Packer], dict[str, Any]]


class GenerationService:
    """Runs the requests of a worker.

    ``pack`` returns the description of a response for a frame, with an ``error`` if the response cannot be sent. With
    ``reserve``, a request starts only when the KV cache can hold it at its maximum length, so that no request is ever
    preempted; otherwise it starts as soon as the engine accepts it. ``arriving`` returns whether the threads that read
    frames have work to do. ``compile_seconds`` is the timeout for compiling the structure of a request. Clients may
    load LoRA adapters from ``adapter_folders``; ``lora_cache_bytes`` and ``max_lora_rank`` are their limits.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        channel: Channel,
        pack: Pack,
        *,
        reserve: bool = False,
        arriving: Callable[[], bool] = lambda: False,
        compile_seconds: float = COMPILE_SECONDS,
        adapter_folders: Sequence[Path] = (),
        lora_cache_bytes: int = CACHE_BYTES,
        max_lora_rank: int = MAX_RANK,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._pack = pack
        self._arriving = arriving
        self._reserve = reserve and engine.cache_tokens > 0
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._compilations = Compilations(engine, compile_seconds)
        self._adapters = AdapterStore(
            engine, adapter_folders, self._commands.put, limit=lora_cache_bytes, max_rank=max_lora_rank
        )
        self._engine_ids = count(1)
        self._orders = count(1)
        self._states: dict[int, RequestState] = {}  # by serial number
        self._waiting: list[tuple[int, int, RequestState]] = []
        # By engine request id: the request, and the index of the first completion of that engine request.
        self._owners: dict[int, tuple[RequestState, int]] = {}
        self._with_deadline: dict[int, RequestState] = {}  # requests without a token yet
        self._reserved = 0
        self._report = ProgressReport()
        self._packer = Packer()  # of the next frame
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="conch-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, state: RequestState) -> None:
        """Queue a request to run; called by the threads that read frames."""
        self._commands.put(lambda: self._accept(state))

    def cancel(self, serial: int) -> None:
        """Cancel a request; no effect if it has ended. Called by the threads that read frames."""
        self._commands.put(lambda: self._cancel(serial))

    def load_adapter(self, name: str, path: str, *, in_place: bool = False, later: bool = False) -> None:
        """Load a LoRA adapter and send a reply; with ``later``, its first request loads it, and there is no reply.

        Called by the threads that read frames. Raises INVALID_ARG or UNSUPPORTED for a path that is not allowed.
        """
        folder = self._adapters.resolve(path)
        if later:
            self._commands.put(lambda: self._adapters.register(name, folder))
        else:
            self._commands.put(lambda: self._adapters.load(name, folder, self._reply, in_place=in_place))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter and send a reply; called by the threads that read frames."""
        self._commands.put(lambda: self._unload_adapter(name))

    def _unload_adapter(self, name: str) -> None:
        try:
            self._adapters.unload(name)
        except ConchError as error:
            self._reply(error)
        else:
            self._reply(None)

    def _reply(self, error: ConchError | None) -> None:
        if error is None:
            self._channel.send({"op": "adapted"})
        else:
            self._channel.send({"op": "failed", "error": [error.code.name, error.message, error.public]})

    def stop(self, seconds: float = 5.0) -> None:
        """End all requests and close the engine; wait for the thread to end, up to ``seconds``."""
        self._commands.put(self._stop)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopping:
                HEARTBEAT.step(stepping=not self._idle)
                self._run_commands()
                HEARTBEAT.step(stepping=True)
                self._refuse_overdue()
                self._admit()
                self._process(self._engine.step())
            self._engine.close()
        except BaseException as error:
            self._fail_all(error)

    def _run_commands(self) -> None:
        """Run the commands of the threads that read frames; an idle service waits for one, or for the next deadline.

        An engine may hold the interpreter lock for a whole step. Therefore the threads get a short time before the step
        to finish reading requests.
        """
        until = 0
        while True:
            try:
                self._commands.get(block=self._idle, timeout=self._seconds_to_deadline())()
            except Empty:
                until = until or monotonic_ns() + MAX_WAIT_NS
                if monotonic_ns() >= until or not self._arriving():
                    return
                sleep(0.0002)

    def _seconds_to_deadline(self) -> float | None:
        """Return the time to the next deadline of a request that may wait for its adapter or structure (s)."""
        if not self._with_deadline:
            return None
        return max(0, min(state.deadline for state in self._with_deadline.values()) - monotonic_ns()) / 1e9

    @property
    def _idle(self) -> bool:
        return not (self._engine.busy or self._waiting or self._report.changed or self._stopping)

    def _accept(self, state: RequestState) -> None:
        state.order = next(self._orders)
        self._states[state.request.serial] = state
        if state.deadline:
            self._with_deadline[state.request.serial] = state
        if state.builder.ends_id:
            for other in list(self._states.values()):
                if other.request.id == state.builder.ends_id and other is not state:
                    self._finish(other)
        if not state.builder.prompts:
            self._respond(state)
        else:
            self._adapters.acquire(state.lora_name, lambda *result: self._on_adapter(state, *result))

    def _on_adapter(self, state: RequestState, adapter: LoadedAdapter | None, error: ConchError | None) -> None:
        """Continue a request after its adapter has been loaded, or fail it with the ``error``."""
        if state.request.serial not in self._states:  # cancelled, or its deadline has passed
            if adapter is not None:
                self._adapters.release(adapter)
            return
        state.adapter = adapter
        if error is not None:
            self._end(state, error, "error")
        elif state.structure is None:
            self._wait(state)
        else:
            self._compilations.add(
                state.structure,
                lambda compiled, error: self._commands.put(lambda: self._compiled(state, compiled, error)),
            )

    def _wait(self, state: RequestState) -> None:
        heapq.heappush(self._waiting, (state.priority, state.order, state))

    def _compiled(self, state: RequestState, compiled: Any, error: ConchError | None) -> None:
        """Continue a request after its structure has been compiled, or fail it with the ``error``."""
        if state.request.serial not in self._states:  # cancelled, or its deadline has passed
            return
        if error is not None:
            error.param = "structured_outputs"
            self._end(state, error, "error")
            return
        state.compiled = compiled
        self._wait(state)

    def _cancel(self, serial: int) -> None:
        state = self._states.get(serial)
        if state is not None:
            self._end(state, cancelled("Request was cancelled"), "abort")

    def _stop(self) -> None:
        self._stopping = True
        for state in list(self._states.values()):
            self._end(state, cancelled("Request was cancelled"), "abort")
        self._send()

    def _refuse_overdue(self) -> None:
        """End the requests without a token whose deadline has passed."""
        if self._with_deadline:
            now = monotonic_ns()
            self._with_deadline = {
                serial: state
                for serial, state in self._with_deadline.items()
                if serial in self._states and not state.first_token
            }
            for state in [state for state in self._with_deadline.values() if now >= state.deadline]:
                self._end(state, unavailable("Request timeout expired"), "abort")

    def _admit(self) -> None:
        """Add waiting requests to the engine while they fit, by priority and then by arrival order."""
        while self._waiting:
            state = self._waiting[0][2]
            if state.request.serial not in self._states:  # cancelled
                heapq.heappop(self._waiting)
                continue
            needed = self._needed(state)
            if self._reserve and self._reserved and self._reserved + needed > self._engine.cache_tokens:
                return
            heapq.heappop(self._waiting)
            self._reserved += needed
            self._add(state)

    def _needed(self, state: RequestState) -> int:
        """Return the maximum KV cache that a request can occupy (tokens, in whole blocks)."""
        block = self._engine.block_tokens
        return sum(
            -(-(len(prompt) + sampling.max_tokens) // block) * block * sampling.beam_width
            for prompt, sampling in state.builder.prompts
        )

    def _add(self, state: RequestState) -> None:
        state.scheduled = monotonic_ns()
        first = 0
        try:
            for prompt, sampling in state.builder.prompts:
                if state.adapter is not None:
                    sampling = replace(sampling, lora_name=state.adapter.key)
                number = next(self._engine_ids)
                self._engine.add(
                    EngineRequest(number, prompt, sampling, state.priority, state.compiled, state.builder.media)
                )
                self._owners[number] = state, first
                state.running[number] = set(range(first, first + sampling.n))
                first += sampling.n
        except Exception as error:  # a refusal by the engine concerns this request only
            self._end(state, failure(error), "error")

    def _process(self, steps: list[Progress]) -> None:
        now = monotonic_ns()
        touched: dict[RequestState, None] = {}
        for step in steps:
            state, first = self._owners.get(step.id, (None, 0))
            if state is None:
                continue
            if step.error is not None:
                self._end(state, step.error, "error")
                touched.pop(state, None)
                continue
            try:
                self._progress(state, first + step.beam, step, now)
            except Exception as error:  # for example from a tokenizer; concerns this request only
                self._end(state, failure(error), "error")
                touched.pop(state, None)
                continue
            touched[state] = None
        for state in touched:
            self._respond(state)
        if steps or self._report.changed:
            self._send()

    def _progress(self, state: RequestState, index: int, step: Progress, now: int) -> None:
        if index not in state.running.get(step.id, ()):
            return
        if step.tokens:
            fresh = len(step.tokens)
            state.generated_tokens += fresh
            self._report.tokens(state, fresh, now)
        reason = state.builder.add(index, step)
        if reason:
            state.finish_reasons.append(reason)
            still = state.running[step.id]
            still.remove(index)
            if not still:
                del state.running[step.id], self._owners[step.id]
                if not step.finish:
                    self._engine.cancel(step.id)

    def _respond(self, state: RequestState) -> None:
        final = state.finished
        try:
            results = state.builder.responses(final)
            if final and not results:
                raise internal("a request has ended without a response")
            for position, result in enumerate(results, 1):
                packed = self._pack(state.request, result, self._packer)
                if packed.get("error"):
                    self._end_with(state, packed, "error")
                    return
                self._report.respond(state, packed, final and position == len(results))
        except Exception as error:  # concerns this request only
            self._end(state, failure(error), "error")
            return
        if final:
            self._forget(state)

    def _finish(self, state: RequestState) -> None:
        """End a request early, with a response of its tokens so far."""
        self._take_out(state, "abort")
        self._respond(state)

    def _end(self, state: RequestState, error: ConchError, reason: str) -> None:
        """End a request with an error."""
        self._end_with(state, self._pack(state.request, error, self._packer), reason)

    def _end_with(self, state: RequestState, packed: Mapping[str, Any], reason: str) -> None:
        """End a request with a last response."""
        self._take_out(state, reason)
        self._report.respond(state, packed, True)
        self._forget(state)

    def _take_out(self, state: RequestState, reason: str) -> None:
        """Cancel the running sequences of a request in the engine."""
        state.finish_reasons.extend([reason] * max(sum(len(still) for still in state.running.values()), 1))
        for number in state.running:
            self._engine.cancel(number)
            self._owners.pop(number, None)
        state.running.clear()

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request.serial]
        if state.scheduled:
            self._reserved -= self._needed(state)
        self._report.end(state)
        if state.adapter is not None:
            adapter, state.adapter = state.adapter, None
            self._adapters.release(adapter)

    def _send(self) -> None:
        """Send a frame with the events since the last frame."""
        packer, self._packer = self._packer, Packer()
        waiting = sum(
            len(state.builder.prompts) for _, _, state in self._waiting if state.request.serial in self._states
        )
        self._channel.send(self._report.frame(self._engine, waiting), packer)

    def _fail_all(self, error: BaseException) -> None:
        """Fail all requests and exit the worker, because its engine is broken."""
        failed = internal(f"engine '{self._engine.name}' failed: {error_text(error)}")
        self._channel.send(log_frame(error, failed.message))
        for state in list(self._states.values()):
            state.running.clear()
            state.finish_reasons.append("error")
            self._report.respond(state, self._pack(state.request, failed, self._packer), True)
            self._forget(state)
        try:
            self._send()
        finally:
            os._exit(BROKEN)
