"""The backend of the I/O format ``text``: a checkpoint, its tokenizer and an engine. Runs in workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.backends.base.libraries import TRANSFORMERS
from conch.backends.generation.backend import GenerationBackend
from conch.backends.generation.defaults import Defaults
from conch.backends.generation.limits import Limits
from conch.backends.generation.options import ServingOptions
from conch.backends.io_formats.text.interface import INPUTS, OUTPUTS, TextInterface
from conch.backends.tasks.base import TaskDescription
from conch.backends.tasks.signature import complete_config
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.config.complete import CHAT_TEMPLATE
from conch.core.errors import invalid
from conch.core.sampling import TEXT_GENERATION
from conch.machine.cores import openmp, usable_cores
from conch.workers.child.channel import Channel, Header


def complete_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration (JSON object) with missing tensors, ``decoupled`` and task filled in.

    Requests have no batch dimension, because each joins the running batch. Raises INVALID_ARG for tensors that such a
    model does not have, and for a ``max_batch_size`` above 0.
    """
    if int(config.get("max_batch_size") or 0) > 0:
        raise invalid(
            f"model '{config.get('name', '')}' has max_batch_size {config['max_batch_size']}, but a text model takes "
            "requests one by one into a running batch: set max_batch_size to 0 and, to bound that batch, "
            "parameter 'max_num_seqs'"
        )
    completed = complete_config(config, TaskDescription(INPUTS, OUTPUTS, max_batch_size=0))
    policy = dict(config.get("model_transaction_policy") or {})
    if "model_transaction_policy" not in config:
        policy["decoupled"] = True
    completed["model_transaction_policy"] = policy
    parameters = dict(config.get("parameters") or {})
    parameters.setdefault("task", {"string_value": TEXT_GENERATION})
    completed["parameters"] = parameters
    return completed


class TextBackend(GenerationBackend):
    """A text generation checkpoint with the I/O format ``text``."""

    def __init__(self, channel: Channel, init: Header, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(channel, init)
        self._checkpoint = checkpoint or self.open_checkpoint()

    def open_checkpoint(self) -> Checkpoint:
        """Open the checkpoint that the configuration names. Raises INVALID_ARG."""
        return Checkpoint.open(Path(self.model["version_directory"]), Options.from_config(self.config))

    def complete(self) -> str:
        return json.dumps(complete_text_config(self.config))

    def defaults(self, generation: Mapping[str, Any], settings: ServingOptions) -> Defaults:
        """Return the default sampling parameters; ``generation`` is generation_config.json."""
        return Defaults.of_checkpoint(generation, settings.max_tokens)

    def arguments(self, engine: str) -> Mapping[str, Any]:
        """Return arguments that are passed unchanged to the library of the named engine."""
        return {}

    def preloads(self, instance: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
        """Return the modules that ``load`` imports for ``instance``, and the environment variables to set before."""
        if self.choose_engine(self._checkpoint, instance) != "transformers":
            return (), {}
        return TRANSFORMERS, openmp(self._checkpoint.options.threads or usable_cores(), 1)

    def load(self, instance: Mapping[str, Any]) -> None:
        checkpoint = self._checkpoint
        self.warn_of(checkpoint.warning)
        os.environ.update(self.preloads(instance)[1])
        settings = ServingOptions.from_checkpoint(checkpoint)
        tokenizer = open_tokenizer(checkpoint, chat_template=settings.chat_template)
        tokenizer.template.require_library(checkpoint.extra)
        engine = self.open_engine(checkpoint, instance, tokenizer, self.arguments)
        self.runtime_facts[CHAT_TEMPLATE] = "yes" if tokenizer.template else "none"
        contract = TextInterface(
            tokenizer,
            self.defaults(checkpoint.json("generation_config.json") or {}, settings),
            Limits(engine),
            decoupled=self.decoupled,
            truncate=settings.truncate,
        )
        self.serve(engine, contract, reserve=settings.reserve)
        del self._checkpoint  # frees the vocabulary of a GGUF file, tens of megabytes
