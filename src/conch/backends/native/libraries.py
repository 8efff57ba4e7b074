"""The versions of the libraries that run models.  Needs the standard library only."""

from __future__ import annotations

import sys


def versioned(name: str, *modules: str) -> str:
    """``name`` with the version of the first of ``modules`` (``name`` itself by default) that has been imported."""
    for module in modules or (name,):
        version = getattr(sys.modules.get(module), "__version__", None)
        if version:
            return f"{name} {version}"
    return name
