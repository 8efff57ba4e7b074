"""The list of models, and embeddings."""

from __future__ import annotations

from typing import Any

import openai
import pytest


def test_models_that_text_can_be_sent_to_are_listed(client: Any) -> None:
    listed = client.models.list().data
    assert {model.id for model in listed} == {"talker", "separate", "embedder", "joined"}
    assert all(model.object == "model" and model.created > 0 and model.owned_by == "conch" for model in listed)


def test_one_model_is_described(client: Any) -> None:
    assert client.models.retrieve("joined").id == "joined"


@pytest.mark.parametrize("name", ["nobody", "identity_fp32", "a/b"])
def test_other_models_are_not_found(client: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("model", ["embedder", "joined"])
def test_texts_are_embedded(client: Any, model: str) -> None:
    texts = [f"{'a' * index}z" for index in range(10)]
    for form in ("float", "base64", openai.NOT_GIVEN):
        answer = client.embeddings.create(model=model, input=texts, encoding_format=form)
        vectors = [one.embedding for one in answer.data]
        if form == "base64":
            assert isinstance(vectors[0], str)
            continue
        assert vectors == [[len(text), ord(text[0]), ord("z"), 3] for text in texts]
    assert [one.index for one in answer.data] == list(range(10))
    assert client.embeddings.create(model=model, input="one").data[0].embedding == [3, ord("o"), ord("e"), 3]


def test_embeddings_are_shortened_and_scaled(client: Any) -> None:
    vector = client.embeddings.create(model="embedder", input="abc", dimensions=2).data[0].embedding
    length = (9 + 97**2) ** 0.5
    assert vector == pytest.approx([3 / length, 97 / length], rel=1e-6)
