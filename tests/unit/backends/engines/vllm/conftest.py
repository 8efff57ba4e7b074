"""The stand-in for the package ``vllm``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conch.backends.generation.engine import EngineSpec
from tests.fakes import vllm


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, contents in vllm.MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    yield
    vllm.engines.clear()


def spec(**settings: Any) -> EngineSpec:
    return EngineSpec(Path("/models/m"), {}, **{"eos_ids": (99,), **settings})
