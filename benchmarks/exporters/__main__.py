"""Compares conch's exporters with optimum's: supported architectures, differences from transformers, and speed.

    python -m benchmarks.exporters encoders [--architectures bert mpnet ...] [--task text-classification]
    python -m benchmarks.exporters causal [--architectures llama gemma2 ...]
    python -m benchmarks.exporters speed MODEL [--causal] [--rounds 15]

``encoders`` and ``causal`` create a tiny random checkpoint of each architecture, export it with each installed
exporter, and print a row each: the largest difference, or the error. ``speed`` exports the checkpoint in the folder
MODEL (``llama-135m``: a random one) and runs the graphs in turns. Encoders are compared on padded batches. Language
models are compared as graphs with a cache (a prompt, single steps, several tokens), with one row of two padded, and in
the decoder over paged attention that conch serves them with.

Exporters: ``conch`` (needs the extra ``convert``), ``optimum-intel`` and ``optimum-onnx``. The last two need different
versions of transformers, so create an environment for each, and run this in both:

    pip install torch "transformers>=5.5,<5.6" onnx onnxscript onnxruntime openvino nncf accelerate
    pip install --no-deps optimum-intel optimum   # it declares torchvision, but works without it
    pip install torch optimum-onnx onnxruntime onnxscript   # the other environment; transformers 4.57
    pip install --no-deps -e .   # in both, with the packages that conch itself needs
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from benchmarks.exporters import architectures
from benchmarks.exporters.compare import cell, compare
from benchmarks.exporters.run import THREADS, apart
from benchmarks.exporters.speed import speed
from conch.convert.libraries import silence_libraries

NEEDED = {
    "conch": "onnxscript",
    "optimum-intel": "optimum.exporters.openvino",
    "optimum-onnx": "optimum.exporters.onnx.convert",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("encoders", "causal", "speed"))
    parser.add_argument("model", nargs="?", default="llama-135m", help="of speed: a checkpoint's folder")
    parser.add_argument("--architectures", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--task", default="feature-extraction", choices=("feature-extraction", "text-classification"))
    parser.add_argument("--exporters", nargs="+", choices=[*NEEDED], default=[*NEEDED], help="default: those installed")
    parser.add_argument("--causal", action="store_true", help="of speed: the model is a language model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--exports", type=int, default=3)
    options = parser.parse_args()
    # torch reads it when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    exporters = installed(options.exporters)
    if not exporters:
        parser.error("none of the exporters is installed: --help names the packages of each")
    if options.question == "speed":
        return speed(options, exporters)
    causal = options.question == "causal"
    task = "text-generation" if causal else options.task
    known = architectures.CAUSAL if causal else architectures.ENCODERS
    print(f"| architecture | {' | '.join(exporters)} |\n|{'---|' * (len(exporters) + 1)}")
    for name in options.architectures or known:
        if name not in known:
            parser.error(f"no architecture '{name}': choose from {', '.join(known)}")
        cells = [cell(apart(compare, exporter, name, task)) for exporter in exporters]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def installed(exporters: Sequence[str]) -> list[str]:
    """Import each exporter, so that separate processes need not, and return those that can be imported.

    Reports the others on stderr, with the reason.
    """
    importable = []
    for name in exporters:
        try:
            with silence_libraries():
                importlib.import_module(NEEDED[name])
            importable.append(name)
        except ImportError as error:
            print(f"{name} is left out: {error} (--help names its packages)", file=sys.stderr)
    return importable


if __name__ == "__main__":
    main()
