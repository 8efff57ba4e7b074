"""What the server knows of backends."""

from __future__ import annotations

import pytest

from conch.backends.table import BACKENDS, backend_of


@pytest.mark.parametrize("there", ["huggingface", "python", "unheard_of", ""])
def test_a_remote_model_answers_as_its_backend_there(there: str) -> None:
    found, model = backend_of("remote", {"backend": there}), BACKENDS.get(there, BACKENDS["remote"])
    assert (found.by_row, found.on_request) == (model.by_row, model.on_request)
    assert not (found.implementation or found.prepares or found.generates)


def test_a_remote_model_that_generates_text_counts_its_tokens() -> None:
    parameters = {"backend": "huggingface", "task": "text-generation"}
    assert backend_of("remote", parameters).on_request == backend_of("huggingface", parameters).on_request
    assert backend_of("remote", parameters).on_request == {"tokens"}
    assert backend_of("remote", {"backend": "remote"}) == BACKENDS["remote"]
