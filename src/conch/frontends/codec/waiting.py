"""What waits for a codec process, and which of it is next.  Pure.

There are two processes.  The first takes the oldest work, so that none waits for ever; the second takes the smallest,
and nothing that is ``GIANT``, so that no number of giants holds up the rest.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

from conch.errors import unavailable

#: From this size on (bytes, those of a compressed body as many as it may become), work is left to the first process.
GIANT: Final = 8 << 20
#: How much work of either size may wait.
_MOST_GIANTS: Final = 32
_MOST_OTHERS: Final = 512


class Sized(Protocol):
    @property
    def size(self) -> int: ...


_Work = TypeVar("_Work", bound=Sized)


class CodecQueue(list[_Work]):
    """Work in the order in which it came."""

    def put(self, work: _Work) -> None:
        """Raises UNAVAILABLE where too much waits."""
        giant = work.size >= GIANT
        if sum((one.size >= GIANT) is giant for one in self) >= (_MOST_GIANTS if giant else _MOST_OTHERS):
            raise unavailable("too many large requests wait to be decoded; try again later")
        self.append(work)

    def take(self, *, smallest: bool) -> _Work | None:
        """The oldest work, or the smallest that is no giant; None where there is none."""
        if not smallest:
            return self.pop(0) if self else None
        chosen = min((one for one in self if one.size < GIANT), key=lambda one: one.size, default=None)
        if chosen is not None:
            self.remove(chosen)
        return chosen
