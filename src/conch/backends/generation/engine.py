"""The interface of engines: an engine accepts requests, and each step returns the new tokens of the running requests.

The service's thread makes all calls except ``compile``, so that engines need no locks.

To add an engine:

1. Write a module or package in ``conch/backends/engines`` with ``open(spec: EngineSpec) -> GenerationEngine``. Import
   its library inside functions, so that it is not required for other engines.
2. Add the name of the module to ``TEXT_ENGINES`` in ``conch/checkpoints/options.py``, with the kind of files that it
   loads. This makes the name a value of the parameter ``engine``. Extend ``choose_engine``
   (``generation_backend.py``) for the cases in which it is the best choice. Add its library to pyproject.toml as an
   extra, to ``PACKAGES`` in ``conch/machine/extras.py``, and to the modules that may be missing for mypy.
3. List its ``features``. Requests with sampling parameters that need other features are refused before they reach it.
4. Test it like the other engines in ``tests/unit/backends/engines`` (same tokens as transformers alone and in a busy
   batch, cancellation, finish reasons, usage), and add it to docs/generation.md (the table of engines) and
   docs/huggingface.md (parameter ``engine``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from conch.backends.generation.lora import LoraWeights
from conch.backends.generation.media import MediaItem, MediaPreparer, MediaSpec, ProjectorSpec
from conch.checkpoints.gguf import GgufFile
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model that an engine is to load, and how to run it.

    ``directory`` is a checkpoint's folder or an OpenVINO export, ``gguf`` a file in it that holds the weights.
    ``config`` is config.json, or its equivalent from a GGUF file. ``device`` is ``cpu`` or ``cuda``, ``device_id`` the
    number of a GPU, ``threads`` the number of cores. ``dtype`` is ``auto``, ``float32``, ``bfloat16`` or ``float16``.
    ``context`` is the length limit of a sequence with its prompt, ``cache_tokens`` the size of the KV cache, and
    ``max_batched_tokens`` the prompt tokens of a step, all in tokens; zero leaves a number to the engine. With
    ``batch_invariant``, the result of a request must not depend on other requests. ``adapters`` are folders of LoRA
    adapters by name; clients may load others from ``adapter_folders``, if there are any. ``speculative`` is a method of
    speculative decoding (empty: none): ``draft_model`` with the folder or file ``draft``, or ``ngram``. ``arguments``
    go to the engine's library unchanged (vLLM's engine arguments, for example). ``tokenizer`` is only needed for
    structured output. ``media`` are the images and recordings that the checkpoint reads, None for texts alone;
    ``projector`` is a file that reads them for a GGUF file.
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
    batch_invariant: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapter_folders: Sequence[Path] = ()
    speculative: str = ""
    draft: Path | None = None
    draft_tokens: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TextTokenizer | None = None
    media: MediaSpec | None = None
    projector: ProjectorSpec | None = None

    @property
    def source(self) -> Path:
        """The path of the weights: the GGUF file, or the folder without one."""
        return self.directory if self.gguf is None else self.gguf.path


@dataclass(slots=True)
class EngineRequest:
    """A prompt (token ids) to complete; the caller chooses ``id``, unique among the engine's unfinished requests."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    #: If not all requests fit, lower numbers go first; requests of equal priority run in arrival order.
    priority: int = 0
    #: The result of ``compile`` for the structure in ``sampling``; if it is None, the engine compiles it itself.
    compiled: Any = None
    #: The images and recordings of the prompt, in its order.
    media: Sequence[MediaItem] = ()


@dataclass(slots=True)
class TokenLogprobs:
    """The natural log-probability of a sampled token, its rank, and the most likely tokens at its position.

    ``rank`` is 1 for the most likely token and 0 if unknown. ``top`` has token ids with their log-probabilities, best
    first.
    """

    logprob: float
    rank: int = 0
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """The result of a step for a request.

    ``tokens`` are the new tokens. Beam search reports nothing until it ends, and then one object for each beam, best
    first, with all tokens of the beam. ``finish`` is empty while the request continues, else ``stop`` (at an
    end-of-sequence or stop token, which is the last of ``tokens``) or ``length``; with beams it is set on every object.
    ``error`` also ends the request. ``prompt_logprobs``, for each token of the prompt after the first, come with the
    first token if they are requested.
    """

    id: int
    tokens: Sequence[int] = ()
    finish: str = ""
    error: ConchError | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    beam: int = 0
    #: Sum of the log-probabilities of all tokens of a beam.
    cumulative_logprob: float | None = None
    #: The tokens of the prompt that were not computed because a prefix was cached; None if nothing is known about it.
    cached_tokens: int | None = None


