"""``make install-sizes``: writes into docs/ how many megabytes conch, its extras and the packages of images take.

The sizes are those of the files of the packages that are installed in this environment, without the environment itself
and pip. An extra counts with all that it requires and the core does not.
"""

from __future__ import annotations

import datetime
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conch.machine.extras import DISTRIBUTION
from deploy.container.slim import removable

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/README.md"
IMAGES: Final = ROOT / "docs/kubernetes.md"
#: A row of the table: the extra, its purpose, its size.
_ROW: Final = re.compile(r"^(\| `(\w+)` \| .* \|) [^|]* \|$", re.MULTILINE)
#: A row of the table of images: the arguments of the build, what the image serves, its size.
_IMAGE: Final = re.compile(r"^(\| `(?:EXTRAS=(\w*))?( SLIM=1)?` \| .* \|) [^|]* \|$", re.MULTILINE)
_SUM: Final = re.compile(r"<!-- core -->.*?<!-- end of core -->", re.DOTALL)


class MissingPackageError(LookupError):
    """A required package is not installed."""


def main() -> None:
    core = closure(DISTRIBUTION)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    largest = sorted(core, key=size, reverse=True)[:5]
    listed = ", ".join(f"{name} {megabytes(size(name))}" for name in largest)
    text = _SUM.sub(
        f"<!-- core -->conch alone installs {megabytes(sum(map(size, core)))} MB in {len(core)} packages "
        f"({listed}; {datetime.date.today()}, {python}).<!-- end of core -->",
        PAGE.read_text("utf-8"),
    )
    PAGE.write_text(_ROW.sub(lambda row: f"{row[1]} {added(row[2], core)} |", text), "utf-8")
    images = IMAGES.read_text("utf-8")
    IMAGES.write_text(_IMAGE.sub(lambda row: f"{row[1]} {image(row[2], bool(row[3]))} |", images), "utf-8")


def image(extra: str, slim: bool) -> int:
    """Return the megabytes of the packages in an image."""
    files = {path for name in closure(DISTRIBUTION, extra) for path in files_of(name)}
    if slim:
        packages = Path(str(metadata.distribution("numpy").locate_file("")))
        removed = removable(packages)
        files = {path for path in files if not any(path.is_relative_to(gone) for gone in removed)}
    return megabytes(sum(path.stat().st_size for path in files))


def added(extra: str, core: set[str]) -> str:
    """Return the megabytes that an extra adds to the core, or that they are unknown here."""
    try:
        return str(megabytes(sum(map(size, closure(DISTRIBUTION, extra) - core))))
    except MissingPackageError:
        return "not measured"


def closure(name: str, *extras: str) -> set[str]:
    """Return the names of the installed packages that a package with extras requires, and its own.

    Raises :class:`MissingPackageError` if one of them is not installed.
    """
    packages: set[str] = set()
    pending, visited = [(canonicalize_name(name), extra) for extra in ("", *extras)], set[tuple[str, str]]()
    while pending:
        package, extra = pending.pop()
        if (package, extra) in visited:
            continue
        visited.add((package, extra))
        packages.add(package)
        try:
            declared = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            raise MissingPackageError(package) from None
        for requirement in map(Requirement, declared):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required = canonicalize_name(requirement.name)
                pending += [(required, part) for part in ("", *requirement.extras)]
    return packages


def size(name: str) -> int:
    """Return the bytes of a package's files."""
    return sum(path.stat().st_size for path in files_of(name))


def files_of(name: str) -> set[Path]:
    """Return the files of a package; those of conch are in src/."""
    if name == DISTRIBUTION:
        paths = {path for path in (ROOT / "src").rglob("*") if path.suffix != ".pyc"}
    else:
        paths = {Path(str(file.locate())).resolve() for file in metadata.files(name) or ()}
    return {path for path in paths if path.is_file()}


def megabytes(size: int) -> int:
    return round(size / 1e6)


if __name__ == "__main__":
    main()
