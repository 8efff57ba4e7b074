"""Which unit tests need more than the core and the extra ``dev``; with ``--core`` only the others run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

# How fast examples are made says how busy the machine is, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

#: Folders and files here that import torch, transformers, tokenizers or an engine. Single tests that do are marked
#: ``extras``.
NEED_EXTRAS: Final = (
    "measure/analyze/options/test_reading.py",
    "backends/io_formats",
    "backends/engines",
    "backends/generation/test_agreement.py",
    "backends/generation/test_draft.py",
    "backends/generation/test_generation_backend.py",
    "backends/generation/test_service.py",
    "backends/graphs",
    "backends/python/test_dlpack_torch.py",
    "backends/tasks",
    "benchmarks/test_client.py",
    "benchmarks/test_day_zero_checkpoints.py",
    "benchmarks/test_day_zero_retrieval.py",
    "checkpoints/test_gguf.py",
    "checkpoints/test_gguf_damaged.py",
    "checkpoints/test_gguf_reference.py",
    "checkpoints/test_gguf_weights.py",
    "checkpoints/test_hub.py",
    "checkpoints/tokenizers",
    "convert/causal",
    "convert/encoder",
    "convert/layout",
    "convert/report/test_page.py",
    "convert/test_run.py",
    "deploy/ray/test_cluster.py",
    "deploy/ray/test_ingress.py",
    "deploy/ray/test_replica.py",
    "measure/analyze/report/test_analysis_page.py",
    "measure/perf/report/test_perf_page.py",
    "measure/reports/test_pages.py",
    "repository/stores/test_hub_store.py",
    "telemetry/tracing/test_collector.py",
)
_PATHS: Final = frozenset(Path(__file__).parent / path for path in NEED_EXTRAS)


def pytest_configure(config: pytest.Config) -> None:
    gone = sorted(str(path) for path in _PATHS if not path.exists())
    if gone and config.getoption("core"):
        raise pytest.UsageError(f"{__file__}: NEED_EXTRAS has what is not there: {', '.join(gone)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("core") and collection_path in _PATHS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("core"):
        marked = [item for item in items if any(item.get_closest_marker(name) for name in ("extras", "long"))]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
