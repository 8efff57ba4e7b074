"""The memory of models, as reported in the log and to clients."""

from __future__ import annotations

from conch.telemetry.memory import ModelMemory, total_memory

MEBIBYTE = 1 << 20


def test_parts_are_listed_beside_the_sum() -> None:
    memory = ModelMemory(workers=380 * MEBIBYTE, shared_regions=32 * MEBIBYTE, gpus={1: 90}, weights=5, kv_cache=0)
    assert memory.host == 412 * MEBIBYTE
    assert memory.kinds() == {"workers": 380 * MEBIBYTE, "shared_regions": 32 * MEBIBYTE, "gpu": 90, "weights": 5}
    assert memory.usage() == [
        {"type": "CPU", "id": 0, "byte_size": 412 * MEBIBYTE},
        {"type": "GPU", "id": 1, "byte_size": 90},
    ]


def test_the_log_tells_the_sum_and_its_parts() -> None:
    memory = ModelMemory(workers=380 * MEBIBYTE, shared_regions=32 * MEBIBYTE)
    assert memory.sentence() == "412 MiB: workers 380 MiB, shared regions 32 MiB"
    assert ModelMemory(gpus={0: 20 << 30}).sentence().startswith("0 MiB and 20.0 GiB of GPU memory: ")


def test_the_log_tells_once_what_workers_have_in_memory() -> None:
    memory = ModelMemory(workers=380 * MEBIBYTE, weights=90 * MEBIBYTE, kv_cache=8 * MEBIBYTE)
    assert memory.sentence() == "380 MiB (including weights 90 MiB, KV cache 8 MiB): workers 380 MiB"
    assert ModelMemory(workers=MEBIBYTE, weights=2 * MEBIBYTE).sentence() == "1 MiB: workers 1 MiB"


def test_a_model_without_workers_uses_nothing() -> None:
    assert ModelMemory().usage() == []


def test_models_are_summed_on_each_gpu() -> None:
    both = total_memory(
        [ModelMemory(workers=1, gpus={0: 5}), ModelMemory(workers=2, shared_regions=4, gpus={0: 1, 2: 7})]
    )
    assert both == ModelMemory(workers=3, shared_regions=4, gpus={0: 6, 2: 7})
