"""Text to token ids: the first step of an ensemble that ``conch convert --layout triton`` wrote.

Runs on conch and on NVIDIA's server, in any Python from 3.9 with numpy and ``tokenizers`` (or ``transformers``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tokenizes with the files beside this one; the parameters contain the checkpoint's settings."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.prompt = parameters.get("prompt", "")
        self.lower = parameters.get("lower_case") == "true"
        self.tokenize = tokenizer(
            os.path.join(args["model_repository"], args["model_version"]),
            int(parameters["max_length"]),
            int(parameters["pad_id"]),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        try:
            columns = [self.texts(request, name) for name in self.inputs]
            if any(len(column) != len(columns[0]) for column in columns):
                raise ValueError(f"{' and '.join(self.inputs)} must have the same number of texts")
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        arrays = self.tokenize(*columns)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, arrays[name]) for name in self.outputs])

    def texts(self, request: Any, name: str) -> list[str]:
        elements = pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()
        if not len(elements):
            raise ValueError(f"input '{name}' has no text")
        texts = []
        for index, element in enumerate(elements):
            try:
                text = element if isinstance(element, str) else element.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"input '{name}' is not valid UTF-8: element {index}, byte {error.start}") from None
            text = self.prompt + text if name == self.inputs[0] else text
            texts.append(text.lower() if self.lower else text)
        return texts


def tokenizer(folder: str, max_length: int, pad_id: int) -> Callable[..., Any]:
    """Return a function from texts (and optional second texts) to INT64 arrays [texts, tokens] by name."""
    file = os.path.join(folder, "tokenizer.json")
    if os.path.exists(file):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            pass
        else:
            return fast(Tokenizer.from_file(file), max_length, pad_id)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(texts: list[str], pairs: list[str] | None = None) -> dict[str, Any]:
        encoded = loaded(
            texts,
            pairs,
            padding=True,
            truncation=True,
            max_length=max_length,
            return_token_type_ids=True,
            return_tensors="np",
        )
        return {name: np.asarray(array, np.int64) for name, array in encoded.items()}

    return tokenize


def fast(loaded: Any, max_length: int, pad_id: int) -> Callable[..., Any]:
    """Return the same function based on the library of tokenizer.json."""
    loaded.enable_truncation(max_length)
    loaded.enable_padding(pad_id=pad_id, pad_token=loaded.id_to_token(pad_id) or "[PAD]")

    def tokenize(texts: list[str], pairs: list[str] | None = None) -> dict[str, Any]:
        rows: Any = texts if pairs is None else list(map(lambda *pair: pair, texts, pairs))
        encodings = loaded.encode_batch(rows)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
            "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
        }

    return tokenize
