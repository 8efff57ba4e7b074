"""The dimensions of a model that nobody has to name: what can be tried of it, by what it is.

Pure.  What a model cannot do is not tried: batches where ``max_batch_size`` is 0, dynamic batching of sequences,
delays of models that answer in several responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from conch.analyze.options.settings import SWEPT, AnalyzeSettings
from conch.analyze.search.model_facts import ModelFacts
from conch.analyze.search.overrides import Path, at
from conch.analyze.search.space import BATCH, DELAY, INSTANCES, OFF, PREFERRED, Dimension, Shares

#: Queue delays (microseconds): requests leave at once, or wait for about as long as small, middling and large models
#: compute.
DELAYS: Final = (OFF, 0, 100, 500, 2000)
#: Preferred sizes, as shares of the largest batch.
PREFERENCES: Final = (Shares(), Shares((1.0,)), Shares((0.5, 1.0)))

#: By backend, the parameter that says how many cores the instances share.
_THREADS: Final[Mapping[str, str]] = {
    "huggingface": "threads",
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
}
_BY_DEFAULT: Final[Mapping[str, tuple[str, ...]]] = {"brute": ("instances", "batch", "variant")}


def automatic_dimensions(settings: AnalyzeSettings, facts: ModelFacts) -> list[Dimension]:
    """The dimensions of a model under the settings; none for an ensemble, which computes nothing itself."""
    if facts.config.get("ensemble_scheduling") or facts.config.get("platform") == "ensemble":
        return []
    if settings.run_config_search_disable or settings.reload_model_disable:
        return []
    chosen = settings.sweep or _BY_DEFAULT.get(settings.run_config_search_mode, SWEPT)
    found = [one for one in _automatic(settings, facts) if _kind(one) in chosen and len(one.values) > 1]
    if (
        "delay" not in chosen
        and any(one.path == BATCH for one in found)
        and facts.config.get("dynamic_batching") is None
    ):
        # Larger batches are of no use to a model that gets each request alone.
        found.append(Dimension(facts.name, DELAY, (0,)))
    return found


def _kind(dimension: Dimension) -> str:
    named = {INSTANCES: "instances", BATCH: "batch", DELAY: "delay", PREFERRED: "preferred"}
    if dimension.path in named:
        return named[dimension.path]
    return "variant" if dimension.path[1] == "variant" else "threads"


def _automatic(settings: AnalyzeSettings, facts: ModelFacts) -> Iterator[Dimension]:
    config, name = facts.config, facts.name
    least, most = settings.run_config_search_min_instance_count, settings.run_config_search_max_instance_count
    yield _dimension(name, config, INSTANCES, range(least, most + 1))
    decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
    if int(config.get("max_batch_size", 0)) > 0 and not config.get("sequence_batching") and not decoupled:
        least, most = settings.run_config_search_min_model_batch_size, settings.run_config_search_max_model_batch_size
        # A request has to fit into a batch.
        least = max(least, settings.batch_size_of(name))
        yield _dimension(name, config, BATCH, doubled(least, max(least, most)))
        delay = int(at(config, DELAY) or 0) if config.get("dynamic_batching") is not None else OFF
        yield Dimension(name, DELAY, DELAYS, _nearest(DELAYS, delay))
        yield Dimension(name, PREFERRED, PREFERENCES)
    if facts.variants:
        yield _unsaid(name, config, "variant", facts.variants, facts.auto, ordered=False)
    parameter = _THREADS.get(str(config.get("backend", "")))
    if parameter and facts.threads > 1:
        counts = [str(one) for one in (*doubled(1, facts.threads - 1), facts.threads)]
        yield _unsaid(name, config, parameter, counts, str(facts.threads), ordered=True)


def _unsaid(
    model: str, config: Mapping[str, Any], parameter: str, values: Sequence[str], unsaid: str, *, ordered: bool
) -> Dimension:
    """The dimension of a parameter that does the same as ``unsaid`` where the configuration does not say it."""
    path: Path = ("parameters", parameter, "string_value")
    own = at(config, path)
    tried = [None if own is None and value == unsaid else value for value in values]
    return Dimension(model, path, tuple(tried), _nearest(tried, own), ordered=ordered)


def doubled(least: int, most: int) -> list[int]:
    """``least``, twice that, and so on, not above ``most``."""
    found = [least]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _dimension(model: str, config: Mapping[str, Any], path: Path, values: Sequence[Any]) -> Dimension:
    return Dimension(model, path, tuple(values), _nearest(values, at(config, path)))


def _nearest(values: Sequence[Any], value: Any) -> int:
    if value in values:
        return list(values).index(value)
    numbers = [index for index, one in enumerate(values) if isinstance(one, int)]
    if not isinstance(value, int) or not numbers:
        return 0
    return min(numbers, key=lambda index: abs(values[index] - value))
