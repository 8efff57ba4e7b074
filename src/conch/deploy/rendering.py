"""Renders templates with placeholders ``@{name}``, because shells and Terraform use ``$``."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

_SIZES: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

_PLACE: Final = re.compile(r"@\{(\w+)\}")


def render(template: str, /, **values: object) -> str:
    """Fill in the template ``template`` of ``templates/``.  Raises KeyError for a missing value."""
    text = (files("conch.deploy") / "templates" / template).read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: str(values[match[1]]), text)


def shown(size: int) -> str:
    """Format a size (bytes) in decimal units, as in the platforms' limits."""
    for unit, name in _SIZES:
        if size >= 0.9995 * unit:  # 999.6 kB are 1 MB with three digits
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
