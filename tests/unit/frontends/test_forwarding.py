"""Headers and metadata that become parameters of requests."""

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest
from conch.frontends.forwarding import HeaderForwarding

HEADERS = [("x-first", "1"), ("accept", "*/*"), ("X-Second", "2")]


def request() -> InferRequest:
    return InferRequest("m", {}, lambda response: None, parameters={"own": True})


def test_headers_that_match_somewhere_are_forwarded() -> None:
    made = request()
    HeaderForwarding("^X-", "--option").add(HEADERS, made)
    assert made.parameters == {"own": True, "x-first": "1", "X-Second": "2"}


@pytest.mark.parametrize(("pattern", "names"), [("(?-i)^x-", {"x-first"}), ("(?i)SECOND", {"X-Second"})])
def test_pattern_says_whether_case_counts(pattern: str, names: set[str]) -> None:
    made = request()
    HeaderForwarding(pattern, "--option").add(HEADERS, made)
    assert set(made.parameters) == {"own", *names}


def test_empty_pattern_forwards_nothing() -> None:
    made = request()
    forwarding = HeaderForwarding("", "--option")
    forwarding.add(HEADERS, made)
    assert not forwarding.enabled
    assert made.parameters == {"own": True}


@pytest.mark.parametrize("name", ["priority", "triton_anything"])
def test_reserved_header_is_refused(name: str) -> None:
    with pytest.raises(ConchError) as caught:
        HeaderForwarding(".", "--option").add([(name, "1")], request())
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConchError) as caught:
        HeaderForwarding("(", "--http-header-forward-pattern")
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith("invalid --http-header-forward-pattern '(': ")
