"""Conversion of embedding models and of rerankers over language models.

Variants are compared as whole tasks: with prompts, modules and masks, texts in and vectors or scores out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.tasks import media
from conch.backends.tasks.encoders.encoder_task import PAIR, TEXT, EncodedRequest, EncoderNetwork, PaddedBatch
from conch.backends.tasks.encoders.ranking import Rerank
from conch.backends.tasks.engines import IMAGE_FOLDER, PIXELS
from conch.backends.tasks.huggingface_backend import EngineOpener, make_task
from conch.backends.tasks.retrieval.embedding import TASK, Embedding
from conch.backends.tasks.retrieval.images import IMAGE, ImageTokens
from conch.backends.tasks.retrieval.pipeline import NetworkPipeline, PromptTokens, TextRequest
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Contrasts
from conch.checkpoints.modules import (
    MULTI_VECTOR,
    NETWORKS,
    SPARSE,
    EmbeddingModel,
    Module,
    joined,
    predicts_tokens,
)
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert import evidence, sentences
from conch.convert.conversion import Progress
from conch.convert.encoder import agreement
from conch.convert.encoder.agreement import SampleOutputs, TaskAgreement
from conch.convert.encoder.contrasts import (
    DENSE_VECTOR,
    SPARSE_VECTOR,
    TOKEN_VECTORS,
    EncoderAnswers,
    compare_order,
    contrasts,
)
from conch.convert.encoder.conversion import EncoderConversion
from conch.convert.encoder.evaluate import EncoderOutputs, calibration_arrays, divided, ids_of_shape
from conch.convert.encoder.modules import contained
from conch.convert.encoder.network import load_embedding, load_ranking
from conch.convert.encoder.pictures import image_search
from conch.convert.encoder.variants import VariantBuilder
from conch.convert.footprint import Opening
from conch.convert.layout import checkpoint_files
from conch.convert.libraries import silence_libraries
from conch.convert.measure import Run, timed
from conch.convert.plan import Plan
from conch.convert.sentences import TextSample
from conch.convert.verdict import REFERENCE, BuiltVariant, FailedVariant
from conch.core.errors import ConchError, unsupported
from conch.core.tensors import WireTensor, pack_bytes
from conch.measure.texts.shapes import Shape

AnyTask = TypeVar("AnyTask", bound=Task)
_CPU: Final = {"kind": "CPU", "device_id": 0, "count": 1}


def open_task(checkpoint: Checkpoint) -> Task:
    """Open the task of a checkpoint as the server does, on the CPU."""
    with silence_libraries():
        return make_task(checkpoint, EngineOpener(checkpoint, _CPU))


def network_of(task: Task) -> EncoderNetwork:
    """Return the network of a task that is measured; of an embedding model, that of documents if they have one."""
    if isinstance(task, Embedding):
        own = [task.pipelines_by_task[name] for name in ("document", None, "query") if name in task.pipelines_by_task]
        return next(pipeline for pipeline in [*own, *task.pipelines] if isinstance(pipeline, NetworkPipeline))
    if not isinstance(task, EncoderNetwork):
        raise unsupported(f"{type(task).__name__} has no network to convert")
    return task


def compute(network: EncoderNetwork, ids: Array, budget: int, images: Sequence[Tokens] = ()) -> None:
    """Run a network on ``[sequences, tokens]`` in runs of at most ``budget`` tokens, on images, and what follows it."""
    groups = [[Tokens(row) for row in part["input_ids"]] for part in divided({"input_ids": ids}, budget)]
    groups += [[images[index] for index in run] for run in network.divide(images)]
    for sequences in groups:
        request = TextRequest(Request({}, frozenset()), sequences, 0, PromptTokens())
        request.task = None
        requests = [request] * len(sequences)
        of_images = isinstance(sequences[0], ImageTokens)
        batch = (
            network.pad(sequences, requests) if of_images else PaddedBatch(sequences, requests, network.encoder.pad_id)
        )
        arrays = batch.arrays(network.engine.inputs, types=network.encoder.types)
        outputs = network.compute(arrays, batch, ExecutionWork())
        list(network.extract(outputs, batch))


def open_and_compute(checkpoint: Checkpoint, ids: Array, budget: int, images: Sequence[Tokens]) -> Task:
    """Return the task of a variant after its first runs."""
    task = open_task(checkpoint)
    compute(network_of(task), ids, budget, images)
    return task


def texts_tensor(texts: Sequence[str]) -> WireTensor:
    """Return BYTES ``[texts, 1]``."""
    return WireTensor("texts", "BYTES", (len(texts), 1), pack_bytes([text.encode() for text in texts]))


class TaskConversion(EncoderConversion[AnyTask]):
    """Compares variants by the results of their tasks for ``samples``: texts, or pairs of texts.

    Subclasses set ``samples`` first. The folder of the conversion holds links to the files that a converted model has,
    so that variants open there.
    """

    samples: Sequence[TextSample]

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        super().__init__(plan, checkpoint, folder, progress)
        self.engines, self.precisions = plan.engines, plan.precisions
        self.shapes = plan.shapes(checkpoint.max_length)
        for name in checkpoint_files(checkpoint, weights=True, code=plan.trust_remote_code):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to((checkpoint.directory / name).resolve())
        reference: Any = open_task(self._opened(BuiltVariant(REFERENCE, "torch", "fp32", None)))
        self._reference: AnyTask = reference

    @abstractmethod
    def request(self, task: AnyTask, index: int) -> Request:
        """Return the request for a sample."""

    @abstractmethod
    def outputs(self, task: AnyTask, result: Result) -> SampleOutputs:
        """Return the outputs in the result of a sample."""

    def lengths(self, network: AnyTask) -> list[int]:
        return [network.prepare(self.request(network, index)).length for index in range(len(self.samples))]

    def run_group(self, network: AnyTask, indices: Sequence[int]) -> list[SampleOutputs]:
        requests = [network.prepare(self.request(network, index)) for index in indices]
        results = network.execute(requests, ExecutionWork())
        for result in results:
            if isinstance(result, ConchError):
                raise result
        return [self.outputs(network, result) for result in results if isinstance(result, Result)]

    def runs(self, networks: Mapping[str, AnyTask], shape: Shape) -> dict[str, Run]:
        """Return one run of each network on the same tokens and as many images, with what follows it."""
        ids, images = self._ids(shape), self.images(shape.batch)
        return {
            name: timed(partial(compute, network_of(task), ids, self.run_tokens, images))
            for name, task in networks.items()
        }

    def images(self, count: int) -> list[Tokens]:
        """Return ``count`` images of a model that embeds texts and images; none of other models."""
        return []

    def opening(self, variant: BuiltVariant) -> Opening:
        largest = max(self.shapes, key=lambda shape: shape.batch * shape.tokens)
        images = self.images(largest.batch)
        return partial(open_and_compute, self._opened(variant), self._ids(largest), self.run_tokens, images)

    def _ids(self, shape: Shape) -> Array:
        return ids_of_shape(network_of(self._reference).encoder, self.samples, shape)

    def open_variant(self, variant: BuiltVariant) -> Any:
        return self._reference if variant.name == REFERENCE else open_task(self._opened(variant))

    def _opened(self, variant: BuiltVariant) -> Checkpoint:
        """Return the checkpoint with only this variant."""
        entry = replace(variant.to_manifest(self.folder), passed=True)
        options = replace(self.checkpoint.options, engine="auto", truncation="truncate")
        return replace(self.checkpoint, directory=self.folder, variant=entry, options=options, refuses_long_texts=False)


class EmbeddingConversion(TaskConversion[Embedding]):
    """Compares vectors, and the order in which they rank passages for queries."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        self.model = convertible(checkpoint, whole=True)
        if plan.layout == "triton":
            self._check_triton()
        #: The images by name, which are the passages of a model that embeds texts and images.
        self._files: dict[str, bytes] = {}
        if self.model.reads_images:
            media.require_images(checkpoint.task)
            fitted, compared = image_search(plan.data)
            self._fitted, self.texts = fitted.texts, compared.texts
            self._files = {**fitted.files, **compared.files}
        else:
            self._fitted, self.texts = sentences.search_texts(plan.data)
        self.samples = _samples(self.texts)
        super().__init__(plan, checkpoint, folder, progress)
        if self.model.reads_images:
            self._check_images()
        #: Without modules, pooling is an option of the server, and so not in the graph.
        self._whole = self.model.saved or plan.layout == "triton"
        self.sample_count = len({*self.texts.queries, *self.texts.passages})
        self.warn(evidence.few_samples(self.sample_count, both=self._fitted == self.texts))
        names = ("texts", "images") if self.model.reads_images else ("queries", "passages")
        self.compared_on = f"{len(self.texts.queries)} {names[0]} and {len(self.texts.passages)} {names[1]}"

    def _check_triton(self) -> None:
        """Raise UNSUPPORTED unless one graph computes one vector per text: NVIDIA's server has nothing for the rest."""
        others = {
            "images, which need the image processor of transformers": self.model.reads_images,
            "sparse vectors": self.model.family == SPARSE,
            "several vectors per text": self.model.family == MULTI_VECTOR,
            "the heads of BGE-M3": self.model.heads,
            "several networks": len(self._networks) > 1,
            "modules that stay outside of a graph (of one task only, or pooling without the prompt)": any(
                contained(self.model, network) is None for network in self._networks
            ),
        }
        for reason, applies in others.items():
            if applies:
                raise unsupported(
                    "--layout triton is for models with one vector per text from one network, and this one has "
                    f"{reason}: leave the option out, and serve the converted model with conch"
                )

    def _check_images(self) -> None:
        """Raise UNSUPPORTED if the images of the model differ in size; warn of the limits of the verdict."""
        shapes = {tuple((name, array.shape) for name, array in image.arrays.items()) for image in self._images}
        if len(shapes) > 1 or {name for shape in shapes for name, _ in shape} != {PIXELS}:
            raise unsupported(
                f"'{self.checkpoint.source}' cannot be converted, because its images keep their proportions and a "
                "graph needs images of one size: serve the checkpoint itself"
            )
        if self.plan.data is None:
            self.warn(["the built-in images are drawings: provide your own images with --data"])
        self.warn(["latencies are of a batch of texts and as many images"])

    @property
    def serves_by_shape(self) -> bool:
        """Whether the model embeds only texts: the shapes of a choice between variants are those of texts."""
        return super().serves_by_shape and not self.model.reads_images

    @cached_property
    def _images(self) -> list[ImageTokens]:
        """The images to compare, as inputs of the network."""
        return self._prepared_images(self.texts)

    def _prepared_images(self, texts: sentences.SearchTexts) -> list[ImageTokens]:
        prepared = [self._reference.prepare(self._request(name, None)) for name in texts.passages]
        sequences = [sequence for request in prepared for sequence in getattr(request, "sequences", ())]
        return [sequence for sequence in sequences if isinstance(sequence, ImageTokens)]

    def images(self, count: int) -> list[Tokens]:
        return [*islice(cycle(self._images), count)] if self.model.reads_images else []

    @property
    def _networks(self) -> list[Module]:
        """The modules with a network."""
        firsts = {id(path[0]): path[0] for path in map(self.model.path_of, self.model.tasks)}
        return [module for module in firsts.values() if module.kind in NETWORKS]

    def build_variants(self, variants: Sequence[tuple[str, str]]) -> list[BuiltVariant | FailedVariant]:
        """Build all variants of each network; a variant of the model has a graph of each."""
        built, folders = [], []
        for first in self._networks:
            graphs: list[tuple[str, Any, list[Mapping[str, Array]]]] = [(first.path, None, self._calibration(first))]
            if self.model.reads_images:
                images: list[Mapping[str, Array]] = [image.arrays for image in self._prepared_images(self._fitted)]
                graphs.append((joined(first.path, IMAGE_FOLDER), images[0][PIXELS], images))
            for folder, pixels, calibration in graphs:
                load = partial(load_embedding, self.checkpoint, self.model, first, whole=self._whole, pixels=pixels)
                built.append(VariantBuilder(load, calibration, self.folder / folder, self.progress).build(variants))
                folders.append(folder)
        return [_joined(parts, self.folder, tuple(folders)) for parts in zip(*built, strict=True)]

    def _calibration(self, first: Module) -> list[Mapping[str, Array]]:
        arrays: list[Mapping[str, Array]] = []
        for index, sample in enumerate(_samples(self._fitted)):
            if sample.text in self._files:
                continue
            task = self._task(index < len(self._fitted.queries))
            pipeline = self._reference.pipelines_by_task[task]
            if isinstance(pipeline, NetworkPipeline) and self.model.path_of(task)[0] is first:
                prepared = self._reference.prepare(self._request(sample.text, task))
                if isinstance(prepared, EncodedRequest):
                    arrays += calibration_arrays(prepared.sequences, pipeline.encoder.pad_id)
        return arrays

    def _task(self, is_query: bool) -> str | None:
        """Return the task of a query or of a passage, or another one if the model has none for it."""
        task = "query" if is_query else "document"
        return task if task in self.model.tasks else self.model.tasks[0]

    def request(self, task: Embedding, index: int) -> Request:
        return self._request(self.samples[index].text, self._task(index < len(self.texts.queries)))

    def _request(self, text: str, task: str | None) -> Request:
        inputs = {TEXT.name: texts_tensor([text])}
        if text in self._files:
            inputs = {IMAGE.name: WireTensor(IMAGE.name, "BYTES", (1, 1), pack_bytes([self._files[text]]))}
        if self.model.saved and task is not None:
            inputs[TASK] = texts_tensor([task])
        return Request(inputs, frozenset())

    def outputs(self, task: Embedding, result: Result) -> SampleOutputs:
        arrays: dict[str, Any] = result.outputs
        outputs = {}
        if DENSE_VECTOR in arrays:
            outputs[DENSE_VECTOR] = arrays[DENSE_VECTOR]
        if "sparse_indices" in arrays:
            indices = arrays["sparse_indices"][0]
            outputs[SPARSE_VECTOR] = np.zeros((1, self._words), np.float32)
            outputs[SPARSE_VECTOR][0, indices[indices >= 0]] = arrays["sparse_values"][0, indices >= 0]
        if TOKEN_VECTORS in arrays:
            outputs[TOKEN_VECTORS] = arrays[TOKEN_VECTORS][0, : arrays["num_vectors"][0, 0]]
        return outputs

    @property
    def _words(self) -> int:
        """The size of a sparse vector."""
        return self.model.dimension if not self.model.heads and self.model.dimension > 0 else self._vocabulary

    @property
    def _vocabulary(self) -> int:
        configs = [self.checkpoint.part(first.path).config for first in self._networks]
        sizes: list[int] = [config["vocab_size"] for config in configs if isinstance(config.get("vocab_size"), int)]
        return max([*sizes, network_of(self._reference).encoder.tokenizer.vocabulary])

    def task_figures(
        self, reference: Sequence[SampleOutputs], actual: Sequence[SampleOutputs]
    ) -> Mapping[str, TaskAgreement]:
        first, most = compare_order(self.texts, self.model.similarity, reference, actual)
        return {"recall": most, "task": first}

    def contrast(self, reference: EncoderOutputs, actual: EncoderOutputs) -> Contrasts:
        """Return the texts with the most different vectors, and the text or image that is nearest by both."""
        return contrasts(self.texts, self.model.similarity, reference.outputs, actual.outputs)


