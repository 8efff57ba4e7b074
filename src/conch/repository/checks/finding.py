"""A checked model, and a problem that ``conch check`` reports on one line with its position in a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conch.config.pbtxt import locate
from conch.config.reading import FieldPath, Problem, read_small, shown_name
from conch.config.schema import PYTHON_RUNTIME, ModelConfig, implementation, is_ensemble
from conch.repository.model_files import ModelFiles
from conch.repository.versions import select_versions

#: Matches the separator between the problem and the advice in a message.
_ADVICE = re.compile(r"[;:] (?=(?:accept|check|choose|did you mean|it has|it must|join|pass|run|set|use)\b)")


@dataclass(frozen=True, order=True)
class Finding:
    """One problem. ``line`` counts from 1; 0 means the whole file or directory.

    ``location`` replaces ``path`` in the output for a copy of a file in a store.
    """

    path: Path
    line: int
    severity: str
    problem: str
    fix: str = ""
    location: str = ""

    def __str__(self) -> str:
        position = f"{self.location or self.path}:{self.line}" if self.line else self.location or str(self.path)
        fix = f" (fix: {self.fix})" if self.fix else ""
        return shown_name(f"{position}: {self.severity}: {' '.join(self.problem.split())}{fix}")


def with_fix(path: Path, line: int, severity: str, message: str, fix: str = "") -> Finding:
    """Return a finding for a server error; advice in the message becomes the fix, otherwise ``fix`` is used."""
    problem, *advice = _ADVICE.split(message, maxsplit=1)
    return Finding(path, line, severity, problem, advice[0] if advice else fix)


def line_of(text: str, name: str) -> int:
    """Return the first line (from 1) with ``name`` in quotation marks."""
    match = re.search(rf"""(["']){re.escape(name)}\1""", text)
    return text.count("\n", 0, match.start()) + 1 if match else 1


@dataclass(frozen=True)
class CheckedModel:
    """A model with a readable configuration; ``config`` is the completed one."""

    files: ModelFiles
    config: ModelConfig

    @property
    def versions(self) -> tuple[int, ...]:
        """The served versions, ascending."""
        return select_versions(self.config, self.files.versions).versions

    @property
    def filename(self) -> str:
        """The name of the model's file in a version directory; empty if the backend has no fixed name."""
        return "" if self.config.runtime == PYTHON_RUNTIME else str(self.config.default_model_filename)

    def model_files(self) -> Iterator[Path]:
        """Yield the path of the model's file in each served version; it may not exist."""
        if self.filename and not is_ensemble(self.config):
            for version in self.versions:
                yield self.files.version_directory(version) / self.filename

    def sources(self) -> Iterator[Path]:
        """Yield each ``model.py`` that runs the model: its own, or that of its Python-based backend."""
        if self.files.backend_directory is not None:
            yield self.files.backend_directory / PYTHON_RUNTIME
        elif implementation(self.config) == "python" and not self.config.runtime:
            yield from self.model_files()

    def finding(self, problem: Problem, severity: str = "error") -> Finding:
        """Return the problem as a finding at its line of the configuration."""
        return in_configuration(self.files, problem.message, problem.field, problem.hint, severity)

    def warning(self, message: str, field: FieldPath = (), fix: str = "") -> Finding:
        """Return a warning at a field of the configuration."""
        return in_configuration(self.files, message, field, fix, "warning")

    def completes_itself(self) -> bool:
        """Return whether the backend may add tensors when it loads the model."""
        if implementation(self.config) != "python":
            return not is_ensemble(self.config) and self.config.platform != "pytorch_libtorch"
        return any("auto_complete_config" in _text(source) for source in self.sources())


def in_configuration(
    files: ModelFiles, problem: str, field: FieldPath = (), fix: str = "", severity: str = "error"
) -> Finding:
    """Return a finding at a field of the configuration, or at the model's directory without a configuration file."""
    if files.config_path is None:
        return Finding(files.directory, 0, severity, problem, fix)
    return Finding(files.config_path, locate(files.config_text, field), severity, problem, fix)


def _text(path: Path) -> str:
    try:
        return read_small(path).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
