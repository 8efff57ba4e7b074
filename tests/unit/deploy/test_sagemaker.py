"""What SageMaker takes, and what an endpoint with several models cannot have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.deploy import sagemaker
from conch.deploy.bundle import Deployment
from conch.deploy.requirements import Contents, Entry
from tests.unit.deploy.given import given


def variant(deployment: Deployment) -> dict[str, Any]:
    (found,) = sagemaker.create_endpoint_config(deployment)["ProductionVariants"]
    assert isinstance(found, dict)
    return found


def test_a_repository_above_the_limit_is_refused() -> None:
    with pytest.raises(ConchError, match="has 513 GB, but the volume of a SageMaker instance accepts at most 512 GB"):
        sagemaker.plan(given(size=513 * 10**9))


def test_of_several_models_each_has_to_fit() -> None:
    entries = tuple(Entry(f"{name}/1/x", None, 300 * 10**9) for name in "ab")
    sagemaker.plan(replace(given(), contents=Contents(entries)), multi_model=True)
    with pytest.raises(ConchError, match="has 600 GB"):
        sagemaker.plan(replace(given(), contents=Contents(entries)))


def test_the_volume_has_room_for_the_artifact_packed_and_unpacked() -> None:
    assert "VolumeSizeInGB" not in variant(given())
    assert variant(given(size=20 * 10**9 + 1))["VolumeSizeInGB"] == 41
    assert variant(given(size=500 * 10**9))["VolumeSizeInGB"] == 512


def test_vllm_gets_an_instance_with_a_gpu_and_a_disk_of_its_own() -> None:
    found = variant(given(size=500 * 10**9, extras=("vllm",)))
    assert found["InstanceType"].startswith("ml.g")
    assert "VolumeSizeInGB" not in found


def test_the_environment_names_the_model_and_what_requests_are() -> None:
    assert sagemaker.environment(given("m")) == {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m"}
    generating = sagemaker.environment(given("m", "generate"))
    assert generating["SAGEMAKER_TRITON_INFERENCE_TYPE"] == "generate"


def test_several_models_are_loaded_each_by_itself() -> None:
    with pytest.raises(ConchError, match="cannot serve the ensemble 'e': remove --multi-model"):
        sagemaker.plan(given("e", ensembles=("e",)), multi_model=True)
    with pytest.raises(ConchError, match="several models supports only 'infer', not 'generate'"):
        sagemaker.plan(given(endpoint="generate"), multi_model=True)
    container = sagemaker.create_model(given(), multi_model=True)["PrimaryContainer"]
    assert (container["Mode"], container["ModelDataUrl"]) == ("MultiModel", "s3://BUCKET/a-name/models/")


def test_the_steps_are_those_of_the_endpoint() -> None:
    one = sagemaker.plan(given("m", "generate_stream", hub=("org/a",))).texts(10)["README.md"]
    assert "invoke_endpoint_with_response_stream(" in one and "downloads org/a from the Hugging Face Hub" in one
    several = sagemaker.plan(given("m"), multi_model=True).texts(10)
    assert "--target-model m.tar.gz" in several["README.md"]
    assert "Requests name their model." in several["README.md"]
    assert not [name for text in (several, {"one": one}) for name in text if "@{" in text[name]]