def _samples(texts: sentences.SearchTexts) -> list[TextSample]:
    return [TextSample(text) for text in (*texts.queries, *texts.passages)]


def _joined(
    parts: Sequence[BuiltVariant | FailedVariant], folder: Path, folders: tuple[str, ...]
) -> BuiltVariant | FailedVariant:
    """Return a variant of all networks of a model; ``parts`` are that of each, in ``folders`` below ``folder``."""
    for part in parts:
        if isinstance(part, FailedVariant):
            return part
    first = parts[0]
    if not isinstance(first, BuiltVariant) or first.path is None:
        return first
    return replace(first, path=folder / first.path.name, folders=folders)


def convertible(checkpoint: Checkpoint, *, whole: bool) -> EmbeddingModel:
    """Return the modules of a checkpoint that embeds texts. Raises UNSUPPORTED, naming the reason, if it has no graph.

    ``whole`` is whether graphs contain the modules after the network where they can.
    """
    model = EmbeddingModel.read(checkpoint)
    firsts = {id(path[0]): path[0] for path in map(model.path_of, model.tasks)}
    networks = [module for module in firsts.values() if module.kind in NETWORKS]
    problem = ""
    if any(module.methods == ("forward", "forward") for module in networks):
        problem = "its network reads pages of documents as texts with images"
    elif not networks:
        problem = f"its module '{model.path_of(model.tasks[0])[0].kind}' has no network to export"
    for first in networks:
        if predicts_tokens(first) and (not whole or contained(model, first) is None):
            problem = (
                "its tasks pool the same logits of words in different ways, so its graph would have to return the "
                "logits of all words at all positions"
            )
    if problem:
        raise unsupported(f"'{checkpoint.source}' cannot be converted, because {problem}: serve the checkpoint itself")
    return model


