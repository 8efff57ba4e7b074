"""The backend ``huggingface``: runs the task of a checkpoint on batches of requests.

An idle thread prepares queued requests (``prepare``). The server then starts them by serial number, without sending
their inputs again. The module of a task is imported on first use, so that a text classifier does not need an audio
library.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from conch.backends.base.arrays import UNFINISHED, Request, Result, failure
from conch.backends.base.backend_base import TRANSFORMERS, BatchBackend, quiet_libraries, versioned
from conch.backends.base.openmp import ComputeThreads, use_one_thread
from conch.backends.tasks.causal import torch_class
from conch.backends.tasks.engines import PRECISIONS, NetworkEngine, choose, open_engine
from conch.backends.tasks.task import ExecutionWork, OpenEngine, PreparedRequest, Task, TaskDescription, complete_config
from conch.backends.tasks.tokens import TextPreparation, TokenizedRequest, with_tokens
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError, invalid
from conch.machine.facts import openmp, openmp_threads, usable_cores
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.channel import Channel, Header

#: ``module:class`` by task name; all other tasks use ``OTHERS``.
TASKS: Final[dict[str, str]] = {
    "feature-extraction": "retrieval.embedding:Embedding",
    "text-classification": "encoders.text_classification:TextClassification",
    "text-ranking": "encoders.ranking:Rerank",
    "zero-shot-classification": "encoders.text_classification:ZeroShotClassification",
    "token-classification": "encoders.token_classification:TokenClassification",
    "question-answering": "encoders.question_answering:QuestionAnswering",
    "fill-mask": "encoders.fill_mask:FillMask",
    "summarization": "text2text:Text2Text",
    "translation": "text2text:Text2Text",
    "text2text-generation": "text2text:Text2Text",
    "automatic-speech-recognition": "speech:SpeechRecognition",
    "image-classification": "vision:ImageClassification",
}
OTHERS: Final = "pipeline:PipelineTask"


def task_class(name: str) -> type[Task]:
    """Return the class for a task name; ``translation_xx_to_yy`` counts as ``translation``."""
    if name.startswith("translation_"):
        name = "translation"
    module, _, class_name = TASKS.get(name, OTHERS).partition(":")
    task_type: type[Task] = getattr(import_module(f"conch.backends.tasks.{module}"), class_name)
    return task_type


def make_task(checkpoint: Checkpoint, open_engine: OpenEngine) -> Task:
    """Create the task of a checkpoint, ready to serve. Raises the errors of the constructor of :class:`Task`."""
    return task_class(checkpoint.task)(checkpoint, open_engine)


def describe_task(checkpoint: Checkpoint) -> TaskDescription:
    """Return the tensors of a checkpoint's task, for configurations without inputs and outputs."""
    return task_class(checkpoint.task).describe(checkpoint)


#: Size (bytes) above which decoding an input takes longer than waking another thread.
LONG_BYTES: Final = 8192


