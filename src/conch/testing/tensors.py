"""Converts a test's values to tensors: arrays unchanged, lists and texts as in the client library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conch.backends.python.tensor import DATATYPE, encode_strings
from conch.client.values import encode_inputs
from conch.core.inference import ModelSignature
from conch.core.tensors import WireTensor


def input_tensors(signature: ModelSignature, values: Mapping[str, Any]) -> dict[str, WireTensor]:
    """Return the tensors of a request; invalid ones are left to the server's checks.

    An array keeps its shape and type. Lists, texts and numbers are converted to the declared type; raises INVALID_ARG
    if that would change their values. They may omit the batch dimension and trailing dimensions of 1.
    """
    plain = {
        name: value for name, value in values.items() if name in signature.inputs and not isinstance(value, np.ndarray)
    }
    encoded = encode_inputs(signature, plain)
    tensors = {name: encoded.get(name) or to_tensor(name, value) for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.datatype == "UINT16" and name in signature.inputs and signature.inputs[name].datatype == "BF16":
            tensor.datatype = "BF16"  # NumPy has no BF16, so its bits are given as UINT16
    return tensors


def to_tensor(name: str, value: Any) -> WireTensor:
    """Return the tensor for an array or an array-like; raises TypeError for types that no model takes."""
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        array = np.asarray(value, np.object_)
    datatype = DATATYPE.get(array.dtype)
    if datatype is None:
        raise TypeError(f"tensor '{name}': no model takes arrays of dtype {array.dtype}")
    data = encode_strings(array) if datatype == "BYTES" else array.tobytes()
    return WireTensor(name, datatype, array.shape, data)
