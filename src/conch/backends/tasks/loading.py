"""How tasks that generate load what they need through transformers, and the errors that this may raise.

Called by the constructors of tasks, on a worker's main thread, before the first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conch import extras
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, invalid, one_line, unsupported


def device_of(open_engine: object) -> str:
    """PyTorch's name of the device to run on: the opener's ``device``, and ``cpu`` where it has none."""
    return str(getattr(open_engine, "device", "cpu"))


def dtype_of(options: Options, device: str) -> Any:
    """The argument ``dtype`` of ``from_pretrained``: the option's, else FP32 on a CPU and the stored type elsewhere."""
    import torch

    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if device == "cpu" else "auto"


@contextmanager
def loading(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    """Turn what transformers raises while it loads ``what`` into one sentence.

    UNSUPPORTED for a library that is not installed, INVALID_ARG for a checkpoint that cannot be loaded.
    """
    try:
        extras.require(f"the {what} of '{checkpoint.source}'", "torch", "transformers")
        yield
    except ConchError:
        raise
    except ImportError as error:
        raise unsupported(f"the {what} of '{checkpoint.source}' needs a library: {extras.advice(error)}") from error
    except Exception as error:
        # Readers of configurations and weights raise whatever they meet.
        if "trust_remote_code" in str(error) and not checkpoint.options.trust_remote_code:
            raise invalid(
                f"the {what} of '{checkpoint.source}' needs the Python code that comes with it: set parameter "
                "'trust_remote_code' to true if you trust it"
            ) from error
        raise invalid(f"the {what} of '{checkpoint.source}' cannot be loaded: {one_line(error)}") from error


def load_model(head: str, checkpoint: Checkpoint, options: Options, device: str) -> Any:
    """The network as transformers' class ``head`` (``AutoModelForSeq2SeqLM`` …), ready to run on ``device``."""
    with loading(checkpoint, "model"):
        import transformers

        model = getattr(transformers, head).from_pretrained(
            checkpoint.directory,
            dtype=dtype_of(options, device),
            trust_remote_code=options.trust_remote_code,
        )
        return model.to(device).eval()


def load_pipeline(task: str, checkpoint: Checkpoint, options: Options, device: str) -> Any:
    """transformers' pipeline for ``task`` over the checkpoint on ``device``."""
    with loading(checkpoint, f"pipeline '{task}'"):
        import transformers

        make: Any = transformers.pipeline
        loaded = make(
            task,
            model=str(checkpoint.directory),
            device=device,
            dtype=dtype_of(options, device),
            trust_remote_code=options.trust_remote_code,
        )
        loaded.model.eval()
        return loaded


def load_tokenizer(checkpoint: Checkpoint, options: Options) -> Any:
    """The tokenizer as transformers loads it.  Not safe to call from several threads at once."""
    with loading(checkpoint, "tokenizer"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(checkpoint.directory, trust_remote_code=options.trust_remote_code)
