"""What Vertex AI takes, and where the repository is."""

from __future__ import annotations

import pytest

from conch.core.errors import ConchError
from conch.deploy import vertex
from tests.unit.deploy.given import given


def test_a_repository_above_the_limit_is_refused() -> None:
    with pytest.raises(ConchError, match="has 6 TB, but Artifact Registry accepts at most 5 TB"):
        vertex.plan(given(size=6 * 10**12))
    with pytest.raises(ConchError, match="m/1/x has 6 TB, but Cloud Storage accepts at most 5 TB"):
        vertex.plan(given(size=6 * 10**12), from_bucket=True)


def test_routes_are_the_platforms_or_the_servers_own() -> None:
    assert vertex.routes(given("m")) == ("/predict", "/health")
    assert vertex.routes(given("m", "generate")) == ("/v2/models/m/generate", "/v2/health/ready")
    assert vertex.routes(given("m", "openai")) == ("/v1/chat/completions", "/v2/health/ready")


def test_a_bucket_needs_the_extra_for_stores() -> None:
    texts = vertex.plan(given(extras=("huggingface",)), from_bucket=True).texts(10)
    assert "--build-arg EXTRAS=huggingface,stores " in texts["README.md"]
    assert "--artifact-uri=gs://BUCKET/a-name/model_repository" in texts["README.md"]
    assert "COPY model_repository" not in texts["container/Containerfile"]


def test_names_of_models_are_words_of_the_shell() -> None:
    program = vertex.plan(given("m$(reboot)")).texts(10)["container/start"]
    assert "'--vertex-ai-default-model=m$(reboot)'" in program


def test_no_place_of_a_template_is_left_open() -> None:
    texts = vertex.plan(given(hub=("org/a",))).texts(10)
    assert not [name for name, text in texts.items() if "@{" in text]
