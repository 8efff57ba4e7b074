"""Lays out the pages of the repository as the site's sources: ``python docs/site/pages.py build/pages``.

Pages stay where GitHub shows them, with links relative to the repository. Here docs/ becomes the root of the site, the
README its start page, and links follow. A link to a file that is not a page leads to the repository at the environment
variable ``REPOSITORY_URL``; where that is empty, it becomes plain text.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PAGES: Final = (
    "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md",
    "examples/*/README.md", "benchmarks/README.md", "docs/**/*.md",
)  # fmt: skip
_OTHERS: Final = ("docs/images/*", "docs/site/*.css")
#: Where pages go that the site calls otherwise.
_RENAMED: Final = {"README.md": "index.md", "docs/README.md": "all-pages.md", "benchmarks/README.md": "benchmarks.md"}
#: The modules of the Python API, and the headings of their references.
_MODULES: Final = {
    "conch": "Serve and call models",
    "conch.testing": "Test a model",
    "conch.backends.python.pb_utils": "Write a model: `triton_python_backend_utils`",
}

_FENCE: Final = re.compile(r"^```")
#: Notes for the test of the pages, and the marks of tables.
_COMMENT: Final = re.compile(r"^<!-- .* -->$")
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def place_of(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return _RENAMED.get(path) or path.removeprefix("docs/").replace("README.md", "index.md")


def pages() -> list[str]:
    """Return the paths of all pages, from the repository's root."""
    return [path.relative_to(ROOT).as_posix() for pattern in _PAGES for path in sorted(ROOT.glob(pattern))]


def sources() -> dict[str, str]:
    """Return the text of every page, by its place in the site."""
    repository = os.environ.get("REPOSITORY_URL", "")
    known = set(pages())
    written = {
        place_of(path): "\n".join(_lines((ROOT / path).read_text("utf-8"), path, known, repository)) for path in known
    }
    return written | {place: make() for place, make in _MADE.items()}


def _lines(text: str, page: str, known: set[str], repository: str) -> Iterator[str]:
    in_block = False
    for line in text.splitlines():
        in_block ^= _FENCE.match(line) is not None
        if in_block:
            yield line
        elif not _COMMENT.match(line):
            yield _LINK.sub(lambda link: _link(link, page, known, repository), line)


def _link(link: re.Match[str], page: str, known: set[str], repository: str) -> str:
    image, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if f"{linked}/README.md" in known:
        linked += "/README.md"
    elif f"{linked.removeprefix('docs/')}.md" in _MADE:
        linked += ".md"
    elif linked not in known and not image:
        return f"[{text}]({repository.rstrip('/')}/tree/main/{linked})" if repository else text
    relative = posixpath.relpath(place_of(linked), posixpath.dirname(place_of(page)) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _python_api() -> str:
    parts = ["# Python API\n\nEverything that conch exports. [Serve from a program](library.md) is the guide.\n"]
    for module, heading in _MODULES.items():
        parts.append(f"## {heading}\n")
        parts += [f"::: {module}.{name}\n" for name in _exported(module)]
    return "\n".join([*parts, "## A fixture for pytest\n\n::: conch.pytest_plugin.load_model\n"])


def _exported(module: str) -> list[str]:
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(statement.value) if not name.startswith("__")]
    raise ValueError(f"{module} does not say what it exports")


def _decisions() -> str:
    rows = ["# Decisions\n\nWhat was decided, with its measurements, and what was rejected.\n"]
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}](decisions/{path.name})")
    return "\n".join(rows) + "\n"


#: The pages that only the site has, by their places.
_MADE: Final = {"python-api.md": _python_api, "decisions.md": _decisions}


def main(folder: Path) -> None:
    """Write the sources; files that have not changed keep their times, so that a served site reloads only others."""
    wanted = {place: text.encode() for place, text in sources().items()}
    for pattern in _OTHERS:
        wanted |= {place_of(path.relative_to(ROOT).as_posix()): path.read_bytes() for path in ROOT.glob(pattern)}
    for place, content in wanted.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != content:
            target.write_bytes(content)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
