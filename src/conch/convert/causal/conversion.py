"""Conversion of a causal language model: exports with quantized weights, judged by their predictions on real text.

Only one variant is in memory with the reference, because language models are large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Contrast, Contrasts
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.convert import evidence, sentences
from conch.convert.causal import agreement, export
from conch.convert.causal.agreement import Predictions, ServedGraph, shared_prefix
from conch.convert.causal.export import CausalNetwork, load
from conch.convert.conversion import Conversion, Progress, kept, shortened
from conch.convert.footprint import Opening
from conch.convert.libraries import describe_error, silence_libraries
from conch.convert.measure import Run
from conch.convert.plan import Plan
from conch.convert.verdict import REFERENCE, BuiltVariant, FailedVariant
from conch.core.errors import invalid
from conch.core.sampling import TEXT_GENERATION
from conch.measure.texts.shapes import Shape


def contrasts(
    reference: Predictions,
    variant: Predictions,
    prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Contrasts:
    """Return the differences of tokens' log-probabilities, and the continuations that diverge earliest."""
    pairs = list(zip(reference.continuations, variant.continuations, strict=True))
    before, after = (np.concatenate([np.asarray(text) for text in texts.logprobs]) for texts in (reference, variant))
    lost = [1 - shared_prefix(a, b) / len(a) if len(a) else 0.0 for a, b in pairs]

    def describe(index: int) -> Contrast:
        expected, actual = pairs[index]
        return Contrast(
            shortened(decode(prompts[index])), shortened(decode(expected)), shortened(decode(actual)),
            round(lost[index], 4),
        )  # fmt: skip

    return kept("difference of a token's log-probability", np.abs(before - after), lost, describe)


