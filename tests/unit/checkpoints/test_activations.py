"""Activations in numpy equal the classes of PyTorch that sentence-transformers creates by name."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn.modules import activation as torch_activations

from conch.checkpoints.activations import ACTIVATIONS, activation_named
from conch.core.errors import Code, ConchError

#: Activations that need arguments, several inputs, or change the number of values.
LEFT_OUT = {"GLU", "MultiheadAttention", "Softmax2d", "Threshold"}


def test_the_table_has_every_activation_that_pytorch_creates_without_arguments() -> None:
    classes = {name for name in torch_activations.__all__ if inspect.isclass(getattr(torch_activations, name))}
    assert set(ACTIVATIONS) == classes - LEFT_OUT | {"Identity"}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_an_activation_equals_that_of_pytorch(name: str) -> None:
    values = np.array([[-90.0, -4.5, -3.0], [-1.0, -0.5, -1e-3], [0.0, 0.25, 0.5], [1.0, 6.5, 40.0]], np.float32)
    instance = getattr(torch.nn, name)().eval()
    expected = instance(torch.from_numpy(values)).detach().numpy()
    found = activation_named(f"{type(instance).__module__}.{name}", "model")(values)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.GLU", "torch.nn.modules.activation.Unknown", "my.Tanh"])
def test_an_unknown_activation_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConchError, match=f"'model' names the activation '{name}'") as error:
        activation_named(name, "model")
    assert error.value.code is Code.UNSUPPORTED
