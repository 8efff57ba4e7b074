"""The backend ``vllm``: names in its files that nobody understands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conch.backends.contracts.vllm import VllmBackend
from conch.errors import Code, ConchError
from tests.unit.backends.tensor_backends import initialise, parameters


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ({}, {"gpu_memory_utilisation": 0.5}, "parameter 'gpu_memory_utilisation' is not known; did you mean "),
        ({}, {"max_num_seq": 4}, "parameter 'max_num_seq' is not known; did you mean 'max_num_seqs'?"),
        ({"max_model_lenght": "64"}, {}, "parameter 'max_model_lenght' is not known; did you mean 'max_model_len'?"),
    ],
)
def test_misspelt_names_are_refused_before_the_model_is_looked_for(
    tmp_path: Path, given: dict[str, str], arguments: dict[str, float], message: str
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "org/name", **arguments}))
    with pytest.raises(ConchError) as refused:
        initialise(VllmBackend, tmp_path, {"parameters": parameters(**given)})
    assert refused.value.message.startswith(message)
    assert refused.value.code is Code.INVALID_ARG
