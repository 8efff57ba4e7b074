"""Reads small files of repositories and checkpoints safely: without blocking on pipes, and with a size limit."""

from __future__ import annotations

import errno
import json
import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final

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
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file. Raises OSError as :func:`open_regular` does, and for more than ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and may have {most:,}", str(path))
        return file.read(most)


def read_json(path: Path, most: int = MOST_JSON_BYTES) -> Any:
    """Read a JSON file. Raises OSError as :func:`read_small` does, and ValueError for invalid JSON."""
    content = read_small(path, most)
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
