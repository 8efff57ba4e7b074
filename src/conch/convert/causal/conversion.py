"""The conversion of a causal language model: exports with weights in fewer bits, judged by what they say on real text.

One variant is in memory at a time beside the reference, since language models are large.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.engines.openvino import pipelines, vocabulary
from conch.checkpoints.contrasts import Contrast, Contrasts
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.convert import evidence, sentences
from conch.convert.causal import agreement, export, network
from conch.convert.causal.agreement import Predictions, shared_prefix
from conch.convert.causal.export import StatefulGraph
from conch.convert.causal.network import CausalNetwork
from conch.convert.causal.served import ServedGraph
from conch.convert.contrasting import kept, shortened
from conch.convert.conversion import Conversion, Progress
from conch.convert.footprint import Opening
from conch.convert.libraries import describe_error, silence_libraries
from conch.convert.measure import Run
from conch.convert.plan import Plan
from conch.convert.variant import REFERENCE, BuiltVariant, FailedVariant
from conch.errors import internal, invalid
from conch.sampling import TEXT_GENERATION
from conch.texts.shapes import Shape


def contrasts(
    reference: Predictions,
    variant: Predictions,
    prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Contrasts:
    """The differences of tokens' log-probabilities, and the continuations by how soon they differ."""
    pairs = list(zip(reference.continuations, variant.continuations, strict=True))
    before, after = (np.concatenate([np.asarray(text) for text in one.logprobs]) for one in (reference, variant))
    lost = [1 - shared_prefix(a, b) / len(a) if len(a) else 0.0 for a, b in pairs]

    def describe(index: int) -> Contrast:
        expected, given = pairs[index]
        return Contrast(
            shortened(decode(prompts[index])), shortened(decode(expected)), shortened(decode(given)),
            round(lost[index], 4),
        )  # fmt: skip

    return kept("difference of a token's log-probability", np.abs(before - after), lost, describe)


