"""The sampling parameters of a request: collected, completed with defaults, and checked against the engine.

``conch/core/sampling/parameters.py`` declares them. No I/O; used by the threads that read the server's frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any, Final

from conch.backends.generation.engine import GenerationEngine
from conch.backends.generation.features import engines_with, listed
from conch.core.errors import Code, ConchError, did_you_mean, invalid, unsupported
from conch.core.sampling.parameters import IGNORED, NAMES, REFUSED, Feature, SamplingParams
from conch.core.sampling.structures import parsed

#: Minimum similarity (``difflib`` ratio) of an unknown name and a suggested one.
_LIKENESS: Final = 0.6


class SamplingOverrides:
    """The sampling parameters that a request sets: ``values`` by field of ``SamplingParams``."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        # The source of each value, to name both sources of contradictory values.
        self._sources: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a parameter; ``default`` if the request does not set it."""
        return self.values.get(name, default)

    def set(self, name: str, value: Any, source: str = "", *, label: str = "") -> bool:
        """Set a value; return False if ``name`` is not a sampling parameter.

        Messages about contradictory values name ``source``, and messages about an invalid value name ``label``. Raises
        INVALID_ARG with ``name`` for an invalid value, or one that contradicts a value set before for the same
        parameter.
        """
        known = NAMES.get(name)
        if known is None:
            return False
        if value is None:
            return True
        parameter, type = known
        try:
            typed = type.read(name, value, label or f"sampling parameter '{name}'")
        except ConchError as error:
            error.param = name
            raise
        source = source or name
        key = parameter.name
        before = self.values.get(key)
        if before is None:
            if typed is not None:
                self.values[key] = typed
                self._sources[key] = source
        elif not _same(before, typed):
            raise invalid(f"{source} is {_shown(typed)}, but {self._sources[key]} is {_shown(before)}", name)
        return True

    def check(self) -> None:
        """Raise INVALID_ARG for values that contradict each other."""
        min_tokens, max_tokens, n = self.get("min_tokens"), self.get("max_tokens"), self.get("n", 1)
        if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
            raise invalid(
                f"{self._sources['min_tokens']} is {min_tokens}, which is more than "
                f"{self._sources['max_tokens']}, {max_tokens}",
                "min_tokens",
            )
        if self.get("use_beam_search") and "beam_width" not in self.values:
            self.values["beam_width"] = max(n, 2)
        beams, temperature = self.get("beam_width", 1), self.get("temperature")
        if beams > 1:
            if temperature:
                raise invalid(
                    f"beam search does not sample: temperature must be 0 or absent, not {temperature}", "temperature"
                )
            if n > beams:
                raise invalid(f"n is {n}, which is more than the beam width, {beams}", "n")
        elif n > 1 and temperature == 0:
            raise invalid(f"n is {n}, but with temperature 0 all samples are the same: n must be 1", "n")


def refuse_unsupported(name: str, value: Any) -> None:
    """Raise INVALID_ARG for a vLLM parameter that none of conch's engines supports.

    Empty and false values are accepted.
    """
    if name in REFUSED and value:
        raise invalid(f"sampling parameter '{name}' is not supported", name)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return isclose(value, other, rel_tol=1e-6)  # an FP32 tensor and JSON differ by rounding
    return bool(value == other)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)[:80]


def read_document(overrides: SamplingOverrides, text: str, source: str) -> None:
    """Set all values of the JSON object in input ``source``. Raises INVALID_ARG for invalid JSON, names or values."""
    document = parsed(f"input '{source}'", text)
    if not isinstance(document, dict):
        raise invalid(f"input '{source}' must be a JSON object, not {text[:80]}")
    for name, value in document.items():
        if overrides.set(name, value, f"{name} in '{source}'"):
            continue
        refuse_unsupported(name, value)
        if name not in IGNORED and name not in REFUSED:
            hint = did_you_mean(name, NAMES, likeness=_LIKENESS)
            raise invalid(f"sampling parameter '{name}' is not known{'; ' + hint if hint else ''}", name)


#: Default of ``max_tokens`` if neither the request nor the model sets it.
MAX_TOKENS: Final = 256
#: The reason of errors about a prompt, or a prompt and its completion, that do not fit into the context; OpenAI's.
TOO_LONG: Final = "context_length_exceeded"
#: Lower temperatures count as zero, because engines divide by the temperature.
GREEDY: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling parameters for requests that do not set them.

    Without ``sample``, decoding is greedy, unless a request sets a parameter that only matters for sampling, or comes
    with a default temperature; with ``greedy``, the checkpoint selects greedy decoding. ``default_temperature`` is the
    model's own default, which takes precedence.
    ``chosen``: the configuration or the checkpoint sets ``max_tokens``. If it is false, a chat completion may use the
    whole context, because chat models end their completions themselves.
    """

    max_tokens: int = MAX_TOKENS
    chosen: bool = False
    sample: bool = False
    greedy: bool = False
    default_temperature: float | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_checkpoint(
        cls, generation: Mapping[str, Any], max_tokens: int = 0, temperature: float | None = None
    ) -> Defaults:
        """Read generation_config.json; a ``max_tokens`` above 0 takes precedence over its ``max_new_tokens``.

        ``temperature`` is the model's own default.
        """

        def number(name: str, default: float) -> float:
            value = generation.get(name)
            return value if isinstance(value, int | float) and not isinstance(value, bool) else default

        chosen = max_tokens or int(number("max_new_tokens", 0))
        return cls(
            max_tokens=chosen or MAX_TOKENS,
            chosen=chosen > 0,
            sample=generation.get("do_sample") is True,
            greedy=generation.get("do_sample") is False,
            default_temperature=temperature,
            temperature=float(number("temperature", 1.0)),
            top_k=int(number("top_k", 0)),
            top_p=float(number("top_p", 1.0)),
            min_p=float(number("min_p", 0.0)),
            repetition_penalty=float(number("repetition_penalty", 1.0)),
        )

    @classmethod
    def of_vllm(cls) -> Defaults:
        """Return the defaults of vLLM's ``SamplingParams``: 16 tokens, sampled; independent of the checkpoint."""
        return cls(max_tokens=16, sample=True)

    def sampling(
        self, overrides: SamplingOverrides, remaining: int, *, chat: bool = False, temperature: float | None = None
    ) -> SamplingParams:
        """Complete the sampling parameters of a request; ``remaining`` tokens fit after its prompt.

        The completion of a ``chat`` may use all of them if ``chosen`` is false. ``temperature`` is the default that
        comes with the request, which applies if neither the model nor its checkpoint has one.
        """
        limit = remaining if chat and not self.chosen else min(self.max_tokens, remaining)
        sampling = SamplingParams(
            **{"max_tokens": max(limit, 1), "repetition_penalty": self.repetition_penalty, **overrides.values}
        )
        beams = sampling.beam_width > 1
        if overrides.get("temperature") is None:
            sampling.temperature = 0.0 if beams else self._temperature(_asks_to_sample(overrides), temperature)
        if sampling.temperature < GREEDY:
            sampling.make_greedy()
        elif self.sample:
            for name in ("top_k", "top_p", "min_p"):
                if name not in overrides.values:
                    setattr(sampling, name, getattr(self, name))
        return sampling

    def _temperature(self, asked: bool, default: float | None) -> float:
        """Return the temperature of a request without one; ``asked``: another parameter requests sampling."""
        if self.default_temperature is not None:
            return self.default_temperature
        if self.sample or asked:
            return self.temperature
        return 0.0 if self.greedy or default is None else default


