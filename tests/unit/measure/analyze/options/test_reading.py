"""Settings from a command line and a file: what they mean, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.measure.analyze.judging.goals import Constraint, Price, WeightedObjective
from conch.measure.analyze.options.reading import read_settings


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_model_analyzers_file_is_understood(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
model_repository: models
run_config_search_mode: brute
profile_models:
  add:
    parameters:
      concurrency: {start: 2, stop: 6, step: 2}
      batch_sizes: 4
    model_config_parameters:
      max_batch_size: [6, 8]
    objectives: [perf_throughput]
    weighting: 3
    cpu_only: true
  sub:
perf_analyzer_flags:
  percentile: 95
objectives: {perf_latency_p99: 5, perf_throughput: 10}
constraints:
  perf_latency_p99: {max: 100}
  gpu_used_memory: {max: 200}
  perf_throughput: {min: 50}
min_percentage_of_search_space: 3
""",
    )
    settings = read_settings({}, file).settings
    add, sub = settings.profile_models
    assert (add.concurrency, add.batch_sizes, add.cpu_only) == ((2, 4, 6), (4,), True)
    assert add.config == {"max_batch_size": [6, 8]}
    assert sub.name == "sub"
    assert settings.optuna_min_percentage_of_search_space == 3
    assert settings.perf_analyzer_flags == {"percentile": 95}
    goals = settings.goals(["add", "sub"])
    assert goals.models["add"].objectives == (WeightedObjective("throughput"),)
    assert goals.models["add"].weight == 3
    assert goals.models["sub"].objectives == (WeightedObjective("latency_p99", 5), WeightedObjective("throughput", 10))
    assert goals.models["sub"].constraints == (
        Constraint("latency_p99", maximum=0.1),
        Constraint("gpu_memory", maximum=200e6),
        Constraint("throughput", minimum=50),
    )


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "final_rounds: 7\nclient_protocol: http\n")
    settings = read_settings({"final_rounds": "2"}, file).settings
    assert (settings.final_rounds, settings.client_protocol) == (2, "http")


def test_goals_are_said_in_words() -> None:
    settings = read_settings(
        {
            "objectives": ["latency:p99=2", "cost"],
            "constraints": [
                "p99<100ms",
                "p99 <= 0.05 s",
                "memory<4GB",
                "throughput > 50",
                "gpu_memory<1GiB",
                "p50<900µs",
            ],
            "price": "core=0.04,gb=0.005",
        }
    ).settings
    assert settings.objectives == (WeightedObjective("latency_p99", 2), WeightedObjective("cost"))
    assert settings.constraints == (
        Constraint("latency_p99", maximum=0.05),
        Constraint("memory", maximum=4e9),
        Constraint("throughput", minimum=50),
        Constraint("gpu_memory", maximum=float(1 << 30)),
        Constraint("latency_p50", maximum=pytest.approx(0.0009)),
    )
    assert settings.price == Price(core=0.04, gigabyte=0.005)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: all\nprofile_model: a\n", "line 2: there is no option 'profile_model'; did you mean 'profile_models'?"),
        (
            "profile_models:\n  a:\n    parameters:\n      concurency: 1\n",
            "line 4: profile_models.a.parameters: unknown key 'concurency'; did you mean 'concurrency'?",
        ),
        ("profile_models:\n- b\n- a:\n    weighting: no\n", "line 4: profile_models.a.weighting: False is not a "),
        ("a: [1\n", "line 2: "),
        ("gpus: all\ngpus: all\n", "line 2: 'gpus' is already in line 1"),
        ("- a\n", "does not have options as 'name: value'"),
        ("gpus: [GPU-1]\n", "line 1: gpus: choose GPUs for the server by CUDA_VISIBLE_DEVICES"),
        ("triton_launch_mode: docker\n", "line 1: triton_launch_mode: conch does not start containers"),
        ("run_config_search_mode: quik\n", "did you mean 'quick'?"),
        ("constraints:\n  perf_latency_p9: {max: 1}\n", "line 2: "),
        ("constraints:\n  perf_latency_p99: {max: 1, min: 2}\n", "nothing can satisfy latency_p99"),
        ("run_config_search_min_concurrency: 8\nrun_config_search_max_concurrency: 4\n", "is greater than"),
        ("concurrency: 1\nrequest_rate: 5\n", "mutually exclusive"),
        ("profile_models: [a, a]\n", "a is given twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        read_settings({}, written(tmp_path, text))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"constraints": ["p99<100"]}, "--constraint: 'p99<100' has no unit; write 100ms or 0.1s"),
        ({"constraints": ["p99<4GB"]}, "latency_p99 is not measured in GB, but in ms"),
        ({"constraints": ["fast"]}, "--constraint: 'fast' is not a bound such as p99<100ms"),
        ({"objectives": ["trougput"]}, "--objective: there is no figure 'trougput'; did you mean 'throughput'?"),
        ({"model_repository": "s3://bucket/models"}, "is not a directory: copy the models out of"),
        ({"concurrency": "8:4"}, "--concurrency: '8:4' is not a range"),
        ({"optuna_min_trials": "0"}, "--optuna-min-trials: '0' is not a whole number of at least 1"),
        ({"run_config_search_max_instance_count": "9999999"}, "is not a number of instances, at most 1000"),
        (
            {"output_formats": "html,PDF"},
            "--output-formats: conch does not write PDF: write the report as HTML and print",
        ),
        ({"batch_sizes": "1,4"}, "batch_sizes: 1, 4: an analysis takes one batch size"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        read_settings(given)
    assert message in caught.value.message


def test_an_option_without_effect_is_accepted_with_the_reason(tmp_path: Path) -> None:
    read = read_settings({}, written(tmp_path, "triton_docker_image: image\ngpus: all\n"))
    assert read.warnings == (
        "triton_docker_image has no effect: conch does not start containers",
        "gpus has no effect: conch does so anyway",
    )


def test_an_alias_that_contains_itself_is_no_endless_file(tmp_path: Path) -> None:
    with pytest.raises(ConchError):
        read_settings({}, written(tmp_path, "a: &a\n  b: *a\n"))
