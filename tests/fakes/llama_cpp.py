"""A stand-in for the package llama-cpp-python: llama.cpp's functions for a model that adds up its tokens.

The most likely token after a sequence is the sum of its tokens modulo the size of the vocabulary, so that a wrong cache
gives wrong tokens. An adapter adds its number. The content of a "GGUF file" chooses what happens: ``refused`` is
refused with an error in the log, ``recurrent`` cannot be shortened, ``nan`` gives no finite logits, ``window`` adds
the last ``WINDOW`` tokens once more, for layers with a sliding window. A context for embeddings gives for each token
its sum and its position, or for each sequence its sum.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch.checkpoints.gguf import read_gguf

VOCABULARY = 40
CONTEXT = 512
SEQUENCES = 64
EMBEDDING = 2
WINDOW = 8

llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
llama_adapter_lora_p_ctypes = ctypes.POINTER(ctypes.c_void_p)
_log: list[Any] = []
_adapters: dict[int, int] = {}


class llama_batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


@dataclass
class Parameters:
    """All parameters of models and contexts; they may have any name."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


@dataclass
class Model:
    kind: str
    parameters: Any
    freed: bool = False


@dataclass
class Context:
    model: Model
    parameters: Any
    #: By sequence: the tokens by position, and the positions that the layers with a window hold.
    memory: dict[int, dict[int, int]] = field(default_factory=dict)
    windows: dict[int, set[int]] = field(default_factory=dict)
    shift: int = 0
    logits: Any = None
    vectors: Any = None
    #: Whether attention was causal, by call of ``llama_set_causal_attn``.
    causal: list[bool] = field(default_factory=list)
    freed: bool = False


#: The contexts that were opened, the latest last.
contexts: list[Context] = []


def llama_log_set(callback: Any, data: Any) -> None:
    _log[:] = [callback]


def llama_backend_init() -> None:
    pass


def llama_supports_gpu_offload() -> bool:
    return False


def llama_max_parallel_sequences() -> int:
    return SEQUENCES


def llama_model_default_params() -> Parameters:
    return Parameters()


def llama_context_default_params() -> Parameters:
    return Parameters()


def llama_model_load_from_file(path: bytes, parameters: Any) -> Model | None:
    content = Path(path.decode()).read_bytes()
    kind = "real" if content.startswith(b"GGUF") else content.decode()
    if kind == "refused":
        _log[0](2, b"load: loading\n", None)
        _log[0](4, b"llama_model_load: error loading model: tensor 'a' ", None)
        _log[0](5, b"not found\n", None)
        _log[0](4, b"llama_model_load_from_file_impl: failed to load model\n", None)
        return None
    return Model(kind, parameters)


def llama_model_free(model: Model) -> None:
    model.freed = True


def llama_model_has_encoder(model: Model) -> bool:
    return model.kind == "encoder"


def llama_model_is_diffusion(model: Model) -> bool:
    return False


def llama_model_is_recurrent(model: Model) -> bool:
    return model.kind == "recurrent"


def llama_model_is_hybrid(model: Model) -> bool:
    return False


def llama_model_n_swa(model: Model) -> int:
    return WINDOW if model.kind == "window" else 0


def llama_model_n_ctx_train(model: Model) -> int:
    return CONTEXT


def llama_model_get_vocab(model: Model) -> Model:
    return model


def llama_vocab_n_tokens(vocab: Model) -> int:
    return VOCABULARY


def llama_model_n_embd_out(model: Model) -> int:
    return EMBEDDING


def llama_model_n_embd_inp(model: Model) -> int:
    return EMBEDDING


def llama_set_causal_attn(context: Context, causal: bool) -> None:
    context.causal.append(causal)


def llama_model_n_cls_out(model: Model) -> int:
    return 1


def llama_init_from_model(model: Model, parameters: Any) -> Context | None:
    if parameters.type_v == 2 and parameters.flash_attn_type == 0:
        _log[0](4, b"llama_init_from_model: V cache quantization requires flash_attn\n", None)
        return None
    contexts.append(Context(model, parameters))
    return contexts[-1]


def llama_get_memory(context: Context) -> Context:
    return context


def llama_n_ctx(context: Context) -> int:
    return int(context.parameters.n_ctx)


def llama_free(context: Context) -> None:
    context.freed = True


def llama_adapter_lora_init(model: Model, path: bytes) -> Any:
    content = Path(path.decode()).read_bytes()
    # The number of an adapter that conch wrote is that of its tensors.
    text = str(len(read_gguf(Path(path.decode())).tensors)) if content.startswith(b"GGUF") else content.decode()
    if not text.isdigit():
        _log[0](4, b"llama_adapter_lora_init_impl: lora tensor 'a' has unexpected suffix\n", None)
        return llama_adapter_lora_p_ctypes()
    number = max(_adapters, default=0) + 1
    _adapters[number] = int(text)
    return ctypes.cast(number, llama_adapter_lora_p_ctypes)


