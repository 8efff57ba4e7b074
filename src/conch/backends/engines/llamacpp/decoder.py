"""The decoder of the engine ``llamacpp``: a context of llama.cpp whose sequences share one KV cache. Runs in workers.

llama.cpp assigns cells of the cache to tokens, and a cell may belong to several sequences. The block tables of the
batcher therefore only count: sequences never need more cells than their blocks have.

The order in which attention adds up tokens follows from their cells. If results must not depend on other sequences,
or if ``kv_unified`` is false, each slot has a separate part of the cache, which it fills from the start. In a
shared cache, attention passes over all cells up to the last used one, which takes time: with 12,000 cells of ended
sequences, a token of SmolLM2-135M takes 1.8 times as long. Therefore the tokens of ended sequences are copied to memory
outside the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import Chunk, Decoder, Logits, MediaSpan, SavedTokens
from conch.backends.engines.llamacpp.library import CACHE_TYPES, Arguments, LlamaLibrary, library
from conch.backends.engines.llamacpp.lora import gguf_adapter
from conch.backends.engines.llamacpp.projector import Projector
from conch.backends.generation.engine import EngineSpec, kv_token_bytes
from conch.backends.generation.lora import LoraWeights
from conch.backends.generation.media import MediaItem
from conch.checkpoints.gguf import ADAPTED, GgufFile, llamacpp_problem, type_name
from conch.core.errors import ConchError, internal, invalid, unsupported
from conch.machine.memory import free_memory

#: The default number of tokens in a step.
BATCHED: Final = 512
#: The default cache holds ``TOKENS_EACH`` tokens for each of ``SEQUENCES`` sequences, limited to 1 / ``PART_OF_MEMORY``
#: of the free memory.
SEQUENCES: Final = 32
TOKENS_EACH: Final = 4096
PART_OF_MEMORY: Final = 8
#: The number of positions in a part of saved tokens, at most those of a sliding window: llama.cpp saves only the last
#: window of a sequence, but a shorter sequence with the same beginning needs earlier tokens.
PART: Final = 512
#: llama.cpp's sizes of caches are multiples of this (tokens).
_CELLS: Final = 256
#: The status of ``llama_decode`` for a full cache, and llama.cpp's split mode for one GPU.
_FULL: Final = 1
_NO_SPLIT: Final = 0


class LlamaDecoder(Decoder):
    """A model of llama.cpp and a context with ``slots`` sequences."""

    loads_adapters = True

    def __init__(self, spec: EngineSpec) -> None:
        gguf = spec.gguf
        if gguf is None:
            raise invalid(f"engine 'llamacpp' needs a GGUF file: {spec.directory} has none")
        if problem := llamacpp_problem(gguf, spec.adapters.values()):
            raise invalid(f"engine 'llamacpp' cannot serve {spec.source}: {problem}")
        self._gguf, self._llama = gguf, library()
        module = self._llama.module
        arguments = Arguments.of(spec)
        self._model = load_model(self._llama, spec, arguments)
        if module.llama_model_has_encoder(self._model) or module.llama_model_is_diffusion(self._model):
            module.llama_model_free(self._model)
            raise invalid(
                f"engine 'llamacpp' cannot load {spec.source}: a model of kind '{spec.config.get('model_type')}' does "
                "not write token after token"
            )
        self.rewinds = not (module.llama_model_is_recurrent(self._model) or module.llama_model_is_hybrid(self._model))
        self.vocabulary = int(module.llama_vocab_n_tokens(module.llama_model_get_vocab(self._model)))
        sequences = spec.max_sequences or SEQUENCES
        most = int(module.llama_max_parallel_sequences())
        if sequences > most:
            raise invalid(f"parameter 'max_num_seqs' is {sequences}; llama.cpp has at most {most} sequences")
        self._separate = not arguments.kv_unified
        shared = self.rewinds and not self._separate
        # Every slot of a recurrent model has its own memory; the slots of other models only share the cache. The last
        # sequence of a shared cache is no slot, but has the part of a slot that is being saved or restored.
        count = most if shared else sequences
        self.slots, self._spare = count - shared, count - 1
        self._window = int(module.llama_model_n_swa(self._model))
        self._part = min(PART, self._window or PART)
        context = spec.context or int(module.llama_model_n_ctx_train(self._model))
        recurrent = bool(module.llama_model_is_recurrent(self._model))
        self.token_bytes = 0 if recurrent else _token_bytes(spec, arguments)
        cells = sequences * context if recurrent else _cells(spec, self.token_bytes, sequences, context)
        if self._separate:
            context = min(context, cells // sequences)
            cells = sequences * -(-context // _CELLS) * _CELLS
        self.batched_tokens = max(spec.max_batched_tokens or BATCHED, sequences)
        self._context = open_context(self._llama, self._model, spec, arguments, cells, self.batched_tokens, count)
        self._memory = module.llama_get_memory(self._context)
        cells = int(module.llama_n_ctx(self._context))
        self.blocks = cells // self.block_tokens
        self.context = min(context, self.blocks * self.block_tokens)
        if shared:
            default = cells * self.token_bytes
            self.saved_bytes = default if arguments.cache_ram is None else arguments.cache_ram << 20
            self.retained_tokens = 0 if self.saved_bytes else None
        cache = " and ".join(dict.fromkeys((arguments.type_k, arguments.type_v)))
        self.precision = weights_type(gguf) + ("" if recurrent else f" (KV cache {cache})")
        self._batch = LlamaBatch.of(module, self.batched_tokens)
        self._projector = self._open_projector(spec, arguments)
        # By slot: the ends of spans with more tokens than positions, and the differences.
        self._surplus: dict[int, list[tuple[int, int]]] = {}
        self._adapters = {name: self._load_adapter(path) for name, path in spec.adapters.items()}
        self._adapter = ""
        self.adapters = tuple(self._adapters)
        self._llama.checked(f"engine 'llamacpp' cannot serve {spec.source}", self._try)

    def run(self, chunks: Sequence[Chunk], adapter: str = "") -> Logits:
        self._use(adapter)
        # Only neighbours in a separated cache are computed together.
        ordered = sorted(chunks, key=attrgetter("slot")) if self._separate else chunks
        if self._projector is not None:
            ordered = [self._read_media(self._projector, chunk) for chunk in ordered]
        module, rows = self._llama.module, self._batch.fill(ordered)
        if self._batch.struct.n_tokens:
            self._decode(self._batch.struct)
        if not rows:
            return np.empty((0, self.vocabulary), np.float32)
        logits: Logits = np.ctypeslib.as_array(module.llama_get_logits(self._context), (rows, self.vocabulary))
        if self._separate:
            slots = np.repeat([chunk.slot for chunk in chunks], [chunk.wanted for chunk in chunks])
            if (slots[1:] < slots[:-1]).any():
                logits = logits[slots.argsort(kind="stable").argsort()]
        return logits

    def share(self, source: int, target: int, tokens: int, copied: tuple[int, int] | None) -> None:
        self._llama.module.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if source in self._surplus:
            self._surplus[target] = list(self._surplus[source])
        self.truncate(target, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        position = self._position(slot, tokens)
        if slot in self._surplus:
            self._surplus[slot] = [(end, saved) for end, saved in self._surplus[slot] if end <= tokens]
        if not self._llama.module.llama_memory_seq_rm(self._memory, slot, position, -1):
            raise internal(f"llama.cpp cannot shorten a sequence to {tokens} tokens")

    def holds(self, slot: int, tokens: int) -> bool:
        first = int(self._llama.module.llama_memory_seq_pos_min(self._memory, slot))
        return self._continues(first, self._position(slot, tokens))

    def save(self, slot: int) -> SavedTokens | None:
        module, parts, size = self._llama.module, list[npt.NDArray[np.uint8]](), 0
        first = int(module.llama_memory_seq_pos_min(self._memory, slot))
        end = int(module.llama_memory_seq_pos_max(self._memory, slot)) + 1
        for start in range(0, end, self._part):
            module.llama_memory_seq_cp(self._memory, slot, self._spare, start, start + self._part)
            data = np.empty(int(module.llama_state_seq_get_size(self._context, self._spare)), np.uint8)
            size += data.size
            complete = size <= self.saved_bytes and data.size == module.llama_state_seq_get_data(
                self._context, _address(data), data.size, self._spare
            )
            module.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
            if not complete:
                return None
            parts.append(data)
        return SavedTokens(size, (parts, first, self._surplus.get(slot, [])))

    def restore(self, slot: int, saved: SavedTokens, tokens: int, blocks: Sequence[int]) -> bool:
        module = self._llama.module
        parts, first, surplus = saved.content
        if surplus:
            self._surplus[slot] = list(surplus)
        position = self._position(slot, tokens)
        if not self._continues(first, position):
            return False
        for data in parts[: -(-position // self._part)]:
            complete = module.llama_state_seq_set_data(self._context, _address(data), data.size, self._spare)
            if complete:
                module.llama_memory_seq_cp(self._memory, self._spare, slot, -1, -1)
            module.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
            if not complete:
                return False
        self.truncate(slot, tokens)
        return True

    def media_spans(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> list[MediaSpan]:
        assert self._projector is not None
        return self._projector.spans(prompt, items)

    def close(self) -> None:
        module = self._llama.module
        if self._context is not None:
            if self._projector is not None:
                self._projector.close()
            module.llama_free(self._context)
            module.llama_model_free(self._model)  # frees the adapters
            self._context = self._model = None

    def _try(self) -> bool:
        """Compute a token. Raises INTERNAL for weights that give no logits."""
        logits = self.run([Chunk(0, 0, [0])])
        self.truncate(0, 0)
        if not np.isfinite(logits).all():
            raise internal("its logits are not finite numbers")
        return True

    def _open_projector(self, spec: EngineSpec, arguments: Arguments) -> Projector | None:
        """Load the projector; without one that loads, the model reads texts alone."""
        if spec.projector is None:
            return None
        at_once = min(arguments.n_ubatch or BATCHED, self.batched_tokens)
        try:
            projector = Projector(self._llama, self._model, spec, spec.projector, at_once)
        except ConchError as error:
            self.warnings = (f"it reads only text: {error.message}",)
            return None
        self.preparer = projector
        self.shares_media = not projector.dimensional
        return projector

    def _decode(self, batch: Any) -> None:
        if status := int(self._llama.module.llama_decode(self._context, batch)):
            full = "the KV cache has no room for the batch"
            raise internal(f"llama.cpp failed: {full if status == _FULL else f'{self._llama.reason()} ({status})'}")

    def _continues(self, first: int, position: int) -> bool:
        """Whether a sequence can continue at ``position``; its layers with a window hold the positions from ``first``.

        llama.cpp may have used the cells of positions before the window for other tokens.
        """
        return first <= max(position - self._window, 0)

    def _position(self, slot: int, tokens: int) -> int:
        """Return the position of the token after the first ``tokens`` tokens of a slot."""
        return tokens - sum(saved for end, saved in self._surplus.get(slot, ()) if end <= tokens)

    def _read_media(self, projector: Projector, chunk: Chunk) -> Chunk:
        """Read a chunk up to its last image or recording; returns the rest, which starts at its position."""
        start = chunk.start
        for span in chunk.media:
            if begin := max(span.start - start, 0):
                text = chunk.tokens[start - chunk.start : span.start - chunk.start]
                self._batch.fill([Chunk(chunk.slot, self._position(chunk.slot, start), text, 0)])
                self._decode(self._batch.struct)
                start += begin
            self._read_span(projector, chunk.slot, span, start - span.start)
            start = span.end
        return Chunk(chunk.slot, self._position(chunk.slot, start), chunk.tokens[start - chunk.start :], chunk.wanted)

    def _read_span(self, projector: Projector, slot: int, span: MediaSpan, skipped: int) -> None:
        """Read the vectors of a span after the first ``skipped``."""
        vectors = projector.vectors(span.content)
        positions = projector.positions(span.content, self._position(slot, span.start))
        module = self._llama.module
        if span.content.whole:
            module.llama_set_causal_attn(self._context, False)
        for start in range(skipped, len(vectors), self.batched_tokens):
            end = start + self.batched_tokens
            self._decode(self._batch.vectors(vectors[start:end], positions[:, start:end], slot))
        if span.content.whole:
            module.llama_set_causal_attn(self._context, True)
        if saved := len(vectors) - span.positions:
            self._surplus.setdefault(slot, []).append((span.end, saved))

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        architecture = self._gguf.text("general.architecture")
        if architecture not in ADAPTED:
            raise invalid(f"engine 'llamacpp' does not convert LoRA adapters for the architecture '{architecture}'")
        self._adapters[key] = self._convert_adapter(adapter)

    def detach_adapter(self, key: str) -> None:
        if key == self._adapter:
            self._use("")
        self._llama.module.llama_adapter_lora_free(self._adapters.pop(key))

    def _load_adapter(self, path: Path) -> Any:
        """Load an adapter, a GGUF file or a folder of PEFT. Raises INVALID_ARG for one that does not fit the model."""
        if path.suffix != ".gguf":
            return self._convert_adapter(LoraWeights.read(path))
        return self._read_adapter(path, path)

    def _convert_adapter(self, adapter: LoraWeights) -> Any:
        with NamedTemporaryFile(suffix=".gguf") as file:
            file.write(gguf_adapter(adapter, self._gguf))
            file.flush()
            return self._read_adapter(Path(file.name), adapter.path.parent)

    def _read_adapter(self, file: Path, source: Path) -> Any:
        name, module = str(file).encode(), self._llama.module
        return self._llama.checked(f"LoRA adapter {source}", lambda: module.llama_adapter_lora_init(self._model, name))

    def _use(self, adapter: str) -> None:
        """Apply the adapter to the following runs; empty: none."""
        if adapter == self._adapter:
            return
        module = self._llama.module
        loaded = [self._adapters[adapter]] if adapter else []
        handles = (module.llama_adapter_lora_p_ctypes * max(1, len(loaded)))(*loaded)
        scales = (ctypes.c_float * max(1, len(loaded)))(*[1.0] * len(loaded))
        if module.llama_set_adapters_lora(self._context, handles, len(loaded), scales):
            raise internal(f"llama.cpp cannot use LoRA adapter '{adapter}'")
        self._adapter = adapter


@dataclass(slots=True)
class LlamaBatch:
    """A ``llama_batch`` in memory of numpy: ``struct`` points to the other arrays, one entry for each token."""

    struct: Any
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.int8]
    #: The number of sequences of each token, always 1, and the addresses of the entries of ``slots``.
    counts: npt.NDArray[np.int32] = field(repr=False)
    addresses: npt.NDArray[np.uintp] = field(repr=False)
    #: The arrays of the last result of ``vectors``.
    _vectors: tuple[npt.NDArray[Any], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, module: Any, size: int) -> LlamaBatch:
        """Return a batch with room for ``size`` tokens."""
        tokens, positions, slots = (np.zeros(size, np.int32) for _ in range(3))
        wanted, counts = np.zeros(size, np.int8), np.ones(size, np.int32)
        addresses = slots.ctypes.data + slots.itemsize * np.arange(size, dtype=np.uintp)
        struct = module.llama_batch()
        arrays: dict[str, npt.NDArray[Any]] = {"token": tokens, "pos": positions, "n_seq_id": counts}
        for name, values in {**arrays, "seq_id": addresses, "logits": wanted}.items():
            setattr(struct, name, ctypes.cast(values.ctypes.data, type(getattr(struct, name))))
        return cls(struct, tokens, positions, slots, wanted, counts, addresses)

    def fill(self, chunks: Sequence[Chunk]) -> int:
        """Enter the tokens of ``chunks``; returns the number of tokens whose logits are wanted."""
        end = rows = 0
        for chunk in chunks:
            begin, end = end, end + len(chunk.tokens)
            if end > len(self.tokens):
                raise internal(f"a step has more than {len(self.tokens)} tokens")
            self.tokens[begin:end] = chunk.tokens
            self.positions[begin:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            self.slots[begin:end] = chunk.slot
            self.wanted[begin:end] = 0
            self.wanted[end - chunk.wanted : end] = 1
            rows += chunk.wanted
        self.struct.n_tokens = end
        return rows

    def vectors(self, vectors: npt.NDArray[np.float32], positions: npt.NDArray[np.int32], slot: int) -> Any:
        """Return a ``llama_batch`` of ``vectors`` ``[tokens, size]`` at ``positions`` ``[numbers, tokens]``.

        It uses the memory of this object, and no logits are wanted.
        """
        count = len(vectors)
        self.slots[:count], self.wanted[:count] = slot, 0
        self._vectors = np.ascontiguousarray(vectors), np.ascontiguousarray(positions)
        struct = type(self.struct)()
        struct.n_tokens, struct.n_seq_id, struct.seq_id = count, self.struct.n_seq_id, self.struct.seq_id
        struct.logits = self.struct.logits
        for name, values in zip(("embd", "pos"), self._vectors, strict=True):
            setattr(struct, name, ctypes.cast(values.ctypes.data, type(getattr(struct, name))))
        return struct


def weights_type(gguf: GgufFile) -> str:
    """Return the type that most bytes of the weights have."""
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        name = type_name(tensor.type)
        sizes[name] = sizes.get(name, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name], default="unknown")


def load_model(llama: LlamaLibrary, spec: EngineSpec, arguments: Arguments) -> Any:
    """Load the weights. Raises INVALID_ARG for a file that llama.cpp does not load."""
    module = llama.module
    if spec.device == "cuda" and not module.llama_supports_gpu_offload():
        raise unsupported(
            "engine 'llamacpp' has no support for GPUs: reinstall llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"
        )
    parameters = module.llama_model_default_params()
    parameters.n_gpu_layers = arguments.n_gpu_layers
    parameters.split_mode, parameters.main_gpu = _NO_SPLIT, spec.device_id
    what = f"engine 'llamacpp' cannot load {spec.source}"
    path = str(spec.source).encode()
    return llama.checked(what, lambda: module.llama_model_load_from_file(path, parameters))


def open_context(
    llama: LlamaLibrary,
    model: Any,
    spec: EngineSpec,
    arguments: Arguments,
    cells: int,
    batched: int,
    slots: int,
    *,
    pooling: int | None = None,
) -> Any:
    """Allocate a KV cache of ``cells`` tokens. Raises INVALID_ARG if llama.cpp refuses the arguments.

    With a value of ``llama_pooling_type``, the context gives vectors in place of logits, and computes all tokens of a
    batch at once.
    """
    module = llama.module
    parameters = module.llama_context_default_params()
    parameters.n_ctx = -(-cells // _CELLS) * _CELLS
    parameters.n_batch = batched
    parameters.n_ubatch = min(arguments.n_ubatch or BATCHED, batched) if pooling is None else batched
    if pooling is not None:
        parameters.embeddings, parameters.pooling_type = True, pooling
    parameters.n_seq_max = slots
    # llama.cpp has room for the logits of a token of each sequence at least.
    parameters.n_outputs_max, parameters.n_outputs_max_per_seq = max(batched, slots), 0
    parameters.n_threads = parameters.n_threads_batch = spec.threads or 1
    parameters.flash_attn_type = arguments.flash_attn
    parameters.type_k, parameters.type_v = CACHE_TYPES[arguments.type_k][0], CACHE_TYPES[arguments.type_v][0]
    parameters.offload_kqv = parameters.op_offload = spec.device == "cuda"
    # Sequences of a unified cache may have any length and share cells; layers with a sliding window keep all tokens, so
    # that sequences can be shortened and shared.
    parameters.kv_unified, parameters.swa_full = arguments.kv_unified or pooling is not None, True
    what = f"engine 'llamacpp' cannot serve {spec.source}"
    return llama.checked(what, lambda: module.llama_init_from_model(model, parameters))


def _address(data: npt.NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _token_bytes(spec: EngineSpec, arguments: Arguments) -> int:
    """Return the size of a token in the KV cache (bytes)."""
    numbers = kv_token_bytes(spec.config, 1) / 2
    return round(numbers * (CACHE_TYPES[arguments.type_k][1] + CACHE_TYPES[arguments.type_v][1]))


def _cells(spec: EngineSpec, token_bytes: int, sequences: int, context: int) -> int:
    """Return the size of the KV cache (tokens); ``context`` is the length limit of a sequence."""
    if spec.cache_tokens:
        return spec.cache_tokens
    sequence_tokens = min(context, TOKENS_EACH)
    fitting = free_memory().available // PART_OF_MEMORY // token_bytes
    return max(sequence_tokens, min(sequences * sequence_tokens, fitting))
