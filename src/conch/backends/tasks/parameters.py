"""Model parameters of individual tasks; ``checkpoints/options.py`` has the parameters that all checkpoints share.

Most are the default of an optional input of the same name.
"""

from __future__ import annotations

from typing import Final

from conch.config.parameters import Parameter

TASK_PARAMETERS: Final = (
    Parameter(
        "prompt_name",
        "a name in `config_sentence_transformers.json`",
        "its `default_prompt_name`",
        "`feature-extraction`: the prompt that is put before each text",
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
    Parameter("max_candidate_labels", "labels", "1000", "zero-shot tasks: the most labels of a row"),
    Parameter("multi_label", "`true`, `false`", "`false`", "`zero-shot-classification`: score each label by itself"),
    Parameter(
        "aggregation_strategy",
        "`none`, `simple`, `first`, `average`, `max`",
        "`none`",
        "`token-classification`: how tokens become entities",
    ),
    Parameter("max_answer_len", "tokens", "15", "`question-answering`: the longest answer"),
    Parameter(
        "max_seq_len", "tokens", "384", "`question-answering`: a window; a longer context is read in several windows"
    ),
    Parameter("doc_stride", "tokens", "128, at most half a window", "`question-answering`: how far windows overlap"),
    Parameter(
        "handle_impossible_answer",
        "`true`, `false`",
        "`false`",
        "`question-answering`: an empty answer is possible, too",
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