def _asks_to_sample(overrides: SamplingOverrides) -> bool:
    """Whether a request without a temperature sets a parameter that only matters for sampling."""
    return bool(
        overrides.get("top_k", 1) != 1
        or overrides.get("top_p", 1) < 1
        or overrides.get("min_p", 0)
        or overrides.get("n", 1) > 1
    )


class UnknownAdapter(ConchError):
    """INVALID_ARG for a LoRA adapter that the model does not have; ``known`` are the names of its adapters."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"LoRA {name[:100]} is not supported, the model has: {', '.join(known) or 'none'}",
            Code.INVALID_ARG,
            param="lora_name",
        )
        self.name, self.known = name, known


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks requests against an engine's context, cache, vocabulary, adapters and features."""

    engine: GenerationEngine

    def remaining(self, tokens: int) -> int:
        """Return how many tokens fit into the context after ``tokens``."""
        return self.engine.context - tokens

    def check(self, prompt: list[int], sampling: SamplingParams, source: str | None = None) -> None:
        """Raise INVALID_ARG for a request that does not fit, UNSUPPORTED for features that the engine lacks.

        ``source`` is the input that has the prompt.
        """
        engine, length = self.engine, len(prompt)
        needed = (length + sampling.max_tokens) * sampling.beam_width
        if engine.cache_tokens and needed > engine.cache_tokens and engine.cache_tokens <= engine.context:
            raise invalid(
                f"the request needs {needed} tokens of KV cache, but the model has {engine.cache_tokens} in all", source
            )
        if length >= engine.context:
            raise invalid(
                f"the prompt has {length} tokens, but the context of the model is {engine.context}, "
                "and at least one is to be generated",
                source,
                reason=TOO_LONG,
            )
        if length + sampling.max_tokens > engine.context:
            raise invalid(
                f"the prompt has {length} tokens and max_tokens is {sampling.max_tokens}: together more than the "
                f"context of the model, {engine.context}",
                "max_tokens",
                reason=TOO_LONG,
            )
        if engine.cache_tokens and needed > engine.cache_tokens:
            raise invalid(
                f"{sampling.beam_width} beams of up to {length + sampling.max_tokens} tokens do not fit into the KV "
                f"cache of the model, {engine.cache_tokens} tokens",
                "max_tokens",
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise invalid(f"min_tokens is {sampling.min_tokens}, but max_tokens is {sampling.max_tokens}", "min_tokens")
        # Faster than to look at each token of a long prompt. An engine that prepares images checks their places itself.
        if max(prompt) >= engine.vocabulary or (min(prompt) < 0 and engine.preparer is None):
            self.check_token_ids("input", prompt, source)
        self.check_token_ids("'logit_bias'", sampling.logit_bias, "logit_bias")
        self.check_token_ids("'stop_token_ids'", sampling.stop_token_ids, "stop_token_ids")
        self.check_features(sampling)

    def check_features(self, sampling: SamplingParams) -> None:
        """Raise UNSUPPORTED for features that the engine lacks, UnknownAdapter for an unknown adapter."""
        if sampling.lora_name and sampling.lora_name not in self.engine.adapters:
            raise UnknownAdapter(sampling.lora_name, self.engine.adapters)
        for feature, parameter in sampling.features().items():
            if feature not in self.engine.features:
                raise unsupported(f"engine '{self.engine.name}' {self._lack(feature)}", param=parameter)

    def _lack(self, feature: Feature) -> str:
        """Return why the engine does not have a feature, and which ones have it."""
        missing = f"does not have {feature.value}"
        if feature in self.engine.lacking:
            return f"{missing}: a library for it is not installed"
        engines = engines_with(feature)
        return f"{missing} for this model" if self.engine.name in engines else f"{missing}; {listed(engines)} do"

    def check_token_ids(self, name: str, ids: Iterable[int], param: str | None = None) -> None:
        """Raise INVALID_ARG for token ids outside of the vocabulary; ``name`` denotes ``ids`` in the message."""
        vocabulary = self.engine.vocabulary
        unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise invalid(f"{name} has token id {unknown}; the vocabulary of the model has {vocabulary} tokens", param)
