"""The journal of an analysis: the measurements so far in a file, from which an interrupted analysis resumes.

The file has JSON lines, each of them flushed to disk, so that no point is lost however the process ends. The first line
of each start has the conditions: texts by name; ``measuring`` is a mapping in JSON. A point is reused if all conditions
that concern it are unchanged: the machine, conch, the way of measuring, and the models' files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch import __version__
from conch.core.errors import ConchError, invalid, unavailable
from conch.machine.facts import MachineFacts
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.results import Candidate, Point, from_json
from conch.measure.perf.inputs.data import DataOptions
from conch.repository.scan import ModelRepository

try:
    import fcntl
except ImportError:  # on systems without fcntl, concurrent analyses are not detected
    fcntl = None  # type: ignore[assignment]

FILENAME: Final = "checkpoint.jsonl"
#: The version of the format.
FORMAT: Final = 2
#: Conditions of all points; others belong to a model (``model NAME``).
_COMMON: Final = ("machine", "conch", "measuring")


class Journal:
    """The journal in ``folder``, which is created if necessary; ``conditions`` are the current ones, texts by name.

    ``changes`` are sentences about changed conditions. Raises INVALID_ARG for a file with other content, and
    UNAVAILABLE while another analysis uses it.
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

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of points, including outdated ones."""
        return sum(map(len, self._points.values()))

    def close(self) -> None:
        """Release the file for other analyses."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def points(
        self, models: Iterable[str], candidate: Candidate, load: float, finalist: Candidate | None = None
    ) -> Sequence[Point]:
        """Return the points of ``candidate`` at ``load`` under the current conditions, in the order of measurement.

        They are from the search, or from the final rounds of ``finalist``.
        """
        return self._points.get((self._under(models), _key(candidate), load, _of(finalist)), ())

    def failure(self, models: Iterable[str], candidate: Candidate) -> str:
        """Return the reason why the candidate could not be served or measured; empty if there is none."""
        return self._failures.get((self._under(models), _key(candidate)), "")

    def configs(self, models: Iterable[str], candidate: Candidate) -> Mapping[str, Mapping[str, Any]]:
        """Return the configurations that were in force with the candidate; empty if it was not loaded."""
        return self._configs.get((self._under(models), _key(candidate)), {})

    def loaded(self, models: Iterable[str], candidate: Candidate, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the configurations that are in force with a candidate."""
        if self.configs(models, candidate) != configs:
            self._keep(models, candidate, configs=configs)
            self._configs[self._under(models), _key(candidate)] = configs

    def add(self, models: Iterable[str], candidate: Candidate, point: Point, finalist: Candidate | None = None) -> None:
        """Record a point."""
        self._keep(models, candidate, point=dataclasses.asdict(point), finalist=_of(finalist))
        self._points.setdefault((self._under(models), _key(candidate), point.load, _of(finalist)), []).append(point)

    def fail(self, models: Iterable[str], candidate: Candidate, error: str) -> None:
        """Record the failure of a candidate."""
        self._keep(models, candidate, error=error)
        self._failures[self._under(models), _key(candidate)] = error

    def _keep(self, models: Iterable[str], candidate: Candidate, **what: Any) -> None:
        under = self._under(models)
        self._append({"under": under, "candidate": candidate.name, "overrides": candidate.overrides, **what})

    def _under(self, models: Iterable[str]) -> str:
        """Return a hash of the conditions that concern a search over ``models``."""
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
                raise unavailable(f"{self.path} is in use by another analysis: choose another folder (-s)") from None

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)  # an incomplete line from the end of the process
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
                    f"{self.path}, line {number}, is not a journal of this version of conch ({error}):"
                    " remove it, or choose another folder (-s)"
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
        point = from_json(Point, record["point"])
        self._points.setdefault((record["under"], key, point.load, record["finalist"]), []).append(point)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    for name, text in now.items():
        was = before.get(name)
        if was is None or was == text:
            continue
        if name.startswith("model "):
            yield f"{name} has changed: its measurements are repeated"
        elif name == "measuring":
            old, new = json.loads(was), json.loads(text)
            names = ", ".join(sorted(key for key in {*old, *new} if old.get(key) != new.get(key)))
            yield f"the measurement settings have changed ({names}): all measurements are repeated"
        else:
            yield f"the {name} has changed from {was} to {text}: all measurements are repeated"


def _key(candidate: Candidate) -> str:
    """Return a text that equivalent candidates share; their names depend on the order of a search."""
    return json.dumps(candidate.overrides, sort_keys=True)


def _of(finalist: Candidate | None) -> str:
    return _key(finalist) if finalist is not None else ""


#: The settings that affect points; goals and the search mode do not.
_MEASURING = (
    "triton_launch_mode", "triton_http_endpoint", "triton_grpc_endpoint", "triton_server_flags",
    "triton_server_environment", "client_protocol", "perf_analyzer_flags", "batch_sizes",
)  # fmt: skip


def conditions(
    settings: AnalyzeSettings, repository: ModelRepository | None, configs: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, str]:
    """Return the conditions by name for the journal; ``configs`` are the completed ones of the repository."""
    names = [name for name in _MEASURING if settings.triton_launch_mode == "remote" or not name.endswith("_endpoint")]
    measuring = {name: getattr(settings, name) for name in names}
    measuring["default data"] = DataOptions().source
    if settings.budget is not None:
        measuring["budget"] = settings.budget  # a budget shortens windows
    measuring["loads"] = "rates" if settings.loads_are_rates else "callers"
    by_name = {
        "machine": str(MachineFacts.read()),
        "conch": __version__,
        "measuring": json.dumps(measuring, sort_keys=True, default=str),
    }
    for model, config in configs.items():
        own = settings.model(model)
        model_options = {
            "perf_flags": own.perf_flags, "batch_sizes": own.batch_sizes, "rates": bool(own.request_rate),
            "config": config,
        }  # fmt: skip
        by_name[f"model {model}"] = _digest([_files(repository, model), model_options])
    return by_name


def _files(repository: ModelRepository | None, model: str) -> Any:
    """Return times and sizes of a model's files; None if they are on another machine."""
    if repository is None:
        return None
    try:
        stamps = repository.fingerprint(model)
    except (ConchError, OSError):
        return None
    versions = {str(version): sorted(files) for version, files in stamps.versions.items()}
    return [sorted(stamps.config), versions, sorted(stamps.rest)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
