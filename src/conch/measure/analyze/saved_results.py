"""Saves finished searches to a file, so that reports can be written again, also under other goals.

``results.json`` is in the directory of the reports. ``conch analyze profile`` writes it; ``report`` and ``apply`` read
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from conch.config.reading import read_json
from conch.core.errors import invalid, not_found
from conch.measure.analyze.journal import read_point
from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals, Price, WeightedObjective
from conch.measure.analyze.judging.ranking import FinalRound, FinalRounds
from conch.measure.analyze.results import Candidate, CandidateResult, LoadKind

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
class SavedSearch:
    """The models that were measured together, their goals, and the results, the default first.

    ``final`` are the final rounds of the winner, if any.
    """

    models: Sequence[str]
    goals: Goals
    results: Sequence[CandidateResult]
    complete: bool = True
    final: FinalRounds | None = None


def save(folder: Path, circumstances: Circumstances, searches: Sequence[SavedSearch]) -> Path:
    """Write the file atomically."""
    document = {
        "format": FORMAT,
        "circumstances": asdict(circumstances),
        "searches": [asdict(search) for search in searches],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / FILENAME, folder / f".{FILENAME}.new"
    new.write_text(json.dumps(document) + "\n", encoding="utf-8")
    new.replace(path)
    return path


def load(folder: Path) -> tuple[Circumstances, list[SavedSearch]]:
    """Read the file; raises NOT_FOUND if it does not exist, and INVALID_ARG if it has other content."""
    path = folder / FILENAME
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise not_found(f"{path} does not exist: run 'conch analyze profile' first, or give its folder (-e)") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {error}") from None
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        known = document["circumstances"]
        pairs = {name: [(key, value) for key, value in known[name]] for name in ("machine", "settings")}
        return Circumstances(**{**known, **pairs}), [_search(search) for search in document["searches"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid(f"{path} has no results of this version ({type(error).__name__}: {error})") from None


def _search(values: Mapping[str, Any]) -> SavedSearch:
    goals = values["goals"]
    model_goals = {
        name: ModelGoals(
            tuple(WeightedObjective(**objective) for objective in model["objectives"]),
            tuple(Constraint(**constraint) for constraint in model["constraints"]),
            model["weight"],
        )
        for name, model in goals["models"].items()
    }
    return SavedSearch(
        tuple(values["models"]),
        Goals(model_goals, Price(**goals["price"])),
        [_result(result) for result in values["results"]],
        values["complete"],
        _rounds(values["final"]),
    )


def _rounds(values: Mapping[str, Any] | None) -> FinalRounds | None:
    if values is None:
        return None
    rounds = [
        FinalRound(read_point(entry["winner"]), tuple(map(read_point, entry["defaults"]))) for entry in values["rounds"]
    ]
    return FinalRounds(values["name"], tuple(rounds))


def _result(values: Mapping[str, Any]) -> CandidateResult:
    points = tuple(map(read_point, values["points"]))
    return CandidateResult(Candidate(**values["candidate"]), points, values["error"], values["configs"])
