"""What a model runs with (engine, variant, precision, device, threads, limits), as its workers tell when they start.

The log says it for every worker, the statistics for the model, and a model's configuration among its parameters, where
every client of Triton takes it.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from conch.config.complete import RUNTIME_FACT_PREFIX
from conch.config.schema import ModelConfig, copied, implementation

#: Of a model or of one of its workers, by name: ``engine``, ``precision`` …; numbers as texts.
RuntimeFacts = Mapping[str, str]


def sentence(facts: RuntimeFacts) -> str:
    """``engine onnxruntime 1.23.2, precision fp32, threads 2 …``, for the log."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def merged(workers: Iterable[RuntimeFacts]) -> dict[str, str]:
    """What the workers of a model run with together; where they differ, all values in their order."""
    values: dict[str, dict[str, None]] = {}
    for facts in workers:
        for name, value in facts.items():
            values.setdefault(name, {})[value] = None
    return {name: ", ".join(different) for name, different in values.items()}


def shown(config: ModelConfig, facts: RuntimeFacts) -> ModelConfig:
    """``config`` as clients see it.  That of a Python model is shown as Triton shows it."""
    if not facts or implementation(config) == "python":
        return config
    described = copied(config)
    for name, value in facts.items():
        described.parameters[f"{RUNTIME_FACT_PREFIX}{name}"].string_value = value
    return described
