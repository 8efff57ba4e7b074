"""Conversion of an encoder: all variants are in memory together, and are measured alternately.

Embedding models and rerankers over language models are compared in ``retrieval``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines import NetworkEngine, open_engine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Contrasts, Manifest
from conch.checkpoints.modules import EmbeddingModel
from conch.checkpoints.ranking import RankingPlan
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.checkpoints.tokenizers.open import TYPES, open_tokenizer, original_tokenizer
from conch.convert import evidence, sentences
from conch.convert.conversion import Conversion, Progress
from conch.convert.encoder import agreement, network
from conch.convert.encoder.agreement import OutputAgreement, SampleOutputs, TaskAgreement
from conch.convert.encoder.contrasts import EncoderAnswers
from conch.convert.encoder.evaluate import (
    EncoderOutputs,
    Neighbours,
    apart,
    calibration_arrays,
    divided,
    greatest,
    ids_of_shape,
    run_samples,
    run_together,
    tokenize,
    widest,
)
from conch.convert.encoder.network import head_of
from conch.convert.encoder.variants import VariantBuilder, planned
from conch.convert.footprint import Opening
from conch.convert.layout import EnsembleModels
from conch.convert.libraries import silence_libraries
from conch.convert.measure import Run, timed
from conch.convert.plan import Plan
from conch.convert.verdict import REFERENCE, BuiltVariant, FailedVariant
from conch.core.errors import unsupported
from conch.core.lengths import CPU_TOKENS, GPU_TOKENS
from conch.measure.texts.shapes import Shape


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerance of a precision.

    ``vector``, ``token`` and ``logits`` are lower bounds of the smallest cosine: of sentence embeddings, of single
    tokens' vectors, and of logits (of classes, positions or words). ``mean`` is the bound of all mean cosines,
    ``argmax`` that of the share of logits with the same argmax, ``task`` the maximum loss in the task's metric, and
    ``recall`` that in recall@100, whose last passages are all about equally far from the query.

    The bounds also apply to a row alone and the same row in a batch, because otherwise one of the two could not be as
    close to the reference.
    """

    vector: float
    token: float
    logits: float
    mean: float
    argmax: float
    task: float
    recall: float


TOLERANCES: Final[dict[str, Tolerance]] = {
    # The same arithmetic in another order: only rounding and occasional near-ties differ.
    "fp32": Tolerance(vector=0.9999, token=0.999, logits=0.999, mean=0.9999, argmax=0.99, task=0.01, recall=0.01),
    # 11 bits of significand: errors of 5e-4 per operation, which accumulate over layers.
    "fp16": Tolerance(vector=0.999, token=0.99, logits=0.99, mean=0.999, argmax=0.98, task=0.01, recall=0.02),
    # 8 bits of significand: eight times as coarse.
    "bf16": Tolerance(vector=0.995, token=0.95, logits=0.97, mean=0.995, argmax=0.96, task=0.02, recall=0.04),
    # 8 bits per weight and activation. Single tokens (especially [CLS], [SEP] and punctuation) change much more than
    # the mean over a sentence, which is used.
    "int8": Tolerance(vector=0.97, token=0.80, logits=0.90, mean=0.97, argmax=0.95, task=0.05, recall=0.08),
}

#: Logits of fewer classes have no bound of the smallest cosine: near the border between two classes, a few small
#: numbers point in any direction. The share of changed classes is bounded instead.
MIN_CLASSES: Final = 32


def missed_tolerances(
    precision: str,
    outputs: Mapping[str, OutputAgreement],
    task: TaskAgreement | None,
    neighbours: Neighbours | None = None,
    recall: TaskAgreement | None = None,
) -> tuple[str, ...]:
    """Return why a variant of ``precision`` is refused, one sentence per missed bound; empty if it passes.

    Precisions without their own tolerance use that of ``int8``.
    """
    tolerance = TOLERANCES.get(precision, TOLERANCES["int8"])
    missed = [reason for name, output in outputs.items() for reason in _missed(name, output, tolerance)]
    for figure, bound in ((task, tolerance.task), (recall, tolerance.recall)):
        if figure is not None and not -figure.delta <= bound:
            missed.append(
                f"{figure.name} {_rounded(figure.value)} is {_rounded(-figure.delta)} below the reference's, "
                f"more than {bound:g}"
            )
    if neighbours is not None:
        missed += _dependent(neighbours, outputs, tolerance)
    return tuple(missed)


