"""``make release``: builds the packages of a commit into dist/, checks them, and lists what they contain.

A release is the commit of a tag ``vVERSION``: ``--tag`` checks that version, tag and changelog agree. Without it, this
is a rehearsal of any commit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
#: The entries at the top of the wheel, but for its metadata.
PACKAGES: Final = {"conch", "triton_python_backend_utils"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag of the release, such as v0.2.0")
    tag = parser.parse_args().tag
    version, changelog = read_version(), (ROOT / "CHANGELOG.md").read_text("utf-8")
    notes = changelog_section(changelog, version)
    if tag and (problem := release_problem(version, tag, changelog)):
        sys.exit(problem)
    if _output("git", "status", "--porcelain", "--untracked-files=no"):
        print("There are changes without a commit; they are not in the packages.")

    DIST.mkdir(exist_ok=True)
    packages = build_twice()
    tool("twine", "check", "--strict", *packages)
    wheel, source = packages
    tool("check_wheel_contents", wheel)
    if problem := content_problem(zipfile.ZipFile(wheel).namelist()):
        sys.exit(problem)
    bill = DIST / "conch_server.cdx.json"
    write_bill_of_materials(wheel, bill)
    (DIST / "NOTES.md").write_text(notes, "utf-8")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (wheel, source, bill))
    (DIST / "SHA256SUMS").write_text(sums)
    print(f"\n{'Release' if tag else 'Rehearsal of'} {version} in {DIST}, the same in two builds:\n{sums}")


def read_version() -> str:
    """Return the version, which stands only in ``conch/__init__.py``."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/conch/__init__.py").read_text(), re.MULTILINE)
    return str(version)


def changelog_section(changelog: str, version: str) -> str:
    """Return the section of a version, or of the version that a ``.dev`` version leads to."""
    released = re.sub(r"\.dev\d+$", "", version)
    match = re.search(rf"^## {re.escape(released)} .*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None:
        sys.exit(f"CHANGELOG.md has no section '## {released} (date)'")
    return match[0].rstrip() + "\n"


def release_problem(version: str, tag: str, changelog: str) -> str:
    """Return why a commit with this tag is no release; empty if it is one."""
    if tag != f"v{version}":
        return f"the tag is {tag}, but conch/__init__.py has the version {version}"
    if ".dev" in version:
        return f"{version} is no version to publish"
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        return f"the section of {version} in CHANGELOG.md has no date: '## {version} (YYYY-MM-DD)'"
    return ""


def build_twice() -> list[Path]:
    """Build the wheel and the source distribution of the commit twice, each from a copy of its files; return both.

    Times in the packages are that of the commit. Ends the program if the builds differ.
    """
    epoch = _output("git", "log", "-1", "--format=%ct").decode().strip()
    files = _output("git", "archive", "HEAD")
    with tempfile.TemporaryDirectory(prefix="conch-release-") as folder:
        builds = []
        for number in "12":
            copy = Path(folder, number)
            with tarfile.open(fileobj=BytesIO(files)) as archive:
                archive.extractall(copy, filter="data")
            # hatchling is installed: no build looks for another version.
            tool("build", "--no-isolation", copy, environment={"SOURCE_DATE_EPOCH": epoch})
            builds.append(sorted(copy.joinpath("dist").iterdir(), key=lambda path: path.suffix, reverse=True))
        for first, second in zip(*builds, strict=True):
            if first.read_bytes() != second.read_bytes():
                sys.exit(f"two builds of {first.name} differ")
        return [Path(shutil.copy(path, DIST)) for path in builds[0]]


def content_problem(names: list[str]) -> str:
    """Return what does not belong in the wheel; empty if nothing."""
    extra = sorted(
        name for name in names
        if name.partition("/")[0] not in PACKAGES and not re.match(r"conch_server-[^/]+\.dist-info/", name)
    )  # fmt: skip
    extra += sorted(name for name in names if re.search(r"(^|/)(tests|benchmarks|__pycache__)/|\.pyc$", name))
    return f"the wheel contains {', '.join(extra)}" if extra else ""


def write_bill_of_materials(wheel: Path, file: Path) -> None:
    """Write a CycloneDX document of the wheel and the packages that it installs, in the tested versions."""
    with tempfile.TemporaryDirectory(prefix="conch-release-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = Path(folder, "bin/python")
        tool("pip", "--python", python, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        tool("cyclonedx_py", "environment", "--output-reproducible", "--output-file", file, python)


def tool(module: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a tool of this environment; ends the program if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], env={**os.environ, **(environment or {})}
    )
    if ended.returncode:
        sys.exit(f"{module} failed")


def _output(*command: str) -> bytes:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


if __name__ == "__main__":
    main()
