"""Which threads compute with OpenMP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from conch.backends.base.openmp import ComputeThreads, call_in_thread, use_one_thread
from conch.core.errors import ConchError, invalid


def refuse() -> None:
    raise invalid("no")


def test_all_callers_compute_in_the_same_thread_with_its_number_of_threads() -> None:
    compute_threads = ComputeThreads(1, 3)

    def call() -> tuple[int, int]:
        use_one_thread()
        assert torch.get_num_threads() == 1
        return compute_threads.call(lambda: (threading.get_ident(), torch.get_num_threads()))

    with ThreadPoolExecutor(4) as receivers:
        calls = [future.result() for future in [receivers.submit(call) for _ in range(8)]]
    assert calls == [(calls[0][0], 3)] * 8
    with pytest.raises(ConchError, match="no"):
        compute_threads.call(refuse)


def test_a_thread_for_one_call_ends_with_it() -> None:
    thread = call_in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(ConchError, match="no"):
        call_in_thread(refuse)
