"""The response cache of an ensemble, whose answers are its members': when one is loaded anew, others count.

Made by the loader; asked on the event loop, at each request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from conch.caching.cache import CacheArea
from conch.errors import ConchError
from conch.server.model import Model


class MembersArea:
    """Gives the entries that count now, which ``make`` makes for the models that ``origins`` finds.

    A response of members that have been replaced meanwhile is not kept, however long it was under way.
    """

    def __init__(self, origins: Callable[[], Sequence[Model]], make: Callable[[Sequence[Model]], CacheArea]) -> None:
        self._origins = origins
        self._make = make
        found = origins()
        self._area = make(found)
        self._serials = _serials(found)

    def __call__(self) -> CacheArea:
        try:
            found = self._origins()
        except ConchError:  # one is away; what the others do about it is not the cache's business
            return self._area
        serials = _serials(found)
        if serials != self._serials:
            self._area.forget()
            self._area, self._serials = self._make(found), serials
        return self._area


def _serials(models: Sequence[Model]) -> list[int]:
    return [model.serial for model in models]


def joint_identity(identity: bytes, origins: Sequence[Model]) -> bytes:
    """A digest of what a version of this ``identity`` answers from, of which ``origins`` are a part."""
    if not origins:
        return identity
    return hashlib.blake2b(b"".join([identity, *(model.identity for model in origins)]), digest_size=16).digest()
