"""The errors with which calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conch.core.errors import Code, ConchError


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> ConchError:
    """Return the error that a call raises; fails if it raises none."""
    with pytest.raises(ConchError) as caught:
        call(*arguments, **options)
    return caught.value


def refused_argument(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the message of a call that is refused for its arguments, in one line."""
    error = refused(call, *arguments, **options)
    assert error.code is Code.INVALID_ARG and "\n" not in error.message
    return error.message
