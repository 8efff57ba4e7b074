"""The options of model analyzer that conch has not: why they have no effect, or why they are refused.

Source: model analyzer's ``docs/config.md`` and the flags of ``model-analyzer profile --help``, release 1.58.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_ITSELF: Final = "conch measures itself and starts no perf_analyzer"
_CONTAINERS: Final = "conch starts no containers"
_STARTS: Final = "in local mode conch starts 'conch serve'; to measure tritonserver, start it and use remote mode"
_TABLES: Final = "the reports have the same columns and plots for all"
_PAGE: Final = "one page has the summary and the details of each configuration"

#: Accepted with a warning that gives the reason.
NO_EFFECT: Final[Mapping[str, str]] = {
    "collect_cpu_metrics": "processor time and memory are always noted",
    "monitoring_interval": "what a server uses is noted with every window of a measurement",
    "duration_seconds": "what a server uses is noted with every window of a measurement",
    "dcgm_disable": "GPUs are asked through NVML, which needs no DCGM",
    "use_concurrency_formula": "every candidate is measured at a load that fits its instances and batches",
    "triton_docker_image": _CONTAINERS,
    "triton_docker_mounts": _CONTAINERS,
    "triton_docker_labels": _CONTAINERS,
    "triton_docker_shm_size": _CONTAINERS,
    "triton_docker_args": _CONTAINERS,
    "triton_metrics_url": "what a server uses is read from its processes and GPUs, where they are on this machine",
    "triton_server_path": _STARTS,
    "triton_install_path": _STARTS,
    "triton_output_path": "what a server says is shown where it fails to start",
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
    "concurrency_sweep_disable": "the best load of every configuration is searched, and no sweep follows",
    "num_top_model_configs": "every search has a ranking of its own",
    "always_report_gpu_metrics": "what GPUs the server uses is always shown",
    "client_max_retries": "a server is waited for as long as perf_analyzer_timeout says",
}

#: Refused, because the results would not be what was asked for; ``{}`` stands for the value.
REFUSED: Final[Mapping[str, str]] = {
    "gpus": "choose GPUs for the server by CUDA_VISIBLE_DEVICES in triton_server_environment",
    "model_type": "only model_type generic is measured; 'conch perf' measures tokens of language models",
    "genai_perf_flags": "requests are those of 'conch perf': give its flags under perf_analyzer_flags",
}
#: Values of refused options that ask for nothing that conch does not do.
_HARMLESS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "gpus": lambda value: value in ("all", ["all"]),
    "model_type": lambda value: str(value).lower() == "generic",
}


def harmless(name: str, value: Any) -> bool:
    """Whether a refused option's value may be given all the same."""
    return name in _HARMLESS and _HARMLESS[name](value)
