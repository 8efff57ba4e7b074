"""How much a variant's outputs may differ from those of the reference, by precision.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Final

from conch.convert.encoder.agreement import OutputAgreement, TaskAgreement
from conch.convert.encoder.neighbours import PARTS, Neighbours


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a precision must reach.

    ``vector``, ``token`` and ``logits`` bound the smallest cosine: of sentence embeddings, of the vectors of single
    tokens, and of logits (of classes, positions or words).  ``mean`` bounds every mean cosine, ``argmax`` the share of
    logits whose largest is at the same place, and ``task`` how much of the task's metric may be lost.

    A row alone must be as close to the same row in a batch, since it could otherwise be no closer to the reference.
    """

    vector: float
    token: float
    logits: float
    mean: float
    argmax: float
    task: float


TOLERANCES: Final[dict[str, Tolerance]] = {
    # The same arithmetic in another order: what differs is rounding, and a near-tie here and there.
    "fp32": Tolerance(vector=0.9999, token=0.999, logits=0.999, mean=0.9999, argmax=0.99, task=0.01),
    # 11 bits of significand: errors of 5e-4 a step, which add up over layers.
    "fp16": Tolerance(vector=0.999, token=0.99, logits=0.99, mean=0.999, argmax=0.98, task=0.01),
    # 8 bits of significand: eight times as coarse.
    "bf16": Tolerance(vector=0.995, token=0.95, logits=0.97, mean=0.995, argmax=0.96, task=0.02),
    # 8 bits for each weight and activation.  Single tokens (above all [CLS], [SEP] and punctuation) move far more than
    # the mean over a sentence, which is what is used.
    "int8": Tolerance(vector=0.97, token=0.80, logits=0.90, mean=0.97, argmax=0.95, task=0.05),
}

#: Logits of fewer classes have no bound on their smallest cosine: where a text is near the border between two, a few
#: small numbers point anywhere.  How often another class wins is bounded instead.
MIN_CLASSES: Final = 32


def reasons(
    precision: str,
    outputs: Mapping[str, OutputAgreement],
    task: TaskAgreement | None,
    neighbours: Neighbours | None = None,
) -> tuple[str, ...]:
    """Why a variant of ``precision`` is refused, a sentence for each bound that it misses; empty when it passes.

    A precision without a row of its own has to meet that of ``int8``.
    """
    tolerance = TOLERANCES.get(precision, TOLERANCES["int8"])
    missed = [reason for name, output in outputs.items() for reason in _missed(name, output, tolerance)]
    if task is not None and not -task.delta <= tolerance.task:
        missed.append(
            f"{task.name} {_rounded(task.value)} is {_rounded(-task.delta)} below the reference's, "
            f"more than {tolerance.task:g}"
        )
    if neighbours is not None:
        missed += _dependent(neighbours, outputs, tolerance)
    return tuple(missed)


def together(
    precisions: Sequence[str], outputs: Mapping[str, OutputAgreement], found: Neighbours, largest: float
) -> tuple[str, ...]:
    """Why two variants must not serve together, each for some shapes: a text's answer would depend on its neighbours by
    more than the stricter of the two precisions allows.

    ``found`` compares their answers, alone and in batches.  Of scores and few classes the direction says nothing, but
    they are compared with those of other texts, which the other variant may have answered: what they may differ by is
    bounded as a share of the ``largest`` number of all.
    """
    strict = max((TOLERANCES.get(one, TOLERANCES["int8"]) for one in precisions), key=lambda one: one.vector)
    missed = [*_dependent(found, outputs, strict)]
    widths = [outputs[name].width for name in _answers(outputs) if "logits" in name]
    bound = 1 - strict.logits
    if widths and min(widths) < MIN_CLASSES and not found.max_difference <= bound * largest:
        missed.append(
            f"answers differ by up to {found.max_difference:.2g}, which is more than {bound:.2g} of the largest, "
            f"{largest:.2g}"
        )
    return tuple(missed)


def _dependent(found: Neighbours, outputs: Mapping[str, OutputAgreement], tolerance: Tolerance) -> Iterator[str]:
    bound = min(_cosine_bound(name, outputs[name].width, tolerance) for name in _answers(outputs))
    if found.cosine_min is not None and not found.cosine_min >= bound:
        yield f"cosine {_rounded(found.cosine_min)} of a row alone with the same row in a batch is below {bound:g}"
    if found.argmax is not None and not found.argmax >= tolerance.argmax:
        yield f"{_rounded(found.argmax)} of the answers are the same alone and in a batch, below {tolerance.argmax:g}"


def _answers(outputs: Mapping[str, OutputAgreement]) -> Sequence[str]:
    """The outputs that are answers, and not what these are made of, where there are any."""
    return [name for name in outputs if name not in PARTS] or [*outputs]


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
    return tolerance.token if name == "last_hidden_state" else tolerance.vector


def _rounded(value: float) -> str:
    """The value with up to four decimal places, which tell it from a tolerance that it misses."""
    return f"{value:.4f}".rstrip("0").rstrip(".") or "0"
