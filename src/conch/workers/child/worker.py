"""The program of a worker process: ``python worker.py <socket fd>``, and ``--at-terminal`` where a model is debugged.

With ``--template`` it is that of a process which forks workers (``template.py``).  The server starts it
(``workers/host/spawn.py``) by its path, so that it runs in any environment that has numpy and
Python 3.9: of the server's packages it sees only ``conch`` itself, and nothing of what conch needs.
The main thread reads frames and makes the backend's calls; a backend may ask for more threads that do
the same.  Every failure is answered with a frame.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch.workers.child.channel import Channel
    from conch.workers.child.receive_lock import ReceiveLock

#: The argument that leaves the server's terminal to the model.
AT_TERMINAL = "--at-terminal"
#: The argument that makes it a template.
TEMPLATE = "--template"


def main(fd: int, *arguments: str) -> None:
    """Serve the channel at ``fd``, or the control socket of a template, until the server says stop or goes away."""
    find_conch()
    from conch.workers.child.messages import line_buffer_streams
    from conch.workers.child.parentage import end_with_parent

    end_with_parent()
    at_terminal = AT_TERMINAL in arguments
    # Ctrl+C and a service manager reach the whole group: the server finishes what runs, then ends its workers.
    # A handler, unlike SIG_IGN, is not inherited by programs that the model starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    # Cached bytecode is told from its source by size and whole seconds: too coarse for a quick reload.
    sys.dont_write_bytecode = True
    if not at_terminal:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    sys.argv = [""]  # the model's, as it would be for a program without arguments
    line_buffer_streams()
    os.set_inheritable(fd, False)
    if TEMPLATE in arguments:
        from conch.workers.child.template import TemplateProgram

        TemplateProgram(socket.socket(fileno=fd), work).serve()
    work(fd, at_terminal)


def work(fd: int, at_terminal: bool = False) -> None:
    """Be the worker at the channel ``fd``; does not return."""
    from conch.workers.child.breakpoints import debug_at_terminal, pass_breakpoints
    from conch.workers.child.channel import Channel
    from conch.workers.child.forked import keep_from_children
    from conch.workers.child.heartbeat import HEARTBEAT
    from conch.workers.child.messages import send_messages
    from conch.workers.child.parentage import take_name
    from conch.workers.child.receive_lock import ReceiveLock

    take_name("conch-worker")
    if not at_terminal:  # which is for the server's process group alone
        os.setpgid(0, 0)
    connection = socket.socket(fileno=fd)
    channel = Channel(connection, on_closed=lambda: os._exit(1))
    keep_from_children(channel)
    HEARTBEAT.start(channel)
    send_messages(channel)
    if at_terminal:
        debug_at_terminal(channel)
    else:
        pass_breakpoints(channel)
    Worker(channel, ReceiveLock(channel)).serve()


def find_conch() -> None:
    """Make ``conch`` importable without its environment, and this folder's modules not by bare names."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != folder]
    package = types.ModuleType("conch")
    package.__path__ = [os.path.dirname(os.path.dirname(folder))]
    sys.modules["conch"] = package


class Worker:
    """Answers frames from ``init`` to ``stop``, in one thread or in as many as the backend wants.

    With several, whichever thread is not busy receives the next frame, so that none is handed over.  It is
    the only one that runs until it says that it is going to compute: threads that wake up meanwhile would
    only fight for the interpreter.  One alone keeps the turn.
    """

    def __init__(self, channel: Channel, turns: ReceiveLock) -> None:
        self._channel = channel
        self._backend: Any = None
        self._open_error: Exception | None = None  # why there is no backend
        self._receive_lock = turns
        self._several = False

    def let_another_receive(self) -> None:
        """Let another thread receive frames, unless this one has let it already since its last frame."""
        if self._several:
            self._receive_lock.pass_on()

    def _serve_along(self) -> None:
        """Answer frames in a thread; whatever ends it ends the worker, as it would in the main thread."""
        try:
            self.serve()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def serve(self) -> None:
        """Answer frames; does not return."""
        from conch.errors import Code, ConchError

        channel = self._channel
        while True:
            self._receive_lock.take()
            header, payload = channel.receive()
            op = header["op"]
            try:
                if self._open_error is not None and op != "stop":
                    raise self._open_error
                if op == "execute":
                    self._backend.execute(header, payload)
                elif op == "prepare":
                    self._backend.prepare(header, payload)
                elif op == "init":
                    self._open(header)
                elif op == "complete":
                    channel.send({"op": "completed", "config": self._backend.complete()})
                elif op == "preloads":
                    preloads = getattr(self._backend, "preloads", _none)(header["instance"])
                    channel.send({"op": "preloads", "modules": preloads[0], "environment": preloads[1]})
                elif op == "start":
                    ready = {"op": "ready", "async": self._backend.start(header["instance"], header["config"])}
                    if hasattr(self._backend, "slots"):
                        ready["slots"] = self._backend.slots
                    ready["runs_with"] = getattr(self._backend, "runs_with", {"engine": _interpreter()})
                    ready["dependencies"] = getattr(self._backend, "dependencies", [])
                    channel.send(ready)
                    self._several = self._backend.threads > 1
                    for number in range(1, self._backend.threads):
                        threading.Thread(target=self._serve_along, name=f"conch-{number}", daemon=True).start()
                elif op == "stop":
                    if self._backend is not None:
                        self._backend.stop()
                    channel.send({"op": "stopped"})
                    end()
                elif not self._backend.control(header):
                    raise ConchError(f"a worker does not know the frame {op!r}")
            except Exception as error:
                code = error.code if isinstance(error, ConchError) else Code.INTERNAL
                message = str(error) if isinstance(error, ConchError) else f"{type(error).__name__}: {error}"
                public = error.public if isinstance(error, ConchError) else message
                self._log_cause(error, message.partition("\n")[0])
                if op == "execute":
                    failed = {"error": [code.name, public]}
                    channel.send({"op": "done", "batch": header.get("batch"), "times": (0, 0, 0), **failed})
                else:
                    channel.send({"op": "failed", "error": [code.name, message, public]})

    def _log_cause(self, error: Exception, heading: str) -> None:
        """Log the traceback of what was not foreseen, or of what the model raised; who asked gets the message alone."""
        from conch.errors import ConchError
        from conch.workers.child.tracebacks import log_frame

        cause = error.__cause__ if isinstance(error, ConchError) else error
        if cause is not None and not isinstance(cause, ConchError):
            self._channel.send(log_frame(cause, heading))

    def _open(self, init: Any) -> None:
        """Make the backend; what is wrong with it is the answer to the next frame, since ``init`` has none."""
        module, name = init["backend"].split(":")
        try:
            self._backend = getattr(importlib.import_module(module), name)(self._channel, init)
            self._backend.before_computing = self.let_another_receive
        except Exception as error:
            self._open_error = error


def _none(instance: Any) -> tuple[list[str], dict[str, str]]:
    """What a backend imports before it loads a model, and the variables to set before: nothing worth sharing."""
    return [], {}


def _interpreter() -> str:
    return "python " + ".".join(map(str, sys.version_info[:3]))


def end() -> None:
    """Leave the process as a program that has come to its end, but without waiting for its threads."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
