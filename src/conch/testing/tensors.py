"""What a test writes as tensors: arrays as they are, lists and texts as the library of clients takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conch.backends.python import strings
from conch.backends.python.datatypes import DATATYPE
from conch.inference import ModelSignature
from conch.library.values import encode_inputs
from conch.tensors import WireTensor


def input_tensors(signature: ModelSignature, values: Mapping[str, Any]) -> dict[str, WireTensor]:
    """The tensors of a request; those that do not fit are left to the server's own checks.

    An array keeps its shape and type.  Lists, texts and numbers become what the model declares, where that keeps what
    they say, else INVALID_ARG is raised; they may leave out the batch dimension, and dimensions of 1 at their end.
    """
    plain = {
        name: value for name, value in values.items() if name in signature.inputs and not isinstance(value, np.ndarray)
    }
    encoded = encode_inputs(signature, plain)
    tensors = {name: encoded.get(name) or to_tensor(name, value) for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.datatype == "UINT16" and name in signature.inputs and signature.inputs[name].datatype == "BF16":
            tensor.datatype = "BF16"  # NumPy has no such type, so its bits are given
    return tensors


def to_tensor(name: str, value: Any) -> WireTensor:
    """The tensor for an array, or for what NumPy makes an array of; TypeError for types that no model takes."""
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        array = np.asarray(value, np.object_)
    datatype = DATATYPE.get(array.dtype)
    if datatype is None:
        raise TypeError(f"tensor '{name}': no model takes arrays of dtype {array.dtype}")
    data = strings.encode(array) if datatype == "BYTES" else array.tobytes()
    return WireTensor(name, datatype, array.shape, data)
