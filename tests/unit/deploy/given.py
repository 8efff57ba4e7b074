"""A deployment to plan for, without files."""

from __future__ import annotations

from typing import Any

from conch.config.schema import ModelConfig
from conch.deploy.bundle import Deployment
from conch.deploy.requirements import Contents, Entry, RepositoryRequirements


def given(model: str = "m", endpoint: str = "infer", size: int = 10, **requirements: Any) -> Deployment:
    """One of a model of ``size`` bytes; ``requirements`` are fields of ``RepositoryRequirements``."""
    found = RepositoryRequirements({model: ModelConfig()}, **requirements)
    return Deployment("a-name", model, endpoint, found, Contents((Entry("m/1/x", None, size),)), "{}")
