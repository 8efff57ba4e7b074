"""The backend ``huggingface``: its parameters, and the choice of the implementation for a checkpoint.

Checkpoints that generate text use ``TextBackend``, all others ``HuggingFaceBackend``. Runs in workers, which find it
through ``table.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from conch.backends.base.backend_base import BackendBase
from conch.backends.generation.options import GENERATION_PARAMETERS
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_FILE, read_model_file
from conch.checkpoints.options import CHECKPOINT_PARAMETERS, Options
from conch.config.parameters import Parameter, ParameterTable
from conch.core.errors import ConchError
from conch.core.sampling import TEXT_GENERATION
from conch.workers.child.channel import Channel, Header

TASK_PARAMETERS: Final = (
    Parameter(
        "prompt_name",
        "a name in `config_sentence_transformers.json`",
        "its `default_prompt_name`",
        "`feature-extraction`, `text-ranking`: the prompt that is put before each text, or before the query",
    ),
    Parameter(
        "token_ids",
        "`own`, `refuse`, or the path of a `tokenizer.json`",
        "`own`",
        "embedding, classification and ranking of texts: the tokenizer of the token ids that clients send in place of "
        "texts; `refuse` takes only texts",
    ),
    Parameter(
        "function_to_apply",
        "`sigmoid`, `softmax`, `none`",
        "the checkpoint's",
        "`text-classification`, `text-ranking`: how logits become scores",
    ),
    Parameter(
        "hypothesis_template",
        "text with `{}` in the label's place",
        "`This example is {}.`",
        "`zero-shot-classification`: the sentence about a label",
    ),
    Parameter("max_candidate_labels", "labels", "1000", "zero-shot tasks: maximum number of labels in a row"),
    Parameter(
        "multi_label", "`true`, `false`", "`false`", "`zero-shot-classification`: score each label independently"
    ),
    Parameter(
        "aggregation_strategy",
        "`none`, `simple`, `first`, `average`, `max`",
        "`none`",
        "`token-classification`: how tokens become entities",
    ),
    Parameter("max_answer_len", "tokens", "15", "`question-answering`: maximum length of an answer"),
    Parameter(
        "max_seq_len", "tokens", "384", "`question-answering`: a window; a longer context is read in several windows"
    ),
    Parameter(
        "doc_stride", "tokens", "128, at most half a window", "`question-answering`: overlap of consecutive windows"
    ),
    Parameter(
        "handle_impossible_answer",
        "`true`, `false`",
        "`false`",
        "`question-answering`: allow an empty answer",
    ),
    Parameter(
        "chunk_length_s",
        "seconds, 0.1 or more; 0: none",
        "30; Whisper: 0",
        "`automatic-speech-recognition`: length of a chunk. With Whisper, chunks replace its windows, which is "
        "faster on a GPU but less exact where chunks meet",
    ),
    Parameter("max_audio_seconds", "seconds", "3600", "tasks with audio: the longest recording"),
    Parameter("max_image_pixels", "pixels", "64000000", "tasks with images: the largest image"),
)


PARAMETERS: Final = ParameterTable(
    "huggingface", (*CHECKPOINT_PARAMETERS, *TASK_PARAMETERS, *GENERATION_PARAMETERS), strict=True
)


def open_huggingface(channel: Channel, init: Header) -> BackendBase:
    """Create the backend for the checkpoint of a model.

    Raises INVALID_ARG for an unknown parameter, and the errors of :meth:`Checkpoint.open`.
    """
    config = json.loads(init["config"])
    directory = Path(init["model"]["version_directory"])
    PARAMETERS.check(config.get("parameters") or ())
    document = read_model_file(directory)
    try:
        PARAMETERS.check(document)
    except ConchError as error:
        raise ConchError(f"{directory / MODEL_FILE}: {error.message}", error.code) from None
    checkpoint = Checkpoint.open(directory, Options.from_config(config), model_file=document)
    if checkpoint.task == TEXT_GENERATION:
        from conch.backends.io_formats.text import TextBackend

        return TextBackend(channel, init, checkpoint)
    from conch.backends.tasks.huggingface_backend import HuggingFaceBackend

    return HuggingFaceBackend(channel, init, checkpoint)
