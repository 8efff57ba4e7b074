"""An encoded request, the interface between encoders and senders. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: The smallest number of a text; all numbers have as many digits.
_FIRST_NUMBER: Final = 100_000


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded request: a whole HTTP request, or a gRPC message with its prefix.

    ``inferences`` is its batch size. ``fields_at`` is the offset of its sequence fields (bytes, -1: none).
    ``number_at`` is the offset of the number at the start of its text (bytes, -1: none), which senders change so that
    no two requests are equal.
    """

    data: bytes
    inferences: int = 1
    fields_at: int = -1
    number_at: int = -1

    def with_fields(self, fields: bytes) -> Payload:
        """Return the request with other sequence fields, which have the same size."""
        at = self.fields_at
        return Payload(self.data[:at] + fields + self.data[at + len(fields) :], self.inferences, at)

    def numbered(self, number: int) -> Payload:
        """Return the request with another number in its text."""
        at = self.number_at
        digits = b"%d" % (_FIRST_NUMBER + number % (9 * _FIRST_NUMBER))
        return Payload(self.data[:at] + digits + self.data[at + len(digits) :], self.inferences, number_at=at)


Payloads = Sequence[Payload]
