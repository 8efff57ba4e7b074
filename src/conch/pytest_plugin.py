"""The fixture ``load_model`` for pytest, which knows this module by conch's entry point.

Loaded by every run of pytest where conch is installed, so it imports nothing before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conch.testing import ModelUnderTest


@pytest.fixture
def load_model() -> Iterator[Callable[..., ModelUnderTest]]:
    """``load_model("models/greeter")`` is :func:`conch.testing.load`; models are finalised when the test has ended."""
    from contextlib import ExitStack

    from conch import testing

    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(testing.load(*arguments, **options))
