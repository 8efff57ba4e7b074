"""The activation functions of PyTorch by name, in numpy, with the default arguments of their classes.

sentence-transformers saves an activation as the dotted name of its class, without arguments, and creates it again
without arguments. Runs in workers that may not have PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.core.errors import unsupported

Array = npt.NDArray[Any]
Activation = Callable[[Array], Array]

_SELU_ALPHA: Final = 1.6732632423543772848170429916717
_SELU_SCALE: Final = 1.0507009873554804934193349852946
#: The slope of RReLU outside of training: the middle of its range.
_RRELU_SLOPE: Final = (1 / 8 + 1 / 3) / 2

_erf: Final = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    """Return the logistic function of each element."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    """Return probabilities over the last dimension."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return np.asarray(powers)


def _softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros_like(x))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _leaky(x: Array, slope: float) -> Array:
    return np.where(x > 0, x, slope * x)


#: Activations by class name.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "CELU": _elu,
    "ELU": _elu,
    "GELU": lambda x: np.asarray(x * (1 + _erf(x / math.sqrt(2))) / 2),
    "Hardshrink": lambda x: np.where(np.abs(x) > 0.5, x, 0),
    "Hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "Hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "Hardtanh": lambda x: np.clip(x, -1, 1),
    "Identity": lambda x: x,
    "LeakyReLU": lambda x: _leaky(x, 0.01),
    "LogSigmoid": lambda x: -_softplus(-x),
    "LogSoftmax": _log_softmax,
    "Mish": lambda x: np.asarray(x * np.tanh(_softplus(x))),
    "PReLU": lambda x: _leaky(x, 0.25),
    "RReLU": lambda x: _leaky(x, _RRELU_SLOPE),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "SELU": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0))),
    "SiLU": lambda x: x * sigmoid(x),
    "Sigmoid": sigmoid,
    "Softmax": softmax,
    "Softmin": lambda x: softmax(-x),
    "Softplus": _softplus,
    "Softshrink": lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Tanh": lambda x: np.asarray(np.tanh(x)),
    "Tanhshrink": lambda x: np.asarray(x - np.tanh(x)),
}


def activation_named(name: str, source: str) -> Activation:
    """Return the activation with PyTorch's dotted ``name``; it takes and returns FP32 ``[rows, values]``.

    ``source`` is the checkpoint in errors. Raises UNSUPPORTED for a name that is not in the table, and for one outside
    of PyTorch, which is code of the checkpoint's author.
    """
    module, _, kind = name.rpartition(".")
    if not name.startswith("torch.") or kind not in ACTIVATIONS:
        whose = "" if module.startswith("torch.") else "; only activations of PyTorch are run"
        raise unsupported(f"'{source}' names the activation '{name}', which is not supported{whose}")
    activation = ACTIVATIONS[kind]
    return lambda x: activation(x).astype(np.float32, copy=False)
