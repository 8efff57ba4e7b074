"""The task ``image-classification``: returns the labels of images with their scores, on any engine.

Images are decoded and preprocessed on arrival, with Pillow, numpy and the checkpoint's image processor. torchvision is
not used, so that results do not depend on whether it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.tasks import media
from conch.backends.tasks.classification import apply, best_first, checked_top_k, default_function, mislabelled
from conch.backends.tasks.task import ExecutionWork, OpenEngine, PreparedRequest, Task, TaskDescription
from conch.backends.tasks.transformers import load_image_processor, loading
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError, invalid
from conch.core.inference import TensorSpec

#: The default number of labels in a response.
TOP_K: Final = 5
#: The maximum number of images in one run of the engine, except for a larger request.
BATCH_IMAGES: Final = 32


def processed(processor: Any, images: Sequence[Any], **settings: Any) -> dict[str, Array]:
    """Convert Pillow images to a network's inputs. Raises INVALID_ARG for images that cannot get the network's size."""
    try:
        features = processor(images=list(images), **{"return_tensors": "np", **settings})
        return {name: np.asarray(value) for name, value in features.items()}
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise invalid(f"the model does not accept input 'image': {error}") from error


class PreparedImages(PreparedRequest):
    """The network's inputs by name, ``[rows, …]``: ``pixel_values`` FP32 and sometimes a mask."""

    __slots__ = ("arrays", "top_k")

    def __init__(self, request: Request, arrays: dict[str, Array], top_k: int) -> None:
        super().__init__(request, 1, request.rows)
        self.arrays = arrays
        self.top_k = top_k


class ImageClassification(Task):
    """Input ``image`` STRING [1] (a file), optional ``top_k`` INT32 [1].

    Outputs ``label`` STRING [-1] and ``score`` FP32 [-1], best first, and ``logits`` FP32 [-1] by class.
    """

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        self._pixels = media.max_pixels(checkpoint.options)
        media.require_images(checkpoint.task)
        self._processor = load_image_processor(checkpoint)
        self._engine = open_engine("AutoModelForImageClassification")
        self._engine.require_outputs(("logits",), checkpoint.source)
        with loading(checkpoint, "network for images"):
            example = processed(self._processor, [media.example_image()])
            self._engine.require_tensors(example)
            self._engine.run(example)
        self._labels = checkpoint.labels or []
        self._config = checkpoint.config
        self._top_k = checkpoint.options.top_k or TOP_K

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        classes = len(checkpoint.labels or ()) or -1
        return TaskDescription(
            (TensorSpec("image", "BYTES", (1,)), TensorSpec("top_k", "INT32", (1,), optional=True)),
            (
                TensorSpec("label", "BYTES", (-1,)),
                TensorSpec("score", "FP32", (-1,)),
                TensorSpec("logits", "FP32", (classes,)),
            ),
            BATCH_IMAGES,
        )

    def prepare(self, request: Request) -> PreparedImages:
        """Decode, resize and normalise the images. Raises INVALID_ARG for an input that is not an image."""
        images = media.images(request.files("image"), pixels=self._pixels)
        if not images:
            raise invalid("the request has no rows")
        top_k = checked_top_k(request.option("top_k", self._top_k), 1 << 31)
        return PreparedImages(request, processed(self._processor, images), top_k)

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        requests = [prepared for prepared in batch if isinstance(prepared, PreparedImages)]
        logits: list[Array] = [np.empty(0)] * len(requests)
        before = monotonic_ns()
        for indices in _runs(requests):
            arrays = {
                name: np.concatenate([requests[index].arrays[name] for index in indices])
                for name in requests[indices[0]].arrays
            }
            rows = [requests[index].sequence_count for index in indices]
            arranged = monotonic_ns()
            batch_logits = self._engine.run(arrays)["logits"]
            computed = monotonic_ns()
            work.add(sum(rows), sum(rows), sum(rows))
            work.arrange_ns += arranged - before
            work.engine_ns += computed - arranged
            for index, part in zip(indices, np.split(batch_logits, np.cumsum(rows)[:-1]), strict=True):
                logits[index] = part
            before = monotonic_ns()
            work.answer_ns += before - computed
        results: list[Result | ConchError] = []
        results += [self._result(prepared, logit) for prepared, logit in zip(requests, logits, strict=True)]
        work.answer_ns += monotonic_ns() - before
        return results

    def _result(self, prepared: PreparedImages, logits: Array) -> Result:
        classes = logits.shape[1]
        labels = self._labels or [f"LABEL_{index}" for index in range(classes)]
        if len(labels) != classes:
            raise mislabelled(classes, len(labels))
        scores = apply(default_function(self._config, classes), logits)
        label, score = best_first(labels, scores, prepared.top_k)
        result = Result({"label": label, "score": score})
        if "logits" in prepared.request.outputs:
            result.outputs["logits"] = logits
        return result


def _runs(requests: Sequence[PreparedImages]) -> list[list[int]]:
    """Group the indices of requests with images of the same size, up to ``BATCH_IMAGES`` images per group."""
    runs: dict[tuple[Any, ...], list[list[int]]] = {}
    rows: dict[tuple[Any, ...], int] = {}
    for index, prepared in enumerate(requests):
        key = tuple((name, array.shape[1:]) for name, array in sorted(prepared.arrays.items()))
        if key not in runs or rows[key] + prepared.sequence_count > BATCH_IMAGES:
            runs.setdefault(key, []).append([])
            rows[key] = 0
        runs[key][-1].append(index)
        rows[key] += prepared.sequence_count
    return [run for same in runs.values() for run in same]
