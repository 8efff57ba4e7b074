"""Work for exchanges that may take longer than one iteration of the event loop.

Used by the handlers, for example to decode a large body or to load a model.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import coroutine
from typing import Any, Final

from conch.core.errors import ConchError, internal
from conch.core.tensors import Buffer
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import JSON, Header, HttpExchange
from conch.frontends.offloading.offloader import LARGE_BYTES
from conch.wire import compression

LOG = logging.getLogger("conch")

#: Maximum compression ratio of deflate.
_DEFLATED = 1032


def take_body(exchange: HttpExchange, limit: int) -> tuple[Buffer, str, int]:
    """Take the body out of an exchange, which then no longer keeps it; decompress it if it is small.

    Returns the body, its remaining ``Content-Encoding`` (empty for none), and its maximum decompressed size (bytes).
    ``limit`` is that of the settings (bytes). Raises the errors of :func:`conch.wire.compression.decompress`.
    """
    body, exchange.body = exchange.body, b""
    if b"content-encoding" not in exchange.headers:
        return body, "", len(body)
    encoding = exchange.headers[b"content-encoding"].decode("latin-1")
    if compression.is_identity(encoding):
        return body, "", len(body)
    if len(body) <= LARGE_BYTES:
        if limit <= LARGE_BYTES:
            plain: Buffer | None = compression.decompress(body, encoding, limit)
        else:
            plain = compression.decompress_limited(body, encoding, LARGE_BYTES)
        if plain is not None:
            return plain, "", len(plain)
    return body, encoding, max(min(_DEFLATED * len(body), limit), LARGE_BYTES + 1)


#: Keeps the tasks until they are done.
_TASKS: Final[set[asyncio.Task[None]]] = set()


def start_work(
    exchange: HttpExchange,
    work: Coroutine[Any, Any, None],
    *,
    cancel_on_disconnect: bool = False,
    held: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run ``work``, which responds to the exchange; if it raises, the exchange is refused.

    Work that need not wait is done when this function returns, without a task, which would take longer than most
    requests. With ``cancel_on_disconnect``, work that waits is cancelled if the client disconnects before it ends,
    unless it sets ``exchange.on_disconnect`` later. The context of ``held`` is entered while the work waits.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return
    except Exception as error:
        _fail(exchange, error)
        return
    exchange.worked_for = True
    loop = asyncio.get_running_loop()
    stack = ExitStack()
    stack.enter_context(held())
    run = _run(exchange, _continue(work, awaited), stack)
    task = loop.create_task(run)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)

    def cancel() -> None:
        # Only after its first step a task passes its cancellation on to the work.
        if inspect.getcoroutinestate(run) == inspect.CORO_CREATED:
            loop.call_soon(task.cancel)
        else:
            task.cancel()

    if cancel_on_disconnect:
        exchange.on_disconnect = cancel


async def respond_after(
    exchange: HttpExchange, action: Awaitable[object], content: Header = JSON, body: bytes = b""
) -> None:
    """Respond with ``body``, whose type is ``content``, when ``action`` completes."""
    await action
    exchange.respond(200, [content], body)


async def _run(exchange: HttpExchange, rest: Awaitable[None], held: ExitStack) -> None:
    try:
        with held:
            await rest
    except Exception as error:
        _fail(exchange, error)
    finally:
        exchange.worked_for = False
        if exchange.gone:
            exchange.let_go()


def _fail(exchange: HttpExchange, error: Exception) -> None:
    if not isinstance(error, ConchError):
        LOG.error("a request to %s failed", exchange.path.decode("latin-1"), exc_info=error)
        error = internal("internal server error")
    if exchange.started:
        exchange.abort()
    else:
        refuse(exchange, error)


@coroutine
def _continue(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that waits for ``awaited``; Python 3.12 has eager tasks for this."""
    while True:
        step, value = work.send, None
        try:
            yield awaited
        except BaseException as error:
            step, value = work.throw, error
        try:
            awaited = None
            awaited = step(value)
        except StopIteration:
            return
        finally:
            value = None  # an error refers to this frame, which must not refer back to it or to what failed
