"""The pytest fixture ``load_model``, which pytest finds through conch's entry point.

Every run of pytest loads this module if conch is installed, so it imports nothing until a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conch.testing import ModelUnderTest


@pytest.fixture
def load_model() -> Iterator[Callable[..., ModelUnderTest]]:
    """Provide :func:`conch.testing.load` as ``load_model("models/greeter")``; closes models after the test."""
    from contextlib import ExitStack

    from conch import testing

    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(testing.load(*arguments, **options))
