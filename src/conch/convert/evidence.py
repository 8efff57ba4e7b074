"""Checks whether the samples suffice for a verdict, and whether the reference is better than chance.

Results become part of the verdict, or are printed and reported as warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from conch.backends.base.arrays import Array
from conch.convert.statistics import wilson

#: The minimum number of samples for judging precisions below fp32.  If 35 samples all agree, Wilson's interval begins
#: at 0.90; with fewer, twice the allowed loss of int8 cannot be ruled out.
MIN_SAMPLES: Final = 35
#: The same for language models (tokens of compared texts), because their figures are means over tokens.
MIN_TOKENS: Final = 1000


def too_few(precision: str, count: int, unit: str, least: int) -> tuple[str, ...]:
    """Return why ``precision`` cannot be judged on ``count`` samples (or tokens, the ``unit``); empty if it can.

    fp32 always can: it is the same arithmetic, and its figures are compared number by number.
    """
    if precision == "fp32" or count >= least:
        return ()
    return (f"{count} {unit} are too few to judge {precision}: {least} at least are needed",)


def few_samples(count: int, *, both: bool) -> list[str]:
    """Return a warning for fewer samples than ``MIN_SAMPLES``; ``both``: they are used for calibration, too."""
    if count >= MIN_SAMPLES:
        return []
    least = wilson(1, count)[0]
    calibrated = ", and variants are calibrated on the samples that they are compared on" if both else ""
    return [
        f"only {count} samples are compared{calibrated}: where all agree, the share that agrees may still be "
        f"{least:.2f} (95 % interval); variants below fp32 do not serve without {MIN_SAMPLES}, for which --data needs "
        f"{-(-MIN_SAMPLES * 3 // 2)} texts"
    ]


def few_tokens(count: int) -> list[str]:
    """Return a warning for texts of fewer than ``MIN_TOKENS`` tokens."""
    if count >= MIN_TOKENS:
        return []
    return [
        f"only {count} tokens are compared: variants below fp32 do not serve without {MIN_TOKENS}; give longer --data"
    ]


def chance(labels: Sequence[int], reference: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return a warning if the reference is not better than always giving the most frequent label.

    ``labels`` are the correct ones, ``reference`` the reference's.  It is better if the whole 95 % interval of its
    accuracy is above that label's share.
    """
    label, frequent = Counter(labels).most_common(1)[0]
    share = frequent / len(labels)
    accuracy = sum(a == b for a, b in zip(labels, reference, strict=True)) / len(labels)
    low, high = wilson(accuracy, len(labels))
    if low > share:
        return []
    return [
        f"the checkpoint itself is at chance level on these labels: its accuracy is {accuracy:.2f} ({low:.2f} … "
        f"{high:.2f}), and always answering '{_name(label, names)}' gives {share:.2f}; accuracy cannot tell the "
        "variants apart, and only their agreement with the checkpoint does"
    ]


def one_answer(reference: Sequence[Array], names: Sequence[str]) -> list[str]:
    """Return a warning if the reference gives the same label for all samples; ``reference`` has the labels of each."""
    labels = {int(label) for labels in reference for label in labels}
    if len(labels) > 1 or len(reference) < 2:
        return []
    return [
        f"the checkpoint answers '{_name(labels.pop(), names)}' to all {len(reference)} samples: whether labels agree "
        "says little; give other texts with --data"
    ]


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)