class HuggingFaceBackend(BatchBackend):
    """One checkpoint on one device; its instances share the weights."""

    def __init__(self, channel: Channel, init: Header, checkpoint: Checkpoint) -> None:
        super().__init__(channel, init)
        quiet_libraries()
        self._checkpoint = checkpoint
        self._task: Task
        self._texts: TextPreparation
        self._waiting = PreparedRequests()
        self._prepare_ns = 0

    def complete(self) -> str:
        task = with_tokens(self._checkpoint, describe_task(self._checkpoint))
        return json.dumps(complete_config(self.config, task))

    def preloads(self, instance: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
        """Return the modules that ``load`` imports for ``instance``, and the environment variables to set before."""
        return (TRANSFORMERS, self._variables(instance)) if self._engine == "torch" else ((), {})

    @property
    def _engine(self) -> str:
        """The name of the engine that computes the network on a CPU; empty without a network."""
        has_network = task_class(self._checkpoint.task).has_network(self._checkpoint)
        return choose(self._checkpoint)[0] if has_network else ""

    def _variables(self, instance: Mapping[str, Any]) -> dict[str, str]:
        # For checkpoint code that runs PyTorch directly; conch's engines set their own thread counts.
        return openmp(self._checkpoint.options.threads or usable_cores(), instance["count"])

    def load(self, instance: Mapping[str, Any]) -> None:
        if not self._batched:
            raise invalid(
                f"model '{self.model['name']}' has max_batch_size 0; backend 'huggingface' needs at least 1, because "
                "the tensors of its tasks have a batch dimension"
            )
        checkpoint = self._checkpoint
        self.dependencies = checkpoint.dependencies
        self.warn_of(checkpoint.warning)
        cores = checkpoint.options.threads or usable_cores()
        os.environ.update(self._variables(instance))
        opener = EngineOpener(checkpoint, instance)
        if not opener.on_gpu and (engine := self._engine) in ("torch", "llamacpp"):
            # A context of llama.cpp computes one batch at a time.
            callers = instance["count"] if engine == "torch" else 1
            self.compute_threads = ComputeThreads(callers, openmp_threads(cores, instance["count"]))
        self._task = self.compute(make_task, checkpoint, opener)
        self._texts = TextPreparation(checkpoint, self._task)
        self.text_limit = checkpoint.options.text_limit(checkpoint.max_length)
        self.warn_of(opener.warning)
        self.runtime_facts = opener.runtime_facts
        if not opener.on_gpu:
            self.runtime_facts["threads"] = str(cores)
        self.runtime_facts |= {name: str(limit) for name, limit in self._task.limits.items()}
        self.runtime_facts |= self._task.runtime_facts

    def prepare(self, header: Header, payload: bytearray) -> None:
        """Decode queued requests and report their lengths to the server."""
        unpacker = BorrowingUnpacker(payload, self.channel)
        lengths = []
        for index, fields in enumerate(header["requests"]):
            try:
                request = self.receive(fields, unpacker)
            except Exception as error:  # the requests after it cannot be read either
                for unread in header["requests"][index:]:
                    self._waiting.add(Request({}, frozenset(), serial=unread["serial"]), failure(error))
                break
            if request.size > LONG_BYTES:
                self.before_computing()
            prepared = self._prepared(request)
            self._waiting.add(request, prepared)
            if isinstance(prepared, PreparedRequest):
                lengths.append((request.serial, prepared.length, prepared.sequence_count))
        self.channel.send({"op": "prepared", "lengths": lengths})

    def receive(self, fields: Mapping[str, Any], unpacker: BorrowingUnpacker) -> Request:
        if "inputs" not in fields:
            return self._waiting.request(fields["serial"])
        return super().receive(fields, unpacker)

    def control(self, header: Header) -> bool:
        if header["op"] == "drop":
            self._waiting.drop(header["serial"])
            return True
        return super().control(header)

    def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
        if sum(request.size for request in requests) > LONG_BYTES:
            self.before_computing()
        begin = monotonic_ns()
        ready = [self._waiting.take(request) or self._prepared(request) for request in requests]
        spent, self._prepare_ns = self._prepare_ns, 0
        work = ExecutionWork(
            prepare_ns=spent, waited_ns=monotonic_ns() - begin, others_wait=lambda: len(self._waiting) > 0
        )
        batch = [entry for entry in ready if not isinstance(entry, ConchError | TokenizedRequest)]
        self.before_computing()
        outcomes = self.compute(self._task.execute, batch, work) if batch else []
        for entry, outcome in zip(batch, outcomes, strict=True):
            if outcome is UNFINISHED:
                self._waiting.add(entry.request, entry)
            elif isinstance(outcome, Result):
                self._texts.count(entry, outcome)
        computed = iter(outcomes)
        results = [
            entry
            if isinstance(entry, ConchError)
            else entry.result
            if isinstance(entry, TokenizedRequest)
            else next(computed)
            for entry in ready
        ]
        return results, work.counts

    def _prepared(self, request: Request) -> PreparedRequest | ConchError:
        begin = monotonic_ns()
        if self.compute_threads is not None:
            use_one_thread()
        try:
            return self._texts.prepare(request)
        except BaseException as error:  # includes Rust panics; the rest of the batch still runs
            return failure(error)
        finally:
            self._prepare_ns += monotonic_ns() - begin


class EngineOpener:
    """Opens the engine of a checkpoint for the instances of a worker, with the head that the task requests.

    ``device`` is PyTorch's name of the device, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(self, checkpoint: Checkpoint, instance: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._instance = instance
        self.on_gpu = instance["kind"] == "GPU"
        self.device = f"cuda:{instance['device_id']}" if self.on_gpu else "cpu"
        self._engine: NetworkEngine | None = None
        self._opened: dict[tuple[Path, str, Any], NetworkEngine] = {}

    @property
    def runtime_facts(self) -> dict[str, str]:
        """Runtime facts by name: engine, precision and variants.

        A task that opens no engine runs its network in transformers, so the engine is ``torch``.
        """
        engine = self._engine
        if engine is None:
            facts = {"engine": versioned("torch")}
            dtype = self._checkpoint.options.dtype
            if dtype != "auto" or not self.on_gpu:
                facts["precision"] = PRECISIONS.get(dtype, "fp32")
            return facts
        library = (engine.library,) if engine.library else ()
        facts = {"engine": versioned(engine.name, *library), "precision": engine.precision, **engine.facts}
        if engine.variant:
            facts["variant"] = engine.variant
        others = [part.variant for part in engine.parts if part.variant != engine.variant]
        return {**facts, "by_shape": ", ".join(others)} if others else facts

    @property
    def warning(self) -> str:
        """The warning from opening the engine; empty if there is none."""
        return self._engine.warning if self._engine is not None else ""

    def __call__(self, head: str, part: Checkpoint | None = None, **settings: Any) -> NetworkEngine:
        checkpoint = part or self._checkpoint
        key = checkpoint.directory, head, tuple(sorted(settings.items()))
        if key not in self._opened:
            self._opened[key] = open_engine(
                checkpoint,
                head=head,
                device="cuda" if self.on_gpu else "cpu",
                device_id=self._instance["device_id"],
                instances=self._instance["count"],
                torch_class=torch_class(head),
                **settings,
            )
        engine = self._engine = self._opened[key]
        return engine


class PreparedRequests:
    """Prepared requests that have neither completed nor been dropped, and do not run.

    Messages arrive in order, but several threads handle them. The thread that runs a request waits for the thread that
    prepares it; a drop may arrive before preparation ends.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Request, PreparedRequest | ConchError]] = {}
        self._dropped: set[int] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: Request, prepared: PreparedRequest | ConchError) -> None:
        with self._changed:
            if request.serial in self._dropped:
                self._dropped.remove(request.serial)
                return
            self._known[request.serial] = request, prepared
            self._changed.notify_all()

    def drop(self, serial: int) -> None:
        with self._changed:
            if self._known.pop(serial, None) is None:
                self._dropped.add(serial)

    def request(self, serial: int) -> Request:
        """Wait until the request with this serial number is prepared; return it without removing it."""
        with self._changed:
            self._changed.wait_for(lambda: serial in self._known)
            return self._known[serial][0]

    def take(self, request: Request) -> PreparedRequest | ConchError | None:
        """Remove and return the prepared form of ``request``; None if it arrived together with its execution."""
        known = self._known.pop(request.serial, None)
        return known[1] if known is not None else None
