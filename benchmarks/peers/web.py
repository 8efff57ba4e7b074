"""The usual web service: FastAPI, uvicorn, ONNX Runtime; a text in, its embedding out, as JSON.

    python web.py PORT CHECKPOINT GRAPH

Runs in the peers' environment and imports nothing of conch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from tokenizers import Tokenizer


class Question(BaseModel):
    text: str


class Answer(BaseModel):
    embedding: list[float]


def service(checkpoint: Path, graph: Path) -> FastAPI:
    app = FastAPI()
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    takes = [tensor.name for tensor in session.get_inputs()]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.no_padding()

    @app.get("/v2/health/ready")
    def ready() -> dict[str, Any]:
        return {}

    # A plain function: FastAPI runs it in its pool of threads, so that a model does not stop the loop.
    @app.post("/embed")
    def embed(question: Question) -> Answer:
        ids = np.array([tokenizer.encode(question.text).ids], np.int64)
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        hidden: Any = session.run(None, {name: arrays[name] for name in takes})[0]
        mean = hidden[0].mean(0)
        return Answer(embedding=(mean / np.linalg.norm(mean)).tolist())

    return app


if __name__ == "__main__":
    uvicorn.run(
        service(Path(sys.argv[2]), Path(sys.argv[3])),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        access_log=False,
        log_level="warning",
    )
