"""The font of a PDF: Helvetica, which needs no file, or one of the machine for what Helvetica cannot write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: Where fonts are that have the letters of most languages; ``{}`` is the style.
_PLACES: Final = (
    ("/usr/share/fonts/truetype/dejavu", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    ("/usr/share/fonts/dejavu-sans-fonts", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    ("/usr/share/fonts/TTF", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    ("/usr/share/fonts/truetype/noto", "NotoSans-Regular.ttf", "NotoSans-Bold.ttf"),
    ("/usr/share/fonts/truetype/liberation", "LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf"),
    ("/usr/share/fonts/truetype/freefont", "FreeSans.ttf", "FreeSansBold.ttf"),
    ("/System/Library/Fonts/Supplemental", "Arial Unicode.ttf", "Arial Bold.ttf"),
    ("C:/Windows/Fonts", "arial.ttf", "arialbd.ttf"),
)
#: What Helvetica lacks and is written otherwise.
_PLAIN: Final = str.maketrans({
    "–": "-", "—": "-", "−": "-", "‐": "-", "…": "...", "’": "'", "‘": "'", "“": '"', "”": '"', "„": '"', "≥": ">=",
    "≤": "<=", "→": "->", "←": "<-", "•": "·", "≈": "~", "\u2009": " ", "\u202f": " ", "μ": "µ",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lettering:
    """The families of a document, the second of fixed width; ``plain`` ones have the letters of Latin-1 alone."""

    family: str
    fixed: str
    plain: bool

    @property
    def bullet(self) -> str:
        """The dot before an item."""
        return "·" if self.plain else "•"

    def fit(self, text: str) -> str:
        """The text in the letters that the font has; control characters would be boxes."""
        text = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
        return text.translate(_PLAIN).encode("latin-1", "replace").decode("latin-1") if self.plain else text


def lettering_for(document: Any, texts: Iterable[str]) -> Lettering:
    """The font that can write all texts, added to the document where it comes from a file.

    Letters that no font here has become question marks.
    """
    try:
        for text in texts:
            text.translate(_PLAIN).encode("latin-1")
    except UnicodeEncodeError:
        for folder, normal, bold in _PLACES:
            if (path := Path(folder, normal)).is_file():
                document.add_font("text", "", str(path))
                document.add_font("text", "B", str(thick if (thick := Path(folder, bold)).is_file() else path))
                return Lettering("text", "text", plain=False)
    return Lettering("Helvetica", "Courier", plain=True)
