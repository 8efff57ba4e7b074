"""Attention masks of causal language models in the one form whose windows OpenVINO's paged KV cache recognises.

Paging drops a graph's masks, and masks causally by itself.  A window ("the last 4,096 tokens") is kept only where the
mask is a sum, and is lost without a word where it is a Boolean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from conch.errors import internal

#: Added where there is to be no attention: the smallest number of fp16, which every precision can hold.
MASKED: Final = -65504.0
#: Which input of OpenVINO's paged attention is the window; 0 stands for none.
_WINDOW_INPUT: Final = 10


@contextmanager
def additive_masks() -> Iterator[None]:
    """Have transformers make masks as sums inside the block, for networks with the attention ``sdpa``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as FUNCTIONS

    # This instance's entries go before those of the class, which stay.
    FUNCTIONS["sdpa"] = _additive
    try:
        yield
    finally:
        del FUNCTIONS["sdpa"]


def _additive(
    *,
    batch_size: Any,
    q_length: Any,
    kv_length: Any,
    mask_function: Callable[..., Any],
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Any = None,
    **_: Any,
) -> Any:
    """FP32 ``[rows, 1, queries, keys]``: 0 or :data:`MASKED`; sizes are tensors while a network is traced."""
    import torch
    from transformers import masking_utils

    # Some versions of transformers give the positions themselves for the length.
    queries = q_length if getattr(q_length, "ndim", 0) else torch.arange(q_offset, q_offset + q_length)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask_function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding))
    rows, keys = torch.arange(batch_size), torch.arange(kv_length) + kv_offset
    allowed = mask_function(
        rows[:, None, None, None], torch.arange(1)[None, :, None, None], queries[:, None], keys[None, :]
    )
    allowed = allowed.expand(batch_size, -1, queries.shape[0], kv_length)
    return torch.where(allowed, torch.tensor(0.0), torch.tensor(MASKED))


def windows_of(config: Any) -> list[int]:
    """The sliding window of each layer, in tokens; 0 for a layer that sees all of them."""
    window = getattr(config, "sliding_window", None) or 0
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window if getattr(config, "use_sliding_window", True) else 0] * layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def verify_windows(model: Any, config: Any) -> None:
    """INTERNAL where paging ``model`` (an ``openvino.Model``, which stays as it is) would lose a layer's window."""
    from openvino._offline_transformations import paged_attention_transformation
    from openvino.passes import ConstantFolding, Manager

    wanted = Counter(windows_of(config))
    paged = model.clone()
    paged_attention_transformation(paged)
    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(paged)
    nodes: Any = paged.get_ops()
    found = Counter(
        int(node.input_value(_WINDOW_INPUT).get_node().data)
        for node in nodes
        if node.get_type_name() == "PagedAttentionExtension"
    )
    if found != wanted:
        raise internal(f"OpenVINO's KV cache keeps windows {_layers(found)} and not {_layers(wanted)}")


def _layers(windows: Counter[int]) -> str:
    return ", ".join(f"{window} ({count} layers)" for window, count in sorted(windows.items()))
