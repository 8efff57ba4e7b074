"""The classes of a checkpoint by index, from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from conch.errors import invalid

#: The endings of architectures whose networks give one number for each class.
_CLASSIFIERS: Final = (
    "ForSequenceClassification", "ForTokenClassification", "ForImageClassification", "ForAudioClassification",
    "ForVideoClassification",
)  # fmt: skip
#: Names of the weights that have one row for each class.
_HEADS: Final = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
#: The classes of a classifier whose configuration does not say, as in transformers.
_DEFAULT_CLASSES: Final = 2


def labels_of(config: Mapping[str, Any], path: str) -> list[str] | None:
    """The labels by class index; ``LABEL_0`` … for classes without names; None for a model without classes.

    ``path`` names the file in errors.  Raises INVALID_ARG when the indices have gaps, or when ``num_labels`` or
    ``label2id`` say something else.
    """
    count = config.get("num_labels")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise invalid(f"{path}: num_labels must be a positive number, not {count!r}")
    names = config.get("id2label")
    if names is None:
        if count is None and not _is_classifier(config):
            return None
        return [f"LABEL_{index}" for index in range(count or _DEFAULT_CLASSES)]
    labels = _in_order(names, path)
    if count is not None and count != len(labels):
        raise invalid(f"{path}: id2label has {len(labels)} labels, num_labels says {count}")
    _check_inverse(labels, config.get("label2id"), path)
    return labels


def check_head(
    labels: list[str] | None, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], folder: str
) -> None:
    """Raise INVALID_ARG, naming the folder, when the weights of a classifier have another number of classes."""
    if labels is None or not _is_classifier(config):
        return
    for head in _HEADS:
        if head in shapes and shapes[head] and shapes[head][0] != len(labels):
            raise invalid(
                f"checkpoint {folder} has {len(labels)} labels in config.json, but its weights ({head}) have "
                f"{shapes[head][0]} classes"
            )


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(_CLASSIFIERS) for name in config.get("architectures") or ())


def _in_order(names: Any, path: str) -> list[str]:
    if not isinstance(names, Mapping) or not names:
        raise invalid(f"{path}: id2label must map class indices to labels")
    try:
        by_index = {int(index): str(label) for index, label in names.items()}
    except ValueError:
        raise invalid(f"{path}: id2label has an index that is not a number") from None
    missing = next((index for index in range(len(names)) if index not in by_index), None)
    if missing is not None:
        raise invalid(f"{path}: id2label has {len(names)} labels, but none for class {missing}")
    return [by_index[index] for index in range(len(by_index))]


def _check_inverse(labels: list[str], indices: Any, path: str) -> None:
    """Labels that ``label2id`` has too must have the same index; that it leaves some out, transformers ignores too."""
    if not isinstance(indices, Mapping):
        return
    for index, label in enumerate(labels):
        other = indices.get(label)
        if other is not None and labels.count(label) == 1 and str(other) != str(index):
            raise invalid(f"{path}: id2label gives class {index} the label '{label}', label2id says {other}")
