"""Reads :class:`AnalyzeSettings` from the command line and a file.

Pure, except for reading the file. The command line takes precedence. Options of model analyzer without effect here are
accepted with a warning, others are refused. Source: model analyzer's ``docs/config.md`` and the flags of
``model-analyzer profile --help``, release 1.58.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.config.reading import read_small
from conch.core.errors import ConchError, did_you_mean, invalid, one_line
from conch.machine import extras
from conch.measure.analyze.options.settings import OPTIONS, AnalyzeSettings
from conch.measure.analyze.options.values import OptionProblem
from conch.options.declaration import flag_of

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
    "genai_perf_flags": "requests are those of 'conch perf': set its flags under perf_analyzer_flags",
}
#: Values of refused options that match the behaviour of conch.
_HARMLESS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "gpus": lambda value: value in ("all", ["all"]),
    "model_type": lambda value: str(value).lower() == "generic",
}


def harmless(name: str, value: Any) -> bool:
    """Return whether the value of a refused option is accepted."""
    return name in _HARMLESS and _HARMLESS[name](value)


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of a file, and the line of each key by its path, such as ``profile_models.add.parameters``."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[str, int]


def read_document(path: Path) -> SettingsFile:
    """Read the options in a file.

    Raises INVALID_ARG for a file that cannot be read or is not a mapping, and UNSUPPORTED if PyYAML is missing.
    """
    yaml = extras.load(f"reading {path}", "yaml")
    try:
        text = read_small(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{path} cannot be read: {one_line(error)}") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        lines = _note(path, root) if root is not None else {}
        content = loader.construct_document(root) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise invalid(f"{path}, line {mark.line + 1 if mark else 1}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise invalid(f"{path} is not YAML: {one_line(error)}") from None
    finally:
        loader.dispose()
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise invalid(f"{path} does not have options as 'name: value'")
    return SettingsFile(path, content, lines)


def _note(path: Path, root: Any) -> dict[str, int]:
    """Return the lines of all keys by their paths; raises INVALID_ARG for a duplicate key in a mapping."""
    lines: dict[str, int] = {}
    noted: set[int] = set()

    def note(node: Any, where: str) -> None:
        if isinstance(node.value, str) or id(node) in noted:
            return
        noted.add(id(node))  # an alias is one node in several locations
        names: dict[str, int] = {}
        for child in node.value:
            # An element of a list has the path of the list, so that both forms of a model have the same path.
            key, value = child if isinstance(child, tuple) else (child, child)
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                note(value, where)
                continue
            if key is not value and key.value in names:
                raise invalid(f"{path}, line {line}: '{key.value}' is already in line {names[key.value]}")
            names[key.value] = line
            below = f"{where}.{key.value}" if where else key.value
            lines.setdefault(below, line)
            note(value, below)

    note(root, "")
    return lines


@dataclass(frozen=True, slots=True)
class Read:
    """The settings, and a sentence for each option without effect."""

    settings: AnalyzeSettings
    warnings: tuple[str, ...] = ()


#: The option of each key that a file may use: the option's name, or one of its long flags.
KEYS: Final[Mapping[str, str]] = {
    key: name
    for name, option in OPTIONS.items()
    for key in (name, *(flag[2:].replace("-", "_") for flag in option.flags if flag.startswith("--")))
}


def read_settings(texts: Mapping[str, Any], file: Path | None = None) -> Read:
    """Merge options of the command line (texts by name) and of a file into settings.

    Raises INVALID_ARG, naming the option and the line of the file, and UNSUPPORTED for a file if PyYAML is missing.
    """
    chosen: dict[str, Any] = {}
    warnings: list[str] = []
    if file is not None:
        document = read_document(file)
        for key, value in document.content.items():
            try:
                _take(chosen, warnings, key, value)
            except ConchError as error:
                raise _with_position(document, error, key) from None
    for name, text in texts.items():
        _take(chosen, warnings, name, text, written=OPTIONS[name].flag if name in OPTIONS else flag_of(name))
    return Read(AnalyzeSettings(**chosen), tuple(warnings))


def _take(chosen: dict[str, Any], warnings: list[str], key: str, value: Any, *, written: str = "") -> None:
    written = written or key
    if key in KEYS:
        read = OPTIONS[KEYS[key]].read
        assert read is not None
        chosen[KEYS[key]] = read(written, value)
    elif key in NO_EFFECT or (key in REFUSED and harmless(key, value)):
        warnings.append(f"{written} has no effect: {NO_EFFECT.get(key, 'conch does so anyway')}")
    elif key in REFUSED:
        raise invalid(f"{written}: {REFUSED[key]}")
    else:
        hint = did_you_mean(key, (*KEYS, *NO_EFFECT, *REFUSED), "docs/analyze.md lists them")
        raise OptionProblem(f"there is no option '{key}'; {hint}", key)


def _with_position(document: SettingsFile, error: ConchError, key: str) -> ConchError:
    """Return the error with the file name and the line of its key."""
    where = error.path if isinstance(error, OptionProblem) else key
    while where and where not in document.lines:
        where = where.rpartition(".")[0]
    line = document.lines.get(where, document.lines.get(key, 1))
    return ConchError(f"{document.path}, line {line}: {error.message}", error.code)
