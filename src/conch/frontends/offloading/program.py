"""The program of a codec process: ``python program.py <socket fd>``.

``pool.py`` starts it by its path, with the server's search path. It does one piece of work at a time, and ends when the
server closes the socket or dies.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
import traceback
from typing import Final, NoReturn

from conch.core.errors import ConchError, internal, invalid
from conch.core.tensors import Buffer
from conch.frontends.offloading import decode, encode
from conch.frontends.offloading.documents import error_document
from conch.frontends.offloading.memory import Header, SharedMessage, receive
from conch.workers.child.forked import end_with_parent

WORK: Final = {**decode.WORK, **encode.WORK}
#: Maximum size of a header (bytes), which the server reads on its event loop.
MOST_HEADER: Final = 8 << 20
#: Maximum number of tensors in a request, or of requests in a body: more would block the event loop.
MOST_PARTS: Final = 100_000


def main(fd: int) -> NoReturn:
    """Serve the socket at ``fd``."""
    end_with_parent()
    # Ctrl+C and service managers signal the whole process group; the server ends this process when it is unused.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _be_killed_first()
    # Parsed data has no cycles, and the collector would traverse all of it repeatedly.
    gc.disable()
    connection = socket.socket(fileno=fd)
    while True:
        try:
            header, body = receive(connection)
        except EOFError:
            sys.exit(0)
        with SharedMessage(*_answer(connection, header, body)) as message:
            del header, body
            message.send(connection)


def _answer(connection: socket.socket, header: Header, body: memoryview) -> tuple[Header, list[Buffer]]:
    """Return the result of some work, or an error."""

    def ask(question: Header) -> Header:
        with SharedMessage({"ask": question}) as message:
            message.send(connection)
        told = receive(connection)[0]
        if "refused" in told:
            raise _RefusedError
        return told

    try:
        result, parts = _work(header["work"])(header, body, ask)
        result["parts"] = list(map(len, parts))
        if len(parts) > MOST_PARTS:
            raise invalid(f"the request has {len(parts)} tensors; at most {MOST_PARTS} are allowed")
        size = len(json.dumps(result))
        if size > MOST_HEADER:
            raise invalid(f"the names and parameters of the request take {size} bytes; at most {MOST_HEADER} may be")
    except ConchError as error:
        return {"error": error_document(error), **_usage()}, []
    except _RefusedError:
        return {"error": None, **_usage()}, []
    except Exception as error:
        failed = internal(f"{type(error).__name__}: {error}")
        return {"error": error_document(failed), "traceback": traceback.format_exc(), **_usage()}, []
    return {"result": result, **_usage()}, parts


def _work(name: str) -> decode.Work:
    if name in WORK:
        return WORK[name]
    # This import takes as long as all the others, and not every server uses gRPC.
    from conch.frontends.offloading import grpc_messages

    return grpc_messages.WORK[name]


class _RefusedError(Exception):
    """Raised when the server refuses the request after a question."""


def _usage() -> Header:
    """Return the peak resident memory of this process (bytes); the server replaces a process that has become large."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("VmHWM:")]
    except OSError:
        lines = []
    return {"peak": int(lines[0][1]) << 10 if lines else 0}


def _be_killed_first() -> None:
    """Let the kernel end this process rather than the server when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
