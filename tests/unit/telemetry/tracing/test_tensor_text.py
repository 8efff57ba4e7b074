"""How the elements of tensors read in trace files."""

from __future__ import annotations

import numpy as np
import pytest

from conch.core.tensors import WireTensor, pack_bytes
from conch.telemetry.tracing.tracing import data_text


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        ("FP32", np.array([1.5, 1e-7, 2], np.float32).tobytes(), "1.5,1e-07,2"),
        ("FP64", np.array([1 / 3, 1e20], np.float64).tobytes(), "0.333333,1e+20"),
        ("INT64", np.array([-(2**63)], np.int64).tobytes(), "-9223372036854775808"),
        ("UINT8", b"\0\xff", "0,255"),
        ("BOOL", b"\1\0", "1,0"),
        ("FP16", b"\0\0", ""),
        ("BYTES", pack_bytes([b'a"', "é".encode(), b"\xff"]), '"a"","é","\ufffd"'),
        ("BYTES", b"\5\0\0\0a", ""),
        ("INT32", b"", ""),
    ],
)
def test_elements(datatype: str, data: bytes, text: str) -> None:
    assert data_text(WireTensor("t", datatype, (-1,), memoryview(data))) == text
