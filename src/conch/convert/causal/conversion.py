"""The conversion of a causal language model: exports with weights in fewer bits, judged by what they say on real text.

One variant is in memory at a time beside the reference, since language models are large.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.convert import verdict
from conch.convert.causal import agreement, export, tokenizer, weights
from conch.convert.causal import network as causal_network
from conch.convert.causal import texts as causal_texts
from conch.convert.causal.agreement import Observed
from conch.convert.causal.export import StatefulGraph
from conch.convert.causal.measure import BEFORE, STEPS, Runs, measure, shapes
from conch.convert.causal.served import Served
from conch.convert.encoder.openvino import module as openvino_module
from conch.convert.encoder.variants import Candidate
from conch.convert.libraries import quiet, reason
from conch.convert.manifest import REFERENCE, choose, failed, manifest_of
from conch.convert.measure import budgets
from conch.convert.plan import Plan
from conch.errors import internal, invalid

BACKENDS: Final = ("torch", "openvino")
#: What the others are made from.
WHOLE: Final = "openvino-fp32"
_ENGINES: Final = frozenset(BACKENDS)
_OTHERWISE: Final = "serve the checkpoint as it is (engine transformers); --force accepts those that ran"
#: The smallest log-probability that is told from none at all.
_LEAST: Final = -1e4


@dataclass(frozen=True, slots=True)
class Built:
    """An export: its precision and file, or why there is none."""

    precision: str
    file: Path | None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"openvino-{self.precision}"


class CausalConversion:
    """The state between the steps of one conversion."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, work: Path, progress: Callable[[str], None]) -> None:
        self.plan = plan
        self.checkpoint = checkpoint
        self.progress = progress
        self.engines = plan.engines if plan.backends else ("openvino",)
        self.precisions = tuple(dict.fromkeys(weights.USUAL if plan.quantize is None else plan.quantize))
        self._check()
        self.built = work / "built"
        self.built.mkdir()
        self.context = checkpoint.positions or checkpoint.max_length
        self.shapes = shapes(plan, self.context)
        self.tokenizer = open_tokenizer(checkpoint)
        self.texts = causal_texts.load(self.tokenizer.encode, plan.data, self.context)
        self.continued = causal_texts.continued(self.context)
        self.candidates: dict[str, Candidate] = {}
        self.sizes: dict[str, float] = {}
        #: Why structured output is not to be had; empty where it is.
        self.unstructured = ""
        self.tokenizer_files: tuple[Path, ...] = ()

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
            if precision not in weights.PRECISIONS:
                known = ", ".join(weights.PRECISIONS)
                raise invalid(f"--quantize {precision} is not made of language models: choose from {known}, none")

    def judge(self) -> Manifest:
        """Export, compare and measure every variant; INVALID_ARG when none may serve."""
        self.progress("loading the checkpoint")
        network = causal_network.load(self.checkpoint, replace(self.checkpoint.options, threads=self.plan.threads))
        built = self._build(network)
        self.progress(f"comparing {REFERENCE} on {self.texts.tokens} tokens")
        scores = [_scores(network.logits(np.array([text]))[0], text) for text in self.texts.compared]
        continued = network.greedy(self.texts.prompts, self.continued)
        expected = Observed([one for one, _ in scores], [one for _, one in scores], continued)
        found = [self._reference(expected, self._measure(REFERENCE, network))]
        found += self._after_whole([self._judged(one, expected) for one in built])
        for one in found[1:]:
            for problem in one.reasons:
                self.progress(f"{one.name} refused: {problem}" if one.agreement else f"{one.name}: {problem}")
        manifest = manifest_of(
            self.plan, self.checkpoint, found, engines=self.engines, precisions=self.precisions, shapes=self.shapes,
            samples=len(self.texts.compared), tokens=self.texts.tokens, megabytes=self.sizes,
            structured_output=self.unstructured or "yes",
        )  # fmt: skip
        return choose(self.plan, manifest, _ENGINES, otherwise=_OTHERWISE)

    def prove(self, graph: Path, candidate: Candidate) -> None:
        """Of graphs that were edited for other servers, which language models have none of."""
        raise internal(f"{graph} was not to be edited")

    def _convert_tokenizer(self, vocabulary: int) -> None:
        """The tokenizer in OpenVINO's form, without which the model serves all but structured output."""
        self.progress("converting the tokenizer")
        folder = self.built / "tokenizer"
        texts = self.texts.compared
        self.unstructured = tokenizer.write(self.checkpoint, self.tokenizer, texts, vocabulary, folder)
        if self.unstructured:
            self.progress(f"structured output will not be available: {self.unstructured}")
        self.tokenizer_files = tuple(folder.iterdir())

    def _build(self, network: causal_network.CausalNetwork) -> list[Built]:
        self.progress("exporting to OpenVINO")
        exported = export.export(network)
        self._convert_tokenizer(network.vocabulary)
        whole = self._write(exported, "fp32")
        built = [Built("fp32", whole)]
        for precision in self.precisions:
            self.progress(f"compressing weights to {precision}")
            try:
                with quiet():
                    model: Any = openvino_module().Core().read_model(whole)
                built.append(Built(precision, self._write(model, precision)))
            except Exception as error:  # a library's, about one variant
                built.append(Built(precision, None, reason(error)))
        return built

    def _write(self, model: Any, precision: str) -> Path:
        name = f"openvino-{precision}"
        file = weights.write(model, self.built / name, precision, self.texts.fitted)
        self.sizes[name] = round(sum(one.stat().st_size for one in file.parent.iterdir()) / 1e6, 1)
        beside = tuple(Path(shutil.copy(one, file.parent)) for one in self.tokenizer_files)
        self.candidates[name] = Candidate(name, "openvino", precision, file, beside)
        return file

    def _reference(self, expected: Observed, latency: Sequence[Latency]) -> Variant:
        self.candidates[REFERENCE] = Candidate(REFERENCE, "torch", "fp32", None)
        figures = agreement.compare(expected, expected)
        asked = "torch" in self.engines
        return Variant(
            REFERENCE, "torch", "fp32", "", tuple(latency), figures.to_json(), asked,
            () if asked else (verdict.NOT_ASKED_FOR,),
        )  # fmt: skip

    def _judged(self, built: Built, expected: Observed) -> Variant:
        if built.file is None:
            return failed(built.name, built.problem)
        path = built.file.relative_to(self.built).as_posix()
        one = Variant(built.name, "openvino", built.precision, path)
        self.progress(f"comparing {built.name} on {self.texts.tokens} tokens")
        try:
            observed, latency = self._run(built, built.file)
        except Exception as error:  # a library's, about one variant
            return replace(one, reasons=(f"it does not run: {reason(error)}",))
        figures = agreement.compare(expected, observed)
        problems = agreement.reasons(built.precision, figures)
        return replace(
            one, agreement=figures.to_json(), latency=tuple(latency), passed=not problems, reasons=problems
        )  # fmt: skip

    def _run(self, built: Built, file: Path) -> tuple[Observed, list[Latency]]:
        """What a variant says, and its speed.  Next tokens are the graph's, all else is the serving pipeline's."""
        likeliest = self._likeliest(file)
        with quiet():
            served = self._served(built, file)
        logprobs = [served.logprobs(text) for text in self.texts.compared]
        observed = Observed(logprobs, likeliest, served.greedy(self.texts.prompts, self.continued))
        return observed, self._measure(built.name, served)

    def _likeliest(self, file: Path) -> list[Array]:
        graph, found = StatefulGraph(file, self.plan.threads), []
        for text in self.texts.compared:
            graph.reset()
            logits = graph.run(np.array([text]))[0, :-1]
            # Not a number is the largest to numpy, at whichever place it is first.
            found.append(np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1))
        return found

    def _served(self, built: Built, file: Path) -> Served:
        batch = max(shape.batch for shape in self.shapes)
        lengths = [shape.tokens for shape in self.shapes]
        longest = max(self.texts.longest, *lengths)
        prompts = len(self.texts.prompts) * (causal_texts.PROMPT + self.continued + 64)
        room = max(longest, batch * (BEFORE + STEPS + 64), prompts)
        config = self.checkpoint.config
        return Served(file, built.precision, config, longest=longest, room=room, threads=self.plan.threads)

    def _measure(self, name: str, runs: Runs) -> list[Latency]:
        self.progress(f"measuring {name}")
        parts = len(self.precisions) + 2
        return [
            measure(runs, shape, self.texts, self.context, budget=seconds / parts)
            for shape, seconds in budgets(self.shapes, self.plan.seconds).items()
        ]

    @staticmethod
    def _after_whole(found: list[Variant]) -> list[Variant]:
        """What was made from an export that is wrong is not right by chance."""
        whole = next(one for one in found if one.name == WHOLE)
        if whole.passed:
            return found
        wrong = f"{WHOLE}, which it was made from, was refused"
        return [
            one if one is whole else replace(one, passed=False, reasons=(wrong, *one.reasons)) for one in found
        ]  # fmt: skip


def _scores(logits: Array, text: Sequence[int]) -> tuple[Array, Array]:
    """The log-probability of each token after the first, and the likeliest one at each of these places."""
    before = logits[:-1].astype(np.float64)
    top = before.max(-1, keepdims=True)
    shifted = before - top
    norm = np.log(np.exp(shifted).sum(-1))
    places = np.arange(len(text) - 1)
    return np.maximum(shifted[places, list(text[1:])] - norm, _LEAST), before.argmax(-1)
