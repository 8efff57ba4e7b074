"""Which deployments a repository becomes, and when their replicas must be replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conch.deploy.ray import planning
from conch.deploy.ray.options import RayOptions
from conch.deploy.ray.planning import DeploymentPlan, plan_deployments, shortage
from tests.models import write
from tests.refusals import refused_argument

ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_STRING dims: 1 }
output { name: "OUT" data_type: TYPE_STRING dims: 1 }
ensemble_scheduling { step {
  model_name: "member" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
} }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name in ("first", "member"):
        write(folder, name, 'backend: "python"', {"1/model.py": "# a model", "labels.txt": "a"})
    write(folder, "whole", ENSEMBLE)
    (folder / "whole" / "1").mkdir()
    return folder


def plans(repository: Path, **options: Any) -> dict[str, DeploymentPlan]:
    found = plan_deployments(RayOptions(model_repository=(str(repository),), **options))
    assert len({plan.name for plan in found}) == len(found)
    return {plan.name: plan for plan in found}


def refusal(repository: Path, **options: Any) -> str:
    return refused_argument(plans, repository, **options)


def test_every_model_has_a_deployment_of_its_own(repository: Path) -> None:
    found = plans(repository)
    assert {name: (plan.models, plan.loads) for name, plan in found.items()} == {
        name: ((name,), (name,)) for name in ("first", "member", "whole")
    }


def test_models_that_another_calls_are_in_its_replicas(repository: Path) -> None:
    found = plans(repository, models=("first+member", "member"))
    assert {name: (plan.models, plan.loads) for name, plan in found.items()} == {
        "first": (("first",), ("first", "member")),
        "member": (("member",), ("member",)),
    }


def test_models_that_share_replicas_are_one_deployment(repository: Path) -> None:
    found = plans(repository, models=("first+member", "member", "whole"), max_models_per_replica=2)
    assert found.keys() == {"models"}
    assert (found["models"].models, found["models"].loads) == (("first", "member", "whole"), ())


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (("firts",), "did you mean 'first'"),
        (("first+none",), "none"),
        (("first", "first+member"), "--models names 'first' twice"),
        (("first+",), "--models: there is no model ''"),
        (("+first",), "--models: there is no model ''"),
    ],
)
def test_what_cannot_be_deployed_is_refused(repository: Path, models: tuple[str, ...], words: str) -> None:
    assert words in refusal(repository, models=models)


def test_a_repository_without_models_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)
    assert "none" in refusal(tmp_path / "none", models=("none",))


@pytest.mark.parametrize("name", ["a#b", "Grüße", "registry", "ingress"])
def test_names_that_deployments_cannot_have_are_refused(repository: Path, name: str) -> None:
    write(repository, name, 'backend: "python"', {"1/model.py": ""})
    assert f"'{name}' cannot be a Ray Serve deployment" in refusal(repository)
    assert name in plans(repository, max_models_per_replica=2)["models"].models


@pytest.mark.parametrize("name", ["a b.c", "greet%2F?", "models"])
def test_other_names_are_taken_as_they_are(repository: Path, name: str) -> None:
    write(repository, name, 'backend: "python"', {"1/model.py": ""})
    assert plans(repository)[name].loads == (name,)


def versions(repository: Path, **options: Any) -> dict[str, str]:
    return {name: plan.version for name, plan in plans(repository, **options).items()}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name, version in after.items() if before.get(name) != version}


def test_replicas_stay_while_nothing_has_changed(repository: Path) -> None:
    before = versions(repository)
    cache = repository / "first" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").write_text("x")
    assert versions(repository) == before
    assert (
        versions(repository, min_replicas=2, max_replicas=3, cpus_per_replica=2.0, ingress_options={"x": "y"}) == before
    )


@pytest.mark.parametrize("file", ["1/model.py", "2/model.py", "config.pbtxt", "labels.txt"])
def test_replicas_are_replaced_when_files_of_their_models_change(repository: Path, file: str) -> None:
    before = versions(repository, models=("first", "member", "whole"))
    path = repository / "member" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("# something else")
    os.utime(path, (1, 1))
    # an ensemble runs its members in its own replicas
    assert changed(before, versions(repository, models=("first", "member", "whole"))) == {"member", "whole"}


def test_replicas_are_replaced_when_a_model_beside_theirs_changes(repository: Path) -> None:
    grouped = ("first+member",)
    before = versions(repository, models=grouped)
    assert before != versions(repository, models=("first",))
    (repository / "member" / "labels.txt").write_text("other labels")
    assert changed(before, versions(repository, models=grouped)) == {"first"}


@pytest.mark.parametrize(
    "options", [{"replica_options": {"log_verbose": "1"}}, {"drain_secs": 31}, {"max_models_per_replica": 2}]
)
def test_replicas_are_replaced_when_their_options_change(repository: Path, options: dict[str, Any]) -> None:
    before, after = versions(repository), versions(repository, **options)
    assert not set(before.values()) & set(after.values())


def test_replicas_are_replaced_by_those_of_another_conch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions(repository)
    monkeypatch.setattr(planning, "__version__", "another")
    assert changed(before, versions(repository)) == before.keys()


def test_a_file_may_have_any_name(repository: Path) -> None:
    before = versions(repository)
    (Path(os.fsdecode(os.fsencode(repository / "first") + b"/\xff"))).write_text("x")
    assert changed(before, versions(repository)) == {"first"}


def test_ensembles_of_each_other_end(repository: Path) -> None:
    write(repository, "member", ENSEMBLE.replace('"member"', '"whole"'))
    assert plans(repository)["whole"].version != ""


@pytest.mark.parametrize(
    ("options", "total", "short"),
    [
        ({}, {"CPU": 3.0}, ""),
        ({}, {}, ""),
        ({"cpus_per_replica": 0.5, "min_replicas": 2}, {"CPU": 3.0}, ""),
        ({}, {"CPU": 2.0}, "3 replicas with 1 CPU each need 3, but the cluster has 2: reduce this with "
         "--cpus-per-replica 0.666, start fewer replicas, or add nodes"),
        ({"gpus_per_replica": 1}, {"CPU": 8.0}, "3 replicas with 1 GPU each need 3, but the cluster has 0: reduce this "
         "with --gpus-per-replica 0, start fewer replicas, or add nodes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_into_a_cluster_is_reported_with_the_flag_that_helps(
    options: dict[str, Any], total: dict[str, float], short: str
) -> None:
    deployments = [DeploymentPlan(name, (name,), (name,), "1") for name in ("a", "b", "c")]
    assert shortage(RayOptions(model_repository=(), **options), deployments, total) == short
