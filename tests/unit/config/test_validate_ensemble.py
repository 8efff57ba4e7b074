"""Ensembles that are refused, in the words of the real Triton 2.51."""

from __future__ import annotations

import pytest

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.reading import Problem
from conch.config.schema import ModelConfig
from conch.config.validate import validate, validate_ensemble
from conch.config.validate_ensemble import (
    cycle_problem,
    step_model_not_loaded,
    step_model_not_valid,
    step_model_problems,
    version_problem,
)

A = 'input { name: "A" data_type: TYPE_FP32 dims: 4 }\n'
B = 'output { name: "B" data_type: TYPE_FP32 dims: 4 }\n'


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> str:
    maps = "".join(f'input_map {{ key: "{key}" value: "{value}" }} ' for key, value in inputs.items())
    maps += "".join(f'output_map {{ key: "{key}" value: "{value}" }} ' for key, value in outputs.items())
    return f'step {{ model_name: "{model}" model_version: {version} {maps}}}'


def ensemble(*steps: str, tensors: str = A + B, more: str = "", name: str = "e") -> ModelConfig:
    text = f'platform: "ensemble" {tensors} {more} ensemble_scheduling {{ {" ".join(steps)} }}'
    return complete(parse(text, "config.pbtxt"), name, ())


def model(name: str, text: str = A + B) -> ModelConfig:
    return complete(parse(text, "config.pbtxt"), name, {"model.py"})


ONE = step("ok", {"A": "A"}, {"B": "B"})
TWICE = "ensemble tensor 'B' can appear in an output map only once for ensemble 'e' step "


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (complete(parse('backend: "python" ensemble_scheduling {}', "c"), "e", ()),
         "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble"),
        (complete(parse('platform: "ensemble"', "c"), "e", ()),
         "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        (complete(parse('platform: "ensemble" max_batch_size: 4 dynamic_batching {}', "c"), "e", ()),
         "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        (ensemble(ONE, more='backend: "python"'),
         "Ensemble model 'e' must have platform type 'ensemble' and empty backend type"),
        (ensemble(ONE, more="instance_group { count: 1 }"), "instance group should not be specified for ensemble 'e'"),
        (ensemble(ONE, more="optimization {}"), "optimization should not be specified for ensemble 'e'"),
        (ensemble(ONE, more="model_warmup {}"), "model_warmup can not be specified for ensemble 'e'"),
        (ensemble(), "must specify 'step' for ensemble 'e'"),
        (ensemble(step("", {"A": "A"}, {"B": "B"})), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (ensemble(step("ok", {}, {"B": "B"})), "must specify 'input_map' in step 0 of ensemble 'e'"),
        (ensemble(step("ok", {"A": "A"}, {})), "must specify 'output_map' in step 0 of ensemble 'e'"),
        (ensemble(ONE, ONE), f"{TWICE}1"),
        (ensemble(step("ok", {"A": "A"}, {"B": "B", "C": "B"})), f"{TWICE}0"),
        (ensemble(ONE, tensors=A + B + 'input { name: "A2" data_type: TYPE_FP32 dims: 1 }'),
         "ensemble input 'A2' for ensemble e' is not used"),
        (ensemble(ONE, tensors=A + B + 'output { name: "B2" data_type: TYPE_FP32 dims: 1 }'),
         "ensemble output 'B2' for ensemble e' is not used"),
        (ensemble(step("ok", {"A": "A"}, {"B": "X"}), step("ok", {"A": "X"}, {"B": "Z"}),
         step("ok", {"A": "Y"}, {"B": "B"})),
         "output 'B' for ensemble 'e' is not written: at least one of its depending tensors, 'Y', is not connected"),
        (ensemble(step("ok", {"A": "A"}, {"B": "X"}), ONE), "ensemble tensor 'X' is unused in ensemble 'e'"),
        (ensemble(ONE, tensors=""), "ensemble tensor 'A' is unused in ensemble 'e'"),
    ],
)  # fmt: skip
def test_ensemble_is_refused_when_it_is_read(config: ModelConfig, message: str) -> None:
    with pytest.raises(Problem) as caught:
        validate(config)
    assert caught.value.message == message


def test_good_ensemble_is_accepted() -> None:
    config = ensemble(step("ok", {"A": "A"}, {"B": "X"}), step("ok", {"A": "X"}, {"B": "B"}))

    validate(config)
    validate_ensemble(config, {"ok": model("ok")})


