"""Small PyTorch programs in files, for the backend ``pytorch``. TorchScript is compiled from this source."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Dict, List, Optional, Tuple  # noqa: UP035 (TorchScript reads these)

import torch


class Classifier(torch.nn.Module):
    """A tiny network for images: (n, 3, 8, 8) to 5 scores each."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.scores = torch.nn.Linear(4, 5)

    def forward(self, image):  # type: ignore[no-untyped-def]
        return self.scores(torch.relu(self.norm(self.convolution(image))).mean((2, 3)))


class AddSub(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:  # noqa: UP006
        return a + b, a - b


class OptionalScale(torch.nn.Module):
    def forward(self, a: torch.Tensor, scale: Optional[torch.Tensor] = None) -> torch.Tensor:  # noqa: UP045
        return a if scale is None else a * scale


class Keyed(torch.nn.Module):
    def forward(self, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:  # noqa: UP006
        return {"sum": x["left"] + x["right"], "left": x["left"]}


class Shout(torch.nn.Module):
    def forward(self, texts: List[str]) -> List[str]:  # noqa: UP006
        return [text + "!" for text in texts]


class Ragged(torch.nn.Module):
    """Twice ``x``, and the sum of each request's elements of it, which end at ``ends``."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        running = torch.cat([torch.zeros(1), torch.cumsum(x, 0)])
        at_ends = running[ends.long()]
        return 2 * x, at_ends[1:] - at_ends[:-1]


class Accumulate(torch.nn.Module):
    """Adds up over a sequence, whose sum so far comes and goes as a state."""

    def forward(
        self, value: torch.Tensor, start: torch.Tensor, total: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:  # noqa: UP006
        total = torch.where(start > 0, value, total + value)
        return total, total


class Failing(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.reshape([7, 7])


def classifier() -> torch.nn.Module:
    """The network with weights that are the same everywhere."""
    torch.manual_seed(0)
    return Classifier().eval()


def save_script(module: torch.nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is said to be old
        torch.jit.script(module).save(str(path))


def save_exported(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], path: Path) -> None:
    """The program for ``arguments``, whose first dimension may be of any size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, arguments, dynamic_shapes=tuple({0: batch} for _ in arguments))
    torch.export.save(program, str(path))
