"""Finds the server's processes on this machine: those that listen on its port.

Called once per level, in the measuring process.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import psutil

from conch.machine.ports import listening_processes, listens
from conch.measure.perf.senders.channels.connecting import Address

#: Programs that listen on behalf of a server elsewhere: on another machine, or in a container.
_FORWARDERS: Final = ("docker-proxy", "kubectl", "rootlessport", "slirp4netns", "ssh", "sshd")


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """The listening processes, ancestors of all others of the server; ``unseen`` is the reason if there are none."""

    pids: tuple[int, ...] = ()
    unseen: str = ""


def find_server(address: Address) -> ServerProcesses:
    """Return the server's processes, if they are on this machine and visible."""
    if not _is_local(address.host):
        return ServerProcesses(unseen=f"the server runs on another machine, {address.host}")
    try:
        oldest = [_oldest(process, address.port) for process in listening_processes(address.port)]
        names = {process.pid: process.name() for process in oldest}
    except (psutil.Error, OSError):
        names = {}
    if not names:
        return ServerProcesses(
            unseen=f"the processes that listen on port {address.port} are not visible (they belong to another"
            " user or a container), so the interference is unknown"
        )
    for name in names.values():
        if name in _FORWARDERS:
            return ServerProcesses(
                unseen=f"port {address.port} is forwarded by {name}: the server's processes are not visible, so the"
                " interference is unknown"
            )
    return ServerProcesses(tuple(sorted(names)))


def _oldest(process: Any, port: int) -> Any:
    """Return the first process that has the socket, from which the others inherited it."""
    parent = process.parent()
    while parent is not None:
        connections = getattr(parent, "net_connections", None) or parent.connections  # before psutil 6
        try:
            shared = any(listens(connection, port) for connection in connections("tcp"))
        except psutil.AccessDenied:
            break
        if not shared:
            break
        process, parent = parent, parent.parent()
    return process


def _is_local(host: str) -> bool:
    """Return whether a host is an address of this machine."""
    own = {address.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for address in interface}
    try:
        resolved: list[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {entry[4][0].partition("%")[0] for entry in resolved}
    return any(ip_address(address).is_loopback or address in own for address in addresses)
