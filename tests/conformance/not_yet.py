"""What conch does not have yet, and the tests that show it.

They are expected to fail for conch, strictly: when a feature arrives, its lines here have to go.
"""

from __future__ import annotations

import re

_NAMES = {
    "sequence batching": (
        r"TestSequences::.*conch",
        r"test_sequence_controls_reach_the_model\[.*conch",
        r"test_wrong_request_is_refused\[.*conch-8\]",
        r"test_load\[conch-sequence_state_twice\]",
        r"test_(http|grpc)\[.*(accumulate|sequence without|sequence batch|sequence of one|implicit state)",
        r"test_(http|grpc)\[(wrong correlation type|stream: sequence|index|index ready|index not only ready)\]",
        r"test_http\[index of a repository\]",
    ),
    "tracing": (
        r"test_trace_settings_of_a_model_fall_back_to_the_global_ones\[.*conch",
        r"test_(http|grpc)\[trace(?! of a version)",
    ),
    "shared memory": (
        r"test_http\[(shm (status|unregister|register (without|absent))|shared memory (output )?unknown|cuda)",
        r"test_grpc\[(shared memory (status|unregister|register)|cuda)",
    ),
    "custom metrics": (
        r"test_utilities\[conch-metrics",
        r"test_custom_metrics_are_on_the_metrics_page\[conch\]",
    ),
}
#: The features, as docs/from-triton.md names them.
FEATURES = tuple(_NAMES)
#: The extensions that Triton names in its metadata for these features.
MISSING_EXTENSIONS = {
    "sequence batching": {"sequence"},
    "tracing": {"trace"},
    "shared memory": {"system_shared_memory", "cuda_shared_memory"},
    "custom metrics": set[str](),
}
_PATTERNS = {feature: re.compile("|".join(names)) for feature, names in _NAMES.items()}


def missing_feature(test: str) -> str | None:
    """The feature without which the test with this id fails for conch."""
    return next((feature for feature, pattern in _PATTERNS.items() if pattern.search(test)), None)
