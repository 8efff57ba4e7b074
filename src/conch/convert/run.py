"""One conversion from beginning to end: build the variants, compare, measure, judge, write, move into place.

Called by ``conch convert`` in its process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from conch.backends.tasks.engines.base import NetworkEngine
from conch.backends.tasks.engines.choice import open_engine
from conch.backends.tasks.engines.onnxruntime import OnnxRuntimeEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.checkpoints.pooling import Pooling, PoolingPlan
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.convert import sentences, verdict
from conch.convert.causal.conversion import CausalConversion
from conch.convert.encoder import agreement, variants
from conch.convert.encoder.agreement import Observation
from conch.convert.encoder.network import head_of
from conch.convert.encoder.observe import TokenBatch, arrays_of, batches, observe, of_shape
from conch.convert.encoder.variants import Candidate, Failure
from conch.convert.libraries import quiet, reason
from conch.convert.manifest import REFERENCE, choose, failed, manifest_of
from conch.convert.measure import budgets, measure
from conch.convert.plan import Plan
from conch.convert.publish import publish, require_free, workspace
from conch.convert.report.causal import TASK
from conch.convert.writing import write
from conch.errors import internal, invalid, unsupported

#: The engines that a variant may serve on, in one model and in the three of ``--layout triton``.
_SERVED: Final = frozenset({"torch", "onnxruntime", "openvino"})
_TRIO: Final = frozenset({"onnxruntime"})
#: How far numbers may be apart that the same network computed, as a share of the largest.
SAME: Final = 1e-3
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a conversion made: the manifest, and the model directories that appeared."""

    manifest: Manifest
    folders: tuple[Path, ...]


def convert(plan: Plan, progress: Progress) -> Outcome:
    """Convert as planned.

    ``progress`` is told each step.  Raises ALREADY_EXISTS for a model that is there, INVALID_ARG when no variant
    passes (with the reasons), and what reading the checkpoint raises.  Nothing is left behind by a failure.
    """
    plan.check()
    require_free(plan.repository, plan.folders, plan.overwrite)
    with workspace(plan.repository) as work:
        progress(f"reading {plan.model}")
        checkpoint = Checkpoint.open(work, plan.options())
        if checkpoint.manifest is not None:
            raise invalid(f"'{plan.model}' is a converted model: convert {checkpoint.manifest.source.model} instead")
        kind = CausalConversion if checkpoint.task == TASK else Conversion
        conversion = kind(plan, checkpoint, work, progress)
        manifest = conversion.judge()
        progress("writing the model")
        made = work / "made"
        manifest = write(made, plan, checkpoint, manifest, conversion.candidates, conversion.prove)
        publish(made, work, plan.repository, plan.folders, plan.overwrite)
    return Outcome(manifest, tuple(plan.repository / name for name in plan.folders))