OPEN = (A + B).replace("dims: 4", "dims: -1")
ROWS = (A + B).replace("dims: 4", "dims: [-1, 4]")
WIDE = 'input { name: "A" data_type: TYPE_FP32 dims: 8 } output { name: "B" data_type: TYPE_FP32 dims: 8 }'
PAIR = A + B + 'input { name: "A2" data_type: TYPE_INT32 dims: 4 } output { name: "C" data_type: TYPE_INT32 dims: 4 }'
JOIN = A + B + 'input { name: "A2" data_type: TYPE_FP32 dims: 4 }'
DECOUPLED = A + B + "model_transaction_policy { decoupled: true }"
MEMBERS = {
    "ok": model("ok"),
    "wide": model("wide", WIDE),
    "pair": model("pair", PAIR),
    "join": model("join", JOIN),
    "stream": model("stream", DECOUPLED),
    "batch": model("batch", A + B + "max_batch_size: 4"),
    "open": model("open", OPEN),
    "optional": model("optional", A + B + 'input { name: "A2" data_type: TYPE_INT32 dims: 4 optional: true }'),
    "rows": model("rows", ROWS),
}  # fmt: skip
ORIGIN = "in ensemble e, step of model 'e' receives inputs originated from different decoupled models"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ensemble(step("zz", {"A": "A"}, {"B": "X"}), step("aa", {"A": "X"}, {"B": "B"})),
         "ensemble e contains models that are not available or ambiguous: zz"),
        (ensemble(step("batch", {"A": "A"}, {"B": "B"}), more="max_batch_size: 8"),
         "ensemble e allows maximum batch size 8, but it contains model batch which only allows maximum batch "
         "size to be 4"),
        (ensemble(step("ok", {"Q": "A"}, {"B": "B"})),
         "in ensemble e, ensemble tensor A is mapping to non-existing input Q in model ok"),
        (ensemble(step("ok", {"A": "A"}, {"Q": "B"})),
         "in ensemble e, ensemble tensor B is mapped from non-existing output Q in model ok"),
        (ensemble(step("pair", {"A": "A"}, {"B": "B"})),
         "in ensemble e, input A2 in model pair is not mapped to any ensemble tensors"),
        (ensemble(step("pair", {"A": "A", "A2": "A"}, {"B": "B"})),
         "in ensemble e, ensemble tensor A: inconsistent data type: TYPE_FP32 is inferred from model e while "
         "TYPE_INT32 is inferred from model pair"),
        (ensemble(step("wide", {"A": "A"}, {"B": "B"})),
         "in ensemble e, ensemble tensor A: inconsistent shape: [4] is inferred from model e while [8] is inferred "
         "from model wide"),
        (ensemble(step("batch", {"A": "A"}, {"B": "B"}), tensors=WIDE, more="max_batch_size: 2"),
         "in ensemble e, ensemble tensor A: inconsistent shape: [-1,8] is inferred from model e while [-1,4] is "
         "inferred from model batch"),
        (ensemble(step("open", {"A": "A"}, {"B": "X"}), step("wide", {"A": "X"}, {"B": "Y"}),
         step("ok", {"A": "Y"}, {"B": "B"})),
         "in ensemble e, ensemble tensor Y: inconsistent shape: [8] is inferred from model wide while [4] is inferred "
         "from model ok"),
        (ensemble(step("stream", {"A": "A"}, {"B": "X"}), step("stream", {"A": "A"}, {"B": "Y"}),
                  step("join", {"A": "X", "A2": "Y"}, {"B": "B"})), ORIGIN),
        (ensemble(step("stream", {"A": "A"}, {"B": "X"}), step("join", {"A": "X", "A2": "A"}, {"B": "B"})), ORIGIN),
    ],
)  # fmt: skip
def test_ensemble_is_refused_when_its_members_do_not_fit(config: ModelConfig, message: str) -> None:
    validate(config)
    with pytest.raises(Problem) as caught:
        validate_ensemble(config, MEMBERS)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "config",
    [
        ensemble(step("batch", {"A": "A"}, {"B": "B"})),
        ensemble(ONE, more="max_batch_size: 4"),
        ensemble(step("rows", {"A": "A"}, {"B": "B"}), more="max_batch_size: 2"),
        ensemble(step("optional", {"A": "A"}, {"B": "B"})),
        ensemble(step("open", {"A": "A"}, {"B": "X"}), step("ok", {"A": "X"}, {"B": "B"})),
        ensemble(step("stream", {"A": "A"}, {"B": "X"}), step("join", {"A": "X", "A2": "X"}, {"B": "B"})),
    ],
)
def test_members_that_triton_accepts_are_accepted(config: ModelConfig) -> None:
    validate_ensemble(config, MEMBERS)


def test_step_without_inputs_is_no_obstacle_to_finding_what_else_is_wrong() -> None:
    config = ensemble(step("ok", {}, {"Q": "B"}))

    assert "non-existing output Q" in " ".join(problem.message for problem in step_model_problems(config, MEMBERS))


def test_ensemble_that_contains_itself_is_refused() -> None:
    members = {"a": ["b"], "b": ["c", "ok"], "c": ["a"], "d": ["a"], "self": ["self"]}

    def message(name: str) -> str | None:
        problem = cycle_problem(name, members)
        return problem and problem.message

    assert message("a") == "circular dependency between ensembles: a -> ... -> c -> a"
    assert message("self") == "circular dependency between ensembles: self -> ... -> self -> self"
    assert message("d") is None
    assert message("ok") is None


def test_step_needs_its_version_loaded() -> None:
    config = ensemble(step("ok", {"A": "A"}, {"B": "B"}, version=7))

    problem = version_problem(config, {"ok": [1, 3]})

    assert problem is not None
    assert problem.message == "ensemble 'e' depends on 'ok' whose required version 7 is not loaded."
    assert version_problem(config, {"ok": [7]}) is None
    assert version_problem(ensemble(ONE), {"ok": [1]}) is None


def test_failure_of_a_member_is_passed_on() -> None:
    assert step_model_not_loaded("e", "m", "why").message == (
        "ensemble 'e' depends on 'm' which has no loaded version. Model 'm' loading failed with error: why"
    )
    assert step_model_not_valid("e", "m", "why").message == (
        "ensemble 'e' depends on 'm' which is not valid. Model 'm' failed with error: why"
    )