def llama_adapter_lora_free(adapter: Any) -> None:
    del _adapters[_address(adapter)]


def llama_set_adapters_lora(context: Context, adapters: Any, count: int, scales: Any) -> int:
    context.shift = sum(round(scales[index]) * _adapters[_address(adapters[index])] for index in range(count))
    return 0


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _held(context: Context, slot: int) -> tuple[dict[int, int], set[int]]:
    return context.memory.setdefault(slot, {}), context.windows.setdefault(slot, set())


def llama_decode(context: Context, batch: llama_batch) -> int:
    rows, vectors = [], []
    window = llama_model_n_swa(context.model)
    for index in range(batch.n_tokens):
        assert batch.n_seq_id[index] == 1
        tokens, inside = _held(context, batch.seq_id[index][0])
        # A vector counts as a token: the sum of its numbers.
        numbers = batch.embd[index * EMBEDDING : (index + 1) * EMBEDDING] if batch.embd else ()
        token = int(sum(numbers)) if batch.embd else batch.token[index]
        position = batch.pos[index]
        if not 0 <= token < VOCABULARY or position != len(tokens):
            _log[0](4, b"llama_decode: invalid input batch\n", None)
            return -1
        tokens[position] = token
        inside.add(position)
        if sum(map(len, context.memory.values())) > context.parameters.n_ctx:
            return 1
        total = sum(tokens.values()) + sum(tokens[held] for held in inside if held > position - window)
        vectors += [float("nan") if context.model.kind == "nan" else float(total), float(position)]
        if batch.logits[index]:
            rows.append((total + context.shift) % VOCABULARY)
    context.vectors = (ctypes.c_float * len(vectors))(*vectors)
    context.logits = (ctypes.c_float * (len(rows) * VOCABULARY))()
    for row, token in enumerate(rows):
        context.logits[row * VOCABULARY + token] = float("nan") if context.model.kind == "nan" else 9.0
    return 0


def llama_get_logits(context: Context) -> Any:
    return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))


def llama_get_embeddings(context: Context) -> Any:
    assert (context.parameters.embeddings, context.parameters.pooling_type) == (True, 0)
    return ctypes.cast(context.vectors, ctypes.POINTER(ctypes.c_float))


def llama_get_embeddings_seq(context: Context, slot: int) -> Any:
    assert (context.parameters.embeddings, context.parameters.pooling_type) == (True, 4)
    return ctypes.cast((ctypes.c_float * 1)(sum(context.memory[slot].values())), ctypes.POINTER(ctypes.c_float))


def llama_memory_clear(context: Context, data: bool) -> None:
    context.memory.clear()
    context.windows.clear()


def llama_memory_seq_pos_min(context: Context, slot: int) -> int:
    return min(_held(context, slot)[1], default=-1)


def llama_memory_seq_pos_max(context: Context, slot: int) -> int:
    return max(_held(context, slot)[1], default=-1)


def llama_memory_seq_cp(context: Context, source: int, target: int, begin: int, end: int) -> None:
    assert context.parameters.kv_unified or (begin, end) == (-1, -1), "slots with memory of their own copy all of it"
    last = end if end >= 0 else CONTEXT
    for position, token in _held(context, source)[0].items():
        if begin <= position < last:
            _held(context, target)[0][position] = token
            if position in context.windows[source]:
                context.windows[target].add(position)


def llama_state_seq_get_size(context: Context, slot: int) -> int:
    return 3 * len(context.memory[slot])


def llama_state_seq_get_data(context: Context, data: Any, size: int, slot: int) -> int:
    tokens, inside = _held(context, slot)
    first = max(tokens) - WINDOW  # of the positions before, layers with a window have nothing
    for index, (position, token) in enumerate(tokens.items()):
        values = (*divmod(position, 256), token + 128 * (position in inside and position > first))
        for number, value in enumerate(values):
            data[3 * index + number] = value
    return size


def llama_state_seq_set_data(context: Context, data: Any, size: int, slot: int) -> int:
    if sum(map(len, context.memory.values())) + size // 3 > context.parameters.n_ctx:
        return 0
    context.memory[slot], context.windows[slot] = {}, set()
    for index in range(0, size, 3):
        position = data[index] * 256 + data[index + 1]
        context.memory[slot][position] = data[index + 2] % 128
        if data[index + 2] >= 128:
            context.windows[slot].add(position)
    return size


def llama_memory_seq_rm(context: Context, slot: int, begin: int, end: int) -> bool:
    tokens, inside = _held(context, slot)
    if context.model.kind == "recurrent" and 0 < begin < len(tokens):
        return False
    for position in [position for position in tokens if position >= begin]:
        del tokens[position]
        inside.discard(position)
    return True
