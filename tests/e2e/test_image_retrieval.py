"""Models of texts and images over the client APIs of retrieval: the vectors are those of sentence-transformers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.util.similarity import maxsim

from tests import task_checkpoints
from tests.servers import ConchServer
from tests.task_checkpoints import image_file

FILES = [image_file(40, 30, 1), image_file(64, 64, 2, "JPEG")]
URLS = [f"data:image/png;base64,{b64encode(file).decode()}" for file in FILES]
PARTS = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
TEXTS = ["a bus", "Where is the nearest library?"]


def picture(file: bytes) -> Any:
    return Image.open(BytesIO(file)).convert("RGB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    task_checkpoints.clip(models / "clip" / "1")
    parameter = 'parameters { key: "task" value { string_value: "feature-extraction" } }'
    (models / "clip" / "config.pbtxt").write_text(f'name: "clip" backend: "huggingface" {parameter}')
    task_checkpoints.colqwen2(models / "pages" / "1")
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ConchServer]:
    with ConchServer(models) as server:
        yield server


@pytest.fixture(scope="module")
def reference(models: Path) -> Any:
    return SentenceTransformer(str(models / "clip" / "1"), device="cpu")


def ask(server: ConchServer, path: str, **body: Any) -> tuple[int, Any]:
    answer = requests.post(f"http://{server.http}{path}", json={"model": "clip", **body}, timeout=60)
    return answer.status_code, answer.json()


def test_vectors_of_texts_and_images_over_each_api(server: ConchServer, reference: Any) -> None:
    texts = np.stack([reference.encode(text) for text in TEXTS])
    images = np.stack([reference.encode(picture(file)) for file in FILES])
    mixed = [TEXTS[0], {"image": URLS[0]}, {"image": URLS[1]}, {"text": TEXTS[1]}]
    for path, members, expected in (
        ("/v1/embeddings", {"input": mixed}, [texts[0], *images, texts[1]]),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": PARTS[:1]}]}, images[:1]),
        ("/pooling", {"messages": [{"role": "user", "content": PARTS[1:]}]}, images[1:]),
        ("/v2/embed", {"images": URLS, "input_type": "image"}, images),
        ("/v2/embed", {"inputs": [{"content": [part]} for part in PARTS], "input_type": "search_document"}, images),
        ("/embed", {"inputs": TEXTS, "normalize": False}, texts),
    ):
        status, answer = ask(server, path, **members)
        assert status == 200, answer
        if path == "/embed":
            found = answer
        elif path == "/v2/embed":
            found = answer["embeddings"]["float"]
        else:
            found = [item.get("embedding") or item["data"] for item in answer["data"]]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_bad_image_has_one_clear_error_in_each_form(server: ConchServer) -> None:
    nothing = f"data:image/png;base64,{b64encode(b'!').decode()}"
    broad = f"data:image/png;base64,{b64encode(image_file(300, 1)).decode()}"
    for url, message in ((nothing, "it is not an image"), (broad, "one side may be at most 100 times the other")):
        status, answer = ask(server, "/v1/embeddings", input=[{"image": url}])
        assert status == 400
        assert message in answer["error"]["message"]
        status, answer = ask(server, "/v2/embed", images=[url])
        assert status == 400
        assert message in answer["message"]
    status, answer = ask(server, "/v2/embed", images=["http://example.com/a.png"])
    assert (status, answer) == (
        400,
        {"message": "'images[0]' is the URL of an image, and this server does not fetch images: send the image as a "
         "data URL"},
    )  # fmt: skip


def test_pages_are_ranked_for_a_query(server: ConchServer, models: Path) -> None:
    reference: Any = MultiVectorEncoder(str(models / "pages" / "1"), device="cpu")
    pages = [reference.encode_document(picture(file)) for file in FILES]
    expected = maxsim([reference.encode_query(TEXTS[0])], pages)[0].numpy()
    documents = [{"image": url} for url in URLS]
    status, answer = ask(server, "/rerank", model="pages", query=TEXTS[0], documents=documents)
    assert status == 200, answer
    assert [result["index"] for result in answer["results"]] == list(np.argsort(-expected))
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, np.sort(expected)[::-1], rtol=1e-4)
    status, answer = ask(server, "/pooling", model="pages", messages=[{"role": "user", "content": PARTS[:1]}])
    np.testing.assert_allclose(answer["data"][0]["data"], pages[0].numpy(), rtol=1e-3, atol=1e-4)
