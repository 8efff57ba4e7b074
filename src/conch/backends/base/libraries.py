"""The libraries that run models: their versions, and what processes import.  Needs the standard library only."""

from __future__ import annotations

import sys
from typing import Final

#: What any network in transformers needs; the network's own module, which is small, comes with the model.
TRANSFORMERS: Final = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def versioned(name: str, *modules: str) -> str:
    """``name`` with the version of the first of ``modules`` (``name`` itself by default) that has been imported."""
    for module in modules or (name,):
        version = getattr(sys.modules.get(module), "__version__", None)
        if version:
            return f"{name} {version}"
    return name
