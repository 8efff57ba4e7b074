"""What was measured so far, in a file: an analysis that was interrupted goes on from it.

JSON lines, appended and flushed to the disk one by one, so that whatever ends the process loses no point.  The first
line of each start says what the conditions were: texts by name, of which ``measuring`` is a mapping in JSON.  A point
counts again where all conditions that concern it are what they were: the machine, conch, how is measured, and the
models' files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from conch.analyze.results import Candidate, ModelFigures, Point
from conch.errors import invalid, unavailable
from conch.perf.server.resources import GpuFigures, ResourceFigures

try:
    import fcntl
except ImportError:  # not on this system: two analyses at a time are not noticed
    fcntl = None  # type: ignore[assignment]

FILENAME: Final = "checkpoint.jsonl"
#: The version of the format.
FORMAT: Final = 2
#: Conditions of everything; others are a model's, ``model NAME``.
_COMMON: Final = ("machine", "conch", "measuring")


class AnalysisCheckpoint:
    """The points of ``folder``, which is made if it is not there; ``conditions`` are texts by name, as they are now.

    ``changes`` are sentences about the conditions that are not what they were.  Raises INVALID_ARG for a file of
    something else, UNAVAILABLE while another analysis uses it.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, str]) -> None:
        self.path = folder / FILENAME
        self._conditions = dict(conditions)
        self._points: dict[tuple[str, str, float, str], list[Point]] = {}
        self._failures: dict[tuple[str, str], str] = {}
        self._configs: dict[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {}
        self.changes: tuple[str, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise
        self._append({"format": FORMAT, "conditions": self._conditions})

    def __enter__(self) -> AnalysisCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many points there are, those that do not count any more among them."""
        return sum(map(len, self._points.values()))

    def close(self) -> None:
        """Let others use the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def points(
        self, models: Iterable[str], candidate: Candidate, load: float, finalist: Candidate | None = None
    ) -> Sequence[Point]:
        """What ``candidate`` measured at ``load`` under the conditions of today, in the order of the measurements: in
        the search, or in the final rounds of ``finalist``."""
        return self._points.get((self._under(models), _key(candidate), load, _of(finalist)), ())

    def failure(self, models: Iterable[str], candidate: Candidate) -> str:
        """Why the candidate could not be served or measured; empty where that is not known."""
        return self._failures.get((self._under(models), _key(candidate)), "")

    def configs(self, models: Iterable[str], candidate: Candidate) -> Mapping[str, Mapping[str, Any]]:
        """The configurations that were in force with the candidate; empty where it was not loaded."""
        return self._configs.get((self._under(models), _key(candidate)), {})

    def loaded(self, models: Iterable[str], candidate: Candidate, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the configurations that are in force with a candidate."""
        if self.configs(models, candidate) != configs:
            self._keep(models, candidate, configs=configs)
            self._configs[self._under(models), _key(candidate)] = configs

    def add(self, models: Iterable[str], candidate: Candidate, point: Point, finalist: Candidate | None = None) -> None:
        """Keep a point."""
        self._keep(models, candidate, point=dataclasses.asdict(point), finalist=_of(finalist))
        self._points.setdefault((self._under(models), _key(candidate), point.load, _of(finalist)), []).append(point)

    def fail(self, models: Iterable[str], candidate: Candidate, error: str) -> None:
        """Keep that a candidate failed."""
        self._keep(models, candidate, error=error)
        self._failures[self._under(models), _key(candidate)] = error

    def _keep(self, models: Iterable[str], candidate: Candidate, **what: Any) -> None:
        under = self._under(models)
        self._append({"under": under, "candidate": candidate.name, "overrides": candidate.overrides, **what})

    def _under(self, models: Iterable[str]) -> str:
        """The conditions that concern a search over ``models``, as a short text that equal ones share."""
        concerned = {
            name: self._conditions.get(name, "") for name in (*_COMMON, *(f"model {model}" for model in models))
        }
        return hashlib.sha256(json.dumps(concerned, sort_keys=True).encode()).hexdigest()[:16]

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise unavailable(f"{self.path} is in use by another analysis: give another folder (-s)") from None

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)  # a line that was being written when the process was ended
        before: Mapping[str, str] = {}
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                if "conditions" in record:
                    if record["format"] != FORMAT:
                        raise ValueError(f"format {record['format']}")
                    before = record["conditions"]
                else:
                    self._take(record)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise invalid(
                    f"{self.path}, line {number}, is no checkpoint of this version ({error}):"
                    " remove it, or give another folder (-s)"
                ) from None
        self.changes = tuple(_changes(before, self._conditions)) if before else ()

    def _take(self, record: Mapping[str, Any]) -> None:
        key = _key(Candidate(record["candidate"], record["overrides"]))
        if "error" in record:
            self._failures[record["under"], key] = record["error"]
            return
        if "configs" in record:
            self._configs[record["under"], key] = record["configs"]
            return
        point = read_point(record["point"])
        self._points.setdefault((record["under"], key, point.load, record["finalist"]), []).append(point)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    for name, text in now.items():
        was = before.get(name)
        if was is None or was == text:
            continue
        if name.startswith("model "):
            yield f"{name} has changed since: what was measured with it is measured anew"
        elif name == "measuring":
            old, new = json.loads(was), json.loads(text)
            names = ", ".join(sorted(key for key in {*old, *new} if old.get(key) != new.get(key)))
            yield f"how is measured has changed since ({names}): all is measured anew"
        else:
            yield f"the {name} is another one, so all is measured anew: it was {was}, and is {text}"


def _key(candidate: Candidate) -> str:
    """A text that candidates share that do the same; their names follow from the order of a search."""
    return json.dumps(candidate.overrides, sort_keys=True)


def _of(finalist: Candidate | None) -> str:
    return _key(finalist) if finalist is not None else ""


def read_point(values: Mapping[str, Any]) -> Point:
    """A point from its JSON, as ``dataclasses.asdict`` gives it.  Raises what Python raises for a wrong shape."""
    resources = values["resources"]
    if resources is not None:
        gpus = {name: GpuFigures(**one) for name, one in resources["gpus"].items()}
        resources = ResourceFigures(**{**resources, "gpus": gpus})
    models = {
        name: ModelFigures(
            **{**model, "percentiles": {float(key): value for key, value in model["percentiles"].items()}}
        )
        for name, model in values["models"].items()
    }
    return Point(**{**values, "models": models, "resources": resources, "warnings": tuple(values["warnings"])})
