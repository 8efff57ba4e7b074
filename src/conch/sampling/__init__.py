"""Sampling parameters: their names in every protocol, their values and what engines need for them, declared once."""

from typing import Final

#: The task of checkpoints that write text, token by token.
TEXT_GENERATION: Final = "text-generation"