def together(
    precisions: Sequence[str], outputs: Mapping[str, OutputAgreement], invariance: Neighbours, largest: float
) -> tuple[str, ...]:
    """Return why two variants must not serve together, each for some shapes.

    They must not if a text's outputs depend on the other rows of its batch by more than the stricter of the two
    precisions allows. ``invariance`` compares their outputs, alone and in batches. The direction of scores and of few
    classes is meaningless, but they are compared between texts, which may run on different variants. So their
    difference is bounded as a share of the ``largest`` number.
    """
    strict = max(
        (TOLERANCES.get(precision, TOLERANCES["int8"]) for precision in precisions),
        key=lambda tolerance: tolerance.vector,
    )
    missed = [*_dependent(invariance, outputs, strict)]
    widths = [outputs[name].width for name in outputs if "logits" in name]
    bound = 1 - strict.logits
    if widths and min(widths) < MIN_CLASSES and not invariance.max_difference <= bound * largest:
        missed.append(
            f"answers differ by up to {invariance.max_difference:.2g}, which is more than {bound:.2g} of the largest, "
            f"{largest:.2g}"
        )
    return tuple(missed)


def _dependent(invariance: Neighbours, outputs: Mapping[str, OutputAgreement], tolerance: Tolerance) -> Iterator[str]:
    bound = min(_cosine_bound(name, outputs[name].width, tolerance) for name in outputs)
    if invariance.cosine_min is not None and not invariance.cosine_min >= bound:
        yield f"cosine {_rounded(invariance.cosine_min)} of a row alone with the same row in a batch is below {bound:g}"
    if invariance.argmax is not None and not invariance.argmax >= tolerance.argmax:
        yield (
            f"{_rounded(invariance.argmax)} of the answers are the same alone and in a batch, "
            f"below {tolerance.argmax:g}"
        )


def _missed(name: str, output: OutputAgreement, tolerance: Tolerance) -> Iterator[str]:
    for figure, value, bound in (
        ("cosine_min", output.cosine_min, _cosine_bound(name, output.width, tolerance)),
        ("cosine_mean", output.cosine_mean, tolerance.mean),
        ("argmax agreement", output.argmax, tolerance.argmax),
    ):
        if value is not None and isnan(value):
            yield f"{name} has values that are not finite"
            return
        if value is not None and value < bound:
            yield f"{figure} {_rounded(value)} of {name} is below {bound:g}"


def _cosine_bound(name: str, width: int, tolerance: Tolerance) -> float:
    if "logits" in name:
        return tolerance.logits if width >= MIN_CLASSES else -1.0
    return tolerance.token if name == "token_embeddings" else tolerance.vector


def _rounded(value: float) -> str:
    """Format a value with up to four decimals, enough to distinguish it from a tolerance."""
    return f"{value:.4f}".rstrip("0").rstrip(".") or "0"


Network = TypeVar("Network")


