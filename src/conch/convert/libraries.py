"""Helpers for calls of libraries: suppressed output, one-line errors, and loading by transformers.

Used in the process of ``conch convert``, which prints only its own steps.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Final

from conch.backends.base.verification import example_ids, require_tensors
from conch.backends.graphs.openvino import runtime_error
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError, invalid

#: The maximum length of a library's message (characters), which has to fit on one line of the report.
MAX_ERROR_CHARACTERS: Final = 240
_COLOUR: Final = re.compile("\x1b\\[[0-9;]*m")


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppress prints, progress bars, warnings and log records below errors in a context (for all threads)."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def describe_error(error: BaseException) -> str:
    """Return why a step failed, on one line: a ConchError's message, or a library's original error.

    OpenVINO's errors begin with places in its source, which are left out.
    """
    while error.__cause__ is not None and not isinstance(error, ConchError):
        error = error.__cause__
    if isinstance(error, ConchError):
        return error.message
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, RuntimeError) and lines and lines[0].startswith("Exception from "):
        text = runtime_error(error).message
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 1] + "…"


def load_pretrained(
    checkpoint: Checkpoint,
    head: str,
    *,
    attention: str,
    outputs: Sequence[str],
    part: Callable[[Any], Any] = lambda module: module,
    example: Mapping[str, Any] | None = None,
) -> Any:
    """Load the checkpoint as transformers' class ``head``, in fp32 on the CPU, with an implementation of attention.

    Returns the ``part`` of the network that gives ``outputs``, for ``example`` or else for token ids. Raises
    INVALID_ARG, caused by the library's error, if it cannot be loaded or lacks weights on which the outputs depend.
    """
    import torch
    import transformers

    try:
        with silence_libraries():
            module, report = getattr(transformers, head).from_pretrained(
                checkpoint.directory,
                attn_implementation=attention,
                dtype=torch.float32,
                trust_remote_code=checkpoint.options.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused by name if they matter
            )
    except Exception as error:  # transformers does not wrap the exceptions of its weight readers
        raise invalid(f"'{checkpoint.source}' cannot be loaded as {head}: {describe_error(error)}") from error
    module.eval()
    used = part(module)

    def compute() -> dict[str, Any]:
        with silence_libraries(), torch.inference_mode():
            result = used(**(example or {"input_ids": example_ids(module.config)}))
            return {name: result[name] for name in outputs}

    require_tensors(module, report, compute, checkpoint.source)
    return used
