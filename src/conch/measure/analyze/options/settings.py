"""The options of ``conch analyze``.

The command line and the file (``-f``) use these declarations; :mod:`conch.measure.analyze.options.reading` parses them.
Names are model analyzer's, with dashes on the command line. Entries of ``profile_models`` are names, or mappings with
sweeps and goals.
"""
# ruff: noqa: RUF009 (``option`` returns a field of a dataclass)

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from conch.core.errors import did_you_mean, invalid
from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals, Price, WeightedObjective, bounds
from conch.measure.analyze.options import goal_texts, values
from conch.measure.analyze.options.values import OptionProblem
from conch.measure.reports.files import NO_PDF
from conch.options import declaration
from conch.options.declaration import Reader


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The options of one model: its sweeps, goals and requests.

    ``config`` is the nested ``model_config_parameters`` (:mod:`conch.measure.analyze.search.searches`). Empty loads,
    sizes and goals default to those of the whole analysis.
    """

    name: str
    batch_sizes: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    perf_flags: Mapping[str, Any] = field(default_factory=dict)
    cpu_only: bool = False
    objectives: tuple[WeightedObjective, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    weighting: float = 1.0


#: The field and the reader of each key in the file.
_KEYS: Mapping[str, tuple[str, Reader]] = {
    "model_config_parameters": ("config", values.mapping),
    "perf_analyzer_flags": ("perf_flags", values.mapping),
    "cpu_only": ("cpu_only", values.flag),
    "objectives": ("objectives", goal_texts.objectives),
    "constraints": ("constraints", goal_texts.constraints),
    "weighting": ("weighting", values.positive),
}
_PARAMETERS: Mapping[str, Reader] = {
    "batch_sizes": values.counts,
    "concurrency": values.counts,
    "request_rate": values.rates,
}


def models(name: str, value: Any) -> tuple[ModelSettings, ...]:
    """Read models: a list of names, a mapping of names to options, or a list of both."""
    if isinstance(value, str):
        value = values.names(name, value)
    listed: list[tuple[Any, Any]] = []
    for entry in [value] if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]:
        listed += entry.items() if isinstance(entry, Mapping) else [(entry, None)]
    settings = [_model(f"{name}.{key}", values.text(name, key), options) for key, options in listed]
    twice = {model.name for model in settings if sum(model.name == other.name for other in settings) > 1}
    if not settings or twice:
        raise invalid(f"{name}: {'no model is given' if not settings else f'{min(twice)} is given twice'}")
    return tuple(settings)


def _model(path: str, name: str, options: Any) -> ModelSettings:
    if options is None:
        return ModelSettings(name=name)
    if not isinstance(options, Mapping):
        raise values.wrong(path, options, "a mapping of the model's settings")
    fields: dict[str, Any] = {}
    for key, value in options.items():
        if key == "parameters":
            fields |= _parameters(f"{path}.parameters", value)
        elif key in _KEYS:
            target, read = _KEYS[key]
            fields[target] = read(f"{path}.{key}", value)
        else:
            raise _unknown(path, key, ("parameters", *_KEYS))
    return ModelSettings(name=name, **fields)


def _parameters(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise values.wrong(path, value, "a mapping with batch_sizes, concurrency or request_rate")
    for key in value:
        if key not in _PARAMETERS:
            raise _unknown(path, key, tuple(_PARAMETERS))
    return {key: _PARAMETERS[key](f"{path}.{key}", option) for key, option in value.items()}


def _unknown(path: str, key: Any, known: tuple[str, ...]) -> values.OptionProblem:
    hint = did_you_mean(str(key), known, f"the keys are {', '.join(known)}")
    return values.OptionProblem(f"{path}: unknown key '{key}'; {hint}", f"{path}.{key}")


#: Options that are given in milliseconds and stored in seconds.
_MILLISECONDS: Final = ("latency_budget",)


def described(name: str, value: Any) -> str:
    """Format the value of the option ``name`` as a user would write it."""
    if name in _MILLISECONDS:
        return f"{1000 * value:g} ms"
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case WeightedObjective():
            return value.metric if value.weight == 1 else f"{value.metric} (weight {value.weight:g})"
        case Constraint():
            return " and ".join(bounds(value))
        case Price():
            parts = {"core": value.core, "GB": value.gigabyte, "GPU": value.gpu}
            by_use = ", ".join(f"{price:g} a {part}" for part, price in parts.items() if price)
            return f"{value.machine:g} an hour" if value.machine else f"{by_use} an hour"
        case ModelSettings():
            return value.name
        case Mapping():
            return ", ".join(f"{key}={described('', element)}" for key, element in value.items())
        case tuple() | list():
            return ", ".join(described("", element) for element in value)
    return str(value)


SearchMode = Literal["brute", "quick", "optuna"]
LaunchMode = Literal["local", "remote"]

#: The dimensions that ``--sweep`` can name.
SWEPT: Final = ("instances", "batch", "delay", "preferred", "variant", "threads")

_MODELS: Final = "Models"
_SEARCH: Final = "Search"
_GOALS: Final = "Goals"
_SERVER: Final = "Server"
_MEASURING: Final = "Measuring"
_RESULTS: Final = "Results"


def option(
    default: Any, section: str, read: Reader, metavar: str, help: str, *,
    flags: tuple[str, ...] = (), common: bool = False, several: bool = False,
) -> Any:  # fmt: skip
    """Declare an option of an analysis, whose value may also stand in a file.

    The reader of an option with ``several`` values, or of names with values, gets a list of them.
    """
    repeatable = several or isinstance(default, dict)
    return declaration.option(
        default, section, help, read=read, metavar=metavar, flags=flags, common=common, repeatable=repeatable
    )


def _formats(name: str, value: Any) -> tuple[str, ...]:
    """Read the formats of the reports."""
    if "pdf" in (format.strip().lower() for format in values.names(name, value)):
        raise OptionProblem(f"{name}: {NO_PDF}", name)
    return tuple(values.some_of("html", "csv", "json")(name, value))


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings:
    """The options of an analysis.

    Raises INVALID_ARG for options that contradict each other.
    """

    # fmt: off
    model_repository: Path | None = option(
        None, _MODELS, values.directory, "DIR", "Model repository. It is only read.",
        flags=("-m",), common=True)
    profile_models: tuple[ModelSettings, ...] = option(
        (), _MODELS, models, "A,B", "Models to measure.", common=True)
    bls_composing_models: tuple[ModelSettings, ...] = option(
        (), _MODELS, models, "A,B", "Models that a measured model calls (BLS), to tune with it.")
    ensemble_composing_models: tuple[ModelSettings, ...] = option(
        (), _MODELS, models, "A,B", "Steps of an ensemble to tune (default: all).")
    cpu_only_composing_models: tuple[str, ...] = option(
        (), _MODELS, values.names, "A,B", "Composing models to keep on the CPU.")
    cpu_only: bool = option(False, _MODELS, values.flag, "", "Keep all models on the CPU.")

    run_config_search_mode: SearchMode = option(
        "quick", _SEARCH, values.one_of("brute", "quick", "optuna"), "MODE",
        "quick (hill climbing; default), brute (all combinations) or optuna.", common=True)
    sweep: tuple[str, ...] = option(
        (), _SEARCH, values.some_of(*SWEPT), "WHAT,…",
        f"Settings to vary: {', '.join(SWEPT)} (default: all; brute: instances, batch, variant).",
        common=True)
    run_config_search_disable: bool = option(
        False, _SEARCH, values.flag, "", "Vary only the fields under model_config_parameters.")
    run_config_search_min_instance_count: int = option(
        1, _SEARCH, values.count, "N", "Minimum number of instances.")
    run_config_search_max_instance_count: int = option(
        5, _SEARCH, values.instances, "N", "Maximum number of instances.", common=True)
    run_config_search_min_model_batch_size: int = option(1, _SEARCH, values.count, "N", "Minimum max_batch_size.")
    run_config_search_max_model_batch_size: int = option(
        128, _SEARCH, values.count, "N", "Maximum max_batch_size.", common=True)
    run_config_search_min_concurrency: int = option(1, _SEARCH, values.count, "N", "Minimum concurrency.")
    run_config_search_max_concurrency: int = option(1024, _SEARCH, values.count, "N", "Maximum concurrency.")
    run_config_search_min_request_rate: float = option(
        16.0, _SEARCH, values.positive, "N", "Minimum request rate per second.")
    run_config_search_max_request_rate: float = option(
        8192.0, _SEARCH, values.positive, "N", "Maximum request rate per second.")
    run_config_search_max_binary_search_steps: int = option(
        5, _SEARCH, values.count, "N",
        "Maximum steps of the binary search for the best load.")
    run_config_profile_models_concurrently_enable: bool = option(
        False, _SEARCH, values.flag, "", "Measure all models at the same time.")
    request_rate_search_enable: bool = option(
        False, _SEARCH, values.flag, "", "Search request rates instead of concurrencies.")
    early_exit_enable: bool = option(
        False, _SEARCH, values.flag, "", "Stop a sweep of given loads when the throughput stops growing.")
    optuna_min_percentage_of_search_space: float = option(
        5.0, _SEARCH, values.percentage, "N", "optuna: minimum share of the search space, in percent.",
        flags=("--min-percentage-of-search-space", "--optuna-min-percentage-of-search-space"))
    optuna_max_percentage_of_search_space: float = option(
        10.0, _SEARCH, values.percentage, "N", "optuna: maximum share of the search space, in percent.",
        flags=("--max-percentage-of-search-space", "--optuna-max-percentage-of-search-space"))
    optuna_min_trials: int = option(20, _SEARCH, values.count, "N", "optuna: minimum number of trials.")
    optuna_max_trials: int = option(200, _SEARCH, values.count, "N", "optuna: maximum number of trials.")
    optuna_early_exit_threshold: int = option(
        10, _SEARCH, values.count, "N", "optuna: stop after this many trials without improvement.")
    concurrency: tuple[int, ...] = option(
        (), _SEARCH, values.counts, "N,N or A:B:S", "Concurrencies to measure (default: searched).",
        flags=("-c",), common=True)
    request_rate: tuple[float, ...] = option(
        (), _SEARCH, values.rates, "N,N or A:B:S", "Request rates per second to measure, instead of concurrencies.")
    batch_sizes: tuple[int, ...] = option(
        (1,), _SEARCH, values.counts, "N,N", "Inferences per request.", flags=("-b",))

    objectives: tuple[WeightedObjective, ...] = option(
        (), _GOALS, goal_texts.objectives, "WHAT[=WEIGHT]",
        "throughput (default), latency:p99, memory, gpu_memory, cost …; repeatable.",
        flags=("--objective", "--objectives"), common=True, several=True)
    constraints: tuple[Constraint, ...] = option(
        (), _GOALS, goal_texts.constraints, "BOUND", '"p99<100ms", "memory<4GB", "throughput>50" …; repeatable.',
        flags=("--constraint", "--constraints"), common=True, several=True)
    latency_budget: float | None = option(
        None, _GOALS, values.milliseconds, "MS", "Maximum p99 latency; the same as a constraint.")
    min_throughput: float | None = option(
        None, _GOALS, values.positive, "N", "Minimum throughput; the same as a constraint.")
    price: Price | None = option(
        None, _GOALS, values.price, "PRICE",
        "Price per hour for the objective cost: 3.20, or core=0.04,gb=0.005,gpu=2.")

    triton_launch_mode: LaunchMode = option(
        "local", _SERVER, values.launch_mode, "MODE", "local: start conch serve; remote: use a running server.",
        flags=("--mode", "--triton-launch-mode"), common=True)
    triton_http_endpoint: str = option("localhost:8000", _SERVER, values.text, "HOST:PORT", "remote: HTTP address.")
    triton_grpc_endpoint: str = option(
        "localhost:8001", _SERVER, values.text, "HOST:PORT", "remote: gRPC address.", common=True)
    triton_server_flags: Mapping[str, Any] = option(
        {}, _SERVER, values.mapping, "NAME=VALUE", "local: option of conch serve; repeatable.")
    triton_server_environment: Mapping[str, Any] = option(
        {}, _SERVER, values.mapping, "NAME=VALUE", "local: environment variable of the server; repeatable.")
    reload_model_disable: bool = option(
        False, _SERVER, values.flag, "", "remote: do not reload models; only search loads.")

    client_protocol: Literal["http", "grpc"] = option(
        "grpc", _MEASURING, values.one_of("http", "grpc"), "NAME", "Protocol of the requests: grpc (default) or http.")
    perf_analyzer_flags: Mapping[str, Any] = option(
        {}, _MEASURING, values.mapping, "NAME=VALUE", "Option of conch perf, such as shape=INPUT:3,224; repeatable.",
        common=True)
    perf_analyzer_timeout: float = option(
        600.0, _MEASURING, values.positive, "S", "Time limit of one measurement, in seconds.")
    final_rounds: int = option(
        3, _MEASURING, values.number, "N",
        "Number of final rounds that compare the best configuration with the default.")
    budget: float | None = option(
        None, _MEASURING, values.seconds, "TIME",
        "Time limit of the analysis, including the final rounds, such as 5m or 90s.",
        common=True)
    retry_failed: bool = option(
        False, _MEASURING, values.flag, "", "Measure configurations again that failed before.")
    repeat_disturbed: bool = option(
        False, _MEASURING, values.flag, "", "Measure points again that were disturbed.")

    export_path: Path = option(
        Path("analysis"), _RESULTS, values.path, "DIR",
        "Directory for the reports.", flags=("-e",), common=True)
    checkpoint_directory: Path | None = option(
        None, _RESULTS, values.path, "DIR",
        "Directory for the measurements, from which an analysis resumes (default: EXPORT/checkpoints).",
        flags=("-s",))
    output_model_repository_path: Path | None = option(
        None, _RESULTS, values.path, "DIR", "Directory for the measured configurations (default: not kept).")
    override_output_model_repository: bool = option(
        False, _RESULTS, values.flag, "", "Overwrite the contents of that directory.")
    output_formats: tuple[str, ...] = option(
        ("html", "csv", "json"), _RESULTS, _formats, "NAME,…", "Formats: html, csv, json (default: all).",
        flags=("-o",))
    skip_summary_reports: bool = option(False, _RESULTS, values.flag, "", "Do not write the HTML report.")
    # fmt: on

    def __post_init__(self) -> None:
        for name in ("instance_count", "model_batch_size", "concurrency", "request_rate"):
            minimum = getattr(self, f"run_config_search_min_{name}")
            maximum = getattr(self, f"run_config_search_max_{name}")
            if minimum > maximum:
                raise invalid(
                    f"run_config_search_min_{name} ({minimum:g}) is greater than "
                    f"run_config_search_max_{name} ({maximum:g})"
                )
        for sizes in (self.batch_sizes, *(model.batch_sizes for model in self.profile_models)):
            if len(sizes) > 1:
                raise invalid(
                    f"batch_sizes: {', '.join(map(str, sizes))}: an analysis takes one batch size; run one for each,"
                    " with its own --export-path"
                )
        if self.concurrency and self.request_rate:
            raise invalid("concurrency and request_rate are mutually exclusive")

    @property
    def loads_are_rates(self) -> bool:
        """Whether loads are request rates."""
        return bool(self.request_rate) or self.request_rate_search_enable

    @property
    def checkpoints(self) -> Path:
        """The directory of the journal."""
        return self.checkpoint_directory or self.export_path / "checkpoints"

    def batch_size_of(self, model: str) -> int:
        """Return the number of inferences in a request to a model."""
        return (self.model(model).batch_sizes or self.batch_sizes)[0]

    def stays_on_cpu(self, model: str) -> bool:
        """Return whether a model is kept on the CPU, regardless of its configuration."""
        return self.cpu_only or self.model(model).cpu_only or model in self.cpu_only_composing_models

    def goals(self, names: Sequence[str]) -> Goals:
        """Return the goals of models that are profiled together: each model's own, or those of the analysis.

        Raises INVALID_ARG for constraints that contradict each other.
        """
        shorthands = []
        if self.latency_budget is not None:
            shorthands.append(Constraint("latency_p99", maximum=self.latency_budget))
        if self.min_throughput is not None:
            shorthands.append(Constraint("throughput", minimum=self.min_throughput))
        chosen = {}
        for name in names:
            own = self.model(name)
            chosen[name] = ModelGoals(
                own.objectives or self.objectives or (WeightedObjective("throughput"),),
                goal_texts.joined("constraints", (*(own.constraints or self.constraints), *shorthands)),
                own.weighting,
            )
        return Goals(chosen, self.price or Price())

    @property
    def endpoint(self) -> str:
        """The address of the server in remote mode."""
        return self.triton_grpc_endpoint if self.client_protocol == "grpc" else self.triton_http_endpoint

    def changed_options(self) -> Iterator[tuple[str, str]]:
        """Yield the options that differ from their defaults, by name, for reports."""
        for name, declared in OPTIONS.items():
            value = getattr(self, name)
            if value not in (declared.default, {}) and name != "profile_models":
                yield name, described(name, value)

    def model(self, name: str) -> ModelSettings:
        """Return the options of a measured or composing model."""
        known = (*self.profile_models, *self.bls_composing_models, *self.ensemble_composing_models)
        return next((model for model in known if model.name == name), ModelSettings(name=name))


#: The options by name, in the order of the help.
OPTIONS: Final = declaration.options_of(AnalyzeSettings)
