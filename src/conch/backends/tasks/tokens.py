"""Token inputs and outputs of models with a text input: token ids in place of texts, tokens, and token counts.

``token_ids`` INT32 ``[-1]``, padded at the end with -1, replaces ``text_input``, which must be present and is ignored.
Ids are decoded, and the text is encoded as any other. ``tokens`` is one JSON document per row: ``ids``, ``tokens`` (as
in the vocabulary), ``texts``, ``special`` (1 for special tokens), ``starts`` and ``stops`` (characters), ``decoded``
(the text of the ids) and ``max_length``. ``num_input_tokens`` counts the tokens that the network reads.

``prompt_name`` also applies to ``tokens``.

The tasks follow the request parameters ``truncation`` (``refuse``, or the side on which long texts are truncated) and
``max_length``. ``max_pair_tokens`` truncates documents on the right, before a pair is truncated: the second texts of
pairs, and the texts of the task ``document``. ``add_special_tokens`` and ``skip_special_tokens`` are about ``tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.tasks.task import PreparedRequest, Task, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, refused
from conch.core.errors import invalid, one_line, unsupported
from conch.core.inference import TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.core.text_parameters import (
    ADD_SPECIAL_TOKENS,
    MAX_PAIR_TOKENS,
    REFUSE,
    SKIP_SPECIAL_TOKENS,
    TRUNCATION,
)
from conch.machine import extras

TEXT: Final = "text_input"
PAIR: Final = "text_pair"
PROMPT_NAME: Final = "prompt_name"
TOKEN_IDS: Final = TensorSpec("token_ids", "INT32", (-1,), optional=True)
TOKENS: Final = TensorSpec("tokens", "BYTES", (1,))
COUNT: Final = TensorSpec("num_input_tokens", "UINT32", (1,))
#: The tasks that offer them.
TASKS: Final = frozenset({"feature-extraction", "text-classification", "text-ranking"})
_NO_TOKEN: Final = -1
#: The parameter that names the tokenizer of token ids in place of texts.
_SENDERS: Final = "token_ids"
_OWN: Final = "own"


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


class TokenDocuments(NamedTuple):
    """Makes the output ``tokens``; ``max_length`` is the maximum number of tokens of a text."""

    tokenizer: TextTokenizer
    max_length: int

    def ids(self, request: Request, senders: Any = None) -> list[list[int]]:
        """Return the token ids of each row, of the model's tokenizer or of that of the senders.

        Raises INVALID_ARG for ids that its vocabulary does not have.
        """
        array = request.array(TOKEN_IDS.name)
        rows = [[id for id in row if id != _NO_TOKEN] for row in array.reshape(-1, array.shape[-1]).tolist()]
        size = self.tokenizer.vocabulary if senders is None else senders.get_vocab_size()
        owner = "the model's own tokenizer" if senders is None else f"the tokenizer of parameter '{_SENDERS}'"
        for index, row in enumerate(rows):
            if not row:
                raise invalid(f"input '{TOKEN_IDS.name}' has no token in row {index}")
            unknown = next((id for id in row if not 0 <= id < size), None)
            if unknown is not None:
                raise invalid(
                    f"input '{TOKEN_IDS.name}' has the id {unknown} in row {index}, and the vocabulary ends at "
                    f"{size - 1}: the ids must come from {owner}; send texts instead"
                )
        return rows

    def of_texts(self, texts: Sequence[str], *, special: bool, name: str = TEXT) -> list[dict[str, Any]]:
        """Return the tokens of each text of input ``name``, with the model's special tokens if ``special`` is true.

        Raises UNSUPPORTED for a tokenizer in Python, INVALID_ARG for a text that cannot be tokenised.
        """
        fast = self.tokenizer.fast
        if fast is None:
            raise unsupported(
                "the model's tokenizer is written in Python and does not return the positions of its tokens"
            )
        try:
            encodings = fast.encode_batch(texts, add_special_tokens=special)
        except BaseException as error:
            raise refused(error, f"input '{name}'") from None
        return [
            {
                "ids": encoding.ids,
                "tokens": encoding.tokens,
                "texts": [text[start:stop] for start, stop in encoding.offsets],
                "special": encoding.special_tokens_mask,
                "starts": [start for start, _ in encoding.offsets],
                "stops": [stop for _, stop in encoding.offsets],
            }
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def of_ids(self, rows: Sequence[list[int]], *, skip_special: bool) -> list[dict[str, Any]]:
        """Return the text of the token ids of each row."""
        return [{"ids": row, "decoded": self.tokenizer.decode(row, skip_special_tokens=skip_special)} for row in rows]

    def result(self, rows: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> Result:
        """Return the output ``tokens``."""
        documents = [json.dumps({**row, "max_length": self.max_length}) for row in rows]
        return Result({TOKENS.name: Strings(shape, documents)})


class TextPreparation:
    """Prepares the requests of a task with the options of this module."""

    def __init__(self, checkpoint: Checkpoint, task: Task) -> None:
        self._checkpoint = checkpoint
        self._task = task
        #: The tokenizer of token ids in place of texts; None is the model's own.
        self._senders = _open_senders(checkpoint)

    def prepare(self, request: Request) -> PreparedRequest:
        """Decode token ids, tokenise for ``tokens``, or let the task prepare the request; raises INVALID_ARG."""
        has_ids = TOKEN_IDS.name in request.inputs
        if TOKENS.name in request.outputs:
            others = request.outputs - {TOKENS.name, COUNT.name}
            if others:
                raise invalid(
                    f"output '{TOKENS.name}' cannot be requested together with '{min(others)}': it is given without "
                    "running the network; send two requests"
                )
            documents = self._documents
            ids = documents.ids(request) if has_ids else None
            prompt = self._task.prompt_of(request) if PROMPT_NAME in request.inputs else ""
            return TokenizedRequest(request, _tokenized(documents, request, ids, prompt))
        if has_ids:
            if self._checkpoint.options.text("token_ids") == REFUSE:
                raise invalid(
                    f"input '{TOKEN_IDS.name}' is refused, because parameter '{_SENDERS}' of the model is '{REFUSE}': "
                    "send texts (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
                )
            ids = self._documents.ids(request, self._senders)
            decode = self._task.tokenizer.decode if self._senders is None else self._senders.decode
            texts = [decode(row).encode("utf-8", "replace") for row in ids]
            request.inputs[TEXT] = WireTensor(TEXT, "BYTES", (len(texts), 1), pack_bytes(texts))
        self._shorten_documents(request)
        prepared = self._task.prepare(request)
        truncated = getattr(prepared, "truncated", 0)
        if truncated and request.parameters.get(TRUNCATION) == REFUSE:
            raise invalid(f"{truncated} texts have more tokens than the model takes")
        return prepared

    def count(self, prepared: PreparedRequest, result: Result) -> None:
        """Add the number of tokens of each row to a result, if the request names it and the task does not count."""
        counts = prepared.token_counts
        if COUNT.name in prepared.request.outputs and COUNT.name not in result.outputs and counts is not None:
            result.outputs[COUNT.name] = np.array(counts, np.uint32)[:, None]

    @property
    def _documents(self) -> TokenDocuments:
        """Raises UNSUPPORTED for a task without a tokenizer, such as one that reads images."""
        # The limit of the folder of a module may be lower than that of the checkpoint.
        limit = self._task.limits.get("max_length", self._checkpoint.max_length)
        return TokenDocuments(self._task.tokenizer, int(limit))

    def _shorten_documents(self, request: Request) -> None:
        """Truncate the second texts of pairs, or documents, to ``max_pair_tokens`` tokens, if the model takes more.

        Raises UNSUPPORTED for a tokenizer in Python, INVALID_ARG for another value than a positive number, and for a
        text that cannot be tokenised.
        """
        limit = request.parameters.get(MAX_PAIR_TOKENS)
        if limit is None:
            return
        if type(limit) is not int or limit < 1:
            raise invalid(f"parameter '{MAX_PAIR_TOKENS}' is '{limit}'; it must be a whole number of at least 1")
        name = PAIR if PAIR in request.inputs else TEXT
        is_document = name in request.inputs and (name == PAIR or request.option("task") == "document")
        documents = self._documents
        if not is_document or limit >= documents.max_length:
            return
        texts = request.texts(name)
        rows = zip(texts, documents.of_texts(texts, special=False, name=name), strict=True)
        shorter = [text[: row["stops"][limit - 1]] if len(row["ids"]) > limit else text for text, row in rows]
        data = pack_bytes([text.encode() for text in shorter])
        request.inputs[name] = WireTensor(name, "BYTES", (len(shorter), 1), data)


def _open_senders(checkpoint: Checkpoint) -> Any:
    """Open the tokenizer of the clients that the parameter ``token_ids`` names; None for the model's own, or none.

    Raises INVALID_ARG for a file that is missing or cannot be read.
    """
    named = checkpoint.options.text("token_ids") or _OWN
    if named in (_OWN, REFUSE):
        return None
    path = checkpoint.named_path(_SENDERS, named)
    extras.require(str(path), "tokenizers", extra=checkpoint.extra)
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise invalid(f"parameter '{_SENDERS}' names {path}, which cannot be read: {one_line(error)}") from None


def _tokenized(documents: TokenDocuments, request: Request, ids: list[list[int]] | None, prompt: str) -> Result:
    parameters = request.parameters
    if ids is None:
        texts = [prompt + text for text in request.texts(TEXT)]
        rows = documents.of_texts(texts, special=bool(parameters.get(ADD_SPECIAL_TOKENS, True)))
    else:
        rows = documents.of_ids(ids, skip_special=bool(parameters.get(SKIP_SPECIAL_TOKENS, True)))
    result = documents.result(rows, (len(rows), 1))
    if COUNT.name in request.outputs:
        result.outputs[COUNT.name] = np.array([[len(row["ids"])] for row in rows], np.uint32)
    return result
