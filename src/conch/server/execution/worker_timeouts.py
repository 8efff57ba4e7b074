"""Worker timeouts from the server's settings."""

from __future__ import annotations

from dataclasses import replace

from conch.core.errors import invalid
from conch.options.settings import Settings
from conch.workers.host.liveness import WorkerTimeouts


def worker_timeouts(settings: Settings) -> WorkerTimeouts:
    """The timeouts of every worker."""
    return WorkerTimeouts(
        stopped=settings.stopped_worker_secs,
        silent=settings.silent_worker_secs,
        execution=settings.execute_timeout_secs,
        step=settings.step_timeout_secs,
        load_idle=settings.load_idle_secs,
        load=settings.load_timeout_secs,
        unload=settings.unload_timeout_secs,
        finalize=settings.finalize_timeout_secs,
    )


def with_stub_timeout(timeouts: WorkerTimeouts, text: str | None) -> WorkerTimeouts:
    """Apply Triton's ``stub-timeout-seconds``, the Python backend's timeout for worker startup without the model.

    Raises INVALID_ARG if ``text`` is not a whole number of seconds.
    """
    if text is None:
        return timeouts
    if not (text.isascii() and text.isdigit()):
        raise invalid(f"--backend-config: stub-timeout-seconds is '{text}'; it must be a whole number of seconds")
    return replace(timeouts, start=int(text))