#: The maximum length of a passage, and the minimum length of one that is informative (tokens).
MAX_PASSAGE_TOKENS: Final = 512
MIN_PASSAGE_TOKENS: Final = 8
#: The length of all passages concatenated (tokens): a context of many cache blocks.
LONG_TEXT_TOKENS: Final = 1024
#: The maximum number of tokens to evaluate, over all passages.
MAX_TOKENS: Final = 16_384
#: The number of prompts to continue, their length, and the length of continuations (tokens).
PROMPTS: Final = 16
PROMPT_TOKENS: Final = 32
CONTINUATION_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids: ``compared`` are scored, ``prompts`` are continued; ``fitted`` are used only for calibration."""

    compared: list[list[int]]
    prompts: list[list[int]]
    fitted: list[list[int]]

    @property
    def tokens(self) -> int:
        """The number of predicted tokens: all but the first of each text."""
        return sum(len(text) - 1 for text in self.compared)

    @property
    def max_tokens(self) -> int:
        """The length of the longest text."""
        return max(len(text) for text in self.compared)

    def stream(self, length: int) -> list[int]:
        """Return a prompt of exactly ``length`` tokens for measurements, made by repeating the passages."""
        joined = [token for text in self.compared for token in text]
        return (joined * (length // len(joined) + 1))[:length]


def load_texts(encode: Callable[[str], list[int]], file: Path | None, context: int) -> Texts:
    """Load the built-in passages, or the texts of ``file``; ``context`` is the model's context length (tokens).

    Raises INVALID_ARG for a file without texts, or with only short ones.
    """
    max_tokens = min(MAX_PASSAGE_TOKENS, context)
    fitted, samples = sentences.split(sentences.load(TEXT_GENERATION, file))
    ids = [encode(sample.text) for sample in samples]
    compared: list[list[int]] = []
    for text in ids:
        if len(text) >= MIN_PASSAGE_TOKENS and sum(map(len, compared)) < MAX_TOKENS:
            compared.append(text[:max_tokens])
    if not compared:
        raise invalid(f"--data has no text of {MIN_PASSAGE_TOKENS} tokens or more")
    long = [token for text in ids for token in text][: min(LONG_TEXT_TOKENS, context)]
    if len(long) > max_tokens:
        compared.append(long)
    # A prompt is at most half of its text, and of the context.
    prompts = [text[: min(_prompt_tokens(context), max(1, len(text) // 2))] for text in compared[:PROMPTS]]
    return Texts(compared, prompts, [encode(sample.text)[:max_tokens] for sample in fitted])


def _prompt_tokens(context: int) -> int:
    return min(PROMPT_TOKENS, max(1, context // 2))


def continuation_tokens(context: int) -> int:
    """Return the number of tokens to generate after a prompt, for a context length (tokens)."""
    return max(1, min(CONTINUATION_TOKENS, context - _prompt_tokens(context)))


#: Precisions of a language model in addition to fp32. ``fp16`` stores the weights in 16 bits.
PRECISIONS: Final = ("fp16", "int8", "int4", "int4-awq")
USUAL: Final = ("int8", "int4")
#: The number of weights in a matrix row that share a scale and a zero point. If it does not divide the row, the
#: largest power of two that does is used, down to ``MIN_GROUP``, and int8 below that.
GROUP: Final = 128
MIN_GROUP: Final = 32
#: The length of a calibration text (tokens), and the number of texts; each costs a run of the fp32 graph.
CALIBRATION_TOKENS: Final = 256
CALIBRATION_TEXTS: Final = 64
GRAPH: Final = "openvino_model.xml"


def write_weights(model: Any, folder: Path, precision: str, texts: Sequence[Sequence[int]]) -> Path:
    """Write ``model`` (fp32; modified in place) with weights of ``precision`` to ``folder``; returns the file.

    ``texts`` are token ids for calibration, needed only for ``int4-awq``.
    """
    folder.mkdir()
    file = folder / GRAPH
    with silence_libraries():
        import openvino

        if precision.startswith("int"):
            model = _compressed(model, precision, texts)
        openvino.save_model(model, file, compress_to_fp16=precision == "fp16")
    return file


def _compressed(model: Any, precision: str, texts: Sequence[Sequence[int]]) -> Any:
    import nncf

    if precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    settings: dict[str, Any] = {}
    if precision == "int4-awq":
        if not texts:
            raise invalid("int4-awq needs calibration texts")
        settings = {"dataset": nncf.Dataset(calibration(texts)), "awq": True, "scale_estimation": True,
                    "subset_size": min(len(texts), CALIBRATION_TEXTS)}  # fmt: skip
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=GROUP,
        ratio=1.0,
        advanced_parameters=nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST, min_adjusted_group_size=MIN_GROUP
        ),
        **settings,
    )


def calibration(texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the graph's inputs for each text, starting with an empty cache."""
    inputs = []
    for text in texts[:CALIBRATION_TEXTS]:
        ids = np.array([text[:CALIBRATION_TOKENS]], np.int64)
        inputs.append({
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        })  # fmt: skip
    return inputs


#: The engines for which language models can be converted.
BACKENDS: Final = ("torch", "openvino")
BATCH_SIZES: Final = (1, 8)
PROMPT_LENGTHS: Final = (128, 512)
#: The number of tokens before the first measured decoding step, and of steps measured together.
DECODED_FROM: Final = 32
DECODING_STEPS: Final = 16
#: The variant from which other exports are made.
EXPORT: Final = "openvino-fp32"


