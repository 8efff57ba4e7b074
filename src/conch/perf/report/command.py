"""The command that measures again, as a shell takes it, without what must not be passed on.  Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

#: Headers and parameters that are secrets.
_SECRET: Final = re.compile(
    r"(?i)((?:authorization|cookie|[\w-]*(?:api-?key|token|secret|password))\s*[:=]\s*).+", re.DOTALL
)


def command_line(arguments: Sequence[str]) -> str:
    """``conch`` with the arguments of this process; of headers that authorise, the value is left out."""
    return shlex.join(["conch", *(_SECRET.sub(r"\1...", argument) for argument in arguments[1:])])
