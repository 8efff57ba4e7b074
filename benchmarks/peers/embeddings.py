"""The usual web services for embeddings: FastAPI, uvicorn and a library, with OpenAI's ``/v1/embeddings``.

    python embeddings.py PORT sentence-transformers|openvino|onnxruntime NAME=FOLDER ...

Runs in an environment of the peers and imports nothing of conch. ``onnxruntime`` reads ``FOLDER/model.onnx`` and
``FOLDER/tokenizer.json``; ``openvino`` is the backend of sentence-transformers with weights in int8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

Embed = Callable[[list[str]], Any]


class Question(BaseModel):
    model: str
    input: str | list[str]


def open_sentence_transformers(folder: str) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, show_progress_bar=False)


def open_openvino(folder: str) -> Embed:
    from optimum.intel import OVWeightQuantizationConfig  # type: ignore[import-not-found, unused-ignore]
    from sentence_transformers import SentenceTransformer

    small = {"quantization_config": OVWeightQuantizationConfig(bits=8), "export": True}
    model = SentenceTransformer(folder, device="cpu", backend="openvino", model_kwargs=small)
    turn = Lock()  # the backend has one inference request, which fails if two threads use it

    def embed(texts: list[str]) -> Any:
        with turn:
            return model.encode(texts, show_progress_bar=False)

    return embed


def open_onnxruntime(folder: str) -> Embed:
    import onnxruntime
    from tokenizers import Tokenizer

    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    takes = [tensor.name for tensor in session.get_inputs()]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> Any:
        encodings = tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden: Any = session.run(None, {name: arrays[name] for name in takes})[0]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    return embed


OPENERS = {
    "sentence-transformers": open_sentence_transformers,
    "openvino": open_openvino,
    "onnxruntime": open_onnxruntime,
}


def service(library: str, folders: dict[str, str]) -> FastAPI:
    app = FastAPI()
    models = {name: OPENERS[library](folder) for name, folder in folders.items()}

    @app.get("/health")  # type: ignore[untyped-decorator]
    def health() -> dict[str, Any]:
        return {}

    # A plain function: FastAPI runs it in its pool of threads, so that a model does not stop the loop.
    @app.post("/v1/embeddings")  # type: ignore[untyped-decorator]
    def embeddings(question: Question) -> dict[str, Any]:
        texts = [question.input] if isinstance(question.input, str) else question.input
        vectors = models[question.model](texts)
        data = [
            {"object": "embedding", "index": index, "embedding": vector.tolist()}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return {"object": "list", "data": data, "model": question.model, "usage": usage}

    return app


if __name__ == "__main__":
    port, library, *named = sys.argv[1:]
    uvicorn.run(
        service(library, dict(name.split("=", 1) for name in named)),
        host="127.0.0.1",
        port=int(port),
        access_log=False,
        log_level="warning",
    )
