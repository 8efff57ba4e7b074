"""The images for comparing variants of a model that embeds texts and images: drawn, or from a user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.tasks import media
from conch.convert import sentences
from conch.convert.evidence import SEED
from conch.convert.sentences import SearchTexts, TextSample
from conch.core.errors import invalid

#: The number of drawn images, and the length of a side (pixels).
DRAWN: Final = 60
SIDE: Final = 224
#: The maximum numbers of texts and of images from a file, spread evenly, because images take long.
MAX_QUERIES: Final = 64
MAX_IMAGES: Final = 128
_COLOURS: Final = {"red": (200, 30, 40), "green": (40, 160, 60), "blue": (40, 70, 200), "yellow": (230, 200, 40)}
_FORMS: Final = ("circle", "square", "line")


@dataclass(frozen=True, slots=True)
class ImageSearch:
    """Texts, and images to find for each: the passages of ``texts`` name images, whose contents are in ``files``."""

    texts: SearchTexts
    files: Mapping[str, bytes]


def image_search(file: Path | None = None) -> tuple[ImageSearch, ImageSearch]:
    """Return the texts and images for calibrating a quantised model, and those for comparing it.

    They are built in, or the rows of ``file`` with the columns ``image``, a path beside it, and optionally ``text``.
    Raises INVALID_ARG for a file that is unreadable or has no images.
    """
    files, texts = (_drawn(), []) if file is None else _read(file)
    texts = texts or [sample.text for sample in sentences.load("feature-extraction")]
    parts = zip(sentences.split(_samples(texts[:MAX_QUERIES])), sentences.split(_samples(files)), strict=True)
    fitted, compared = (_search(queries, names, files) for queries, names in parts)
    return fitted, compared


def _samples(texts: Any) -> list[TextSample]:
    return [TextSample(text) for text in dict.fromkeys(texts)]


def _search(queries: list[TextSample], names: list[TextSample], files: Mapping[str, bytes]) -> ImageSearch:
    texts = SearchTexts(*(tuple(sample.text for sample in part) for part in (queries, names)))
    return ImageSearch(texts, {name: files[name] for name in texts.passages})


def _read(file: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the images of a file by their paths, and its texts."""
    rows = sentences.read_rows(file)
    rows = rows[:: -(-len(rows) // MAX_IMAGES)]
    files = {}
    for number, row in enumerate(rows, 1):
        if not row.get("image"):
            raise invalid(f"--data {file}: a model for images needs the column 'image', which row {number} lacks")
        path = file.parent / str(row["image"])
        try:
            files[str(row["image"])] = path.read_bytes()
        except OSError as error:
            raise invalid(f"--data {file}: {path} cannot be read: {error.strerror}") from None
    return files, [str(row["text"]) for row in rows if row.get("text")]


def _drawn() -> dict[str, bytes]:
    """Return PNG files of coloured forms on shaded grounds, by descriptions of them."""
    from PIL import Image, ImageDraw

    generator = np.random.default_rng(SEED)
    files = {}
    for number in range(DRAWN):
        shades = generator.integers(0, 256, (4, 4, 3), np.uint8)
        picture = Image.fromarray(shades).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pen, described = ImageDraw.Draw(picture), []
        for _ in range(generator.integers(1, 5)):
            colour, form = generator.choice([*_COLOURS]), generator.choice(_FORMS)
            left, top, size = (int(value) for value in generator.integers(10, SIDE // 2, 3))
            box = left, top, left + size, top + size
            if form == "line":
                pen.line(box, _COLOURS[colour], width=8)
            else:
                (pen.ellipse if form == "circle" else pen.rectangle)(box, _COLOURS[colour])
            described.append(f"a {colour} {form}")
        files[f"drawing {number + 1}: {', '.join(described)}"] = media.png(picture)
    return files
