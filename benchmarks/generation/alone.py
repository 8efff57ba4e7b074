"""Measures conch's engine, or OpenVINO GenAI (engine ``genai``), without a server.

    python -m benchmarks.generation.alone CHECKPOINT [--engine NAME] < LOAD

Runs as a separate process, with the load of the served measurement (its closed loop) as JSON on its input. Prompts are
tokenised before the clock starts, and tokens are not detokenised.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from benchmarks.generation.trace import Load
from conch.backends.generation.engine import EngineRequest as Continued
from conch.backends.generation.engine import GenerationEngine, Progress
from conch.backends.generation.generation_backend import choose_engine, open_engine
from conch.backends.generation.options import engine_spec
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.sampling.parameters import SamplingParams

Prompt = tuple[list[int], int]
GENAI: Final = "genai"


class GenAi:
    """The continuous batching of OpenVINO GenAI with its defaults; has the methods of an engine that ``Loop`` calls."""

    name = GENAI

    def __init__(self, checkpoint: Path) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._genai = openvino.Tensor, openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(checkpoint, openvino_genai.SchedulerConfig(), "CPU")
        self._handles: dict[int, Any] = {}

    def add(self, request: Continued) -> None:
        config = self._genai.GenerationConfig(
            max_new_tokens=request.sampling.max_tokens, ignore_eos=True, do_sample=False
        )
        ids = self._tensor(np.array([request.prompt], np.int64))
        self._handles[request.id] = self._pipeline.add_request(request.id, ids, config)

    def step(self) -> list[Progress]:
        self._pipeline.step()
        progress = []
        for id, handle in list(self._handles.items()):
            if handle.can_read():
                tokens = [token for output in handle.read().values() for token in output.generated_ids]
                ended = handle.get_status() == self._genai.GenerationStatus.FINISHED
                progress.append(Progress(id, tokens, "length" if ended else ""))
                if ended:
                    del self._handles[id]
        return progress

    def close(self) -> None:
        del self._pipeline


class Loop:
    """The closed loop of a load: ``connections`` sequences at a time; when one ends, the next begins."""

    def __init__(self, engine: GenerationEngine | GenAi, prompts: Sequence[Prompt], load: Load) -> None:
        self.engine, self.load = engine, load
        self.prompts = iter(prompts)
        self.places: dict[int, int] = {}
        self.answers = [0] * load.connections
        self.tokens = 0
        self.next = 0

    def run(self) -> float:
        """Run the loop; returns tokens per second."""
        begin = perf_counter()
        until = begin + self.load.seconds
        for connection in range(self.load.connections):
            self._take(connection)
        while self.places:
            for progress in self.engine.step():
                if progress.error is not None:
                    raise progress.error
                self.tokens += len(progress.tokens)
                if progress.finish:
                    connection = self.places.pop(progress.id)
                    self.answers[connection] += 1
                    if self.answers[connection] < self.load.least or perf_counter() < until:
                        self._take(connection)
        return self.tokens / (perf_counter() - begin)

    def _take(self, connection: int) -> None:
        ids, count = next(self.prompts, ([], 0))
        if not ids:
            return
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.engine.add(Continued(self.next, ids, sampling))
        self.places[self.next] = connection
        self.next += 1


def measure(checkpoint: Path, engine: str, load: Load, timeout: float = 900) -> float:
    """Return the tokens per second of the engine that conch uses for ``checkpoint``."""
    command = [sys.executable, "-m", "benchmarks.generation.alone", str(checkpoint), "--engine", engine]
    done = subprocess.run(command, input=json.dumps(load.document()), capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"the engine alone: {done.stderr.strip()[-800:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return float(result["throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", default="auto")
    arguments = parser.parse_args()

    load = Load.read(json.load(sys.stdin))
    chosen = "openvino" if arguments.engine == GENAI else arguments.engine
    options = Options.from_values({"model": str(arguments.checkpoint), "task": "text-generation", "engine": chosen})
    checkpoint = Checkpoint.open(Path.cwd(), options)
    tokenizer = open_tokenizer(checkpoint)
    instance: dict[str, Any] = {"kind": "CPU", "device_id": 0}
    spec = engine_spec(checkpoint, instance, tokenizer)
    engine: Any
    if arguments.engine == GENAI:
        engine = GenAi(arguments.checkpoint)
    else:
        engine = open_engine(choose_engine(checkpoint, on_gpu=False), spec)
    prompts = [(tokenizer.encode(ask.prompt), ask.tokens) for ask in load.asks]
    # A warm-up, because a server also has had some requests before it is measured.
    warm = prompts[-load.connections :]
    Loop(engine, warm, Load(connections=load.connections)).run()
    throughput = Loop(engine, prompts[: -load.connections], load).run()
    engine.close()
    print(json.dumps({"throughput": throughput, "engine": engine.name}))


if __name__ == "__main__":
    main()