#: A passage is cut at the one; shorter than the other it says nothing.
MAX_PASSAGE_TOKENS: Final = 512
MIN_PASSAGE_TOKENS: Final = 8
#: All passages one after another, cut here: a context of many cache blocks.
LONG_TEXT_TOKENS: Final = 1024
#: The most tokens that a conversion evaluates, over all passages.
MAX_TOKENS: Final = 16_384
#: Prompts that are continued: how many, of how many tokens, and by how many.
PROMPTS: Final = 16
PROMPT_TOKENS: Final = 32
CONTINUATION_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids: ``compared`` are scored, ``prompts`` continued, ``fitted`` are for calibration and in neither."""

    compared: list[list[int]]
    prompts: list[list[int]]
    fitted: list[list[int]]

    @property
    def tokens(self) -> int:
        """How many tokens are predicted: all but the first of each text."""
        return sum(len(text) - 1 for text in self.compared)

    @property
    def max_tokens(self) -> int:
        """The length of the longest text."""
        return max(len(text) for text in self.compared)

    def stream(self, length: int) -> list[int]:
        """A prompt of exactly ``length`` tokens for measuring: the passages one after another, again and again."""
        joined = [token for text in self.compared for token in text]
        return (joined * (length // len(joined) + 1))[:length]


def load_texts(encode: Callable[[str], list[int]], file: Path | None, context: int) -> Texts:
    """The built-in passages, or the texts of ``file``; ``context`` is the most tokens that the model takes.

    INVALID_ARG for a file without texts, and for one whose texts are all too short.
    """
    most = min(MAX_PASSAGE_TOKENS, context)
    fitted, samples = sentences.split(sentences.load(TEXT_GENERATION, file))
    ids = [encode(sample.text) for sample in samples]
    compared: list[list[int]] = []
    for text in ids:
        if len(text) >= MIN_PASSAGE_TOKENS and sum(map(len, compared)) < MAX_TOKENS:
            compared.append(text[:most])
    if not compared:
        raise invalid(f"--data has no text of {MIN_PASSAGE_TOKENS} tokens or more")
    long = [token for text in ids for token in text][: min(LONG_TEXT_TOKENS, context)]
    if len(long) > most:
        compared.append(long)
    # No prompt takes more than half of its text, or of the context.
    prompts = [text[: min(_prompt_tokens(context), max(1, len(text) // 2))] for text in compared[:PROMPTS]]
    return Texts(compared, prompts, [encode(sample.text)[:most] for sample in fitted])


def _prompt_tokens(context: int) -> int:
    return min(PROMPT_TOKENS, max(1, context // 2))


def continuation_tokens(context: int) -> int:
    """How many tokens are generated after a prompt, in a model that sees ``context`` tokens."""
    return max(1, min(CONTINUATION_TOKENS, context - _prompt_tokens(context)))


# Grammars are about texts, and the engine sees tokens. With these files it needs neither transformers nor the seconds
# that the conversion takes.


#: Texts whose tokens must mean the same.
COMPARED: Final = 8


def write_tokenizer(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, texts: Sequence[Sequence[int]], logits: int, folder: Path
) -> str:
    """Write the tokenizer into ``folder``; if that is impossible, leave it empty and return why.

    ``texts`` are token ids, which must mean the same text to ``tokenizer``; ``logits`` is the size of the network's
    vocabulary.
    """
    folder.mkdir()
    try:
        with silence_libraries():
            trusted = checkpoint.options.trust_remote_code
            pipelines.write_tokenizer(checkpoint.directory, folder, trust_remote_code=trusted)
            problem = vocabulary.misfit(folder, logits)
            if problem:
                raise internal(problem)
            verify(folder, tokenizer, texts[:COMPARED])
    except Exception as error:  # whatever transformers, OpenVINO and the checkpoint's own code raise
        shutil.rmtree(folder)
        folder.mkdir()
        return describe_error(error)
    return ""


def verify(folder: Path, tokenizer: TextTokenizer, texts: Sequence[Sequence[int]]) -> None:
    """Raise INTERNAL unless both decode tokens to the same text, apart from spaces, which libraries clean up."""
    import openvino_genai

    made: Any = openvino_genai.Tokenizer(folder)
    for ids in texts:
        text: str = made.decode(list(ids))
        if "".join(text.split()) != "".join(tokenizer.decode(ids).split()):
            raise internal("OpenVINO's tokenizer reads tokens as another text")


#: The precisions of a language model besides fp32.  ``fp16`` stores the weights in 16 bits.
PRECISIONS: Final = ("fp16", "int8", "int4", "int4-awq")
USUAL: Final = ("int8", "int4")
#: Weights that share a scale and a zero point, in a row of a matrix; where a row does not divide, the largest power of
#: two that divides it, down to ``MIN_GROUP``, and int8 below that.
GROUP: Final = 128
MIN_GROUP: Final = 32
#: The length of a calibration text in tokens, and the number of texts: each costs a run of the fp32 graph.
CALIBRATION_TOKENS: Final = 256
CALIBRATION_TEXTS: Final = 64
GRAPH: Final = "openvino_model.xml"


def write_weights(model: Any, folder: Path, precision: str, texts: Sequence[Sequence[int]]) -> Path:
    """Write ``model`` (fp32; it is changed) with weights of ``precision`` into ``folder``; returns the file.

    ``texts`` are token ids to calibrate with, which only ``int4-awq`` needs.
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
    """The graph's inputs for each text, from the beginning of an empty cache."""
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


#: The engines that language models are converted for.
BACKENDS: Final = ("torch", "openvino")
BATCH_SIZES: Final = (1, 8)
PROMPT_LENGTHS: Final = (128, 512)
#: Tokens before the first decoding step that is measured, and the steps that are measured at once.
DECODED_FROM: Final = 32
DECODING_STEPS: Final = 16
#: What the other exports are made from.
EXPORT: Final = "openvino-fp32"


