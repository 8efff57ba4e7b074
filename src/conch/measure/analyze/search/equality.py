"""Finds configurations that a server treats the same, so that only one of them is measured.

Pure. Follows ``conch.server.execution.scheduling`` (the scheduler of a model and the fields that it reads) and the
backends' use of threads. A Python model receives its configuration and may read any field, so only its scheduler fields
are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from conch.backends.table import BACKENDS, Backend, backend_of
from conch.machine.cores import pooled
from conch.measure.analyze.search.model_facts import ModelFacts

_PYTHON: Final = "python"
_DELAY: Final = "max_queue_delay_microseconds"
_PREFERRED: Final = "preferred_batch_size"
#: The thread count of ONNX Runtime in a configuration, and the one in force as conch shows it.
_THREADS: Final = "intra_op_thread_count"
_RUNS_WITH: Final = "conch.machine.threads"


def as_served(config: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """Return the configuration without fields that have no effect, and with effective values for the others.

    Configurations that become equal give the same responses with the same performance, under the requests that
    ``facts`` describe.
    """
    served = deepcopy(dict(config))
    served.pop("instance_group", None)
    groups = [dict(group) for group in config.get("instance_group") or ()]
    backend = _backend(config)
    if backend is not None and backend.generates:
        # A single engine per device forms its own batches.
        served["instance_group"] = [group | {"count": 1} for group in groups]
        served["max_batch_size"] = min(1, _number(config, "max_batch_size"))
        _leave_out(served, _DELAY, _PREFERRED)
        return served
    if groups:
        served["instance_group"] = groups
    if not config.get("sequence_batching"):
        _batch(served, facts, backend)
    if _threads(config, facts) is not None and _threads(facts.config, facts) == _text(facts.config, _RUNS_WITH):
        served["parameters"] = {**(served.get("parameters") or {}), _THREADS: {"string_value": _threads(config, facts)}}
    return served


def _backend(config: Mapping[str, Any]) -> Backend | None:
    """Return the backend that runs the model; None if it is not one of conch's own."""
    name = str(config.get("backend", ""))
    parameters = {key: _text(config, key) for key in config.get("parameters") or {}}
    return backend_of(name, parameters) if name in BACKENDS and not config.get("runtime") else None


def _batch(served: dict[str, Any], facts: ModelFacts, backend: Backend | None) -> None:
    """Replace the batching fields by their effective values, in place."""
    batching, largest = served.get("dynamic_batching"), _number(served, "max_batch_size")
    delay, preferred = _number(batching or {}, _DELAY), sorted(set((batching or {}).get(_PREFERRED) or ()))
    if backend is not None and backend.prepares:
        # The batcher by length only checks whether a delayed batch is large enough. It counts sequences; a request may
        # have several.
        preferred = preferred[-1:] if delay else []
        reached: float = largest
    elif preferred not in ([], [largest]):
        reached = largest
    elif delay:
        # A delayed batch waits until it is full; if it never fills up, it waits for the whole delay.
        reached = min(largest, facts.most_waiting + facts.request_batch)
    else:
        reached = min(largest // facts.request_batch * facts.request_batch, facts.most_waiting)
    alone = batching is None or min(largest, reached) <= facts.request_batch
    _leave_out(served, _DELAY, _PREFERRED)
    if not alone:
        kept = {_DELAY: delay or None, _PREFERRED: preferred if preferred != [largest] else None}
        served["dynamic_batching"] = {**served.get("dynamic_batching", {}), **{k: v for k, v in kept.items() if v}}
    if largest and not (backend is None or backend is BACKENDS[_PYTHON]):
        served["max_batch_size"] = facts.request_batch if alone else reached


def _leave_out(served: dict[str, Any], *names: str) -> None:
    """Remove fields of ``dynamic_batching``, and the message itself if it becomes empty."""
    batching = served.pop("dynamic_batching", None) or {}
    if rest := {name: value for name, value in batching.items() if name not in names}:
        served["dynamic_batching"] = rest


def _threads(config: Mapping[str, Any], facts: ModelFacts) -> str | None:
    """Return the size of the thread pool that ONNX Runtime instances share on the server's cores; None if unknown."""
    groups = config.get("instance_group") or [{}]
    text = _text(config, _THREADS) or "0"
    if config.get("backend") != "onnxruntime" or len(groups) != 1 or groups[0].get("kind") != "KIND_CPU":
        return None
    if not (text.isascii() and text.isdigit()):
        return None
    return str(int(text) or pooled(facts.threads, _number(groups[0], "count")))


def _text(config: Mapping[str, Any], parameter: str) -> str:
    value = (config.get("parameters") or {}).get(parameter)
    return str(value.get("string_value", "")) if isinstance(value, Mapping) else ""


def _number(of: Mapping[str, Any], name: str) -> int:
    return int(of.get(name) or 0)
