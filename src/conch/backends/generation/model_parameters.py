"""Parameters of text generation models, in addition to those of every checkpoint (``checkpoints/options.py``).

Request parameters are declared in ``conch/core/sampling/parameters.py``.
"""

from __future__ import annotations

from typing import Final

from conch.config.parameters import Parameter

GENERATION_PARAMETERS: Final = (
    Parameter("max_model_len", "tokens", "the checkpoint's", "tokens of a prompt with its answer"),
    Parameter("max_num_seqs", "sequences", "the engine's", "sequences in the running batch"),
    Parameter("max_num_batched_tokens", "tokens", "the engine's", "tokens of prompts in a step"),
    Parameter("kv_cache_tokens", "tokens", "the engine's", "tokens that the KV cache holds"),
    Parameter(
        "batch_scheduler_policy",
        "`max_utilization`, `guaranteed_no_evict`",
        "`max_utilization`",
        "start a sequence when its prompt fits into the KV cache, or when all that it may become fits",
    ),
    Parameter(
        "enable_prefix_caching", "`true`, `false`", "`true`", "keep what was computed for prompts that begin alike"
    ),
    Parameter(
        "max_tokens", "tokens", "the checkpoint's, else 256", "the length limit of answers to requests without one"
    ),
    Parameter("chat_template", "file", "the checkpoint's", "a Jinja template that makes a prompt of a conversation"),
    Parameter("chat_template_timeout", "seconds", "5", "how long the template may take for a conversation"),
    Parameter("structured_output_timeout", "seconds", "5", "how long a JSON schema or grammar may take to compile"),
    Parameter("speculative_model", "folder", "none", "a smaller checkpoint that guesses tokens ahead"),
    Parameter("num_speculative_tokens", "tokens", "5", "how many it guesses at a time"),
    Parameter("lora_modules", "JSON", "none", "folders of LoRA adapters by the names that requests give"),
)
