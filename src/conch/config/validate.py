"""Every check of a configuration, in the order in which loading makes them."""

from __future__ import annotations

from conch.config.schema import ModelConfig


def validate(config: ModelConfig) -> None:
    """to be filled"""
