"""The base of the engines that choose tokens from logits: their grammars, and the state of a new request."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from typing import Any, TypeVar

import numpy as np

from conch.backends.batching.grammars import Matcher, grammar_compiler
from conch.backends.batching.sampler import SequenceState
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.core.errors import invalid
from conch.core.sampling.parameters import STRUCTURED_OUTPUTS, Feature
from conch.core.sampling.structures import Structure

State = TypeVar("State", bound=SequenceState)


class SamplingEngine(GenerationEngine):
    """An engine that chooses tokens from logits; subclasses call ``open_grammars`` once their attributes are set."""

    partial_structures = True

    def open_grammars(self, spec: EngineSpec) -> None:
        """Open the compiler of grammars; remove the ``features`` for which a library or adapters are missing."""
        if not self.adapters and not spec.adapter_folders:
            self.features -= {Feature.LORA}
        self._grammars = grammar_compiler(spec, self.vocabulary)
        if self._grammars is None:
            self.features -= STRUCTURED_OUTPUTS
            if find_spec("llguidance") is None:
                self.lacking = STRUCTURED_OUTPUTS
        self._eos_ids = frozenset(spec.eos_ids)
        self._arrivals = count()

    def compile(self, structure: Structure) -> Any:
        return self._grammars.compile(structure) if self._grammars is not None else None

    def new_sequence(self, kind: Callable[..., State], request: EngineRequest) -> State:
        """Return the state of a request, an object of the class ``kind``.

        Raises INVALID_ARG for a request that the engine does not support.
        """
        sampling = request.sampling
        if sampling.beam_width > self.max_sequences:
            raise invalid(
                f"beam_width {sampling.beam_width} is more than the {self.max_sequences} sequences of a batch"
            )
        if sampling.beam_width > 1:
            for value, name in (
                (sampling.structured_outputs, "structured output"),
                (sampling.prompt_logprobs, "prompt_logprobs"),
            ):
                if value is not None:
                    raise invalid(f"beam search with {name} is not supported by engine '{self.name}'")
        end_ids = sampling.end_ids(self._eos_ids)
        matcher = None
        if sampling.structured_outputs is not None and self._grammars is not None:
            compiled = request.compiled or self._grammars.compile(sampling.structured_outputs)
            matcher = Matcher(compiled, sampling.reasoning)
            if compiled.start is None:
                # When a structure is complete, only an end-of-sequence token is allowed.
                end_ids |= self._eos_ids
        return kind(
            id=request.id,
            rank=(request.priority, next(self._arrivals)),
            sampling=sampling,
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
            end_ids=frozenset(end for end in end_ids if 0 <= end < self.vocabulary),
            max_length=min(len(request.prompt) + sampling.max_tokens, self.context),
            generator=np.random.default_rng(sampling.seed),
            matcher=matcher,
        )
