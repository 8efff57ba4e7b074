"""How figures of language models are written in the report: tokens a second, perplexity, agreement.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.checkpoints.manifest import Latency, Variant

TASK: Final = "text-generation"
LEGEND: Final = (
    "Writing is decoding with so many sequences in one batch, reading is a prompt of so many tokens; both in tokens a "
    "second, by the median of single runs. Speed-up is the geometric mean over all of these, against PyTorch in fp32. "
    "Perplexity is on the compared texts, with its difference from PyTorch's and the 95 % interval of that; next token "
    "is the share of places in them at which both find the same one likeliest; greedy is how much of continuations "
    "without sampling is the same before the first difference."
)


def heading(shape: tuple[int, int]) -> str:
    batch, tokens = shape
    return f"write x{batch} tok/s" if tokens == 1 else f"read {tokens} tok/s"


def rate(one: Latency) -> str:
    """Tokens a second."""
    value = one.batch * one.tokens / one.median_ms * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def grid(variant: Variant) -> str:
    """Tokens a second, a line for each measurement."""
    lines = []
    for one in sorted(variant.latency, key=lambda one: (one.tokens, one.batch)):
        name = f"write x{one.batch}" if one.tokens == 1 else f"read {one.tokens}"
        lines.append(f"  {name:<10}{rate(one):>8}")
    return "\n".join(lines)


def agreement(figures: Mapping[str, Mapping[str, Any]], size: float | None) -> str:
    """``perplexity 30.51 (+0.87 %: +0.39 … +1.35); next token 0.9461; greedy 0.45; 135 MB``."""
    parts = []
    if (one := figures.get("perplexity")) is not None:
        delta, low, high = (100 * one[name] for name in ("delta", "low", "high"))
        interval = f" ({delta:+.2f} %: {low:+.2f} … {high:+.2f})" if delta or low or high else ""
        parts.append(f"perplexity {one['value']:.2f}{interval}")
    if (one := figures.get("top_1")) is not None:
        parts.append(f"next token {one['value']:.4f}")
    if (one := figures.get("greedy")) is not None:
        parts.append(f"greedy {one['prefix']:.2f}")
    if size is not None:
        parts.append(f"{size:.0f} MB" if size >= 10 else f"{size:.1f} MB")
    return "; ".join(parts) or "–"
