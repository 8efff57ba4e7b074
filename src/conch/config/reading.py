"""Reads small files of repositories and checkpoints safely, and describes errors in them with their positions.

Reading does not block on pipes and has a size limit. A :class:`Problem` gives the path of its field: field names, and
indices into repeated fields, as in ``("input", 1, "dims")``. Checks are generators of problems; loading stops at the
first, ``conch check`` reports all.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final

from conch.core.errors import Code, ConchError

FieldPath = tuple[str | int, ...]
#: The name of one of the files of a GGUF model that was split.
_PART: Final = re.compile(r"(?P<prefix>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


class ConfigError(ConchError):
    """A configuration that cannot be parsed.

    ``line`` and ``column`` count from 1, and are 0 if unknown; ``hint`` suggests a correction.
    """

    def __init__(self, message: str, *, path: str = "", line: int = 0, column: int = 0, hint: str = "") -> None:
        super().__init__(message, Code.INTERNAL)
        self.path = path
        self.line = line
        self.column = column
        self.hint = hint


class Problem(ConchError):
    """An error in a parsed configuration; ``field`` is its position, ``hint`` suggests a correction."""

    def __init__(self, message: str, field: FieldPath = (), *, hint: str = "") -> None:
        super().__init__(message, Code.INVALID_ARG)
        self.field = field
        self.hint = hint


Problems = Iterator[Problem]


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the first problem, if any."""
    for problem in problems:
        raise problem


#: Maximum sizes (bytes) of files that people write, such as configurations and sources, and of JSON that programs
#: write.
MOST_BYTES: Final = 16 << 20
MOST_JSON_BYTES: Final = 64 << 20


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises OSError as ``open`` does, and for anything but a regular file: opening or reading a pipe can block forever,
    and a device may have no end.
    """
    # The file at a path may be replaced at any time, so the open file is checked.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, limit: int = MOST_BYTES) -> bytes:
    """Read a file. Raises OSError as :func:`open_regular` does, and for more than ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {limit:,} are allowed", str(path))
        return file.read(limit)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError as :func:`read_small` does, and ValueError for invalid JSON."""
    content = read_small(path, MOST_JSON_BYTES)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown_name(name: str) -> str:
    """Make a text with file names printable: escape bytes that are not UTF-8 and unprintable characters."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(
        character if character.isprintable() or character == " " else escaped(character) for character in text
    )


def escaped(character: str) -> str:
    """Return the escape of a character: ``\\xNN``, ``\\uNNNN`` or ``\\UNNNNNNNN``."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def gguf_models(paths: Iterable[Path]) -> tuple[list[list[Path]], list[Path]]:
    """Divide GGUF files into models, each a list of its parts in order, and projectors.

    A model that was not split has one part. The names of projectors contain ``mmproj``.
    """
    models: dict[tuple[Path, str, str], list[Path]] = {}
    projectors: list[Path] = []
    for path in sorted(paths):
        if "mmproj" in path.name.lower():
            projectors.append(path)
        else:
            models.setdefault((path.parent, *_split_of(path)), []).append(path)
    return list(models.values()), projectors


def gguf_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the GGUF files of models in a folder, and those of projectors.

    A model that was split into several files is represented by the first of them.
    """
    models, projectors = gguf_models(folder.glob("*.gguf"))
    return [parts[0] for parts in models], projectors


def gguf_parts(gguf: Path) -> list[Path]:
    """Return the files beside ``gguf`` that belong to the same split, in order; only itself for a whole model."""
    split = _split_of(gguf)
    return [path for path in sorted(gguf.parent.glob("*.gguf")) if _split_of(path) == split] or [gguf]


def gguf_stem(gguf: Path) -> str:
    """Return the name of a GGUF file without its suffix and the number of a part."""
    return _split_of(gguf)[0]


def _split_of(gguf: Path) -> tuple[str, str]:
    """Return the prefix and the number of parts in the name of a part; the stem and no number for a whole file."""
    part = _PART.fullmatch(gguf.name)
    return (part["prefix"], part["count"]) if part else (gguf.stem, "")
