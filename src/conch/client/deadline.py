"""The deadline of a call, from its start to its last response."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Final, Self

from conch.core.errors import Code, ConchError, invalid


class DeadlineError(ConchError):
    """No response arrived before the deadline."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a call: ``timeout`` seconds after it began, at ``at`` on the monotonic clock; None is never.

    It covers the whole call: connecting, reading the model's metadata, loading it, and all responses.
    """

    timeout: float | None
    at: float | None

    @classmethod
    def after(cls, timeout: float | None) -> Self:
        """The deadline of a call that begins now. Raises INVALID_ARG unless ``timeout`` is positive or None."""
        if timeout is None:
            return cls(None, None)
        if not timeout > 0:
            raise invalid(f"timeout must be a positive number of seconds, or None for no limit; got {timeout!r}")
        return cls(timeout, monotonic() + timeout)

    def left(self) -> float | None:
        """The seconds left; None for no limit. Raises TimeoutError after the deadline."""
        if self.at is None:
            return None
        left = self.at - monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def no_response(self, model: str) -> ConchError:
        """The error of a call without a response before the deadline; an empty ``model`` means the server."""
        source = f"model '{model}'" if model else "the server"
        return DeadlineError(f"no response from {source} within {self.timeout or 0:g} s", Code.UNAVAILABLE)


NO_DEADLINE: Final = Deadline(None, None)
