"""Checks requests against the limits and features of an engine. Used by the threads that read frames."""

from __future__ import annotations

from dataclasses import dataclass

from conch.backends.generation.engine import GenerationEngine
from conch.core.errors import Code, ConchError, invalid, unsupported
from conch.core.sampling.parameters import SamplingParams


class UnknownAdapter(ConchError):
    """INVALID_ARG for a LoRA adapter that the model does not have; ``known`` are the names of its adapters."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"LoRA {name[:100]} is not supported, the model has: {', '.join(known) or 'none'}", Code.INVALID_ARG
        )
        self.name, self.known = name, known


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks requests against an engine's context, cache, vocabulary, adapters and features."""

    engine: GenerationEngine

    def remaining(self, tokens: int) -> int:
        """Return how many tokens fit into the context after ``tokens``."""
        return self.engine.context - tokens

    def check(self, prompt: list[int], sampling: SamplingParams) -> None:
        """Raise INVALID_ARG for a request that does not fit, UNSUPPORTED for features that the engine lacks."""
        engine, length = self.engine, len(prompt)
        needed = (length + sampling.max_tokens) * sampling.beam_width
        if engine.cache_tokens and needed > engine.cache_tokens and engine.cache_tokens <= engine.context:
            raise invalid(
                f"the request needs {needed} tokens of KV cache, but the model has {engine.cache_tokens} in all"
            )
        if length >= engine.context:
            raise invalid(
                f"the prompt has {length} tokens, but the context of the model is {engine.context}, "
                "and at least one is to be generated"
            )
        if length + sampling.max_tokens > engine.context:
            raise invalid(
                f"the prompt has {length} tokens and max_tokens is {sampling.max_tokens}: together more than the "
                f"context of the model, {engine.context}"
            )
        if engine.cache_tokens and needed > engine.cache_tokens:
            raise invalid(
                f"{sampling.beam_width} beams of up to {length + sampling.max_tokens} tokens do not fit into the KV "
                f"cache of the model, {engine.cache_tokens} tokens"
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise invalid(f"min_tokens is {sampling.min_tokens}, but max_tokens is {sampling.max_tokens}")
        self.check_ids(prompt, "input", sampling)
        self.check_features(sampling)

    def check_features(self, sampling: SamplingParams) -> None:
        """Raise UNSUPPORTED for features that the engine lacks, UnknownAdapter for an unknown adapter."""
        if sampling.lora_name and sampling.lora_name not in self.engine.adapters:
            raise UnknownAdapter(sampling.lora_name, self.engine.adapters)
        for feature in sampling.features():
            if feature not in self.engine.features:
                cause = ": a library for it is not installed" if feature in self.engine.lacking else ""
                raise unsupported(f"engine '{self.engine.name}' does not have {feature.value}{cause}")

    def check_ids(self, prompt: list[int], name: str, sampling: SamplingParams) -> None:
        """Raise INVALID_ARG for token ids outside of the vocabulary; ``name`` denotes the prompt in the message."""
        vocabulary = self.engine.vocabulary
        beyond = max(prompt)
        if beyond >= vocabulary or min(prompt) < 0:
            wrong = beyond if beyond >= vocabulary else min(prompt)
            raise invalid(f"{name} has token id {wrong}; the vocabulary of the model has {vocabulary} tokens")
        for kind, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
            if unknown is not None:
                raise invalid(f"'{kind}' has token id {unknown}; the vocabulary of the model has {vocabulary} tokens")
