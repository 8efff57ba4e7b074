"""The NVIDIA GPUs that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[int, ...]:
    """Return the numbers of the GPUs, from 0, as CUDA numbers the devices in ``CUDA_VISIBLE_DEVICES``."""
    try:
        present = len(list(driver.iterdir()))
    except OSError:
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(range(present))
    return tuple(range(len(_names(visible))))


def environment_for(gpu: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that sees only the GPU with number ``gpu``."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = _names(visible) if visible is not None else []
    return {**environment, "CUDA_VISIBLE_DEVICES": names[gpu] if gpu < len(names) else str(gpu)}


def _names(visible: str) -> list[str]:
    """Return the devices that CUDA takes from the variable, up to the first empty or negative one."""
    names = []
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return names