class CausalConversion(Conversion[CausalNetwork | ServedGraph, Predictions]):
    """Answers are the log-probabilities of real text and greedy continuations."""

    in_memory_together = False
    advice = "serve the checkpoint as it is (engine transformers); --force accepts those that ran"

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        super().__init__(plan, checkpoint, folder, progress)
        self.engines = plan.engines if plan.backends else ("openvino",)
        self.precisions = tuple(dict.fromkeys(USUAL if plan.quantize is None else plan.quantize))
        self._check()
        self.context = checkpoint.positions or checkpoint.max_length
        self.shapes = shapes(plan, self.context)
        self.tokenizer = open_tokenizer(checkpoint)
        self.texts = load_texts(self.tokenizer.encode, plan.data, self.context)
        self.sample_count = len(self.texts.compared)
        self.compared_on = f"{self.texts.tokens} tokens"
        self.warn(evidence.few_tokens(self.texts.tokens))
        #: Why structured output is not available; empty where it is.
        self.unstructured = ""

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
                raise invalid(f"--quantize {precision} is not made of language models: choose from {known}, none")

    @property
    def serving_engines(self) -> frozenset[str]:
        """All engines of ``BACKENDS``, whatever the layout."""
        return frozenset(BACKENDS)

    @property
    def settings(self) -> dict[str, Any]:
        """How much was compared, and whether structured output is available, or why not."""
        return {
            "tokens": self.texts.tokens,
            "structured_output": self.unstructured or "yes",
        }

    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Export to OpenVINO, and make the other precisions of that."""
        self.progress("loading the checkpoint")
        self.network = network.load(self.checkpoint)
        self.progress("exporting to OpenVINO")
        exported = export.export(self.network)
        tokenizer_files = self._convert_tokenizer()
        whole = self._write(exported, "fp32", tokenizer_files)
        built: list[BuiltVariant | FailedVariant] = [BuiltVariant(REFERENCE, "torch", "fp32", None), whole]
        for precision in self.precisions:
            self.progress(f"compressing weights to {precision}")
            try:
                with silence_libraries():
                    import openvino

                    model: Any = openvino.Core().read_model(whole.path)
                built.append(self._write(model, precision, tokenizer_files, made_from=EXPORT))
            except Exception as error:  # a library's, about one variant
                built.append(FailedVariant(f"openvino-{precision}", describe_error(error)))
        return built

    def _convert_tokenizer(self) -> list[Path]:
        """The tokenizer in OpenVINO's form, without which the model serves all but structured output."""
        self.progress("converting the tokenizer")
        folder = self.folder / "tokenizer"
        vocabulary = self.network.vocabulary
        self.unstructured = write_tokenizer(self.checkpoint, self.tokenizer, self.texts.compared, vocabulary, folder)
        if self.unstructured:
            self.progress(f"structured output will not be available: {self.unstructured}")
        return list(folder.iterdir())

    def _write(self, model: Any, precision: str, tokenizer_files: Sequence[Path], made_from: str = "") -> BuiltVariant:
        name = f"openvino-{precision}"
        file = write_weights(model, self.folder / name, precision, self.texts.fitted)
        copies = tuple(Path(shutil.copy(part, file.parent)) for part in tokenizer_files)
        return BuiltVariant(name, "openvino", precision, file, copies, made_from)

    def evaluate(self, variant: BuiltVariant) -> tuple[CausalNetwork | ServedGraph, Predictions]:
        """Of an export, next tokens are the graph's, and all else is the serving pipeline's."""
        count = continuation_tokens(self.context)
        if variant.path is None:
            scores = [score(self.network.logits(np.array([text]))[0], text) for text in self.texts.compared]
            logprobs, next_tokens = map(list, zip(*scores, strict=True))
            return self.network, Predictions(logprobs, next_tokens, self.network.greedy(self.texts.prompts, count))
        next_tokens = self._next_tokens(variant.path)
        with silence_libraries():
            served = self._open(variant.path, variant.precision, count)
        logprobs = [served.logprobs(text) for text in self.texts.compared]
        return served, Predictions(logprobs, next_tokens, served.greedy(self.texts.prompts, count))

    def _next_tokens(self, file: Path) -> list[Array]:
        graph, next_tokens = StatefulGraph(file, self.plan.threads), []
        for text in self.texts.compared:
            graph.reset()
            logits = graph.run(np.array([text]))[0, :-1]
            # numpy takes the first NaN for the largest number; -1 agrees with no token.
            next_tokens.append(np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1))
        return next_tokens

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
        """The sizes of a pipeline that continues the prompts by ``count`` tokens, and is measured."""
        batch = max(shape.batch for shape in self.shapes)
        longest = max(self.texts.max_tokens, *(shape.tokens for shape in self.shapes))
        prompts = len(self.texts.prompts) * (PROMPT_TOKENS + count + 64)
        return {
            "max_text_tokens": longest,
            "cache_tokens": max(longest, batch * (DECODED_FROM + DECODING_STEPS + 64), prompts),
            "threads": self.plan.threads,
        }

    def compare(
        self, precision: str, reference: Predictions, answers: Predictions
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Compare perplexity, next tokens and greedy continuations; see :meth:`Conversion.compare`."""
        figures = agreement.compare(reference, answers)
        few = evidence.too_few(precision, self.texts.tokens, "tokens", evidence.MIN_TOKENS)
        return figures.to_json(), (*agreement.reasons(precision, figures), *few)

    def contrast(self, reference: Predictions, answers: Predictions) -> Contrasts:
        """The continuations that go another way soonest."""
        return contrasts(reference, answers, self.texts.prompts, self.tokenizer.decode)

    def runs(self, networks: Mapping[str, CausalNetwork | ServedGraph], shape: Shape) -> dict[str, Run]:
        """A prompt, or some decoding steps of several sequences: see :func:`run_of`."""
        return {name: run_of(network, shape, self.texts, self.context) for name, network in networks.items()}


def read_with_torch(checkpoint: Checkpoint, prompt: Sequence[int]) -> CausalNetwork:
    """The network in torch after it has read a prompt."""
    loaded = network.load(checkpoint)
    loaded.prefill(prompt)
    return loaded


def read_with_graph(
    prompt: Sequence[int], file: Path, precision: str, config: Mapping[str, Any], **sizes: int
) -> ServedGraph:
    """The pipeline of an export after it has read a prompt."""
    served = ServedGraph(file, precision, config, **sizes)
    served.prefill(prompt)
    return served


def shapes(plan: Plan, context: int) -> list[Shape]:
    """What is measured: a decoding step for each batch size, as ``Bx1``, and a prompt of each length, as ``1xN``.

    INVALID_ARG for a length that is asked for and that the model does not take; the usual ones are cut.
    """
    if plan.expect:
        raise invalid(
            "--expect is for models that answer in one pass: what a language model takes is decided by its user"
        )
    most = context - 1
    for length in plan.sequence_lengths:
        if length > most:
            raise invalid(f"--seq-len {length} is more than the model takes: at most {most} tokens, and one to write")
    lengths = plan.sequence_lengths or [min(length, most) for length in PROMPT_LENGTHS]
    batches = {Shape(batch, 1) for batch in plan.batch_sizes or BATCH_SIZES}
    return sorted(batches) + sorted({Shape(1, length) for length in lengths})


def run_of(network: CausalNetwork | ServedGraph, shape: Shape, texts: Texts, context: int) -> Run:
    """One prompt to its first token, or decoding steps without the first, which the prompts are part of."""
    if shape.tokens > 1:
        prompt = texts.stream(shape.tokens)
        return lambda: [network.prefill(prompt)]
    length = min(DECODED_FROM, max(1, context // 2))
    stream = texts.stream(length + shape.batch)
    # No two of the prompts are the same.
    prompts = [stream[start : start + length] for start in range(shape.batch)]
    steps = max(1, min(DECODING_STEPS, context - length - 2))
    return lambda: network.decode(prompts, steps + 1)[1:]


def score(logits: Array, text: Sequence[int]) -> tuple[Array, Array]:
    """The log-probability of each token after the first, and the likeliest one at each of these places."""
    before = logits[:-1].astype(np.float64)
    shifted = before - before.max(-1, keepdims=True)
    norm = np.log(np.exp(shifted).sum(-1))
    places = np.arange(len(text) - 1)
    # Nothing below this can be told from a probability of zero.
    return np.maximum(shifted[places, list(text[1:])] - norm, -1e4), before.argmax(-1)
