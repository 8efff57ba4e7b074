"""The program of a worker process: ``python worker.py <socket fd>``, with ``--at-terminal`` to debug a model.

With ``--template`` it runs a worker template (``template.py``). The server starts it by its path
(``workers/host/spawn.py``), so that it runs in any environment with numpy and Python 3.9 or newer: of the server's
packages, only ``conch`` itself can be imported, without its requirements. The main thread reads frames and calls the
backend; a backend may request more threads that do the same. Every failure is reported with a frame.
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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch.workers.child.channel import Channel
    from conch.workers.child.receive_lock import ReceiveLock

#: The argument that gives the model the server's terminal.
AT_TERMINAL = "--at-terminal"
#: The argument that makes the process a template.
TEMPLATE = "--template"


def main(fd: int, *arguments: str) -> None:
    """Serve the channel ``fd``, or a template's control socket, until the server sends ``stop`` or ends."""
    find_conch()
    from conch.workers.child.forked import end_with_parent
    from conch.workers.child.messages import line_buffer_streams

    end_with_parent()
    at_terminal = AT_TERMINAL in arguments
    # Ctrl+C and service managers signal the whole group, but the server must finish its requests before it stops the
    # workers. Unlike SIG_IGN, a handler is not inherited by programs that the model starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    # Bytecode caches compare the source's size and its time in whole seconds: too coarse for a quick reload.
    sys.dont_write_bytecode = True
    if not at_terminal:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    sys.argv = [""]  # for the model: a program without arguments
    line_buffer_streams()
    os.set_inheritable(fd, False)
    if TEMPLATE in arguments:
        from conch.workers.child.template import TemplateProgram

        TemplateProgram(socket.socket(fileno=fd), work).serve()
    work(fd, at_terminal)


def work(fd: int, at_terminal: bool = False) -> None:
    """Run the worker at the channel ``fd``; does not return."""
    from conch.workers.child.breakpoints import debug_at_terminal, pass_breakpoints
    from conch.workers.child.channel import Channel
    from conch.workers.child.forked import keep_from_children, take_name
    from conch.workers.child.heartbeat import HEARTBEAT
    from conch.workers.child.messages import send_messages
    from conch.workers.child.receive_lock import ReceiveLock

    take_name("conch-worker")
    if not at_terminal:  # only the server's process group may use the terminal
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
    """Make ``conch`` importable without its environment, and hide the modules of this folder from bare imports."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != folder]
    package = types.ModuleType("conch")
    package.__path__ = [os.path.dirname(os.path.dirname(folder))]
    sys.modules["conch"] = package


class Worker:
    """Handles frames from ``init`` to ``stop``, in as many threads as the backend requests.

    With several threads, any idle one receives the next frame, so that frames are not handed over between threads. The
    others stay asleep until it starts to compute, because they would only contend for the interpreter lock. A single
    thread holds the receive lock all the time.
    """

    def __init__(self, channel: Channel, receive_lock: ReceiveLock) -> None:
        self._channel = channel
        self._backend: Any = None
        self._open_error: Exception | None = None  # why the backend could not be created
        self._receive_lock = receive_lock
        self._several = False

    def pass_receive_lock(self) -> None:
        """Pass the receive lock to another thread, unless this thread has done so since its last frame."""
        if self._several:
            self._receive_lock.pass_on()

    def _serve_along(self) -> None:
        """Handle frames in an additional thread; an exception ends the worker, as in the main thread."""
        try:
            self.serve()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def serve(self) -> None:
        """Handle frames; does not return."""
        from conch.core.errors import Code, ConchError, error_text

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
                    end_openmp_threads()
                    if hasattr(self._backend, "slots"):
                        ready["slots"] = self._backend.slots
                    ready["runs_with"] = getattr(self._backend, "runtime_facts", {"engine": _interpreter()})
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
                    raise ConchError(f"unknown frame {op!r}")
            except Exception as error:
                code = error.code if isinstance(error, ConchError) else Code.INTERNAL
                message = error_text(error)
                public = error.public if isinstance(error, ConchError) else message
                if op != "execute" or code is not Code.INVALID_ARG:  # requests that are refused do not fill the log
                    self._log_cause(error, message.partition("\n")[0])
                if op == "execute":
                    failed = {
                        "error": [code.name, public, getattr(error, "param", None), getattr(error, "reason", None)]
                    }
                    channel.send({"op": "done", "batch": header.get("batch"), "times": (0, 0, 0), **failed})
                else:
                    channel.send({"op": "failed", "error": [code.name, message, public]})

    def _log_cause(self, error: Exception, heading: str) -> None:
        """Log the traceback of an unexpected or model exception; the client receives only its message."""
        from conch.core.errors import ConchError
        from conch.workers.child.messages import log_frame

        cause = error.__cause__ if isinstance(error, ConchError) else error
        if cause is not None and not isinstance(cause, ConchError):
            self._channel.send(log_frame(cause, heading))

    def _open(self, init: Any) -> None:
        """Create the backend; an error is reported in reply to the next frame, because ``init`` has no reply."""
        module, name = init["backend"].split(":")
        try:
            self._backend = getattr(importlib.import_module(module), name)(self._channel, init)
            self._backend.before_computing = self.pass_receive_lock
        except Exception as error:
            self._open_error = error


def end_openmp_threads() -> None:
    """End the threads that GNU's OpenMP, with which PyTorch computes, keeps for the calling thread. Linux only.

    Each thread that computes gets threads of its own. If all together are more than the process has cores, threads that
    wait for each other sleep at once instead of spinning, so that short computations take several times as long.
    """
    import ctypes

    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for path in {line.split(None, 5)[-1].strip() for line in maps if "libgomp" in line}:
            pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # since GCC 9
            if pause is not None:
                pause(1)  # omp_pause_soft


def _none(instance: Any) -> tuple[list[str], dict[str, str]]:
    """Return no modules to import and no variables to set: the default for backends without ``preloads``."""
    return [], {}


def _interpreter() -> str:
    return "python " + ".".join(map(str, sys.version_info[:3]))


def end() -> None:
    """Exit the process like a program that ends normally, but without waiting for threads."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
