"""Containers as processes: ``conch serve`` with a manifest's arguments, over folders and ports of the test's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers import CONCH, ConchServer

#: What the image's entry point adds, but for the address.
LOCAL = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1")

#: The user of the image, where the tests may become somebody else.
USER = 65532 if os.geteuid() == 0 else os.geteuid()
#: What lets that user read wherever the interpreter of the tests is, and write nowhere.
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


def become() -> list[str]:
    """What a command begins with to be run by the image's user; nothing where the tests cannot become another one."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


class ContainerProcess(ConchServer):
    """The process of a container; ``places`` says which folders stand for which of its own."""

    def __init__(self, arguments: Sequence[str], places: Mapping[str, Path], log: Path) -> None:
        super().__init__("", log=log)
        ports = {f"--{name}-port": getattr(self, name).split(":")[1] for name in ("http", "grpc", "metrics")}
        given: list[str] = []
        for argument in arguments:
            flag = argument.partition("=")[0]
            for inside, outside in places.items():
                argument = argument.replace(inside, str(outside))
            given.append(f"{flag}={ports[flag]}" if flag in ports else argument)
        self.command = [str(CONCH), "serve", *LOCAL, *given]
