"""Loads models, pipelines and tokenizers through transformers, and reads the arguments of its ``generate``.

Constructors of tasks load on a worker's main thread, before the first request, and get transformers' errors translated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, Final

from conch.backends.base.arrays import Request
from conch.backends.base.verification import example_ids, report_of, require_tensors
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError, invalid, one_line
from conch.core.inference import TensorSpec
from conch.machine import extras

#: Maximum number of tokens that a pipeline generates in the check at load.
EXAMPLE_TOKENS: Final = 2


def device_of(open_engine: object) -> str:
    """Return PyTorch's name of the device to run on: the opener's ``device``, or ``cpu`` if it has none."""
    return str(getattr(open_engine, "device", "cpu"))


def dtype_of(checkpoint: Checkpoint, device: str) -> Any:
    """Return ``dtype`` for ``from_pretrained``: the option, else FP32 on a CPU and the stored type on a GPU."""
    import torch

    dtype = checkpoint.options.dtype
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.float32 if device == "cpu" else "auto"


@contextmanager
def loading(checkpoint: Checkpoint, what: str, *, runs_torch: bool = True) -> Iterator[None]:
    """Translate errors of transformers while it loads ``what``, which needs PyTorch unless ``runs_torch`` is false.

    Raises UNSUPPORTED for a library that is not installed, INVALID_ARG for a checkpoint that cannot be loaded.
    """
    try:
        extras.require(f"the {what} of '{checkpoint.source}'", *(("torch",) if runs_torch else ()), "transformers")
        yield
    except ConchError:
        raise
    except ImportError as error:
        raise extras.lacks_library(f"the {what} of '{checkpoint.source}'", error) from error
    except Exception as error:
        # The readers of configurations and weights raise errors of many types.
        if "trust_remote_code" in str(error) and not checkpoint.options.trust_remote_code:
            raise invalid(
                f"the {what} of '{checkpoint.source}' needs the Python code of its checkpoint: set parameter "
                "'trust_remote_code' to true if you trust it"
            ) from error
        raise invalid(f"the {what} of '{checkpoint.source}' cannot be loaded: {one_line(error)}") from error


def load_model(head: str, checkpoint: Checkpoint, device: str) -> Any:
    """Load the network with transformers' class ``head`` (``AutoModelForSeq2SeqLM`` …), ready to run on ``device``."""
    with loading(checkpoint, "model"):
        import transformers

        model, report = getattr(transformers, head).from_pretrained(
            checkpoint.directory,
            dtype=dtype_of(checkpoint, device),
            trust_remote_code=checkpoint.options.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # require_tensors rejects those that affect outputs, by name
        )
        model = model.to(device).eval()
        require_tensors(model, report, lambda: _written(model), checkpoint.source)
        return model


def _written(model: Any) -> Any:
    """Return the logits of an encoder-decoder for a few tokens."""
    import torch

    ids = example_ids(model.config).to(model.device)
    with torch.inference_mode():
        return model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits


def load_pipeline(task: str, checkpoint: Checkpoint, device: str) -> Any:
    """Load transformers' pipeline for ``task`` from the checkpoint on ``device``."""
    with loading(checkpoint, f"pipeline '{task}'"):
        import transformers

        make: Any = transformers.pipeline
        loaded = make(
            task,
            model=str(checkpoint.directory),
            device=device,
            dtype=dtype_of(checkpoint, device),
            trust_remote_code=checkpoint.options.trust_remote_code,
        )
        loaded.model.eval()
        return loaded