class CausalConversion(Conversion[CausalNetwork | ServedGraph, Predictions]):
    """Conversion judged by the log-probabilities of real text and by greedy continuations."""

    in_memory_together = False
    advice = "serve the checkpoint directly (engine transformers); --force accepts those that ran"

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        super().__init__(plan, checkpoint, folder, progress)
        self.engines = plan.engines if plan.backends else ("openvino",)
        self.precisions = tuple(dict.fromkeys(plan.precisions if plan.quantize else USUAL))
        self._check()
        self.context = checkpoint.positions or checkpoint.max_length
        self.shapes = shapes(plan, self.context)
        self.tokenizer = open_tokenizer(checkpoint)
        self.texts = load_texts(self.tokenizer.encode, plan.data, self.context)
        self.sample_count = len(self.texts.compared)
        self.compared_on = f"{self.texts.tokens} tokens"
        self.warn(evidence.few_tokens(self.texts.tokens))

    def _check(self) -> None:
        if self.plan.layout == "triton":
            raise invalid("--layout triton is for encoders: leave it out for a language model")
        for backend in self.engines:
            if backend not in BACKENDS:
                raise invalid(
                    f"--backend {backend} does not run converted language models: choose from torch, openvino"
                )
        if "openvino" not in self.engines:
            raise invalid("a language model is converted for OpenVINO: add openvino to --backend")
        for precision in self.precisions:
            if precision not in PRECISIONS:
                known = ", ".join(PRECISIONS)
                raise invalid(f"--quantize {precision} is not supported for language models: choose from {known}, none")

    @property
    def serving_engines(self) -> frozenset[str]:
        """All engines of ``BACKENDS``, regardless of the layout."""
        return frozenset(BACKENDS)

    @property
    def settings(self) -> dict[str, Any]:
        """The amount of compared text."""
        return {"tokens": self.texts.tokens}

    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Export to OpenVINO, and make the other precisions from the export."""
        self.progress("loading the checkpoint")
        self.network = load(self.checkpoint)
        self.progress("exporting to OpenVINO")
        exported = export.export(self.network)
        whole = self._write(exported, "fp32")
        built: list[BuiltVariant | FailedVariant] = [BuiltVariant(REFERENCE, "torch", "fp32", None), whole]
        for precision in self.precisions:
            self.progress(f"compressing weights to {precision}")
            try:
                with silence_libraries():
                    import openvino

                    model: Any = openvino.Core().read_model(whole.path)
                built.append(self._write(model, precision, made_from=EXPORT))
            except Exception as error:  # an exception of a library that concerns one variant
                built.append(FailedVariant(f"openvino-{precision}", describe_error(error)))
        return built

    def _write(self, model: Any, precision: str, made_from: str = "") -> BuiltVariant:
        name = f"openvino-{precision}"
        file = write_weights(model, self.folder / name, precision, self.texts.fitted)
        return BuiltVariant(name, "openvino", precision, file, made_from)

    def evaluate(self, variant: BuiltVariant) -> tuple[CausalNetwork | ServedGraph, Predictions]:
        """Evaluate a variant; an export runs as on the server."""
        count = continuation_tokens(self.context)
        network = self.network if variant.path is None else self._open(variant.path, variant.precision, count)
        scores = [score(network.logits(np.array([text]))[0], text) for text in self.texts.compared]
        logprobs, next_tokens = map(list, zip(*scores, strict=True))
        return network, Predictions(logprobs, next_tokens, network.greedy(self.texts.prompts, count))

    def opening(self, variant: BuiltVariant) -> Opening:
        prompt = self.texts.stream(max(shape.tokens for shape in self.shapes))
        if variant.path is None:
            return partial(read_with_torch, self.checkpoint, prompt)
        return partial(
            read_with_graph, prompt, variant.path, variant.precision, self.checkpoint.config, **self._sizes(0)
        )

    def _open(self, file: Path, precision: str, count: int) -> ServedGraph:
        return ServedGraph(file, precision, self.checkpoint.config, **self._sizes(count))

    def _sizes(self, count: int) -> dict[str, int]:
        """Return the sizes of a served graph that continues the prompts by ``count`` tokens and is measured."""
        batch = max(shape.batch for shape in self.shapes)
        longest = max(self.texts.max_tokens, *(shape.tokens for shape in self.shapes))
        prompts = len(self.texts.prompts) * (PROMPT_TOKENS + count + 64)
        return {
            "cache_tokens": max(longest, batch * (DECODED_FROM + DECODING_STEPS + 64), prompts),
            "threads": self.plan.threads,
        }

    def compare(
        self, precision: str, reference: Predictions, predictions: Predictions
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Compare perplexity, next tokens and greedy continuations; see :meth:`Conversion.compare`."""
        figures = agreement.compare(reference, predictions)
        few = evidence.too_few(precision, self.texts.tokens, "tokens", evidence.MIN_TOKENS)
        return figures.to_json(), (*agreement.reasons(precision, figures), *few)

    def contrast(self, reference: Predictions, predictions: Predictions) -> Contrasts:
        """Return the continuations that diverge earliest."""
        return contrasts(reference, predictions, self.texts.prompts, self.tokenizer.decode)

    def runs(self, networks: Mapping[str, CausalNetwork | ServedGraph], shape: Shape) -> dict[str, Run]:
        """Return runs of a prompt, or of decoding steps of several sequences; see :func:`run_of`."""
        return {name: run_of(network, shape, self.texts, self.context) for name, network in networks.items()}


