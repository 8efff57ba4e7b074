"""Which NVIDIA GPUs this process may use.  Asked once, when the server starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[int, ...]:
    """Ids of the GPUs, numbered from 0 as CUDA does among those that ``CUDA_VISIBLE_DEVICES`` leaves."""
    try:
        present = len(list(driver.iterdir()))
    except OSError:
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(range(present))
    return tuple(range(len(_names(visible))))


def environment_for(gpu: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that is to see GPU number ``gpu`` and no other."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = _names(visible) if visible is not None else []
    return {**environment, "CUDA_VISIBLE_DEVICES": names[gpu] if gpu < len(names) else str(gpu)}


def _names(visible: str) -> list[str]:
    """The devices that CUDA would take from the variable: up to the first empty or negative one."""
    names = []
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return names
