"""Libraries that run models: their versions and the modules to import. Needs only the standard library."""

from __future__ import annotations

import sys
from typing import Final

#: Modules that every network in transformers needs; the small module of the network itself is imported at load.
TRANSFORMERS: Final = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def versioned(name: str, *modules: str) -> str:
    """Return ``name`` with the version of the first imported module of ``modules`` (by default: ``name``)."""
    for module in modules or (name,):
        version = getattr(sys.modules.get(module), "__version__", None)
        if version:
            return f"{name} {version}"
    return name
