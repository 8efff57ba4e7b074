"""Checks of requests against the features of an engine."""

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
