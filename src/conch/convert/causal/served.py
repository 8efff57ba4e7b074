"""An exported language model as the server runs it: OpenVINO GenAI's pipeline with a paged KV cache.

The pipeline is that of the server's engine, created with the same settings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.generation.engine import EngineSpec
from conch.convert.libraries import silence_libraries
from conch.core.sampling.parameters import SamplingParams

#: The engine's dtype by precision; for other precisions the engine chooses.
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32"}


def spec_of(graph: Path, precision: str, config: Mapping[str, Any], threads: int) -> EngineSpec:
    """Return the server engine's specification of a variant, without the size of its cache."""
    dtype = DTYPES.get(precision, "auto")
    return EngineSpec(graph.parent, config, (), threads=threads, dtype=dtype, prefix_caching=False)


class ServedGraph:
    """The pipeline of one exported graph, which is in its own folder.

    ``max_text_tokens`` is the maximum length of a text; ``cache_tokens`` is the maximum number of tokens of all
    concurrent texts.
    """

    def __init__(
        self,
        graph: Path,
        precision: str,
        config: Mapping[str, Any],
        *,
        max_text_tokens: int,
        cache_tokens: int,
        threads: int = 0,
    ) -> None:
        import openvino_genai

        from conch.backends.engines.openvino import pipelines
        from conch.backends.engines.openvino.precision import BLOCK, Precision

        spec = spec_of(graph, precision, config, threads)
        with silence_libraries(), tempfile.TemporaryDirectory() as empty:
            precision_of_cpu = Precision.of(spec, pipelines.capabilities())
            # Inputs and outputs are token ids, so no tokenizer is needed.
            no_tokenizer: Any = openvino_genai.Tokenizer(empty)
            self.pipeline = pipelines.pipeline(
                spec, no_tokenizer, precision_of_cpu, cache_tokens // BLOCK + 64, max(256, max_text_tokens)
            )
        self.number = 0

    def logprobs(self, ids: Sequence[int]) -> Array:
        """Return the natural log-probability of each token after the first."""
        handle = self._add(ids, 1, echo=True)
        self._run()
        [answer] = handle.read_all()
        # The first token has no predecessor, and the last is the generated one.
        return np.array(answer.generated_log_probs[1 : len(ids)], np.float64)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of each prompt, in one batch; no token ends a continuation."""
        handles = [self._add(prompt, count) for prompt in prompts]
        self._run()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the time from a prompt to its first token (s)."""
        handle = self._add(prompt, 1)
        before = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - before
        handle.read_all()
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Return the time of each of ``count`` decoding steps (s) for prompts of equal length in one batch."""
        handles = [self._add(prompt, count + 1) for prompt in prompts]
        self.pipeline.step()
        seconds = []
        while self.pipeline.has_non_finished_requests():
            before = time.perf_counter()
            self.pipeline.step()
            seconds.append(time.perf_counter() - before)
        for handle in handles:
            handle.read_all()
        return seconds

    def _add(self, ids: Sequence[int], count: int, *, echo: bool = False) -> Any:
        import openvino

        from conch.backends.engines.openvino.config import generation_config

        logprobs = 0 if echo else None
        config = generation_config(
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=logprobs), eos_ids=()
        )
        config.echo = echo
        self.number += 1
        return self.pipeline.add_request(self.number, openvino.Tensor(np.array([ids], np.int64)), config)

    def _run(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
