"""Texts and images in one space: pipelines over networks that embed both, such as CLIP, SigLIP and ColPali.

Each row of a request has a text or an image. An image takes part in the runs of a pipeline as a sequence with as many
positions as it has patches or tokens; only images of the same shape share a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request
from conch.backends.tasks import media
from conch.backends.tasks.encoders.encoder_task import EncodedRequest, PaddedBatch
from conch.backends.tasks.engines import PIXELS
from conch.backends.tasks.retrieval.pipeline import NetworkPipeline, TextRequest
from conch.backends.tasks.task import OpenEngine
from conch.backends.tasks.transformers import load_image_processor, loading
from conch.backends.tasks.vision import processed
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import EmbeddingModel, Module
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.core.errors import invalid, unsupported
from conch.core.inference import TensorSpec
from conch.core.lengths import equal_runs

IMAGE: Final = TensorSpec("image", "BYTES", (1,), optional=True)
#: Processors of networks for pages of documents, whose texts are queries in a special form.
_QUERIES: Final = ("ColPaliProcessor", "ColQwen2Processor")
#: The patch size of networks whose configuration has none.
_PATCH: Final = 16


class ImageTokens(Tokens):
    """An image in place of a text: the network's inputs, ``[1, …]`` by name; ``ids`` has an element per position."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: dict[str, Array], ids: Array) -> None:
        super().__init__(ids)
        self.arrays = arrays


class ImageBatch(PaddedBatch):
    """The images of a run."""

    def arrays(self, names: Collection[str], *, types: bool) -> dict[str, Array]:
        images: Sequence[ImageTokens] = self.sequences  # type: ignore[assignment]
        return {name: np.concatenate([image.arrays[name] for image in images]) for name in images[0].arrays}


class ImageTextPipeline(NetworkPipeline):
    """Embeds texts and images by one network."""

    def __init__(
        self, checkpoint: Checkpoint, model: EmbeddingModel, modules: Sequence[Module], open_engine: OpenEngine
    ) -> None:
        media.require_images(checkpoint.task)
        super().__init__(checkpoint, model, modules, open_engine)
        self.gives_hidden_state = False  # images have no tokens
        if PIXELS not in self.engine.inputs:
            raise unsupported(f"'{checkpoint.source}' embeds images, which engine '{self.engine.name}' does not read")
        settings = modules[0].config.get("processing_kwargs") or {}
        self._fills = (settings.get("text") or {}).get("padding") == "max_length"
        self._settings = dict(settings.get("image") or {})
        self._pixels = media.max_pixels(checkpoint.options)
        self._processor = load_image_processor(self.checkpoint, "AutoProcessor")
        self._query: tuple[str, str] | None = None
        if modules[0].config.get("transformer_task") == "retrieval":
            self._query = query_form(self._processor, checkpoint)
            self._settings["return_tensors"] = "pt"
        with loading(checkpoint, "network for images", runs_torch=self.engine.name == "torch"):
            example = self._image(media.example_image()).arrays
            self.engine.require_tensors(example)
            self.engine.run(example)

    def prepare(self, request: Request, texts: Sequence[str], prompt: str, task: str | None) -> TextRequest:
        """Tokenise the texts and preprocess the images; ``texts`` is empty for a request without texts.

        Raises INVALID_ARG for a row with both or neither, and for an input that is not an image.
        """
        files = request.files(IMAGE.name) if request.has(IMAGE.name) else []
        if not files:
            return self._of_texts(request, texts, prompt, task)
        rows = [row for row, data in enumerate(files) if data]
        for row, data in enumerate(files):
            if bool(data) == bool(texts and texts[row]):
                has = "both a text and an image" if data else "neither a text nor an image"
                raise invalid(f"row {row} has {has}; the model embeds either a text or an image per row")
        encoded = self._of_texts(request, [text for text in texts if text], prompt, task)
        pictures = iter(media.images([files[row] for row in rows], pixels=self._pixels))
        own = iter(encoded.sequences)
        sequences = [self._image(next(pictures)) if data else next(own) for data in files]
        prepared = TextRequest(request, sequences, encoded.truncated, encoded.state)
        prepared.pipeline, prepared.task = self, task
        return prepared

    def _of_texts(self, request: Request, texts: Sequence[str], prompt: str, task: str | None) -> TextRequest:
        if self._query is not None:
            begin, end = self._query
            texts, prompt = [f"{begin}{prompt}{text}{end}" for text in texts], ""
        prepared = super().prepare(request, texts, prompt, task)
        if self._fills:
            prepared.sequences = [self._filled(tokens) for tokens in prepared.sequences]
            prepared.length = self.encoder.max_length
        return prepared

    def encode(self, encoder: InputEncoder, texts: Sequence[str]) -> tuple[list[Tokens], int]:
        return super().encode(encoder, texts) if self._query is None else encoder.encode_rendered(texts, ())

    def _filled(self, tokens: Tokens) -> Tokens:
        """Return a text with padding tokens up to the maximum length."""
        tokenizer, count = self._processor.tokenizer, self.encoder.max_length - len(tokens.ids)
        width = (count, 0) if tokenizer.padding_side == "left" else (0, count)
        filled = Tokens(np.pad(tokens.ids, width, constant_values=self.encoder.pad_id), None, tokens.length)
        if "attention_mask" in tokenizer.model_input_names:
            filled.mask = np.pad(np.ones_like(tokens.ids), width)
        return filled

    def _image(self, picture: Any) -> ImageTokens:
        arrays = processed(self._processor, [picture], **self._settings)
        if "input_ids" in arrays:
            return ImageTokens(arrays, arrays["input_ids"][0])
        shape = arrays[PIXELS].shape
        vision = self.checkpoint.config.get("vision_config") or {}
        size = vision.get("patch_size")
        patch = size if isinstance(size, int) and size > 0 else _PATCH
        positions = max(1, shape[1] if len(shape) == 3 else prod(shape[-2:]) // patch**2)
        return ImageTokens(arrays, np.zeros(positions, np.int64))

    def divide(self, sequences: Sequence[Tokens]) -> list[list[int]]:
        texts: list[int] = []
        images: defaultdict[Any, list[int]] = defaultdict(list)
        for index, sequence in enumerate(sequences):
            if isinstance(sequence, ImageTokens):
                shapes = {name: array.shape for name, array in sequence.arrays.items()}
                images[tuple(sorted(shapes.items()))].append(index)
            else:
                texts.append(index)
        divided = [[texts[index] for index in run] for run in super().divide([sequences[index] for index in texts])]
        for own in images.values():
            lengths = [len(sequences[index].ids) for index in own]
            divided += [[own[index] for index in run] for run in equal_runs(lengths, budget=self.budget)]
        return divided

    def pad(self, sequences: Sequence[Tokens], requests: Sequence[EncodedRequest]) -> PaddedBatch:
        if isinstance(sequences[0], ImageTokens):
            return ImageBatch(sequences, requests, self.encoder.pad_id)
        return super().pad(sequences, requests)


def query_form(processor: Any, checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the texts before and after a query in ``processor`` of ColPali or ColQwen2.

    Raises UNSUPPORTED for a processor of another kind.
    """
    name = type(processor).__name__
    if name not in _QUERIES:
        raise unsupported(
            f"'{checkpoint.source}' has a {name}; the supported models for pages have {', '.join(_QUERIES)}"
        )
    begin = processor.tokenizer.bos_token if name == "ColPaliProcessor" else ""
    return f"{begin}{processor.query_prefix}", f"{processor.query_augmentation_token * 10}\n"
