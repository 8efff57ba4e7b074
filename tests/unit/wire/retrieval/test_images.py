"""Images in requests for embeddings, in each API's form."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from conch.core.errors import Code
from conch.core.tensors import split_bytes
from conch.wire.openai.reading import ApiError
from tests.unit.wire.retrieval.models import EMBEDDER, IMAGE_EMBEDDER, body, decoded

FILE = b"\x89PNG of something"
BASE64 = b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"
PART = {"type": "image_url", "image_url": {"url": URL}}


def rows(endpoint: str, **members: Any) -> list[tuple[bytes, bytes]]:
    """The text and the image of each row of the requests to the model."""
    found = []
    for inputs in decoded(endpoint, IMAGE_EMBEDDER, **members).inputs:
        count = next(iter(inputs.values())).shape[0]
        columns = [
            split_bytes(inputs[name].data) if name in inputs else [b""] * count for name in ("text_input", "image")
        ]
        found += list(zip(*columns, strict=True))
    return found


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        ("embeddings", {"input": [{"image": URL}]}),
        ("embeddings", {"input": [{"image": BASE64}], "task": "retrieval.passage"}),
        ("embeddings", {"messages": [{"role": "user", "content": [PART]}]}),
        ("vllm_pooling", {"messages": [{"role": "user", "content": [PART]}]}),
        ("cohere_embed", {"images": [URL], "input_type": "image"}),
        ("cohere_embed", {"inputs": [{"content": [PART]}], "input_type": "search_document"}),
        ("cohere_embed_v1", {"images": [URL]}),
    ],
)
def test_image_in_each_api(endpoint: str, members: dict[str, Any]) -> None:
    assert rows(endpoint, **members) == [(b"", FILE)]


def test_texts_and_images_of_a_request_share_requests_to_the_model() -> None:
    expected = [(b"a", b""), (b"", FILE), (b"b", b"")]
    assert rows("embeddings", input=["a", {"image": URL}, {"text": "b"}]) == expected
    contents = [{"content": [{"type": "text", "text": "a"}]}, {"content": [PART]}, {"content": "b"}]
    assert rows("cohere_embed", inputs=contents) == expected
    request = decoded("cohere_embed", IMAGE_EMBEDDER, inputs=contents)
    assert body(request, embedding=[[0.0] * 8] * 3)["texts"] == ["a", "b"]


def test_images_are_divided_into_requests_that_fit_in_memory() -> None:
    request = decoded("embeddings", IMAGE_EMBEDDER.__class__("m", 1, 256, IMAGE_EMBEDDER.inputs, EMBEDDER.outputs),
                      input=[{"image": URL}] * 40)  # fmt: skip
    assert request.plan.rows == [16, 16, 8]


@pytest.mark.parametrize(
    ("endpoint", "members", "refusal"),
    [
        ("embeddings", {"input": [{"image": "https://a.b/c.png"}]}, "'input[0].image' is the URL of an image, and"),
        ("embeddings", {"input": [{"image": "ftp://a"}]}, "'input[0].image' is \"ftp://a\"; it must be a data URL"),
        ("embeddings", {"input": [{"image": "data:image/png;base64,?"}]}, "'input[0].image' is not base64"),
        ("embeddings", {"input": [{"image": "data:image/png;base64,"}]}, "'input[0].image' has no content"),
        ("embeddings", {"input": [{"image": 3}]}, "'input[0].image' is 3; it must be a data URL"),
        ("embeddings", {"input": [{"image": "é"}]}, "'input[0].image' is not base64"),
        ("embeddings", {"input": "a", "messages": [{}]}, "'messages' cannot be combined with 'input'"),
        ("embeddings", {"messages": [{}, {}]}, "'messages' must have one message"),
        (
            "embeddings",
            {"messages": [{"content": None}]},
            "'messages[0].content' is null; it must be a string or an array of",
        ),
        ("cohere_embed", {"images": [BASE64]}, "'images[0]' is"),
        ("cohere_embed", {"images": [URL], "texts": ["a"]}, "'texts' cannot be combined with 'images'"),
        (
            "cohere_embed",
            {"inputs": [{"content": [PART, {"type": "text", "text": "a"}]}]},
            "'inputs[0].content' must be one text or one image",
        ),
        (
            "cohere_embed",
            {"inputs": [{"content": [{"type": "image_url", "image_url": "http://a/b"}]}]},
            "'inputs[0].content[0].image_url' is the URL of an image",
        ),
        ("cohere_embed", {"inputs": [{"content": [{"type": "video"}]}]}, "must be text or image_url"),
    ],
)
def test_what_is_no_image_is_refused(endpoint: str, members: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ApiError) as caught:
        decoded(endpoint, IMAGE_EMBEDDER, **members)
    assert refusal in caught.value.message
    assert caught.value.code is Code.INVALID_ARG


def test_model_of_texts_refuses_images() -> None:
    with pytest.raises(ApiError, match="model 'm' embeds no images: send texts") as caught:
        decoded("embeddings", EMBEDDER, input=[{"image": URL}])
    assert caught.value.code is Code.UNSUPPORTED