class CausalRankingConversion(TaskConversion[Rerank]):
    """Compares the scores of pairs, and the order of the passages of each query, by a causal language model."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        if plan.layout == "triton":
            raise unsupported("--layout triton is for encoders: leave it out for a reranker over a language model")
        self._fitted, self.samples = sentences.split(sentences.load(checkpoint.task, plan.data))
        super().__init__(plan, checkpoint, folder, progress)
        self.sample_count = len(self.samples)
        self.warn(evidence.few_samples(self.sample_count, both=self._fitted == self.samples))
        self.warn([
            "graphs compute whole pairs: PyTorch computes the tokens with which the pairs of a query begin only once, "
            "which the measured latencies do not show"
        ])  # fmt: skip
        self.compared_on = f"{self.sample_count} pairs"
        self._words = EncoderAnswers(checkpoint.task, self.samples, [], (), lambda ids: "")

    def build_variants(self, variants: Sequence[tuple[str, str]]) -> list[BuiltVariant | FailedVariant]:
        plan = self._reference.plan
        ids = [id for id in (plan.true_id, plan.false_id) if id is not None]
        prepared = [self._reference.prepare(_pair(sample)) for sample in self._fitted]
        sequences = [tokens for pair in prepared for tokens in pair.sequences]
        calibration = calibration_arrays(sequences, self._reference.encoder.pad_id)
        load = partial(load_ranking, self.checkpoint, ids)
        return VariantBuilder(load, calibration, self.folder, self.progress).build(variants)

    def request(self, task: Rerank, index: int) -> Request:
        return _pair(self.samples[index])

    def outputs(self, task: Rerank, result: Result) -> SampleOutputs:
        logits: Any = result.outputs["logits"]
        return {"logits": logits}

    def task_figures(
        self, reference: Sequence[SampleOutputs], actual: Sequence[SampleOutputs]
    ) -> Mapping[str, TaskAgreement]:
        return {"task": agreement.compare_task(self.checkpoint.task, self.samples, reference, actual)}

    def contrast(self, reference: EncoderOutputs, actual: EncoderOutputs) -> Contrasts:
        """Return the pairs with the most different scores."""
        return self._words.contrasts(reference.outputs, actual.outputs)


def _pair(sample: TextSample) -> Request:
    inputs = {TEXT.name: texts_tensor([sample.text]), PAIR.name: texts_tensor([sample.pair or ""])}
    return Request(inputs, frozenset({"logits"}))
