"""Saves finished searches to a file, so that reports can be written again, or for other goals.

``results.json`` is in the directory of the reports. ``conch analyze profile`` writes it; ``report`` and ``apply`` read
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from conch.config.reading import read_json
from conch.core.errors import error_text, invalid, not_found, why_unreadable
from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.ranking import FinalRounds, Recommendation, recommend
from conch.measure.analyze.results import CandidateResult, LoadKind, from_json
from conch.measure.reports.files import write_whole

FILENAME: Final = "results.json"
#: The version of the format.
FORMAT: Final = 2


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of an analysis: facts by name for the reports, and the command that repeats it."""

    load_kind: LoadKind = "concurrency"
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    server: str = ""
    machine: Sequence[tuple[str, str]] = ()
    settings: Sequence[tuple[str, str]] = ()
    reproduce: str = ""
    repository: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """The models that were measured together, their goals, and the results of the candidates, the default first.

    ``complete`` is whether the search reached its end; ``final`` are the final rounds of its winner, if any.
    """

    models: Sequence[str]
    goals: Goals
    results: Sequence[CandidateResult]
    complete: bool = True
    final: FinalRounds | None = None

    @property
    def recommendation(self) -> Recommendation:
        """The ranking of the candidates, and the advice based on the comparison with the default."""
        return recommend(self.results, self.goals, self.final, complete=self.complete)


def save(folder: Path, circumstances: Circumstances, searches: Sequence[SearchOutcome]) -> Path:
    """Write the file atomically."""
    document = {
        "format": FORMAT,
        "circumstances": asdict(circumstances),
        "searches": [asdict(search) for search in searches],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILENAME
    write_whole(path, json.dumps(document).encode() + b"\n")
    return path


def load(folder: Path) -> tuple[Circumstances, list[SearchOutcome]]:
    """Read the file; raises NOT_FOUND if it does not exist, and INVALID_ARG if it has other content."""
    path = folder / FILENAME
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise not_found(f"{path} does not exist: run 'conch analyze profile' first, or set -e to its folder") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {why_unreadable(error)}") from None
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        searches = [from_json(SearchOutcome, search) for search in document["searches"]]
        return from_json(Circumstances, document["circumstances"]), searches
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid(f"{path} has no results of this version ({error_text(error)})") from None
