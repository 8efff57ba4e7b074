"""Puts the facts together: the only place that asks for all of them."""

from __future__ import annotations

import platform
from importlib.util import find_spec

from conch import __version__
from conch.doctor.cache import cache
from conch.doctor.facts import Facts
from conch.doctor.gpus import gpus
from conch.doctor.machine import memory, ports, process_limits, processor
from conch.doctor.packages import packages
from conch.settings import SERVER_VERSION, Settings


def examine() -> Facts:
    """The facts of this machine and this environment, as they are now."""
    settings = Settings()
    services = {"HTTP": settings.http_port, "GRPC": settings.grpc_port, "metrics": settings.metrics_port}
    return Facts(
        conch=__version__,
        protocol=SERVER_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        uvloop=find_spec("uvloop") is not None,
        packages=packages(),
        gpus=gpus(),
        processor=processor(),
        memory=memory(),
        limits=process_limits(),
        ports=ports(services, settings.http_address),
        cache=cache(),
    )
