"""The interface of measured servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conch.core.errors import ConchError
from conch.measure.perf.senders.channels.connecting import Address

#: Overrides by model name, as in ``Candidate.overrides``.
Overrides = Mapping[str, Mapping[str, Any]]
#: Configurations in force by model name, as in ``GET /v2/models/M/config``.
Configs = Mapping[str, Mapping[str, Any]]


class ServerGone(ConchError):
    """The server has ended or does not respond; INTERNAL because its previous actions are unknown."""


class ServerLost(ConchError):
    """The server has ended and does not return: nothing more can be measured."""


class AnalyzedServer(Protocol):
    """A server that loads the profiled models under one configuration after the other."""

    @property
    def address(self) -> Address:
        """The address of requests, for the measured protocol."""

    def load(self, overrides: Overrides) -> Configs:
        """Load all models, with ``overrides`` of the repository's configurations.

        Returns the configurations in force, including those of ensemble steps, which precede their ensemble. Raises
        ServerGone, and ConchError for a configuration that does not load.
        """

    def check(self) -> None:
        """Raise ServerGone if the server cannot be reached."""

    def complaints(self) -> str:
        """Return the server's errors since the last load; empty if its log is unavailable."""

    def restart(self) -> None:
        """Restart the server after :class:`ServerGone`, or if a model completes no request.

        A server that was not started here is only waited for. Raises ServerLost if it does not return.
        """

    def close(self) -> None:
        """Restore the initial state; raises INTERNAL, naming models that could not be restored."""