class EncoderConversion(Conversion[Network, EncoderOutputs]):
    """Compares networks by their outputs for single texts."""

    in_memory_together = True
    #: The length of the longest sample (tokens).
    longest: int

    @property
    def run_tokens(self) -> int:
        """The maximum number of tokens of a run, except of one text: that of the server.

        With the layout ``triton``, NVIDIA's server runs whole batches.
        """
        if self.plan.layout == "triton":
            return max(shape.batch * shape.tokens for shape in self.shapes)
        usual = GPU_TOKENS if "tensorrt" in self.engines else CPU_TOKENS
        return self.checkpoint.options.max_batch_tokens or usual

    @property
    def serving_engines(self) -> frozenset[str]:
        """All engines; only ONNX Runtime for the layout ``triton``, whose model is an ONNX graph."""
        return frozenset({"onnxruntime"} if self.plan.layout == "triton" else {"torch", "onnxruntime", "openvino"})

    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Build the planned variants, preceded by the reference if the plan lacks it."""
        built = self.build_variants(planned(self.engines, self.precisions))
        if "torch" not in self.engines:
            built.insert(0, BuiltVariant(REFERENCE, "torch", "fp32", None))
        return built

    @abstractmethod
    def build_variants(self, variants: Sequence[tuple[str, str]]) -> list[BuiltVariant | FailedVariant]:
        """Build every engine and precision, in order."""

    def evaluate(self, variant: BuiltVariant) -> tuple[Network, EncoderOutputs]:
        """Open a variant as the server does, and run the batches that the server would make."""
        opened, outputs = self.run_variant(variant)
        if variant.name == REFERENCE:
            self.check_reference(outputs.outputs)
        if self.longest > self.run_tokens:
            # Engines keep the memory of their largest run, and all variants are in memory during the measurements.
            del opened
            opened = self.open_variant(variant)
        return opened, outputs

    @abstractmethod
    def open_variant(self, variant: BuiltVariant) -> Network:
        """Open a variant as the server does."""

    def run_variant(self, variant: BuiltVariant) -> tuple[Network, EncoderOutputs]:
        """Open a variant, and return the outputs for all samples."""
        network = self.open_variant(variant)
        lengths = self.lengths(network)
        self.longest = max(lengths)
        return network, run_samples(lengths, partial(self.run_group, network), budget=self.run_tokens)

    @abstractmethod
    def lengths(self, network: Network) -> list[int]:
        """Return the length of each sample (tokens)."""

    @abstractmethod
    def run_group(self, network: Network, indices: Sequence[int]) -> list[SampleOutputs]:
        """Return the outputs of the samples ``indices``, which run together."""

    def check_reference(self, outputs: Sequence[SampleOutputs]) -> None:
        """Warn if the checkpoint's own outputs are not informative."""
        return None

    @abstractmethod
    def task_figures(
        self, reference: Sequence[SampleOutputs], actual: Sequence[SampleOutputs]
    ) -> Mapping[str, TaskAgreement]:
        """Return the figure of the task's metric as ``task``, and that of ``recall`` for embedding models."""

    def compare(
        self, precision: str, reference: EncoderOutputs, actual: EncoderOutputs
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Return figures by output, of the task's metrics, and of batch invariance as ``neighbours``."""
        before, after = reference.outputs, actual.outputs
        outputs = agreement.compare(before, after)
        tasks = self.task_figures(before, after)
        figures = {name: asdict(output) for name, output in outputs.items()}
        figures |= {name: asdict(figure) for name, figure in tasks.items()}
        reasons = missed_tolerances(precision, outputs, tasks["task"], actual.neighbours, tasks.get("recall"))
        few = evidence.too_few(precision, self.sample_count, "samples", evidence.MIN_SAMPLES)
        return {**figures, "neighbours": asdict(actual.neighbours)}, (*reasons, *few)

    @property
    def serves_by_shape(self) -> bool:
        """Whether conch serves the model; with the layout ``triton``, NVIDIA's server runs one graph."""
        return self.plan.layout == "huggingface"

    def compare_pair(self, first: BuiltVariant, second: BuiltVariant) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Return the worst figures of comparing one variant with the other, and each alone with itself in a batch."""
        (_, own), (_, other) = self.run_variant(first), self.run_variant(second)
        worst = widest([apart(own.outputs, other.outputs), own.neighbours, other.neighbours])
        outputs = agreement.compare(own.outputs, other.outputs)
        largest = greatest([*own.outputs, *other.outputs])
        return asdict(worst), together((first.precision, second.precision), outputs, worst, largest)

    def write_models(
        self, target: Path, manifest: Manifest, built: Mapping[str, BuiltVariant]
    ) -> tuple[Path, dict[str, str]]:
        """Write one model, or for ``--layout triton`` three models around the variant ``auto``."""
        if self.plan.layout != "triton":
            return super().write_models(target, manifest, built)
        ensemble, variant = EnsembleModels(self.plan.served_name, self.checkpoint.task), built[manifest.auto]
        lower = bool((self.checkpoint.json("sentence_bert_config.json") or {}).get("do_lower_case"))
        pad_id = open_tokenizer(self.checkpoint).special.pad_id or 0
        prompt = ""
        if self.checkpoint.task == "feature-extraction":
            prompt = EmbeddingModel.read(self.checkpoint).prompts.text(None, None)
        elif self.checkpoint.task == "text-ranking":
            prompt = RankingPlan.read(self.checkpoint).prompts.text(None, None)
        graph = ensemble.write(target, self.checkpoint, variant.files, pad_id, lower=lower, prompt=prompt)
        return target / ensemble.model, {variant.name: graph.name}


def open_and_run(checkpoint: Checkpoint, head: str, device: str, parts: Sequence[Mapping[str, Array]]) -> NetworkEngine:
    """Return the engine of a variant after its first runs."""
    engine = open_engine(checkpoint, head=head, device=device)
    run_all(engine, parts)
    return engine


def run_all(engine: NetworkEngine, parts: Sequence[Mapping[str, Array]]) -> None:
    """Run a network on each of ``parts``."""
    for arrays in parts:
        engine.run(arrays)


class NetworkConversion(EncoderConversion[NetworkEngine]):
    """Compares the outputs of networks: the logits of classifiers, taggers, rerankers and masked language models."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        super().__init__(plan, checkpoint, folder, progress)
        if checkpoint.task == "image-classification":
            raise unsupported(
                "variants are compared on texts, so networks for images cannot be converted: serve the checkpoint "
                "itself"
            )
        self.head = head_of(checkpoint)
        self.engines, self.precisions = plan.engines, plan.precisions
        self.shapes = plan.shapes(checkpoint.max_length)
        truncating = replace(checkpoint, options=replace(checkpoint.options, truncation="truncate"))
        self.encoder = open_encoder(truncating, original_tokenizer(checkpoint))
        mask = self.encoder.tokenizer.special.texts.get("mask_token", "")
        fitted, self.samples = sentences.split(sentences.load(checkpoint.task, plan.data, mask=mask))
        self.sample_count = len(self.samples)
        self.warn(evidence.few_samples(self.sample_count, both=fitted == self.samples))
        self.compared_on = f"{self.sample_count} samples"
        classifies = checkpoint.task == "text-classification"
        self.labels = sentences.label_indices(self.samples, checkpoint.labels) if classifies else None
        self.fitted, self.tokens = tokenize(self.encoder, fitted), tokenize(self.encoder, self.samples)
        self.words = EncoderAnswers(
            checkpoint.task, self.samples, self.tokens, checkpoint.labels or (), self.encoder.tokenizer.decode
        )

    def build_variants(self, variants: Sequence[tuple[str, str]]) -> list[BuiltVariant | FailedVariant]:
        load = partial(network.load, self.checkpoint)
        calibration = calibration_arrays(self.fitted, self.encoder.pad_id)
        return VariantBuilder(load, calibration, self.folder, self.progress).build(variants)

    def lengths(self, network: NetworkEngine) -> list[int]:
        return [len(tokens.ids) for tokens in self.tokens]

    def run_group(self, network: NetworkEngine, indices: Sequence[int]) -> list[SampleOutputs]:
        return run_together(network, self.encoder, [self.tokens[index] for index in indices], self.checkpoint.task)

    def check_reference(self, outputs: Sequence[SampleOutputs]) -> None:
        names = self.checkpoint.labels or ()
        if self.labels is not None:
            labels = [int(agreement.labels_of(sample)[0]) for sample in outputs]
            self.warn(evidence.chance(self.labels, labels, names))
        elif self.checkpoint.task in ("text-classification", "token-classification"):
            self.warn(evidence.same_label_warning([agreement.labels_of(sample) for sample in outputs], names))

    def task_figures(
        self, reference: Sequence[SampleOutputs], actual: Sequence[SampleOutputs]
    ) -> Mapping[str, TaskAgreement]:
        if self.labels is not None:
            return {"task": agreement.accuracy(self.labels, reference, actual)}
        return {"task": agreement.compare_task(self.checkpoint.task, self.samples, reference, actual)}

    def contrast(self, reference: EncoderOutputs, actual: EncoderOutputs) -> Contrasts:
        """Return the texts with the most different outputs, and descriptions of both outputs."""
        return self.words.contrasts(reference.outputs, actual.outputs)

    def runs(self, networks: Mapping[str, NetworkEngine], shape: Shape) -> dict[str, Run]:
        """Return one run of each network on the same arrays."""
        parts = self._parts(shape)
        return {name: timed(partial(run_all, engine, parts)) for name, engine in networks.items()}

    def opening(self, variant: BuiltVariant) -> Opening:
        largest = max(self.shapes, key=lambda shape: shape.batch * shape.tokens)
        return partial(open_and_run, *self._opened(variant), self._parts(largest))

    def _parts(self, shape: Shape) -> list[dict[str, Array]]:
        """Return the inputs of the runs in which a request of ``shape`` is computed."""
        ids = ids_of_shape(self.encoder, self.samples, shape)
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), TYPES: np.zeros_like(ids)}
        return divided(arrays, self.run_tokens)

    def open_variant(self, variant: BuiltVariant) -> NetworkEngine:
        checkpoint, head, device = self._opened(variant)
        with silence_libraries():
            return open_engine(checkpoint, head=head, device=device)

    def _opened(self, variant: BuiltVariant) -> tuple[Checkpoint, str, str]:
        """Return the checkpoint with only this variant, its head, and the device."""
        entry = replace(
            variant.to_manifest(self.folder),
            path=str(variant.path.resolve()) if variant.path is not None else "",
            passed=True,
        )
        checkpoint = replace(self.checkpoint, variant=entry)
        checkpoint = replace(checkpoint, options=replace(checkpoint.options, engine="auto"))
        return checkpoint, self.head, "cuda" if variant.engine == "tensorrt" else "cpu"