def require_pipeline_tensors(pipeline: Any, checkpoint: Checkpoint, example: Callable[[], Any]) -> None:
    """Raise INVALID_ARG if the outputs of ``pipeline`` depend on weights that the checkpoint lacks.

    ``example`` calls the pipeline with an example input. The outputs of the network are compared too, because the
    pipeline's result may be empty (no object detected). A network without a head is exempt: pipelines ignore some of
    its outputs.
    """
    model = pipeline.model
    outputs: list[Any] = []

    def compute() -> Any:
        outputs.clear()
        return [example(), *outputs]

    with loading(checkpoint, "model"):
        report = report_of(model, checkpoint.directory)
    kept = getattr(pipeline, "generation_config", None)
    handle = model.register_forward_hook(lambda *call: outputs.append(_tensors(call[-1]))) if _has_head(model) else None
    try:
        if kept is not None:
            pipeline.generation_config = copy.deepcopy(kept)
            pipeline.generation_config.max_new_tokens = EXAMPLE_TOKENS
        require_tensors(model, report, compute, checkpoint.source)
    finally:
        if kept is not None:
            pipeline.generation_config = kept
        if handle is not None:
            handle.remove()


def _tensors(output: Any) -> list[Any]:
    """Return the tensors in the output of a network, without its caches."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    return [value for value in values if hasattr(value, "detach")]


def _has_head(model: Any) -> bool:
    return getattr(model, "base_model", model) is not model


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer through transformers. The tokenizer is not thread-safe."""
    with loading(checkpoint, "tokenizer"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            checkpoint.directory, trust_remote_code=checkpoint.options.trust_remote_code
        )


def load_image_processor(checkpoint: Checkpoint, name: str = "AutoImageProcessor") -> Any:
    """Load a processor of images, on Pillow and numpy, so that results do not depend on torchvision.

    ``name`` is the class of transformers: ``AutoProcessor`` reads texts too.
    """
    with loading(checkpoint, "image processor", runs_torch=False):
        import transformers

        return getattr(transformers, name).from_pretrained(
            checkpoint.directory, backend="pil", trust_remote_code=checkpoint.options.trust_remote_code
        )


#: Optional inputs by name: datatype, minimum and maximum.
PARAMETERS: Final[Mapping[str, tuple[str, float, float]]] = {
    "max_new_tokens": ("INT32", 1, 1 << 16),
    "max_length": ("INT32", 1, 1 << 16),
    "min_length": ("INT32", 0, 1 << 16),
    "num_beams": ("INT32", 1, 32),
    "do_sample": ("BOOL", 0, 1),
    "temperature": ("FP32", 1e-3, 100.0),
    "top_k": ("INT32", 1, 1 << 20),
    "top_p": ("FP32", 1e-6, 1.0),
}

#: The default limit of generated tokens, if neither the checkpoint nor the request sets one.
DEFAULT_NEW_TOKENS: Final = 256


def generation_inputs(*names: str) -> list[TensorSpec]:
    """Return the optional inputs for the arguments ``names`` (default: all of ``PARAMETERS``), one value each."""
    return [TensorSpec(name, PARAMETERS[name][0], (1,), optional=True) for name in names or PARAMETERS]


def generation_arguments(
    request: Request, names: Sequence[str] = tuple(PARAMETERS), *, most_tokens: int = 0
) -> dict[str, Any]:
    """Return the inputs ``names`` that ``request`` contains, as arguments of ``generate``.

    ``most_tokens`` is the number of tokens that the model can generate; 0 means no limit. Raises INVALID_ARG, naming
    the input, for a value out of range.
    """
    arguments: dict[str, Any] = {}
    for name in names:
        value = request.option(name)
        if value is None:
            continue
        _, minimum, greatest = PARAMETERS[name]
        if most_tokens and name in ("max_new_tokens", "max_length", "min_length"):
            greatest = most_tokens
        if not (isfinite(value) and minimum <= value <= greatest):
            raise invalid(f"input '{name}' is {value:g}; it must be between {minimum:g} and {greatest:g}")
        arguments[name] = value
    return arguments


def stop_when_cancelled(requests: Sequence[Request]) -> Any:
    """Return a ``StoppingCriteriaList`` that ends the rows of cancelled requests; ``requests`` has one entry per row.

    With beam search, generation ends only when all requests are cancelled.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            rows = input_ids.shape[0]
            if rows == len(requests):
                done = [request.cancelled for request in requests]
            else:
                done = [all(request.cancelled for request in requests)] * rows
            return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Cancelled()])
