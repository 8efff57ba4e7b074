"""docs/openai.md names every member that is accepted."""

from __future__ import annotations

import re
from pathlib import Path

from conch.wire.openai.models import EMBEDDINGS
from conch.wire.openai.sampling import EXTENSIONS, IGNORED

TEXT = (Path(__file__).parents[4] / "docs" / "openai.md").read_text(encoding="utf-8")


def test_members_and_outputs_are_documented() -> None:
    named = set(re.findall(r"`([\w.]+)`", TEXT))
    assert {*EXTENSIONS, *IGNORED, *EMBEDDINGS} - named == set()
