"""Tiny embedding models that sentence-transformers saves, and the task of conch over their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from conch.backends.base.arrays import Array, Result
from conch.backends.tasks.task import ExecutionWork, Task
from conch.core.errors import ConchError
from tests.text_checkpoints import TEXTS, request, write

#: Texts of different lengths, which share runs with each other.
NEIGHBOURS: Final = (
    *TEXTS, "", "the", "the station is open", " ".join(TEXTS * 3), "A bus!", "  two  spaces ", "in Berlin",
    "ÀÉ ünïcode", "works at the library", "Hello! " * 9, "a bus in the morning",
)  # fmt: skip
SIZE: Final = 32


def backbone(folder: Path, head: str = "AutoModel", task: str = "feature-extraction", **settings: Any) -> Transformer:
    """A Transformer module over a tiny BERT; ``settings`` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    return Transformer(str(write(folder, head, **settings)), transformer_task=task)


def saved(folder: Path, *modules: Any, kind: type[Any] = SentenceTransformer, **settings: Any) -> Path:
    """A model of ``modules``, saved in ``folder``."""
    kind(modules=list(modules), device="cpu", **settings).save(str(folder), create_model_card=False)
    return folder


def dense(activation: Any, size: int = 5, **settings: Any) -> Dense:
    """A Dense module from vectors of the backbone."""
    return Dense(SIZE, size, activation_function=activation, **settings)


def pooled(folder: Path, *rest: Any, modes: Any = "mean", **settings: Any) -> Path:
    """A dense model: the backbone, pooling and ``rest``; ``settings`` are those of the model."""
    first = backbone(folder.with_name(f"{folder.name}-backbone"))
    return saved(folder, first, Pooling(SIZE, modes), *(rest or (Normalize(),)), **settings)


def embed(task: Task, texts: Sequence[str], /, **inputs: str) -> Result:
    """The result for ``texts`` as one request; the same ``inputs`` for all."""
    extra: dict[str, Any] = {name: [value] * len(texts) for name, value in inputs.items()}
    prepared = task.prepare(request(text_input=list(texts), **extra))
    return completed(task.execute([prepared], ExecutionWork()))[0]


def each(task: Task, texts: Sequence[str], /, **inputs: str) -> list[Result]:
    """The results for ``texts``, a request each, which run together."""
    extra: dict[str, Any] = {name: [value] for name, value in inputs.items()}
    requests = [request(text_input=[text], **extra) for text in texts]
    return completed(task.execute([task.prepare(item) for item in requests], ExecutionWork()))


def completed(results: Sequence[Result | ConchError]) -> list[Result]:
    """The results; an error is raised."""
    for result in results:
        if isinstance(result, ConchError):
            raise result
    return [result for result in results if isinstance(result, Result)]


def vectors(results: Sequence[Result] | Result) -> Array:
    """The dense vectors of results, ``[texts, dimension]``."""
    found = [result.outputs["embedding"] for result in ([results] if isinstance(results, Result) else results)]
    return np.concatenate([np.asarray(vector) for vector in found])


def sparse(results: Sequence[Result] | Result, size: int) -> Array:
    """The sparse vectors of results as dense ones, ``[texts, size]``."""
    rows = []
    for result in [results] if isinstance(results, Result) else results:
        indices, weights = (np.asarray(result.outputs[f"sparse_{name}"]) for name in ("indices", "values"))
        for own, values in zip(indices, weights, strict=True):
            row = np.zeros(size, np.float32)
            row[own[own >= 0]] = values[own >= 0]
            rows.append(row)
    return np.stack(rows)


def token_vectors(results: Sequence[Result] | Result) -> list[Array]:
    """The vectors of each text's tokens."""
    rows = []
    for result in [results] if isinstance(results, Result) else results:
        found, counts = (np.asarray(result.outputs[name]) for name in ("token_embeddings", "num_vectors"))
        rows += [own[: count[0]] for own, count in zip(found, counts, strict=True)]
    return rows


def close(actual: Any, expected: Any) -> None:
    """Both are equal, but for rounding in FP32."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        actual, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
    )