def read_with_torch(checkpoint: Checkpoint, prompt: Sequence[int]) -> CausalNetwork:
    """Return the network in torch after it has processed a prompt."""
    loaded = load(checkpoint)
    loaded.prefill(prompt)
    return loaded


def read_with_graph(
    prompt: Sequence[int], file: Path, precision: str, config: Mapping[str, Any], **sizes: int
) -> ServedGraph:
    """Return an export, as the server runs it, after it has processed a prompt."""
    served = ServedGraph(file, precision, config, **sizes)
    served.prefill(prompt)
    return served


def shapes(plan: Plan, context: int) -> list[Shape]:
    """Return the shapes to measure: decoding steps ``Bx1`` for each batch size, and prompts ``1xN`` of each length.

    Raises INVALID_ARG for a requested length that the model does not support; default lengths are reduced.
    """
    if plan.expect:
        raise invalid(
            "--expect is for models with a single forward pass: the length of a language model's prompts is "
            "not known in advance"
        )
    max_length = context - 1
    for length in plan.sequence_lengths:
        if length > max_length:
            raise invalid(
                f"--seq-len {length} is more than the model accepts: at most {max_length} tokens, and one to write"
            )
    lengths = plan.sequence_lengths or [min(length, max_length) for length in PROMPT_LENGTHS]
    batches = {Shape(batch, 1) for batch in plan.batch_sizes or BATCH_SIZES}
    return sorted(batches) + sorted({Shape(1, length) for length in lengths})


def run_of(network: CausalNetwork | ServedGraph, shape: Shape, texts: Texts, context: int) -> Run:
    """Return a run of a prompt to its first token, or of decoding steps after the first.

    The first step includes processing the prompts.
    """
    if shape.tokens > 1:
        prompt = texts.stream(shape.tokens)
        return lambda: [network.prefill(prompt)]
    length = min(DECODED_FROM, max(1, context // 2))
    stream = texts.stream(length + shape.batch)
    # All prompts are different.
    prompts = [stream[start : start + length] for start in range(shape.batch)]
    steps = max(1, min(DECODING_STEPS, context - length - 2))
    return lambda: network.decode(prompts, steps + 1)[1:]


def score(logits: Array, text: Sequence[int]) -> tuple[Array, Array]:
    """Return the log-probability of each token after the first, and the most likely token at its position."""
    before = logits[:-1].astype(np.float64)
    shifted = before - before.max(-1, keepdims=True)
    norm = np.log(np.exp(shifted).sum(-1))
    positions = np.arange(len(text) - 1)
    # numpy's argmax treats the first NaN as the largest number; -1 matches no token.
    next_tokens = np.where(np.isfinite(before).all(-1), before.argmax(-1), -1)
    # Lower values are indistinguishable from a probability of zero.
    return np.maximum(shifted[positions, list(text[1:])] - norm, -1e4), next_tokens
