"""Pages that list something list all of it: names of ``pb_utils``, fields of configurations, flags, metrics."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from conch.backends.python import pb_utils

DOCS = Path(__file__).parents[2] / "docs"


def words(page: str) -> set[str]:
    return set(re.findall(r"\w+", (DOCS / page).read_text("utf-8")))


def test_everything_in_pb_utils_is_on_its_page() -> None:
    classes = [value for name in pb_utils.__all__ if inspect.isclass(value := getattr(pb_utils, name))]
    methods = {
        name
        for one in classes
        for name, value in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, staticmethod))
    }
    internal = {"pack", "encode", "received"}  # between the modules of the backend
    assert {*pb_utils.__all__, *methods} - internal - words("model_py.md") == set()
