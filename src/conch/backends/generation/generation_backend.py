"""The base class of backends that generate text with an engine: each request joins the running batch.

Runs in workers: two threads read the server's frames, a third one runs the service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, Protocol

from conch.backends.base.arrays import Request
from conch.backends.base.backend_base import BackendBase, quiet_libraries, versioned
from conch.backends.base.openmp import call_in_thread, use_one_thread
from conch.backends.generation.adapters import CACHE_BYTES, MAX_RANK
from conch.backends.generation.agreement import NOT_CHECKED, verify_gguf
from conch.backends.generation.compilation import COMPILE_SECONDS
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.backends.generation.features import INVARIANT_ENGINES, RUN_TIME_ADAPTER_ENGINES, listed
from conch.backends.generation.media import MediaSpec
from conch.backends.generation.options import engine_spec, library_arguments
from conch.backends.generation.service import GenerationService, RequestState, ResponseBuilder
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import cancelled, invalid
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.channel import Channel, Header


def choose_engine(checkpoint: Checkpoint, on_gpu: bool) -> str:
    """Return the value of the parameter ``engine``, or for ``auto`` the best engine for the files and the device.

    ``Checkpoint.open`` has checked the parameter.
    """
    if checkpoint.options.engine != "auto":
        return checkpoint.options.engine
    if checkpoint.variant is not None and checkpoint.variant.engine == "openvino":
        return "openvino"
    if on_gpu and not checkpoint.reads_media:
        # vLLM 0.32 reads no GGUF files.
        return "vllm" if checkpoint.gguf is None and find_spec("vllm") is not None else "transformers"
    if checkpoint.gguf is not None:
        return checkpoint.engine
    return "openvino" if checkpoint.graph_file("openvino") is not None else "transformers"


def open_engine(name: str, spec: EngineSpec) -> GenerationEngine:
    """Load a model on the engine ``conch.backends.engines.<name>``.

    Raises INVALID_ARG for a model that the engine cannot load, and UNSUPPORTED if its library is not installed.
    """
    module: Any = import_module(f"conch.backends.engines.{name}")
    if spec.adapter_folders and name not in RUN_TIME_ADAPTER_ENGINES:
        raise invalid(
            f"engine '{name}' does not load LoRA adapters at run time (parameter 'lora_folders'): the engines "
            f"{listed(RUN_TIME_ADAPTER_ENGINES)} do"
        )
    engine: GenerationEngine = module.open(spec)
    if spec.batch_invariant and not engine.batch_invariant:
        engine.close()
        raise invalid(
            f"parameter 'batch_invariant' is not supported by engine '{name}'; {listed(INVARIANT_ENGINES)} support it"
        )
    return engine


def verify(engine: GenerationEngine, spec: EngineSpec, prompts: Sequence[list[int]]) -> dict[str, str]:
    """Compare completions of ``prompts`` (token ids) with references; returns the results by name.

    For a GGUF file that conch's reference does not compute, transformers is the reference. Raises INVALID_ARG for an
    engine that differs, and the engine's error if it fails on a prompt.
    """
    results: dict[str, str] = {}
    if spec.gguf is not None:
        results["gguf_check"] = verify_gguf(engine, spec.gguf, prompts, spec.threads, adapters=spec.adapters.values())
    result = engine.verify(prompts)
    if not result and results.get("gguf_check", "").startswith(NOT_CHECKED) and engine.name != "transformers":
        comparison: Any = import_module("conch.backends.engines.transformers.comparison")
        result = comparison.compare(engine, spec, prompts)
    return {**results, "transformers_check": result} if result else results


#: Prompts of different lengths for the comparisons with transformers and GGUF weights at load.
_EXAMPLES: Final = ("The station", "Where is the nearest library? It is near the")
#: Size above which a request takes long to read (bytes).
LONG_REQUEST: Final = 1 << 16


def _runtime_facts(engine: GenerationEngine, spec: EngineSpec, checkpoint: Checkpoint) -> dict[str, str]:
    """Return facts about the running model, by name."""
    variant = checkpoint.variant.name if checkpoint.variant is not None and spec.gguf is None else ""
    limits = {
        "threads": spec.threads if spec.device == "cpu" else 0,
        "max_sequences": engine.max_sequences,
        "max_length": engine.context,
        "kv_cache_tokens": engine.cache_tokens,
    }
    return {
        "engine": versioned(engine.name, engine.library or engine.name),
        **({"precision": engine.precision} if engine.precision else {}),
        **({"variant": variant} if variant else {}),
        **{name: str(limit) for name, limit in limits.items() if limit},
        **({"batch_invariant": "true"} if engine.batch_invariant else {}),
    }


class IoFormat(Protocol):
    """The interface of an I/O format: converts requests with its tensors to response builders."""

    def response_builder(self, request: Request) -> ResponseBuilder:
        """Read a request and create its response builder. Raises INVALID_ARG or UNSUPPORTED, in one sentence."""


class GenerationBackend(BackendBase):
    """One language model on one device: two threads check and tokenize requests, and the service runs the engine.

    While one thread reads a long text, the other handles further frames, which may concern the same request. ``slots``
    is the maximum number of requests that the server sends to the worker at a time.
    """

    slots: int
    _io_format: IoFormat
    _service: GenerationService

    def __init__(self, channel: Channel, init: Header) -> None:
        super().__init__(channel, init)
        self.threads = 2
        self._on_gpu = False
        self._lock = threading.Lock()
        self._compile_seconds = COMPILE_SECONDS
        self._adapter_folders: Sequence[Path] = ()
        self._adapter_limits: dict[str, int] = {}
        self._cancelled: dict[int, bool] = {}  # by serial number, for requests that are being read
        quiet_libraries()

    @property
    def decoupled(self) -> bool:
        """Whether a request may have several responses."""
        return bool((self.config.get("model_transaction_policy") or {}).get("decoupled"))

    def choose_engine(self, checkpoint: Checkpoint, instance: Mapping[str, Any]) -> str:
        """Return the name of the engine for a checkpoint on the device of ``instance``."""
        return choose_engine(checkpoint, instance["kind"] == "GPU")

    def open_engine(
        self,
        checkpoint: Checkpoint,
        instance: Mapping[str, Any],
        tokenizer: TextTokenizer,
        arguments: Callable[[str], Mapping[str, Any]],
        media: MediaSpec | None = None,
    ) -> GenerationEngine:
        """Choose an engine and load a checkpoint; ``arguments`` returns the library's own arguments for an engine name.

        ``media`` are the images and recordings that the checkpoint reads.
        Raises INVALID_ARG for a model that cannot be loaded or whose output differs from that of transformers, and
        UNSUPPORTED if the engine's library is not installed.
        """
        self.dependencies = checkpoint.dependencies
        self._on_gpu = instance["kind"] == "GPU"
        name = self.choose_engine(checkpoint, instance)
        chosen = checkpoint.options.engine == "auto" and instance["kind"] != "GPU"
        if chosen and name == "transformers" and (problem := checkpoint.openvino_problem):
            other = "" if checkpoint.llamacpp_problem else "; engine 'llamacpp' may compute its weights as they are"
            self.warn_of(f"engine 'transformers' serves it, since {problem}{other}")
        given = {**library_arguments(name, checkpoint.options), **arguments(name)}
        spec = engine_spec(checkpoint, instance, tokenizer, arguments=given, media=media)
        self._compile_seconds = checkpoint.options.number("structured_output_timeout", COMPILE_SECONDS)
        if self._compile_seconds <= 0:
            raise invalid(f"parameter 'structured_output_timeout' is {self._compile_seconds:g}; it must be more than 0")
        self._adapter_limits = {
            "lora_cache_bytes": checkpoint.options.integer("lora_cache_bytes", CACHE_BYTES),
            "max_lora_rank": checkpoint.options.integer("max_lora_rank", MAX_RANK),
        }
        self._adapter_folders = spec.adapter_folders
        engine = call_in_thread(open_engine, name, spec)
        for warning in engine.warnings:
            self.warn_of(warning)
        self.runtime_facts = _runtime_facts(engine, spec, checkpoint)
        if checkpoint.options.verify_on_load:
            prompts = [prompt for text in _EXAMPLES if (prompt := tokenizer.encode(text))]
            self.runtime_facts |= call_in_thread(verify, engine, spec, prompts)
        self.text_limit = checkpoint.options.text_limit(engine.context)
        return engine

    def serve(self, engine: GenerationEngine, io_format: IoFormat, *, reserve: bool) -> None:
        """Start the service that runs ``engine``."""
        self._io_format = io_format
        self.slots = engine.max_sequences
        self._service = GenerationService(
            engine,
            self.channel,
            self.pack,
            reserve=reserve,
            arriving=self._arriving,
            compile_seconds=self._compile_seconds,
            adapter_folders=self._adapter_folders,
            **self._adapter_limits,
        )
        self._service.start()

    def response_builder(self, request: Request) -> ResponseBuilder:
        """Read a request and create its response builder. Raises INVALID_ARG or UNSUPPORTED, in one sentence."""
        return self._io_format.response_builder(request)

    def execute(self, header: Header, payload: bytearray) -> None:
        unpacker = BorrowingUnpacker(payload, self.channel)
        (fields,) = header["requests"]
        request = self.receive(fields, unpacker)
        serial = request.serial
        self._cancelled[serial] = False
        if request.size > LONG_REQUEST:
            self.before_computing()
        if not self._on_gpu:
            use_one_thread()
        try:
            builder = self.response_builder(request)
        except BaseException:
            with self._lock:
                del self._cancelled[serial]
            raise
        state = RequestState(
            request,
            header["batch"],
            builder,
            arrived=fields.get("arrived") or monotonic_ns(),
            priority=fields.get("priority", 0),
            deadline=fields.get("deadline", 0),
        )
        with self._lock:
            if self._cancelled.pop(serial):
                raise cancelled("Request was cancelled")
            self._service.submit(state)

    def control(self, header: Header) -> bool:
        if header["op"] == "load_adapter":
            name, path = header["name"], header["path"]
            self._service.load_adapter(name, path, in_place=header["in_place"], later=header["later"])
        elif header["op"] == "unload_adapter":
            self._service.unload_adapter(header["name"])
        else:
            return super().control(header)
        return True

    def cancel(self, serial: int) -> None:
        with self._lock:
            if serial in self._cancelled:
                self._cancelled[serial] = True
            else:
                self._service.cancel(serial)

    def stop(self) -> None:
        if hasattr(self, "_service"):
            self._service.stop()

    def _arriving(self) -> bool:
        return bool(self._cancelled) or self.channel.pending()
