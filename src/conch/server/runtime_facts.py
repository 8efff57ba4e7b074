"""Runtime facts of a model (engine, variant, precision, device, threads, limits), reported by workers at startup.

They appear in the log for each worker, in the statistics of the model, and in the parameters of its configuration,
where every Triton client accepts them. Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from conch.config.complete import ADAPTERS, RUNTIME_FACT_PREFIX
from conch.config.schema import ModelConfig, copied, implementation

#: Facts about a model or a worker by name: ``engine``, ``precision`` …; numbers are strings.
RuntimeFacts = Mapping[str, str]


def sentence(facts: RuntimeFacts) -> str:
    """Format facts for the log: ``engine onnxruntime 1.23.2, precision fp32, threads 2 …``."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def merged(workers: Iterable[RuntimeFacts]) -> dict[str, str]:
    """Merge the facts of a model's workers; where they differ, list all values in order."""
    values: dict[str, dict[str, None]] = {}
    for facts in workers:
        for name, value in facts.items():
            values.setdefault(name, {})[value] = None
    return {name: ", ".join(different) for name, different in values.items()}


def adapters(facts: RuntimeFacts) -> tuple[str, ...]:
    """Return the names of a model's LoRA adapters."""
    return tuple(json.loads(facts.get(ADAPTERS, "[]")))


def shown(config: ModelConfig, facts: RuntimeFacts) -> ModelConfig:
    """``config`` with ``facts`` as parameters, for clients; unchanged for a Python model, as in Triton."""
    if not facts or implementation(config) == "python":
        return config
    described = copied(config)
    for name, value in facts.items():
        described.parameters[f"{RUNTIME_FACT_PREFIX}{name}"].string_value = value
    return described
