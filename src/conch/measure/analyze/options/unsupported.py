"""Unsupported model analyzer options: the reasons why they have no effect, or are refused.

Source: model analyzer's ``docs/config.md`` and the flags of ``model-analyzer profile --help``, release 1.58.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_ITSELF: Final = "conch measures directly and does not start perf_analyzer"
_CONTAINERS: Final = "conch does not start containers"
_STARTS: Final = "in local mode conch starts 'conch serve'; to measure tritonserver, start it and use remote mode"
_TABLES: Final = "all reports have the same columns and plots"
_PAGE: Final = "one page has the summary and the details of each configuration"

#: Accepted with a warning that gives the reason.
NO_EFFECT: Final[Mapping[str, str]] = {
    "collect_cpu_metrics": "processor time and memory are always measured",
    "monitoring_interval": "resource use is measured in every window",
    "duration_seconds": "resource use is measured in every window",
    "dcgm_disable": "GPUs are read through NVML, without DCGM",
    "use_concurrency_formula": "every candidate is measured at a load that fits its instances and batches",
    "triton_docker_image": _CONTAINERS,
    "triton_docker_mounts": _CONTAINERS,
    "triton_docker_labels": _CONTAINERS,
    "triton_docker_shm_size": _CONTAINERS,
    "triton_docker_args": _CONTAINERS,
    "triton_metrics_url": "resource use is read from the processes and GPUs of a server on this machine",
    "triton_server_path": _STARTS,
    "triton_install_path": _STARTS,
    "triton_output_path": "server output is shown if it fails to start",
    "perf_analyzer_path": _ITSELF,
    "perf_analyzer_cpu_util": _ITSELF,
    "perf_analyzer_max_auto_adjusts": "windows are repeated until they agree, as 'conch perf' does",
    "perf_output": _ITSELF,
    "perf_output_path": _ITSELF,
    "filename_model_inference": _TABLES,
    "filename_model_gpu": _TABLES,
    "filename_server_only": _TABLES,
    "inference_output_fields": _TABLES,
    "gpu_output_fields": _TABLES,
    "server_output_fields": _TABLES,
    "plots": _TABLES,
    "skip_detailed_reports": _PAGE,
    "num_configs_per_model": _PAGE,
    "concurrency_sweep_disable": "the best load of every configuration is searched; no sweep follows",
    "num_top_model_configs": "every search has its own ranking",
    "always_report_gpu_metrics": "GPU metrics are always shown",
    "client_max_retries": "perf_analyzer_timeout limits how long the analysis waits for a server",
}

#: Refused, because the results would differ from the request.
REFUSED: Final[Mapping[str, str]] = {
    "gpus": "choose GPUs for the server by CUDA_VISIBLE_DEVICES in triton_server_environment",
    "model_type": "only model_type generic is measured; 'conch perf' measures tokens of language models",
    "genai_perf_flags": "requests are those of 'conch perf': give its flags under perf_analyzer_flags",
}
#: Values of refused options that match the behaviour of conch.
_HARMLESS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "gpus": lambda value: value in ("all", ["all"]),
    "model_type": lambda value: str(value).lower() == "generic",
}


def harmless(name: str, value: Any) -> bool:
    """Return whether the value of a refused option is accepted."""
    return name in _HARMLESS and _HARMLESS[name](value)
