"""The optional features of each engine for text generation: for the engines, for errors, and for docs/openai.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from conch.core.sampling.parameters import Feature

#: The features of ``backends/batching``, with which two engines schedule and sample.
BATCHER_FEATURES: Final = frozenset(Feature)
#: A model may lack some of its engine's features: adapters that it does not have, beam search with a recurrent state,
#: structured output where a library is not installed.
ENGINE_FEATURES: Final[Mapping[str, frozenset[Feature]]] = {
    "llamacpp": BATCHER_FEATURES,
    "openvino": BATCHER_FEATURES,
    "transformers": frozenset(Feature) - {Feature.PROMPT_LOGPROBS},
    "vllm": frozenset(Feature) - {Feature.BEAMS},
}
#: The engines with features that models need when they load.
SPECULATIVE_ENGINES: Final = ("llamacpp", "openvino", "vllm")
INVARIANT_ENGINES: Final = ("llamacpp", "openvino")
RUN_TIME_ADAPTER_ENGINES: Final = ("llamacpp", "openvino", "transformers")


def engines_with(feature: Feature) -> list[str]:
    return [engine for engine, features in ENGINE_FEATURES.items() if feature in features]


def listed(engines: Sequence[str]) -> str:
    """Return the names of engines as a part of a sentence, two at least."""
    return f"{', '.join(engines[:-1])} and {engines[-1]}"


def rows() -> Iterator[list[str]]:
    """Yield the rows of a table: a feature, then ``yes`` or ``no`` for each engine."""
    loading = {
        "LoRA adapters at run time": RUN_TIME_ADAPTER_ENGINES,
        "speculative decoding": SPECULATIVE_ENGINES,
        "batch_invariant": INVARIANT_ENGINES,
    }
    features = {feature.value: engines_with(feature) for feature in Feature}
    for name, engines in {**features, **loading}.items():
        yield [name, *("yes" if engine in engines else "no" for engine in ENGINE_FEATURES)]
