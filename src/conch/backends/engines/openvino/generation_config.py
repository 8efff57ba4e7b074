"""Converts ``SamplingParams`` to OpenVINO GenAI's ``GenerationConfig``."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from conch.backends.graphs.openvino import reason
from conch.core.errors import invalid
from conch.core.sampling.parameters import SamplingParams
from conch.core.sampling.structures import Structure

#: A token id outside every vocabulary, for sequences without stop tokens: GenAI requires an end-of-sequence token.
NO_TOKEN: Final = 2**31 - 1
#: The largest prime below 2**32; GenAI's seeds have 32 bits.
MOST_SEEDS: Final = 2**32 - 5


def stop_tokens(sampling: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    """Return the tokens that end a sequence.

    With structured output they always include the end-of-sequence tokens, which end the grammar.
    """
    grammar = sampling.structured_outputs is not None
    return (replace(sampling, ignore_eos=False) if grammar else sampling).end_ids(eos_ids)


def generation_config(sampling: SamplingParams, eos_ids: Sequence[int], tokens: int = 0) -> Any:
    """Return the configuration of a sequence that already has ``tokens`` generated tokens.

    Raises INVALID_ARG for parameters that GenAI rejects.
    """
    import openvino_genai

    stops = stop_tokens(sampling, eos_ids)
    max_new_tokens = sampling.max_tokens - tokens
    values: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(max(0, sampling.min_tokens - tokens), max_new_tokens) if stops else 0,
        "eos_token_id": min(stops, default=NO_TOKEN),
        "stop_token_ids": set(stops) or {NO_TOKEN},
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": 0 if sampling.logprobs is None else 1,
    }
    if sampling.beam_width > 1:
        criteria = openvino_genai.StopCriteria
        values["num_beams"] = sampling.beam_width
        values["num_return_sequences"] = sampling.n
        values["length_penalty"] = sampling.length_penalty
        values["stop_criteria"] = criteria.EARLY if sampling.early_stopping else criteria.HEURISTIC
    elif sampling.temperature > 0:
        values["do_sample"] = True
        values["temperature"] = sampling.temperature
        values["top_p"] = sampling.top_p
        values["min_p"] = sampling.min_p
        if sampling.top_k > 0:
            values["top_k"] = sampling.top_k
        values["rng_seed"] = _seed(sampling.seed)
    if sampling.structured_outputs is not None:
        values["structured_output_config"] = structured_output(sampling.structured_outputs)
    config: Any = openvino_genai.GenerationConfig(**values)
    try:
        config.validate()
    except RuntimeError as error:
        raise invalid(f"OpenVINO GenAI: {reason(error)}") from None
    return config


#: Special characters of regular expressions.
_SPECIAL: Final = re.compile(r"[\\.*+?^${}()|\[\]/-]")


def structured_output(structure: Structure) -> Any:
    """Convert a structure to GenAI's configuration, without compiling it."""
    import openvino_genai

    structure_config: Any = openvino_genai.StructuredOutputConfig
    if structure.kind == "json":
        return structure_config(json_schema=structure.text)
    if structure.kind == "regex":
        return structure_config(regex=structure.text)
    if structure.kind == "grammar":
        return structure_config(grammar=structure.text)
    # A regex, because GenAI encodes U+0080 to U+00FF before a hexadecimal digit incorrectly in constant strings.
    return structure_config(regex="|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in json.loads(structure.text)))


def _seed(seed: int | None) -> int:
    """Return a seed for GenAI; random without one, because GenAI would use the same seed for every request."""
    if seed is None:
        return random.randrange(MOST_SEEDS)
    return seed % MOST_SEEDS
