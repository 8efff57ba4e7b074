"""What OCI takes: sizes, commands and variables; and what its files say of checkpoints that are downloaded."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conch.core.errors import ConchError
from conch.deploy import oci
from conch.deploy.bundle import Deployment
from tests.unit.deploy.given import given


def texts(deployment: Deployment, size: int = 10) -> Mapping[str, str]:
    return oci.plan(deployment).texts(size)


def test_a_repository_above_the_limit_is_refused() -> None:
    oci.plan(given(size=400 * 10**9))
    with pytest.raises(ConchError, match="the repository has 401 GB, but OCI's model catalog accepts at most 400 GB"):
        oci.plan(given(size=401 * 10**9))


def test_a_name_that_makes_the_command_too_long_is_refused() -> None:
    with pytest.raises(ConchError, match="OCI accepts less than 2048: choose a shorter name for the model"):
        oci.plan(given("m" * 2000))


def test_the_disk_has_room_for_the_artifact() -> None:
    assert oci.environment(given())["STORAGE_SIZE_IN_GB"] == "50"
    assert oci.environment(given(size=100 * 10**9))["STORAGE_SIZE_IN_GB"] == "240"


def test_streams_are_switched_on_where_the_endpoint_has_them() -> None:
    for endpoint, path in (
        ("infer", "/v2/models/a%20b/infer"),
        ("generate_stream", "/v2/models/a%20b/generate_stream"),
        ("openai", "/v1/chat/completions"),
    ):
        variables = oci.environment(given("a b", endpoint))
        assert variables["MODEL_DEPLOY_PREDICT_ENDPOINT"] == path
        assert ("MODEL_DEPLOY_ENABLE_STREAMING" in variables) == (endpoint != "infer")


def test_a_large_artifact_goes_through_a_bucket() -> None:
    assert "Terraform uploads it in one request" in texts(given())["README.md"]
    assert "It is too large for one upload, which takes up to 6 GB" in texts(given(), 7 * 10**9)["README.md"]


def test_downloads_are_reported_in_the_steps_and_in_the_container_file() -> None:
    assert "needs no access to the internet" in texts(given())["README.md"]
    found = texts(given(hub=("org/a", "org/b")))
    assert "The server downloads org/a, org/b from the Hugging Face Hub" in found["README.md"]
    assert "# The server downloads org/a, org/b when it starts" in found["container/Containerfile"]
    assert "HF_HOME=/tmp/huggingface" in found["container/Containerfile"]


def test_extras_and_packages_are_installed() -> None:
    found = texts(given(extras=("huggingface", "vllm"), packages=("faiss-cpu",)))
    assert "--build-arg EXTRAS=huggingface,vllm" in found["README.md"]
    assert "    faiss-cpu\n" in found["container/Containerfile"]
    assert "FROM conch\nCOPY --from=packages /opt/conch /opt/conch" in found["container/Containerfile"]
    assert "pip" not in texts(given())["container/Containerfile"]


def test_a_new_version_is_deployed_before_the_old_one_is_deleted() -> None:
    """Terraform deletes first by default; and it knows the deployment by its state, which another folder lacks."""
    found = texts(given())
    assert "create_before_destroy = true" in found["terraform/main.tf"]
    assert "cp terraform.tfstate NEW/terraform/" in found["README.md"]


def test_names_are_texts_in_terraform() -> None:
    found = texts(given('m${file("/etc/passwd")}'))["terraform/main.tf"]
    assert '"--oci-default-model=m$${file(\\"/etc/passwd\\")}"' in found


def test_no_place_of_a_template_is_left_open() -> None:
    assert not [name for name, text in texts(given()).items() if "@{" in text]
