"""Checks of requests against the limits and features of an engine."""

from __future__ import annotations

import pytest

from conch.backends.generation.sampling import Limits
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure
from tests.unit.backends.generation.fake_engine import FakeEngine


def test_a_client_is_told_that_a_library_is_missing_and_not_where_the_server_installs_it() -> None:
    engine = FakeEngine()
    engine.lacking = frozenset({Feature.GRAMMAR})
    with pytest.raises(ConchError) as refused:
        Limits(engine).check_features(SamplingParams(structured_outputs=Structure("grammar", "root ::= x")))
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message == (
        "engine 'fake' does not have structured output by grammar: a library for it is not installed"
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([3] * 64, SamplingParams(), "the prompt has 64 tokens, but the context of the model is 64"),
        ([3], SamplingParams(max_tokens=64), "together more than the context of the model, 64"),
        ([256], SamplingParams(max_tokens=1), "input has token id 256; the vocabulary of the model has 256 tokens"),
        (
            [3] * 10,
            SamplingParams(max_tokens=20, beam_width=4),
            "4 beams of up to 30 tokens do not fit into the KV cache of the model, 100 tokens",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: list[int], sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ConchError, match=message) as refused:
        Limits(FakeEngine(cache_tokens=100)).check(prompt, sampling)
    assert refused.value.code is Code.INVALID_ARG