@dataclass(slots=True)
class EngineUsage:
    """The load of an engine.

    ``running`` counts the requests in the batch, ``waiting`` those that have not joined it yet or were preempted.
    ``used_tokens`` is the KV cache that they occupy, without unused cached prefixes. ``prefix_queries`` and
    ``prefix_hits`` (tokens) and ``preemptions`` (requests) are totals since the engine started.
    """

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class GenerationEngine(ABC):
    """A network with its KV cache and its running batch.

    ``context`` is the maximum length of a sequence with its prompt (tokens), ``max_sequences`` the maximum size of the
    batch, ``cache_tokens`` the size of the KV cache (0: it grows as needed), ``block_tokens`` its allocation unit
    (tokens), ``token_bytes`` the size of a token in it (bytes; 0: unknown). ``reserves_cache``: the whole cache is
    allocated at the start. ``vocabulary`` is the number of token ids. ``precision`` is the data type of the computation
    for display, as the engine's library names it.
    """

    name: ClassVar[str]
    features: frozenset[Feature] = frozenset()
    #: Features that are unavailable because a library is not installed.
    lacking: frozenset[Feature] = frozenset()
    context: int
    max_sequences: int
    vocabulary: int
    cache_tokens: int = 0
    block_tokens: int = 1
    token_bytes: int = 0
    reserves_cache: ClassVar[bool] = False
    precision: str = ""
    #: The module whose version is the engine's, if its name differs from the engine's.
    library: ClassVar[str] = ""
    #: Whether a structure can apply to a part of the text: after ``SamplingParams.reasoning``, or to tool calls.
    partial_structures: ClassVar[bool] = False
    #: Whether the results of a request do not depend on other requests.
    batch_invariant: bool = False
    #: Warnings about the model, for the log.
    warnings: Sequence[str] = ()
    #: Names of LoRA adapters, the values that ``lora_name`` may have in requests.
    adapters: tuple[str, ...] = ()
    #: Whether ``attach_adapter`` works, for a model with ``EngineSpec.adapter_folders``.
    loads_adapters: bool = False
    #: The kinds of items that prompts may have: ``image``, ``audio``.
    media: frozenset[str] = frozenset()
    #: The part that processes these items, None if a processor of transformers does.
    preparer: MediaPreparer | None = None

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Accept a request; a later step returns its first tokens.

        The caller has checked features, adapter names and lengths. Raises ConchError for faults that only the engine
        can detect (INVALID_ARG for a grammar that does not compile), and then keeps nothing of the request.
        """

    def compile(self, structure: Structure) -> Any:  # noqa: B027 (an engine may do that itself, in its steps)
        """Compile the structure of a request; the result is passed with one or several requests.

        This is the only call from another thread, at the same time as steps. It may take long, must release the
        interpreter lock, and must not touch anything that steps use. Raises ConchError (INVALID_ARG for a structure
        that does not compile).
        """

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        """Add a LoRA adapter between two steps, for requests with the ``lora_name`` ``key``.

        Raises INVALID_ARG for an adapter that does not fit the model, and then keeps nothing of it.
        """
        raise NotImplementedError

    def detach_adapter(self, key: str) -> None:
        """Free an adapter that no request in flight uses."""
        raise NotImplementedError

    @abstractmethod
    def step(self) -> list[Progress]:
        """Compute one step of the batch. Returns an empty list at once if there is nothing to compute.

        An exception means that the engine is broken: the worker fails all of its requests and exits.
        """

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Cancel a request, and free its resources no later than the next step; unknown ids have no effect.

        Later steps report nothing about it.
        """

    @abstractmethod
    def usage(self) -> EngineUsage:
        """Return the current load. Called after every step, so it must be cheap."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is anything to compute."""

    def forget(self) -> None:  # noqa: B027 (an engine may neither retain prefixes nor count them)
        """Discard retained prefixes and the totals of ``usage``; called when no request is in flight."""

    def verify(self, prompts: Sequence[list[int]]) -> str:
        """Compare the completions of ``prompts`` (token ids) with those of transformers; returns the result as text.

        Does nothing if transformers cannot run the model, or not cheaply. Called before the first request. Raises
        INVALID_ARG for a model that differs.
        """
        return ""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing but memory)
        """Free all resources; called when no request is in flight."""


def kv_token_bytes(config: Mapping[str, Any], value_bytes: int) -> int:
    """Return the size of a token's keys and values in all layers (bytes), with ``value_bytes`` per number.

    ``config`` is that of a text model. Without ``num_key_value_heads``, as many key heads as query heads are assumed.
    """
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    return layers * int(config.get("num_key_value_heads") or heads) * size * 2 * value_bytes
