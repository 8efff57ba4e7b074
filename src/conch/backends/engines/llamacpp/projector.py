"""Images and recordings on the engine ``llamacpp``: a projector file (mmproj) and libmtmd, which computes it.

libmtmd splits an item into tokens of text and parts. Each part becomes vectors, which llama.cpp reads in the place of
the embeddings of tokens. In a prompt, negative numbers made of the item's digest hold these places.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import MediaSpan
from conch.backends.engines.llamacpp.library import LlamaLibrary
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.media import MediaItem, ProjectorSpec
from conch.checkpoints.gguf import PROJECTOR, read_gguf
from conch.core.errors import internal, invalid

Floats = npt.NDArray[np.float32]

#: The text of a placeholder by kind.
MARKS: Final[Mapping[str, str]] = {"image": "<__image__>", "audio": "<__audio__>"}
#: Types whose vectors or positions depend on the prompt before an item.
_DEPENDENT: Final = ("deepseek4v", "hunyuanvl")
#: libmtmd's types of chunks, and the numbers of a position with M-RoPE.
_TEXT, _IMAGE = 0, 1
_DIMENSIONS: Final = 4


class ChunkMemory:
    """The memory of libmtmd for the parts of an item, which is freed with the last of them."""

    def __init__(self, mtmd: Any, chunks: Any) -> None:
        weakref.finalize(self, mtmd.mtmd_input_chunks_free, chunks).atexit = False


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """A part of an item that becomes ``tokens`` vectors at once.

    ``key`` identifies its content; ``chunk`` points into ``memory``. The part takes ``positions`` positions in a
    sequence. With ``whole``, its vectors attend to each other, so that they must be read in the same run.
    """

    key: tuple[bytes, int]
    memory: ChunkMemory
    chunk: Any
    kind: int
    tokens: int
    positions: int
    whole: bool


@dataclass(slots=True)
class MediaParts:
    """The parts of an item, whose memory is about ``nbytes`` large."""

    nbytes: int
    parts: list[MediaPart] = field(default_factory=list)


class Projector:
    """The projector of ``spec`` for a model of llama.cpp, which reads at most ``at_once`` tokens in a run.

    Threads that read requests call ``prepare``, the engine's thread all else. Raises INVALID_ARG for a file that
    libmtmd does not load for the model, and UNSUPPORTED if llama-cpp-python has no libmtmd.
    """

    def __init__(
        self, llama: LlamaLibrary, model: Any, spec: EngineSpec, projector: ProjectorSpec, at_once: int
    ) -> None:
        self._mtmd = mtmd = llama.mtmd
        file = read_gguf(projector.path)
        if file.text("general.architecture") != PROJECTOR:
            raise invalid(f"{projector.path} is not a multimodal projector (mmproj)")
        kinds = {file.text(f"clip.{prefix}projector_type") for prefix in ("", "vision.", "audio.")}
        if dependent := kinds.intersection(_DEPENDENT):
            raise invalid(f"{projector.path} is a projector of type '{dependent.pop()}', which is not supported")
        parameters = mtmd.mtmd_context_params_default()
        parameters.use_gpu, parameters.n_threads = spec.device == "cuda", spec.threads or 1
        parameters.print_timings = parameters.warmup = False
        name = str(projector.path).encode()
        self._context = llama.checked(
            f"projector {projector.path}", lambda: mtmd.mtmd_init_from_file(name, model, parameters)
        )
        self._size = int(llama.module.llama_model_n_embd_inp(model))
        self._at_once, self._cache_bytes = at_once, projector.cache_bytes
        reads = {"image": mtmd.mtmd_support_vision(self._context), "audio": mtmd.mtmd_support_audio(self._context)}
        self.marks = {kind: mark for kind, mark in MARKS.items() if reads[kind]}
        self.sample_rate = int(mtmd.mtmd_get_audio_sample_rate(self._context)) if reads["audio"] else 0
        #: Whether a position has several numbers, so that an item may take fewer positions than vectors.
        self.dimensional = bool(mtmd.mtmd_decode_use_mrope(self._context))
        self._kept: OrderedDict[tuple[bytes, int], Floats] = OrderedDict()
        self._bytes = 0

    def prepare(self, kind: str, digest: bytes, content: Any) -> MediaItem:
        """Return an item for an image of Pillow or the samples of a recording. Raises INVALID_ARG if it is refused."""
        mtmd = self._mtmd
        if kind == "image":
            pixels = np.ascontiguousarray(np.asarray(content.convert("RGB"), np.uint8))
            pointer = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap, size = mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], pointer), pixels.nbytes
        else:
            samples = np.ascontiguousarray(content, np.float32)
            if len(samples) < 2:  # libmtmd would end the process
                raise invalid(f"input '{kind}' has a recording of {len(samples)} samples", kind)
            values = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap, size = mtmd.mtmd_bitmap_init_from_audio(len(samples), values), samples.nbytes
        chunks = mtmd.mtmd_input_chunks_init()
        memory = ChunkMemory(mtmd, chunks)
        parts = MediaParts(size * 4)  # libmtmd keeps what it made of the item in float32
        marker = bytes(mtmd.mtmd_default_marker())
        text = mtmd.mtmd_input_text(marker, len(marker), False, True)
        status = mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1)
        mtmd.mtmd_bitmap_free(bitmap)
        if status:
            raise invalid(f"input '{kind}' cannot be processed for the model: llama.cpp refuses it ({status})", kind)
        words = MediaItem(kind, digest, {}, "", 0).words()
        tokens: list[int] = []
        for number in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, number)
            count, type = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk)), int(mtmd.mtmd_input_chunk_get_type(chunk))
            if type == _TEXT:
                ids = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(ctypes.c_size_t()))
                tokens += ids[:count]
                continue
            whole = bool(mtmd.mtmd_decode_use_non_causal(self._context, chunk))
            if whole and count > self._at_once:
                raise invalid(
                    f"input '{kind}' becomes {count} tokens that must be read at once, and the model reads "
                    f"{self._at_once} (parameter 'n_ubatch')",
                    kind,
                )
            positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            parts.parts.append(MediaPart((digest, number), memory, chunk, type, count, positions, whole))
            tokens += [words[index % len(words)] for index in range(count)]
        arrays = {"tokens": np.array(tokens, np.int64), "parts": parts}
        return MediaItem(kind, digest, arrays, "", sum(part.tokens for part in parts.parts))

    def spans(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> list[MediaSpan]:
        """Return the places of items in a prompt. Raises INVALID_ARG unless it has all of them and ends with text."""
        parts: dict[int, deque[tuple[MediaPart, list[int]]]] = {}
        for item in items:
            words = item.words()
            for part in item.arrays["parts"].parts:
                places = [words[index % len(words)] for index in range(part.tokens)]
                parts.setdefault(words[0], deque()).append((part, places))
        spans: list[MediaSpan] = []
        position = 0
        while position < len(prompt):
            if prompt[position] >= 0:
                position += 1
                continue
            waiting = parts.get(prompt[position])
            part, places = waiting.popleft() if waiting else (None, [])
            end = position + len(places)
            if part is None or list(prompt[position:end]) != places:
                raise invalid("the prompt does not have its images and recordings as a whole: it was shortened")
            spans.append(MediaSpan(position, end, part.positions, part))
            position = end
        if any(parts.values()):
            raise invalid("the prompt does not have all of its images and recordings: it was shortened")
        if spans and spans[-1].end == len(prompt):
            raise invalid("the prompt ends with an image or a recording: text must follow it")
        return spans

    def vectors(self, part: MediaPart) -> Floats:
        """Return the vectors ``[tokens, size]`` of a part, computed or kept from an earlier prompt."""
        if (vectors := self._kept.get(part.key)) is not None:
            self._kept.move_to_end(part.key)
            return vectors
        if status := self._mtmd.mtmd_encode_chunk(self._context, part.chunk):
            raise internal(f"llama.cpp cannot compute the vectors of an image or a recording ({status})")
        output = self._mtmd.mtmd_get_output_embd(self._context)
        vectors = np.ctypeslib.as_array(output, (part.tokens, self._size)).copy()
        self._kept[part.key] = vectors
        self._bytes += vectors.nbytes
        while self._bytes > self._cache_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return vectors

    def positions(self, part: MediaPart, first: int) -> npt.NDArray[np.int32]:
        """Return the positions ``[numbers of a position, tokens]`` of a part that begins at position ``first``."""
        line = np.arange(first, first + part.tokens, dtype=np.int32)
        if not self.dimensional:
            return line[None]
        if part.kind != _IMAGE:
            return np.repeat(line[None], _DIMENSIONS, axis=0)
        places = (self._mtmd.mtmd_decoder_pos * part.tokens)()
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(part.chunk)
        self._mtmd.mtmd_helper_image_get_decoder_pos(image, first, places)
        return np.array([[place.t, place.y, place.x, place.z] for place in places], np.int32).T

    def close(self) -> None:
        """Free the projector."""
        self._mtmd.mtmd_free(self._context)
