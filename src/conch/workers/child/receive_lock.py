"""Which of a worker's threads receives the next frame, without a word between them.

The threads that have nothing to do wait for the channel itself, and the kernel wakes one of them once there is a frame.
One that was woken beforehand, to wait in the place of one that is about to compute, would take a core away from what
that computes just as it begins: with two cores this took 0.3 ms of a network of 1.2 ms.
"""

import select
import threading

from conch.workers.child.channel import Channel

_FRAMES = select.EPOLLIN | select.EPOLLONESHOT
#: A socket can be written to at once, or soon; so somebody is woken for frames that have been read already.
_AT_ONCE = _FRAMES | select.EPOLLOUT


class ReceiveLock:
    """Of the threads that call ``take`` one at a time has the turn, until it calls ``pass_on``.

    The first thread has the turn from the beginning.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._of_thread = threading.local()
        self._of_thread.has = True
        self._epoll = select.epoll()
        # Not armed until the turn is passed on for the first time.
        self._epoll.register(channel.fileno(), select.EPOLLONESHOT)

    def take(self) -> None:
        """Wait for a frame and the turn to receive it; at once for the thread that has the turn.

        Whoever waits has the server told first of the memory that it gave back: all may be waiting, and none receiving.
        """
        if getattr(self._of_thread, "has", False):
            return
        self._channel.rest()
        while not self._epoll.poll():
            pass
        self._of_thread.has = True

    def pass_on(self) -> None:
        """Let another thread take the turn, once there is a frame; without effect for a thread that has none."""
        if getattr(self._of_thread, "has", False):
            self._of_thread.has = False
            self._epoll.modify(self._channel.fileno(), _AT_ONCE if self._channel.buffered else _FRAMES)
