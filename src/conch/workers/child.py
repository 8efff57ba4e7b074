"""The program of a worker process: ``python child.py <socket fd>``.

Started by ``workers/process.py`` by its path, so that it runs in any environment that has numpy and
Python 3.8: of the server's packages it sees only ``conch`` itself, and nothing of what conch needs.
The main thread reads frames and makes the backend's calls; every failure is answered with a frame.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import signal
import socket
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch.workers.channel import Channel

_PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Serve the channel at ``fd`` until the server says stop or goes away."""
    end_with_parent()
    find_conch()
    # Ctrl+C and a service manager reach the whole group: the server finishes what runs, then ends its workers.
    # A handler, unlike SIG_IGN, is not inherited by programs that the model starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    # Cached bytecode is told from its source by size and whole seconds: too coarse for a quick reload.
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [""]  # the model's, as it would be for a program without arguments
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    from conch.workers.channel import Channel

    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=connection.close)
    serve(Channel(connection, on_closed=lambda: os._exit(1)))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that the model may have left


def end_with_parent() -> None:
    """On Linux, have this process killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def find_conch() -> None:
    """Make ``conch`` importable without its environment, and this folder's modules not by bare names."""
    workers = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != workers]
    package = types.ModuleType("conch")
    package.__path__ = [os.path.dirname(workers)]
    sys.modules["conch"] = package


def serve(channel: Channel) -> None:
    """Answer frames in order, from ``init`` to ``stop``."""
    from conch.errors import Code, ConchError

    backend: Any = None
    while True:
        header, payload = channel.receive()
        op = header["op"]
        try:
            if op == "execute":
                backend.execute(header, payload)
            elif op == "init":
                module, name = header["backend"].split(":")
                backend = getattr(importlib.import_module(module), name)(channel, header)
            elif op == "complete":
                channel.send({"op": "completed", "config": backend.complete()})
            elif op == "start":
                channel.send({"op": "ready", "async": backend.start(header["instance"], header["config"])})
            elif op == "stop":
                backend.stop()
                channel.send({"op": "stopped"})
                return
            elif not backend.control(header):
                raise ConchError(f"a worker does not know the frame {op!r}")
        except Exception as error:
            code = error.code if isinstance(error, ConchError) else Code.INTERNAL
            message = str(error) if isinstance(error, ConchError) else f"{type(error).__name__}: {error}"
            if op == "execute":
                channel.send(
                    {"op": "done", "batch": header.get("batch"), "times": (0, 0, 0), "error": [code.name, message]}
                )
            else:
                channel.send({"op": "failed", "error": [code.name, message]})


if __name__ == "__main__":
    main(int(sys.argv[1]))
