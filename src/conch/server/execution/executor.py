"""The base class of everything that runs the requests of a model version."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.inference import InferRequest
from conch.server.runtime_facts import RuntimeFacts
from conch.workers.host.process import WorkerProcess

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Executor:
    """Runs the requests of a model version, on the event loop.

    The defaults fit an executor without workers, without a queue and without sequences.
    """

    @property
    def ready(self) -> bool:
        """Whether requests can run now."""
        return True

    @property
    def unavailable_reason(self) -> str:
        """The reason why no remote server can take requests; empty if one can, or if this server runs them."""
        return ""

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The processes of the workers."""
        return ()

    @property
    def runtime_facts(self) -> RuntimeFacts:
        """The runtime facts of the workers."""
        return {}

    @property
    def sequences(self) -> int:
        """Number of sequences that are active or wait for a slot."""
        return 0

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence, which the server finishes when it stops."""
        return False

    def submit(self, request: InferRequest) -> None:
        """Run or enqueue a request, which then ends exactly once; raises :class:`ConchError` if it is refused."""
        raise NotImplementedError

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load a LoRA adapter into all workers. Raises ConchError, and then none of them has it."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter that was loaded so. Raises NOT_FOUND for another one."""
        raise NotImplementedError

    def retire(self) -> None:
        """Prepare for the end, because other versions, or none, get new requests; some may still arrive."""

    def abandon(self) -> None:
        """Fail all requests, queued and running; :meth:`stop` follows."""

    async def stop(self, seconds: float | None) -> None:
        """Fail queued requests and end all workers; by force after ``seconds``, or after their timeouts if None."""
