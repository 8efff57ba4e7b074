"""The interface of engines: an engine is given requests, and each step returns the new tokens of those that it runs.

The service's thread makes every call but ``compile``, so that engines need no locks.

To add an engine:

1. Write a module or package below ``conch/backends/engines`` with ``open(spec: EngineSpec) -> GenerationEngine``.  It
   imports its library in functions, so that it need not be installed for other engines.
2. Add the name of that module to ``TEXT_ENGINES`` in ``conch/checkpoints/options.py``, with the kind of files that it
   loads; parameter ``engine`` may then have it.  Say in ``choose_engine`` (``engines.py`` beside this file) when it is
   the best choice.  Its library becomes an extra in pyproject.toml, and mypy is told there that it may be missing.
3. List its ``features``, one by one; the sampling parameters that need others are refused before it sees them.
4. Test it as ``tests/unit/backends/engines`` does its siblings (the same tokens as transformers alone and in a busy
   batch, cancellation, ends, usage), and add it to docs/generation.md (the table of engines) and docs/huggingface.md
   (parameter ``engine``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from conch.checkpoints.gguf.reader import GgufFile
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.errors import ConchError
from conch.sampling.parameters import Feature, SamplingParams
from conch.sampling.structures import Structure


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model that an engine is to load, and how to run it.

    ``directory`` is a checkpoint's folder or an OpenVINO export, ``gguf`` a file in it that holds the weights.
    ``config`` is config.json, or its equivalent from a GGUF file.  ``device`` is ``cpu`` or ``cuda``, ``device_id`` the
    number of a GPU, ``threads`` the number of cores.  ``dtype`` is ``auto``, ``float32``, ``bfloat16`` or ``float16``.
    ``context`` is the length limit of a sequence with its prompt, ``cache_tokens`` the size of the KV cache, and
    ``max_batched_tokens`` the prompt tokens of a step, all in tokens; zero leaves a number to the engine.  ``adapters``
    are folders of LoRA adapters by name, ``draft`` is the folder of a draft model for speculative decoding.
    ``arguments`` go to the engine's library unchanged (vLLM's engine arguments, for example).  ``tokenizer`` is only
    needed for structured output.
    """

    directory: Path
    config: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    gguf: GgufFile | None = None
    device: str = "cpu"
    device_id: int = 0
    threads: int = 0
    dtype: str = "auto"
    trust_remote_code: bool = False
    context: int = 0
    max_sequences: int = 0
    max_batched_tokens: int = 0
    cache_tokens: int = 0
    prefix_caching: bool = True
    adapters: Mapping[str, Path] = field(default_factory=dict)
    draft: Path | None = None
    draft_tokens: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TextTokenizer | None = None

    @property
    def source(self) -> Path:
        """The path of the weights: the GGUF file, or the folder without one."""
        return self.directory if self.gguf is None else self.gguf.path


@dataclass(slots=True)
class EngineRequest:
    """A prompt (token ids) to continue; ``id`` is the caller's, unique among the engine's unfinished requests."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    #: Where not all fit, lower numbers go first; requests of one priority go in the order of their arrival.
    priority: int = 0
    #: What ``compile`` returned for the structure in ``sampling``; engines compile it themselves where it is None.
    compiled: Any = None


@dataclass(slots=True)
class TokenLogprobs:
    """The natural log-probability and the rank (1: the likeliest, 0: unknown) of a chosen token, and the likeliest
    tokens in its place with their log-probabilities, best first."""

    logprob: float
    rank: int = 0
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """What a step did for a request.

    ``tokens`` are the new ones.  Beam search reports nothing before its end, and then one object for each beam, best
    first, with all tokens of the beam.  ``finish`` is empty while the request goes on, else ``stop`` (by an
    end-of-sequence or stop token, which is the last of ``tokens``) or ``length``; with beams it is set on every object.
    ``error`` ends the request as well.
    """

    id: int
    tokens: Sequence[int] = ()
    finish: str = ""
    error: ConchError | None = None
    logprobs: list[TokenLogprobs] | None = None
    beam: int = 0
    #: Sum of the log-probabilities of all tokens of a beam.
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class EngineUsage:
    """The load of an engine.

    ``running`` requests are in the batch; ``waiting`` ones are not yet, or were preempted.  ``used_tokens`` is how much
    of the KV cache they occupy, without cached prefixes that nobody uses.  ``prefix_queries`` and ``prefix_hits``
    (tokens) and ``preemptions`` (requests) are totals over the engine's life.
    """

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class GenerationEngine(ABC):
    """A network with its KV cache and its running batch.

    ``context`` is the length limit of a sequence with its prompt (tokens), ``max_sequences`` the size of the batch,
    ``cache_tokens`` the size of the KV cache (0: it grows as needed), ``block_tokens`` the unit in which the cache is
    allocated, ``token_bytes`` what a token takes in it (0: unknown), ``reserves_cache`` whether all of it is allocated
    from the start, ``vocabulary`` the number of token ids that the network knows.  ``precision`` says for people what
    the arithmetic is done in, in the words of the engine's library.
    """

    name: ClassVar[str]
    features: frozenset[Feature] = frozenset()
    #: Features that the engine could have here with a library that is not installed.
    lacking: frozenset[Feature] = frozenset()
    context: int
    max_sequences: int
    vocabulary: int
    cache_tokens: int = 0
    block_tokens: int = 1
    token_bytes: int = 0
    reserves_cache: ClassVar[bool] = False
    precision: str = ""
    #: The module whose version is the engine's, where it is not called like the engine.
    library: ClassVar[str] = ""
    #: Names of LoRA adapters that ``SamplingParams.lora_name`` may give.
    adapters: tuple[str, ...] = ()

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Accept a request; its first tokens come from a later step.

        The caller has checked features, adapter names and lengths.  Raises ConchError for what only the engine can
        know to be wrong (INVALID_ARG for a grammar that does not compile); it keeps nothing of the request then.
        """

    def compile(self, structure: Structure) -> Any:  # noqa: B027 (an engine may do that itself, in its steps)
        """Compile the structure of a request; what is returned goes with the request, or several of them.

        The one call that another thread makes, while steps run: it takes as long as it takes, keeps the interpreter
        from nobody meanwhile, and touches nothing that steps use.  Raises ConchError (INVALID_ARG for a structure
        that does not compile).
        """

    @abstractmethod
    def step(self) -> list[Progress]:
        """Compute one step of the batch.  Returns an empty list at once when there is nothing to compute.

        An exception means that the engine is broken: the worker fails all of its requests and exits.
        """

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Drop a request and free what it holds, with the next step at the latest; unknown ids have no effect.

        No later step reports anything about it.
        """

    @abstractmethod
    def usage(self) -> EngineUsage:
        """The current load; called after every step, so it has to be cheap."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a step would have anything to do."""

    def verify(self, prompts: Sequence[list[int]]) -> None:  # noqa: B027 (most engines have nothing to compare with)
        """Compare the tokens after ``prompts`` (token ids) with those of transformers, where that is at hand and cheap.

        Called before the first request.  Raises INVALID_ARG for a model that differs.
        """

    def close(self) -> None:  # noqa: B027 (most engines hold nothing but memory)
        """Free everything; no request is under way any more."""
