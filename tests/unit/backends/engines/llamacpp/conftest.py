"""The stand-in for the package ``llama_cpp``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from conch.backends.engines.llamacpp.library import library
from tests.fakes import llama_cpp


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)
    library.cache_clear()
    yield
    library.cache_clear()
    llama_cpp.contexts.clear()
