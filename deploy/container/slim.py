"""Removes from an installation what a server on CPUs never opens; the Containerfile runs it with ``SLIM=1``.

python slim.py /opt/conch/lib/python3.12/site-packages
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

#: In site-packages: OpenVINO for GPUs and NPUs, its readers of formats that conch does not serve, what compilers need,
#: and the tests of numpy.
PATTERNS = (
    "openvino/libs/libopenvino_intel_gpu_plugin.so",
    "openvino/libs/libopenvino_intel_npu_plugin*.so",
    "openvino/libs/cache.json",
    "openvino/libs/libopenvino_jax_frontend.so.*",
    "openvino/libs/libopenvino_paddle_frontend.so.*",
    "openvino/libs/libopenvino_pytorch_frontend.so.*",
    "openvino/libs/libopenvino_tensorflow_*frontend.so.*",
    "openvino/cmake",
    "openvino/include",
    "numpy/_core/include",
    "numpy/**/tests",
)


def removable(packages: Path) -> list[Path]:
    """Return the files and folders in a folder ``site-packages`` that :func:`main` removes."""
    return [path for pattern in PATTERNS for path in packages.glob(pattern)]


def main() -> None:
    for path in removable(Path(sys.argv[1])):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
