"""Refuses weights that lack a tensor on which a network's answers depend.

transformers makes up whatever a checkpoint lacks, at random, and goes on.  Much of that no answer depends on: a pooler
beneath a head that does not look at it, an embedding that only training uses.  So each made-up tensor is changed, and
an answer from before is compared with one from after.

Called by everything that loads PyTorch's weights, in workers and in ``conch convert``.  Costs nothing where nothing is
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.errors import ConchError, invalid, one_line

#: The part of an answer's greatest number by which two answers may differ and still be the same: rounding.
_SAME: Final = 1e-4
#: Names in one message.
_NAMED: Final = 5

#: Returns what a task's answers are made of: tensors, arrays, numbers and texts, in lists and mappings.
Answer = Callable[[], Any]


def require_tensors(model: Any, report: Mapping[str, Any], answer: Answer, source: object) -> None:
    """Raise INVALID_ARG, naming the tensors, if ``answer`` depends on any that the weights of ``source`` do not give.

    ``model`` is a module of PyTorch, ``report`` what transformers says of loading it (``output_loading_info``);
    ``answer`` runs it on an example.  Where no example can be run, every missing tensor counts.
    """
    from torch.nn import Parameter

    made_up = dict.fromkeys(report["missing_keys"], "")
    for name, held, wanted in report["mismatched_keys"]:
        made_up[name] = f", which they have as {list(held)} and config.json makes {list(wanted)}"
    if not made_up:
        return
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in made_up}
    # Buffers of whole numbers are indices and counters, which follow from the configuration.
    learnt = sorted(name for name, one in tensors.items() if one.is_floating_point() or isinstance(one, Parameter))
    if not learnt:
        return
    try:
        before, again = _repeatable(answer), _repeatable(answer)
    except Exception as error:
        why = f", and an example that would tell whether that matters failed: {one_line(error)}"
        raise _lacking(source, learnt[:_NAMED], len(learnt), why) from error
    depends = _found(tensors, learnt, answer, before) if _alike(before, again) else learnt
    if depends:
        raise _lacking(source, [name + made_up[name] for name in depends[:_NAMED]], len(learnt))


def report_of(model: Any, directory: Path) -> Mapping[str, Any]:
    """What transformers says of loading ``model`` from ``directory``, for a loader that keeps it to itself.

    Reads the names and shapes of the weights again, not the weights.
    """
    _, report = type(model).from_pretrained(
        directory, config=model.config, device_map="meta", local_files_only=True, output_loading_info=True
    )
    found: Mapping[str, Any] = report
    return found


def example_ids(config: Any) -> Any:
    """Token ids for a network of this configuration, INT64 ``[1, 8]``, which end as a text does."""
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
        f"the weights of '{source}' lack what its answers depend on: {', '.join(names)}{others}{why}; fetch or save "
        "the trained checkpoint again, or set parameter 'task' to what it was trained for"
    )


def _found(tensors: Mapping[str, Any], names: Sequence[str], answer: Answer, before: Any) -> list[str]:
    """Some of ``names`` on which the answer depends, by halving; those that matter only together, together."""
    if not _matter(tensors, names, answer, before):
        return []
    if len(names) == 1:
        return list(names)
    found: list[str] = []
    middle = len(names) // 2
    for part in (names[:middle], names[middle:]):
        if len(found) < _NAMED:
            found += _found(tensors, part, answer, before)
    if not found:
        found = list(names)
        for name in names:
            others = [one for one in found if one != name]
            if _matter(tensors, others, answer, before):
                found = others
    return found


def _matter(tensors: Mapping[str, Any], names: Sequence[str], answer: Answer, before: Any) -> bool:
    """Whether the answer is another one with other values in ``names``."""
    with _changed([tensors[name] for name in names]):
        try:
            return not _alike(before, _repeatable(answer))
        except Exception:  # numbers that are not, or an index that leads nowhere
            return True


@contextmanager
def _changed(tensors: Sequence[Any]) -> Iterator[None]:
    """Other values in ``tensors`` for the time of the block."""
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


def _repeatable(answer: Answer) -> Any:
    """An answer with the same random numbers every time, for networks that draw some."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return answer()


def _alike(one: Any, other: Any) -> bool:
    """Whether two answers are the same but for rounding."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if one is None or other is None or isinstance(one, str) or isinstance(other, str):
        return bool(one is other or one == other)
    first, second = _numbers(one), _numbers(other)
    if first.shape != second.shape or np.isnan(first).any() or np.isnan(second).any():
        return False
    differ = first != second  # scores that a network rules out are infinite in both
    if not differ.any():
        return True
    apart = np.subtract(first, second, where=differ, out=np.zeros_like(first))
    finite = np.abs(first[np.isfinite(first)])
    return bool(np.abs(apart).max() <= _SAME * finite.max(initial=0))


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, np.float64)
