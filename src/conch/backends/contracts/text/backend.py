"""Text models: a checkpoint, its tokenizer and an engine behind the tensors of text generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.backends.contracts.text.config import complete_text_config
from conch.backends.contracts.text.interface import TextInterface
from conch.backends.generation.backend import GenerationBackend
from conch.backends.generation.defaults import Defaults
from conch.backends.generation.engine_choice import ServingOptions, choose_engine, engine_spec
from conch.backends.generation.engine_table import open_engine
from conch.backends.generation.job import ResponseBuilder
from conch.backends.generation.limits import Limits
from conch.backends.native.arrays import Request
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.workers.child.channel import Channel, Header


class TextBackend(GenerationBackend):
    """Text in, text out."""

    _interface: TextInterface

    def __init__(self, channel: Channel, init: Header, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(channel, init)
        self._checkpoint = checkpoint or self.open_checkpoint()

    def open_checkpoint(self) -> Checkpoint:
        """The checkpoint that the configuration names.  Raises INVALID_ARG."""
        return Checkpoint.open(Path(self.model["version_directory"]), Options.from_config(self.config))

    def complete(self) -> str:
        return json.dumps(complete_text_config(self.config))

    def defaults(self, generation: Mapping[str, Any], settings: ServingOptions) -> Defaults:
        """What generation does where a request says nothing; ``generation`` is generation_config.json."""
        return Defaults.of_checkpoint(generation, settings.max_tokens)

    def arguments(self, engine: str) -> Mapping[str, Any]:
        """What goes to the engine of that name as it is."""
        return {}

    def load(self, instance: Mapping[str, Any]) -> None:
        checkpoint, options = self._checkpoint, self._checkpoint.options
        settings = ServingOptions.from_options(options, checkpoint.directory)
        tokenizer = open_tokenizer(checkpoint, chat_template=settings.chat_template)
        name = choose_engine(checkpoint, options, instance["kind"] == "GPU")
        engine = open_engine(
            name, engine_spec(checkpoint, options, instance, tokenizer.special.eos_ids, arguments=self.arguments(name))
        )
        self.log("INFO", f"model '{self.model['name']}' runs on engine '{name}'")
        self._interface = TextInterface(
            tokenizer,
            self.defaults(checkpoint.json("generation_config.json") or {}, settings),
            Limits(engine),
            decoupled=bool((self.config.get("model_transaction_policy") or {}).get("decoupled")),
            truncate=settings.truncate,
        )
        self.serve(engine, reserve=settings.reserve)

    def reply(self, request: Request) -> ResponseBuilder:
        return self._interface.reply(request)
