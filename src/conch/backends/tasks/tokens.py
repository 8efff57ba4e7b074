"""What tasks with a text input offer besides their own outputs: token ids in place of texts, tokens, and token counts.

``token_ids`` INT32 ``[-1]``, padded at the end with -1, replaces ``text_input``, which must be present and is ignored.
Ids are decoded, and the text is encoded as any other. ``tokens`` is one JSON document per row: ``ids``, ``tokens`` (as
in the vocabulary), ``texts``, ``special`` (1 for special tokens), ``starts`` and ``stops`` (characters), ``decoded``
(the text of the ids) and ``max_length``. ``num_input_tokens`` counts the tokens that the network reads.

The tasks follow the request parameters ``truncation`` (``refuse``, or the side on which long texts are truncated) and
``max_length``. ``add_special_tokens`` and ``skip_special_tokens`` are about ``tokens``.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.tasks.task import PreparedRequest, Task, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import invalid, unsupported
from conch.core.inference import TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.core.text_parameters import (
    ADD_SPECIAL_TOKENS,
    MAX_PAIR_TOKENS,
    REFUSE,
    SKIP_SPECIAL_TOKENS,
    TRUNCATION,
)

TEXT: Final = "text_input"
TOKEN_IDS: Final = TensorSpec("token_ids", "INT32", (-1,), optional=True)
TOKENS: Final = TensorSpec("tokens", "BYTES", (1,))
COUNT: Final = TensorSpec("num_input_tokens", "UINT32", (1,))
#: The tasks that offer them.
TASKS: Final = frozenset({"feature-extraction", "text-classification", "text-ranking"})
_NO_TOKEN: Final = -1


def with_tokens(checkpoint: Checkpoint, task: TaskDescription) -> TaskDescription:
    """Return a task's tensors with those of this module."""
    if checkpoint.task not in TASKS:
        return task
    own = {spec.name for spec in task.outputs}
    outputs = [spec for spec in (COUNT, TOKENS) if spec.name not in own]
    return TaskDescription((*task.inputs, TOKEN_IDS), (*task.outputs, *outputs), task.max_batch_size)


class TokenizedRequest(PreparedRequest):
    """A request for tokens alone, which needs no network: its ``result``."""

    __slots__ = ("result",)

    def __init__(self, request: Request, result: Result) -> None:
        super().__init__(request, 1, request.rows)
        self.result = result


class TextPreparation:
    """Prepares the requests of a task with the options of this module."""

    def __init__(self, checkpoint: Checkpoint, task: Task) -> None:
        self._checkpoint = checkpoint
        self._task = task

    def prepare(self, request: Request) -> PreparedRequest:
        """Decode token ids, tokenise for ``tokens``, or let the task prepare the request; raises INVALID_ARG."""
        ids = self._ids(request) if TOKEN_IDS.name in request.inputs else None
        if TOKENS.name in request.outputs:
            others = request.outputs - {TOKENS.name, COUNT.name}
            if others:
                raise invalid(
                    f"output '{TOKENS.name}' cannot be requested together with '{min(others)}': it is given without "
                    "running the network; send two requests"
                )
            return TokenizedRequest(request, self._tokenized(request, ids))
        if ids is not None:
            texts = [self._task.tokenizer.decode(row).encode("utf-8", "replace") for row in ids]
            request.inputs[TEXT] = WireTensor(TEXT, "BYTES", (len(texts), 1), pack_bytes(texts))
        prepared = self._task.prepare(request)
        self._check_truncation(request, prepared)
        return prepared

    def count(self, prepared: PreparedRequest, result: Result) -> None:
        """Add the number of tokens of each row to a result, if the request asks for it and the task does not count."""
        counts = prepared.token_counts
        if COUNT.name in prepared.request.outputs and COUNT.name not in result.outputs and counts is not None:
            result.outputs[COUNT.name] = np.array(counts, np.uint32)[:, None]

    @property
    def _max_length(self) -> int:
        """The maximum number of tokens of a text, with that of the folder of a module."""
        return int(self._task.limits.get("max_length", self._checkpoint.max_length))

    def _ids(self, request: Request) -> list[list[int]]:
        """Return the token ids of each row. Raises INVALID_ARG for ids that the vocabulary does not have."""
        rows = [[id for id in row if id != _NO_TOKEN] for row in request.array(TOKEN_IDS.name).tolist()]
        size = self._task.tokenizer.vocabulary
        for index, row in enumerate(rows):
            if not row:
                raise invalid(f"input '{TOKEN_IDS.name}' has no token in row {index}")
            unknown = next((id for id in row if not 0 <= id < size), None)
            if unknown is not None:
                raise invalid(
                    f"input '{TOKEN_IDS.name}' has the id {unknown} in row {index}, and the model's vocabulary ends at "
                    f"{size - 1}: the ids must come from the model's own tokenizer; send texts instead"
                )
        return rows

    def _tokenized(self, request: Request, ids: list[list[int]] | None) -> Result:
        special = bool(request.parameters.get(ADD_SPECIAL_TOKENS, True))
        if ids is None:
            rows = [self._tokens(text, special) for text in request.texts(TEXT)]
        else:
            skip, decode = bool(request.parameters.get(SKIP_SPECIAL_TOKENS, True)), self._task.tokenizer.decode
            rows = [{"ids": row, "decoded": decode(row, skip_special_tokens=skip)} for row in ids]
        documents = [json.dumps({**row, "max_length": self._max_length}) for row in rows]
        result = Result({TOKENS.name: Strings((len(documents), 1), documents)})
        if COUNT.name in request.outputs:
            result.outputs[COUNT.name] = np.array([[len(row["ids"])] for row in rows], np.uint32)
        return result

    def _tokens(self, text: str, special: bool) -> dict[str, Any]:
        tokenizer = self._task.tokenizer
        if tokenizer.fast is None:
            raise unsupported(f"the tokenizer of '{self._checkpoint.source}' does not give the places of its tokens")
        encoding = tokenizer.fast.encode(text, add_special_tokens=special)
        return {
            "ids": encoding.ids,
            "tokens": encoding.tokens,
            "texts": [text[start:stop] for start, stop in encoding.offsets],
            "special": encoding.special_tokens_mask,
            "starts": [start for start, _ in encoding.offsets],
            "stops": [stop for _, stop in encoding.offsets],
        }

    def _check_truncation(self, request: Request, prepared: PreparedRequest) -> None:
        """Raise INVALID_ARG if a text was truncated that must not be, UNSUPPORTED for a limit of second texts."""
        parameters, truncated = request.parameters, getattr(prepared, "truncated", 0)
        limit, pair = self._max_length, parameters.get(MAX_PAIR_TOKENS)
        if isinstance(pair, int) and pair < limit:
            raise unsupported(f"this model truncates pairs to {limit} tokens, and not their second text to {pair}")
        if truncated and parameters.get(TRUNCATION) == REFUSE:
            raise invalid(f"{truncated} texts have more tokens than the model takes")
