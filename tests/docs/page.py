"""A page as steps: what a reader would type, save or run, in order.

A fenced or indented block is one of these, by its language and the line before it:

- a *file*, where that line ends with its path alone, as in "`models/greeter/config.pbtxt`:";
- a *session*: commands after ``$``, each with the output that follows it; or lines of ``sh``, without outputs;
- a *program*: any other ``python``; a line "It prints:" makes the next ``text`` block its output;
- a *fragment* of ``pbtxt`` or ``json``, which must be readable;
- ``text``, which only shows something.

Comments, which readers do not see, say what else there is: ``<!-- not run: REASON -->`` before a block, or before the
page's title for all of its blocks; ``<!-- given: NAME as PATH -->`` for files that the page takes for granted
(``given.py``), ``<!-- run: COMMAND -->`` for what is assumed to have been typed. A block that is none of these is a
mistake.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

_FENCE = re.compile(r"```(\w*)\s*$")
_COMMENT = re.compile(r"<!-- (not run|given|run): (.+?) -->$")
#: The path of a file, alone after the end of a sentence.
_PATH = re.compile(r"(?:^|[.;:,)] )`([\w./-]+)`:$")
_PRINTS = re.compile(r"\bprints:$")
_HERE_DOCUMENT = re.compile(r"<<-?\s*'?(\w+)'?")


class Kind(Enum):
    FILE = auto()
    SESSION = auto()
    PROGRAM = auto()
    OUTPUT = auto()
    FRAGMENT = auto()
    TEXT = auto()
    GIVEN = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class PageStep:
    """One block of a page, or one thing that it takes for granted; ``line`` counts from 1.

    ``path`` is that of a file. ``reason`` says why the step is not run; empty for one that is.
    """

    kind: Kind
    line: int
    text: str
    language: str = ""
    path: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ShellCommand:
    """A command, and the output that the page shows for it; None where it shows none."""

    text: str
    output: str | None = None


def steps(source: Path) -> list[PageStep]:
    """The steps of a page, in order."""
    return list(_steps(source.read_text("utf-8").splitlines()))


def _steps(lines: list[str]) -> Iterator[PageStep]:
    whole_page = reason = ""
    before = ""  # the last line of text
    titled = False
    at = 0
    while at < len(lines):
        line = lines[at]
        if comment := _COMMENT.match(line):
            if comment[1] == "given":
                yield PageStep(Kind.GIVEN, at + 1, comment[2], reason=whole_page)
            elif comment[1] == "run":
                yield PageStep(Kind.SESSION, at + 1, comment[2] + "\n", "sh", reason=whole_page)
            elif titled:
                reason = comment[2]
            else:
                whole_page = comment[2]
        elif fence := _FENCE.match(line):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
            yield _block(at + 1, lines[at + 1 : end], fence[1], before, reason or whole_page)
            at, before, reason = end, "", ""
        elif line.startswith("    ") and _may_begin_a_block(lines[at - 1] if at else ""):
            end = next((i for i in range(at, len(lines)) if not lines[i].startswith("    ")), len(lines))
            block = [indented[4:] for indented in lines[at:end]]
            yield _block(at + 1, block, "sh", before, reason or whole_page)
            at, before, reason = end - 1, "", ""
        elif line.strip():
            titled = titled or line.startswith("# ")
            before, reason = line, ""
        at += 1


def _may_begin_a_block(line_before: str) -> bool:
    return not line_before.strip() or _COMMENT.match(line_before) is not None


def _block(line: int, lines: list[str], language: str, before: str, reason: str) -> PageStep:
    path = _PATH.search(before)
    if path:
        kind = Kind.FILE
    elif language in ("sh", "bash") or (not language and any(one.startswith("$ ") for one in lines)):
        kind = Kind.SESSION
    elif language == "python":
        kind = Kind.PROGRAM
    elif language in ("pbtxt", "json"):
        kind = Kind.FRAGMENT
    elif language == "text":
        kind = Kind.OUTPUT if _PRINTS.search(before) else Kind.TEXT
    else:
        kind = Kind.UNKNOWN
    return PageStep(kind, line, "\n".join(lines) + "\n", language, path[1] if path else "", reason)


def commands(step: PageStep) -> list[ShellCommand]:
    """The commands of a session; one goes on over lines as long as the shell would ask for more."""
    prompts = any(line.startswith("$ ") for line in step.text.splitlines())
    found: list[ShellCommand] = []
    typed = ""
    shown: list[str] = []

    def finish() -> None:
        if typed:
            output = "\n".join(shown).strip()
            found.append(ShellCommand(typed, output or None))

    for line in step.text.splitlines():
        if typed and not _is_complete(typed):
            typed += "\n" + line
        elif line.startswith("$ ") or (not prompts and line.strip()):
            finish()
            typed, shown = line.removeprefix("$ "), []
        elif typed:
            shown.append(line)
    finish()
    return found


def _is_complete(typed: str) -> bool:
    if typed.endswith("\\"):
        return False
    document = _HERE_DOCUMENT.search(typed)
    if document:
        return document[1] in typed.splitlines()[1:]
    try:
        shlex.split(typed, comments=True)
    except ValueError:
        return False
    return True
