"""Computes embeddings and scores of texts with llama.cpp, for the tasks of GGUF files that generate none. For workers.

A context computes all tokens of a batch at once, and reserves memory for its maximum batch. It is therefore opened for
small batches, and reopened for a larger one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import Chunk
from conch.backends.engines.llamacpp.decoder import LlamaBatch, load_model, open_context, weights_type
from conch.backends.engines.llamacpp.library import Arguments, library
from conch.backends.generation.agreement import NOT_CHECKED
from conch.backends.generation.engine import EngineSpec
from conch.checkpoints.gguf import GgufFile
from conch.checkpoints.gguf_encoder_reference import class_outputs, token_vectors
from conch.checkpoints.gguf_retrieval import answers_yes_or_no
from conch.core.errors import ConchError, internal, invalid

#: The size of the first context (tokens).
_FIRST: Final = 512
#: Values of ``llama_pooling_type``: a vector for each token, or the outputs of the classifier for each text.
_NONE, _RANK = 0, 4

#: The example of ``verify`` (tokens), and its limit of time (s) on each core.
EXAMPLE: Final = 24
SECONDS: Final = 10.0
#: The smallest cosine of a token's vector and its reference, with quantised matrices and with others. Measured with
#: all-MiniLM-L6-v2: 0.9993 with Q4_0, Q4_1, Q5_0 and Q8_0, 0.99999 with F16 and F32.
QUANTISED: Final = 0.98
PLAIN: Final = 0.995
#: The greatest difference of a classifier's outputs in proportion to the greatest of them, or to 1 if that is greater,
#: with quantised matrices and with others. Measured with a random classifier on all-MiniLM-L6-v2 and 40 texts: 0.056
#: with Q4_0, 0.050 with Q5_0, 0.045 with Q8_0, 0.034 with Q4_1, 0.028 with Q5_1, 0.009 with BF16, 0.001 with F16.
QUANTISED_OUTPUTS: Final = 0.15
PLAIN_OUTPUTS: Final = 0.03

Vectors = npt.NDArray[np.float32]

_logger = logging.getLogger(__name__)


def require_alike(file: GgufFile, vectors: Vectors, expected: Vectors) -> str:
    """Return how alike ``vectors`` ``[tokens, size]`` are to those of the file's weights. Raises INVALID_ARG if not."""
    if vectors.shape != expected.shape:
        raise invalid(f"engine 'llamacpp' returns vectors of another size than {file.path} has")
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((vectors * expected).sum(1) / np.maximum(lengths, np.finfo(np.float32).tiny)).min())
    if not cosine >= (QUANTISED if file.quantised else PLAIN):
        raise _unlike(file, f"the cosine of a token's vector with its reference is {cosine:.4f}")
    return f"the vectors of {len(vectors)} tokens agree, with a cosine of at least {cosine:.5f}"


def require_close(file: GgufFile, outputs: Vectors, expected: Vectors) -> str:
    """Return how much the ``outputs`` ``[classes]`` of a classifier differ from the ``expected`` ones.

    Probabilities of "yes" and "no" are compared as logarithms, which ``expected`` has. Raises INVALID_ARG if they
    differ by more than the tolerance.
    """
    if outputs.shape != expected.shape:
        raise invalid(f"engine 'llamacpp' returns {outputs.size} outputs of the classifier in {file.path}")
    if answers_yes_or_no(file):
        tiny = np.finfo(np.float32).tiny
        outputs, expected = np.log(np.maximum(outputs, tiny)), np.maximum(expected, np.log(tiny))
    difference = float(np.abs(outputs - expected).max())
    tolerance = QUANTISED_OUTPUTS if file.quantised else PLAIN_OUTPUTS
    if not difference <= tolerance * max(1.0, float(np.abs(expected).max())):
        raise _unlike(file, f"an output of its classifier differs by {difference:.4f}")
    return f"the outputs of its classifier differ by at most {difference:.5f}"


def _unlike(file: GgufFile, why: str) -> ConchError:
    return invalid(
        f"engine 'llamacpp' does not reproduce the outputs of {file.path}: {why}; set parameter "
        "'verify_on_load' to false to serve it anyway"
    )


