"""Makes Markdown of the docstrings that the Python API shows: Sphinx's roles become names."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_ROLE: Final = re.compile(r":(?:class|func|meth|attr|mod):`([^`]+)`")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
