"""Sampling parameters, declared once: their names in each protocol, their values and the required engine features."""

from typing import Final

#: The task of checkpoints that generate text token by token.
TEXT_GENERATION: Final = "text-generation"