class Conversion:
    """The state between the steps of one conversion of an encoder."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, work: Path, progress: Progress) -> None:
        self.plan = plan
        self.checkpoint = checkpoint
        self.progress = progress
        self.built = work / "built"
        self.built.mkdir()
        self.head = head_of(checkpoint.task)
        if checkpoint.task == "image-classification":
            raise unsupported(
                "variants are compared on texts, so a network of images is not converted: serve it as it is"
            )
        self.shapes = plan.shapes(checkpoint.max_length)
        self.encoder = open_encoder(checkpoint, replace(checkpoint.options, truncation="truncate"))
        mask = self.encoder.tokenizer.special.texts.get("mask_token", "")
        fitted, self.samples = sentences.split(sentences.load(checkpoint.task, plan.data, mask=mask))
        classifies = checkpoint.task == "text-classification"
        self.labels = sentences.label_indices(self.samples, checkpoint.labels) if classifies else None
        self.calibration: list[TokenBatch] = batches(self.encoder, fitted)
        self.batches: list[TokenBatch] = batches(self.encoder, self.samples)
        embeds = checkpoint.task in ("feature-extraction", "sentence-similarity")
        self.pool = Pooling(PoolingPlan.read(checkpoint, checkpoint.options), checkpoint) if embeds else None
        self.candidates: dict[str, Candidate] = {}

    def judge(self) -> Manifest:
        """Build, compare and measure every variant; INVALID_ARG when none may serve."""
        built = variants.build(
            self.checkpoint, self.checkpoint.options, self.plan.engines, self.plan.precisions,
            lambda: list(arrays_of(self.calibration)), self.built, self.progress,
        )  # fmt: skip
        if "torch" not in self.plan.engines:
            built.insert(0, Candidate(REFERENCE, "torch", "fp32", None))
        opened, failures = self._open(built)
        judged = {one.name: one for one in self._compare(opened)}
        self._measure(opened, judged)
        plan = self.plan
        manifest = manifest_of(
            plan, self.checkpoint, [*judged.values(), *failures], engines=plan.engines, precisions=plan.precisions,
            shapes=self.shapes, samples=len(self.samples),
        )  # fmt: skip
        return choose(plan, manifest, _TRIO if plan.layout == "triton" else _SERVED)

    def _open(self, built: Sequence[Candidate | Failure]) -> tuple[dict[str, NetworkEngine], list[Variant]]:
        opened: dict[str, NetworkEngine] = {}
        failures = []
        for one in built:
            if isinstance(one, Failure):
                failures.append(failed(one.name, one.reason))
                continue
            try:
                opened[one.name] = self._engine(one)
                self.candidates[one.name] = one
            except Exception as error:  # a library's, about one variant
                failures.append(failed(one.name, reason(error)))
        for failure in failures:
            self.progress(f"{failure.name}: {failure.reasons[0]}")
        if REFERENCE not in opened:
            why = next((failure.reasons[0] for failure in failures if failure.name == REFERENCE), "it was not built")
            raise invalid(f"there is no reference to compare with: {REFERENCE}: {why}")
        return opened, failures

    def _engine(self, candidate: Candidate) -> NetworkEngine:
        """As the server opens it, from where the file is now."""
        path = str(candidate.path.resolve()) if candidate.path is not None else ""
        variant = Variant(candidate.name, candidate.engine, candidate.precision, path, passed=True)
        checkpoint = replace(self.checkpoint, variant=variant)
        with quiet():
            return open_engine(
                checkpoint,
                replace(checkpoint.options, engine="auto"),
                head=self.head,
                device="cuda" if candidate.engine == "tensorrt" else "cpu",
            )

    def _compare(self, opened: Mapping[str, NetworkEngine]) -> list[Variant]:
        reference = self._observe(REFERENCE, opened[REFERENCE])
        judged = []
        for name, engine in opened.items():
            candidate = self.candidates[name]
            path = candidate.path.name if candidate.path is not None else ""
            one = Variant(name, candidate.engine, candidate.precision, path)
            try:
                observed = reference if name == REFERENCE else self._observe(name, engine)
                judged.append(self._judged(one, reference, observed))
            except Exception as error:  # a library's, about one variant
                judged.append(replace(one, reasons=(f"it does not run: {reason(error)}",)))
        return judged

    def _observe(self, name: str, engine: NetworkEngine) -> list[Observation]:
        self.progress(f"comparing {name} on {len(self.samples)} samples")
        encoder = self.encoder
        return observe(
            engine,
            self.checkpoint.task,
            self.batches,
            pool=self.pool,
            mask_id=encoder.tokenizer.special.mask_id,
            pad=encoder.pad_id,
            most=encoder.max_length,
        )

    def _judged(self, one: Variant, reference: list[Observation], observed: list[Observation]) -> Variant:
        outputs = agreement.compare(reference, observed)
        if self.labels is not None:
            task = agreement.accuracy(self.labels, reference, observed)
        else:
            task = agreement.compare_task(self.checkpoint.task, self.samples, reference, observed)
        figures: dict[str, Mapping[str, Any]] = {name: asdict(output) for name, output in outputs.items()}
        figures["task"] = asdict(task)
        reasons = verdict.reasons(one.precision, outputs, task)
        passed = not reasons
        if one.name == REFERENCE and "torch" not in self.plan.engines:
            reasons, passed = (verdict.NOT_ASKED_FOR,), False
        for problem in () if reasons == (verdict.NOT_ASKED_FOR,) else reasons:
            self.progress(f"{one.name} refused: {problem}")
        return replace(one, agreement=figures, passed=passed, reasons=reasons)

    def _measure(self, opened: Mapping[str, NetworkEngine], judged: dict[str, Variant]) -> None:
        """Fill in the latencies of everything that ran; the time is divided by what a shape costs."""
        engines = {name: engine for name, engine in opened.items() if judged[name].agreement}
        found: dict[str, list[Latency]] = {name: [] for name in engines}
        for shape, seconds in budgets(self.shapes, self.plan.seconds).items():
            self.progress(f"measuring {shape} tokens")
            arrays = of_shape(self.encoder, self.samples, shape)
            for name, latency in measure(engines, shape, arrays, budget=seconds).items():
                found[name].append(latency)
        for name, latencies in found.items():
            judged[name] = replace(judged[name], latency=tuple(latencies))

    def prove(self, graph: Path, candidate: Candidate) -> None:
        """Raise INTERNAL unless a graph that was edited for other servers says the same as before."""
        with quiet():
            edited = OnnxRuntimeEngine(graph, precision=candidate.precision, threads=self.plan.threads)
        arrays = self.batches[len(self.batches) // 2].arrays
        expected = self._engine(candidate).run(arrays)
        if self.pool is not None:
            expected["embedding"] = self.pool(expected["last_hidden_state"], arrays["attention_mask"])
        for name, values in edited.run(arrays).items():
            difference = float(abs(values - expected[name]).max())
            if not difference <= SAME * max(1.0, float(abs(values).max())):
                raise internal(f"the edited graph gives another {name} than before, by {difference:.2g}")
