"""Structures that fail while their first tokens are tried."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")

import llguidance

from conch.core.errors import Code, ConchError
from conch.core.sampling.structures import Structure
from tests.unit.backends.batching import schemas


class _Matcher:
    """A matcher of llguidance that allows no token, without an error."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def grammar_from_regex(text: str) -> str:
        return text

    def deep_copy(self) -> _Matcher:
        return self

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        return bytes(40)


class _FailingMatcher(_Matcher):
    def compute_bitmask(self) -> bytes:
        raise RuntimeError("too many states\nat 1")


@pytest.mark.parametrize(
    ("matcher", "message"), [(_Matcher, "no text fits its structure"), (_FailingMatcher, "too many states")]
)
def test_structure_whose_first_tokens_fail_is_refused(
    matcher: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "LLMatcher", matcher)
    with pytest.raises(ConchError) as caught:
        schemas.compiler().compile(Structure("regex", "a"))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == f"structured_outputs: this regex does not compile: {message}"