class LlamaEncoder:
    """A model of llama.cpp that gives a vector of ``size`` numbers for each token, or for each text if it ``ranks``.

    Several threads may call ``run``, which take turns.
    """

    def __init__(self, spec: EngineSpec, *, ranks: bool, model: Any = None) -> None:
        """Load the model, unless it is given.

        Raises INVALID_ARG for a file that llama.cpp refuses or that gives no finite numbers.
        """
        if spec.gguf is None:
            raise invalid(f"engine 'llamacpp' needs a GGUF file: {spec.directory} has none")
        for name in ("kv_unified", "n_ubatch", "cache_ram"):
            if name in spec.arguments:
                raise invalid(f"parameter '{name}' is for generated text: all tokens of a batch are computed at once")
        self._llama = library()
        module = self._llama.module
        self._spec, self._arguments, self._ranks = spec, Arguments.of(spec), ranks
        self._model = model or load_model(self._llama, spec, self._arguments)
        self.size = int((module.llama_model_n_cls_out if ranks else module.llama_model_n_embd_out)(self._model))
        self.precision = weights_type(spec.gguf)
        self._rows = int(module.llama_max_parallel_sequences())
        self._lock = threading.Lock()
        self._context: Any = None
        self._batch: LlamaBatch
        self._make_room(_FIRST)
        self._llama.checked(f"engine 'llamacpp' cannot serve {spec.source}", self._try)

    def run(self, sequences: Sequence[Sequence[int]]) -> Vectors:
        """Return the vectors of all tokens of ``sequences``, one after another, or one for each sequence if it ranks.

        Raises INTERNAL if llama.cpp fails.
        """
        with self._lock:
            parts = [self._run(sequences[start : start + self._rows]) for start in range(0, len(sequences), self._rows)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def verify(self) -> str:
        """Compare the vectors of an example with the weights of the file in float32; returns the result as text.

        A file that the reference cannot compute, or not cheaply, is not checked. Raises INVALID_ARG for vectors that
        differ by more than the tolerance.
        """
        file, threads = self._spec.gguf, max(1, self._spec.threads)
        assert file is not None
        count = int(self._llama.module.llama_vocab_n_tokens(self._llama.module.llama_model_get_vocab(self._model)))
        ids = np.random.default_rng(0).integers(0, count, EXAMPLE).tolist()
        vectors = self._token_vectors(ids)
        try:
            with ThreadPoolExecutor(threads) as pool:
                expected = token_vectors(file, pool, ids, SECONDS * threads)
                outputs = class_outputs(file, pool, vectors) if self._ranks else None
        except ConchError as error:
            _logger.warning("%s was not compared with its weights: %s", file.path, error.message)
            return f"{NOT_CHECKED}: {error.message}"
        result = require_alike(file, vectors, expected)
        return result if outputs is None else f"{result}; {require_close(file, self.run([ids])[0], outputs)}"

    def _token_vectors(self, ids: Sequence[int]) -> Vectors:
        """Return the vectors of a text's tokens, also those that a classifier reads."""
        if not self._ranks:
            return self.run([ids])
        encoder = LlamaEncoder(self._spec, ranks=False, model=self._model)
        vectors = encoder.run([ids])
        self._llama.module.llama_free(encoder._context)
        return vectors

    def _run(self, sequences: Sequence[Sequence[int]]) -> Vectors:
        tokens = sum(map(len, sequences))
        try:
            self._make_room(tokens)
        except ConchError as error:
            raise internal(f"llama.cpp cannot allocate memory for a batch of {tokens} tokens") from error
        module = self._llama.module
        if memory := module.llama_get_memory(self._context):  # of a model that reads from left to right
            module.llama_memory_clear(memory, True)
        self._batch.fill([Chunk(slot, 0, ids, len(ids)) for slot, ids in enumerate(sequences)])
        if status := int(module.llama_decode(self._context, self._batch.struct)):
            raise internal(f"llama.cpp failed: {self._llama.reason()} ({status})")
        if not self._ranks:
            vectors = module.llama_get_embeddings(self._context)
            return np.ctypeslib.as_array(vectors, (tokens, self.size)).copy()
        rows = [module.llama_get_embeddings_seq(self._context, slot) for slot in range(len(sequences))]
        return np.stack([np.ctypeslib.as_array(row, (self.size,)) for row in rows])

    def _make_room(self, tokens: int) -> None:
        """Open a larger context if a batch has more ``tokens`` than this one takes."""
        if self._context is not None:
            if tokens <= len(self._batch.tokens):
                return
            self._llama.module.llama_free(self._context)
            self._context = None
        room = max(_FIRST, 1 << (tokens - 1).bit_length())
        self._context = open_context(
            self._llama,
            self._model,
            self._spec,
            self._arguments,
            room,
            room,
            self._rows,
            pooling=_RANK if self._ranks else _NONE,
        )
        self._batch = LlamaBatch.of(self._llama.module, room)

    def _try(self) -> bool:
        """Read two tokens. Raises INTERNAL for weights that give no numbers."""
        if not np.isfinite(self.run([[0, 0]])).all():
            raise internal("its outputs are not finite numbers")
        return True
