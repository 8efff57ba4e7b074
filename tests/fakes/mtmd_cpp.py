"""A stand-in for ``llama_cpp.mtmd_cpp``: an image becomes token 1 and two vectors, whose sums are its first number."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

from tests.fakes.llama_cpp import EMBEDDING


class mtmd_input_text(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char_p), ("text_len", ctypes.c_size_t), ("special", ctypes.c_bool), ("parse", ctypes.c_bool),
    )  # fmt: skip


def _same(*values: Any) -> Any:
    return values[0] if values else None


mtmd_log_set = mtmd_free = mtmd_bitmap_free = _same
#: The chunks of items that have not been freed, by the numbers of the items.
_chunks: dict[int, list[int]] = {}
_numbers = itertools.count(1)


def mtmd_context_params_default() -> Any:
    return SimpleNamespace()


def mtmd_init_from_file(path: bytes, model: Any, parameters: Any) -> Any:
    return SimpleNamespace(output=(ctypes.c_float * (2 * EMBEDDING))(), encoded=0)


def mtmd_support_vision(context: Any) -> bool:
    return True


def mtmd_support_audio(context: Any) -> bool:
    return False


def mtmd_decode_use_mrope(context: Any) -> bool:
    return False


def mtmd_decode_use_non_causal(context: Any, chunk: Any) -> bool:
    return True


def mtmd_default_marker() -> bytes:
    return b"<__media__>"


def mtmd_bitmap_init(width: int, height: int, data: Any) -> int:
    return int(data[0])


def mtmd_input_chunks_init() -> int:
    number = next(_numbers)
    _chunks[number] = []
    return number


def mtmd_input_chunks_free(chunks: int) -> None:
    del _chunks[chunks]


def mtmd_tokenize(context: Any, chunks: int, text: Any, bitmaps: Any, count: int) -> int:
    value = bitmaps[0] or 0
    if value == 0:
        return 2  # a black image is refused
    _chunks[chunks] = [0, value]
    return 0


def mtmd_input_chunks_size(chunks: int) -> int:
    return len(_chunks[chunks])


def mtmd_input_chunks_get(chunks: int, number: int) -> int:
    return _chunks[chunks][number]


def mtmd_input_chunk_get_type(chunk: int) -> int:
    return int(chunk > 0)


def mtmd_input_chunk_get_n_tokens(chunk: int) -> int:
    return 2 if chunk else 1


mtmd_input_chunk_get_n_pos = mtmd_input_chunk_get_n_tokens


def mtmd_input_chunk_get_tokens_text(chunk: int, size: Any) -> Any:
    return (ctypes.c_int32 * 1)(1)


def mtmd_encode_chunk(context: Any, chunk: int) -> int:
    assert any(chunk in chunks for chunks in _chunks.values())
    context.encoded += 1
    context.output[0] = context.output[EMBEDDING] = float(chunk)
    return 0


def mtmd_get_output_embd(context: Any) -> Any:
    return ctypes.cast(context.output, ctypes.POINTER(ctypes.c_float))
