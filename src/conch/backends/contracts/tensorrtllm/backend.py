"""The backend ``tensorrtllm``: the model ``tensorrt_llm`` of the in-flight batcher on one of the engines here.

Parameters that name a compiled engine there name a checkpoint here.  Runs in workers.
Source: triton-inference-server/tensorrtllm_backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.backends.contracts.tensorrtllm.config import Parameters
from conch.backends.contracts.tensorrtllm.interface import TokenInterface
from conch.backends.contracts.tensorrtllm.responses import ALWAYS
from conch.backends.contracts.tensorrtllm.tensors import complete_config, unknown_inputs
from conch.backends.generation.backend import GenerationBackend
from conch.backends.generation.limits import Limits
from conch.backends.generation.options import ServingOptions
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.open import open_tokenizer


class TensorRtLlmBackend(GenerationBackend):
    """A checkpoint behind the tensors of the in-flight batcher: token ids in, token ids out."""

    def complete(self) -> str:
        return json.dumps(complete_config(self.config))

    def load(self, instance: Mapping[str, Any]) -> None:
        directory = Path(self.model["version_directory"])
        parameters = Parameters.of(self.config, directory)
        self._warn(parameters)
        checkpoint = Checkpoint.open(directory, parameters.options)
        self.warn_of(checkpoint.warning)
        settings = ServingOptions.from_checkpoint(checkpoint, policy="guaranteed_no_evict")
        tokenizer = open_tokenizer(checkpoint)
        engine = self.open_engine(
            checkpoint, instance, tokenizer, lambda name: parameters.arguments if name == "vllm" else {}
        )
        self.runs_with["checkpoint"] = str(checkpoint.directory)
        outputs = {str(output["name"]) for output in self.config.get("output", ())}
        contract = TokenInterface(
            Limits(engine),
            decoupled=self.decoupled,
            batched=int(self.config.get("max_batch_size") or 0) > 0,
            max_beam_width=parameters.max_beam_width,
            exclude_input=parameters.exclude_input,
            normalize=parameters.normalize,
            padded=frozenset() if "batch_index" in outputs else frozenset(ALWAYS) & outputs,
        )
        self.serve(engine, contract, reserve=settings.reserve)

    def _warn(self, parameters: Parameters) -> None:
        """Log the parameters and inputs of the configuration that mean nothing here."""
        self.log_without_effect("parameters", parameters.unknown)
        self.log_without_effect("inputs", unknown_inputs(self.config))
