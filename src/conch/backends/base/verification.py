"""Checks at load that a model's weights are complete and that its output equals that of transformers.

transformers initializes missing tensors at random and continues. Many of them do not affect the outputs, for example a
pooler that the head does not use, or an embedding that only training uses. ``require_tensors`` therefore changes each
random tensor and compares the outputs before and after the change. It costs nothing if no tensor is missing.

Called by all code that loads PyTorch weights, in workers and in ``conch convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.core.errors import ConchError, error_text, invalid, one_line

#: Number of tokens to compare.
VERIFIED_TOKENS: Final = 5
#: Limit for the processor time per core of the first step (s); above it, the comparison is skipped as too expensive.
SLOW_STEP: Final = 0.5


def greedy_difference(tokens: Sequence[int], expected_tokens: Sequence[int], logits: Sequence[Any], tie: float) -> str:
    """Describe the first difference between ``tokens`` and ``expected_tokens``; empty if there is none.

    ``logits`` holds the logits ``[vocabulary]`` from which each expected token was chosen. If the logits of two
    different tokens are closer than ``tie``, relative to the greatest absolute logit, they count as equal, and the
    comparison ends there.
    """
    for position, (token, expected) in enumerate(zip(tokens, expected_tokens, strict=False)):
        if token != expected:
            row = logits[position].float()
            behind = float(row[expected] - row[token])
            if behind <= tie * max(float(row[row.isfinite()].abs().max()), 1e-6):
                return ""
            return f"token {position} is {token} instead of {expected}, whose logit is greater by {behind:.3g}"
    return ""


def tie_of(model: Any) -> float:
    """Return the tolerance between equal logits of a PyTorch module, relative to the greatest absolute logit."""
    return 1e-3 if str(model.dtype) == "torch.float32" else 0.05


def require_greedy_likeness(
    model: Any,
    prompts: Sequence[list[int]],
    completions: Sequence[Sequence[int]],
    where: Callable[[list[int]], str],
    **generation: Any,
) -> None:
    """Raise INVALID_ARG if greedy ``completions`` differ from those of ``model.generate`` for each prompt, or it fails.

    ``completions`` are the sequences of ``prompts`` (token ids) as ``generate`` returns them, with the prompt or the
    start token. ``where`` describes a prompt in the message; ``generation`` are further arguments of ``generate``.
    """
    import torch

    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        try:
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=VERIFIED_TOKENS,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **generation,
                )
        except Exception as error:
            raise unlike(f"transformers itself fails: {error_text(error, short=True)}") from error
        begin = output.sequences.shape[1] - len(output.logits)
        expected_tokens = output.sequences[0, begin:].tolist()
        if difference := greedy_difference(
            completion[begin:], expected_tokens, [row[0] for row in output.logits], tie_of(model)
        ):
            raise unlike(f"{where(prompt)}, {difference}")


def unlike(why: str) -> ConchError:
    """Return the error for a model whose output differs from that of transformers."""
    return invalid(
        f"the model's results differ from those of transformers: {why}; set parameter 'verify_on_load' to "
        f"false to serve it anyway"
    )


#: The tolerance for rounding between two outputs for the same input, relative to the largest value.
_ROUNDING: Final[Mapping[str, float]] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
#: The tolerance of ``difference`` for INT8 graphs, whose scales may depend on the whole batch.
_COARSE: Final = 0.25
#: The minimum tolerance between an output and that of transformers.
_LIKE: Final = 2e-4


def rounding(precision: str) -> float:
    """Return the tolerance for rounding in ``precision``, relative to the largest value."""
    return _ROUNDING.get(precision, _COARSE)


def distance(expected: Array, output: Array) -> float:
    """Return the largest difference relative to the largest value of ``expected``; ``output`` may have padding rows."""
    if output.shape != expected.shape:
        output = output[: len(expected)]
    size = float(np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.where(expected == output, 0, np.abs(expected - output))
    furthest = float(apart.max(initial=0))
    return furthest / max(size, 1e-6) if np.isfinite(furthest) else float("inf")


def difference(expected: Array, output: Array, precision: str) -> float:
    """Return the difference of two outputs that are computed in ``precision``, for comparison with ``rounding``.

    It is their :func:`distance`; in INT8, the root mean square of their differences relative to that of ``expected``,
    because the largest of many thousand rounding errors hardly characterizes an output.
    """
    if precision in _ROUNDING or not (np.isfinite(expected).all() and np.isfinite(output).all()):
        return distance(expected, output)
    output = output[: len(expected)] if output.shape != expected.shape else output
    size = float(np.sqrt(np.square(expected, dtype=np.float64).mean()))
    return float(np.sqrt(np.square(expected - output, dtype=np.float64).mean())) / max(size, 1e-6)


def require_likeness(outputs: Mapping[str, Array], expected: Mapping[str, Array], precision: str, what: str) -> None:
    """Raise INVALID_ARG if outputs in both mappings differ; ``what`` names the input, as in "for 'Hello'"."""
    apart = max(
        [distance(expected[name][0], array[0]) for name, array in outputs.items() if name in expected], default=0.0
    )
    if apart > max(_LIKE, rounding(precision)):
        raise unlike(f"its numbers {what} differ by {apart:.2g} of the greatest")


#: Tolerance for rounding between equal outputs, relative to the greatest absolute value.
_SAME: Final = 1e-4
#: Maximum number of tensor names in a message.
_NAMED: Final = 5

#: Returns a task's outputs for an example: tensors, arrays, numbers and texts, in lists and mappings.
Computation = Callable[[], Any]


def require_tensors(model: Any, report: Mapping[str, Any], compute: Computation, source: object) -> None:
    """Raise INVALID_ARG with the names of missing tensors of ``source`` on which the result of ``compute`` depends.

    ``model`` is a PyTorch module, ``report`` the loading report of transformers (``output_loading_info``); ``compute``
    runs the model on an example. If the example cannot be run, every missing tensor counts.
    """
    from torch.nn import Parameter

    made_up = dict.fromkeys(report["missing_keys"], "")
    for name, held, expected_shape in report["mismatched_keys"]:
        made_up[name] = f", which they have as {list(held)} and config.json makes {list(expected_shape)}"
    if not made_up:
        return
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in made_up}
    # Integer buffers are indices and counters, which follow from the configuration.
    learnt = sorted(
        name for name, tensor in tensors.items() if tensor.is_floating_point() or isinstance(tensor, Parameter)
    )
    if not learnt:
        return
    try:
        before, again = _repeatable(compute), _repeatable(compute)
    except Exception as error:
        why = f", and an example that would tell whether that matters failed: {one_line(error)}"
        raise _lacking(source, learnt[:_NAMED], len(learnt), why) from error
    depends = _find_decisive_tensors(tensors, learnt, compute, before) if _alike(before, again) else learnt
    if depends:
        raise _lacking(source, [name + made_up[name] for name in depends[:_NAMED]], len(learnt))


def report_of(model: Any, directory: Path) -> Mapping[str, Any]:
    """Return the loading report of transformers for ``model`` and ``directory``, for loaders that do not return it.

    Reads only the names and shapes of the weights.
    """
    _, report = type(model).from_pretrained(
        directory, config=model.config, device_map="meta", local_files_only=True, output_loading_info=True
    )
    loading_report: Mapping[str, Any] = report
    return loading_report


def example_ids(config: Any) -> Any:
    """Return example token ids for a network, INT64 ``[1, 8]``, ending with its end-of-sequence token if it has one."""
    import torch

    text = config.get_text_config()
    ids = torch.arange(1, 9) * 7919 % int(text.vocab_size)
    end = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    if end is not None and 0 <= end < text.vocab_size:
        ids[ids == end] = 0 if end else 1
        ids[-1] = end
    return ids[None]


def _lacking(source: object, names: Sequence[str], count: int, why: str = "") -> ConchError:
    others = f" (of {count} that are missing)" if count > len(names) else ""
    return invalid(
        f"the weights of '{source}' lack tensors that its results depend on: {', '.join(names)}{others}{why}; fetch "
        "or save the trained checkpoint again, or set parameter 'task' to what it was trained for"
    )


def _find_decisive_tensors(
    tensors: Mapping[str, Any], names: Sequence[str], compute: Computation, before: Any
) -> list[str]:
    """Find some of the ``names`` on which the outputs depend, by bisection; some may matter only in combination."""
    if not _affect_outputs(tensors, names, compute, before):
        return []
    if len(names) == 1:
        return list(names)
    decisive: list[str] = []
    middle = len(names) // 2
    for part in (names[:middle], names[middle:]):
        if len(decisive) < _NAMED:
            decisive += _find_decisive_tensors(tensors, part, compute, before)
    if not decisive:
        decisive = list(names)
        for name in names:
            others = [other for other in decisive if other != name]
            if _affect_outputs(tensors, others, compute, before):
                decisive = others
    return decisive


def _affect_outputs(tensors: Mapping[str, Any], names: Sequence[str], compute: Computation, before: Any) -> bool:
    """Whether other values in the tensors ``names`` change the outputs."""
    with _randomized([tensors[name] for name in names]):
        try:
            return not _alike(before, _repeatable(compute))
        except Exception:  # invalid numbers, or an index out of range
            return True


@contextmanager
def _randomized(tensors: Sequence[Any]) -> Iterator[None]:
    """Change the values of ``tensors`` inside the ``with`` block, and restore them afterwards."""
    import torch

    kept = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            other = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            floats = tensor.is_floating_point()
            tensor.copy_(tensor + other.to(tensor.dtype) if floats else tensor.flip(tuple(range(tensor.dim()))))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)


def _repeatable(compute: Computation) -> Any:
    """Run ``compute`` with a fixed random seed, for networks that use random numbers."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return compute()


def _alike(output: Any, other: Any) -> bool:
    """Whether two outputs are equal except for rounding."""
    if isinstance(output, Mapping) and isinstance(other, Mapping):
        return output.keys() == other.keys() and all(_alike(value, other[name]) for name, value in output.items())
    if isinstance(output, list | tuple) and isinstance(other, list | tuple):
        return len(output) == len(other) and all(map(_alike, output, other))
    if output is None or other is None or isinstance(output, str) or isinstance(other, str):
        return bool(output is other or output == other)
    first, second = _numbers(output), _numbers(other)
    if first.shape != second.shape or np.isnan(first).any() or np.isnan(second).any():
        return False
    differ = first != second  # scores of excluded outputs are infinite in both
    if not differ.any():
        return True
    apart = np.subtract(first, second, where=differ, out=np.zeros_like(first))
    finite = np.abs(first[np.isfinite(first)])
    return bool(np.abs(apart).max() <= _SAME * finite.max(initial=0))


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, np.float64)
