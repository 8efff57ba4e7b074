"""The backend ``huggingface``: what it refuses before it opens a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.backends.huggingface import open_huggingface
from conch.core.errors import Code, ConchError


def refusal(version: Path, **parameters: str) -> ConchError:
    config = {"name": "m", "parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    init: dict[str, Any] = {"config": json.dumps(config), "model": {"version_directory": str(version)}}
    with pytest.raises(ConchError) as refused:
        open_huggingface(None, init)  # type: ignore[arg-type]
    return refused.value


def test_misspelt_parameter_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    error = refusal(tmp_path, model="org/name", revison="v2")
    assert (error.message, error.code) == (
        "parameter 'revison' is not known; did you mean 'revision'?", Code.INVALID_ARG,
    )  # fmt: skip


def test_misspelt_member_of_a_model_file_is_refused_by_the_file_s_name(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model": "org/name", "trust_remote_cod": true}')
    assert refusal(tmp_path).message == (
        f"{tmp_path / 'model.json'}: parameter 'trust_remote_cod' is not known; did you mean 'trust_remote_code'?"
    )
