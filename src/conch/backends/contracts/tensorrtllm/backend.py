"""The backend ``tensorrtllm``: the model ``tensorrt_llm`` of the in-flight batcher, on whichever engine there is.

It takes token ids and gives token ids; parameters that name a compiled engine name a checkpoint here.
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
from conch.backends.generation.engine_choice import ServingOptions, choose_engine, engine_spec
from conch.backends.generation.engine_table import open_engine
from conch.backends.generation.job import ResponseBuilder
from conch.backends.generation.limits import Limits
from conch.backends.native.arrays import Request
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.open import open_tokenizer


class TensorRtLlmBackend(GenerationBackend):
    """Token ids in, token ids out."""

    _interface: TokenInterface

    def complete(self) -> str:
        return json.dumps(complete_config(self.config))

    def load(self, instance: Mapping[str, Any]) -> None:
        directory = Path(self.model["version_directory"])
        parameters = Parameters.of(self.config, directory)
        self._warn(parameters)
        checkpoint = Checkpoint.open(directory, parameters.options)
        options = checkpoint.options
        settings = ServingOptions.from_options(options, checkpoint.directory, policy="guaranteed_no_evict")
        tokenizer = open_tokenizer(checkpoint)
        name = choose_engine(checkpoint, options, instance["kind"] == "GPU")
        arguments = parameters.arguments if name == "vllm" else {}
        engine = open_engine(
            name, engine_spec(checkpoint, options, instance, tokenizer.special.eos_ids, arguments=arguments)
        )
        self.log("INFO", f"model '{self.model['name']}' runs {checkpoint.directory} on engine '{name}'")
        outputs = {str(output["name"]) for output in self.config.get("output", ())}
        self._interface = TokenInterface(
            Limits(engine),
            decoupled=bool((self.config.get("model_transaction_policy") or {}).get("decoupled")),
            batched=int(self.config.get("max_batch_size") or 0) > 0,
            max_beam_width=parameters.max_beam_width,
            exclude_input=parameters.exclude_input,
            normalize=parameters.normalize,
            padded=frozenset() if "batch_index" in outputs else frozenset(ALWAYS) & outputs,
        )
        self.serve(engine, reserve=settings.reserve)

    def reply(self, request: Request) -> ResponseBuilder:
        return self._interface.reply(request)

    def _warn(self, parameters: Parameters) -> None:
        """Name what the configuration says and nobody here understands."""
        self.log_without_effect("parameters", parameters.unknown)
        self.log_without_effect("inputs", unknown_inputs(self.config))
