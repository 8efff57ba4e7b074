"""Whisper: the processor time that a second of sound takes in PyTorch, and in each converted precision.

``python -m benchmarks.speech [--size tiny base]``. The checkpoints have the shapes of OpenAI's and random weights; the
time of a window depends on the number of tokens that are written, not on their choice. All engines transcribe each
window in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
import transformers
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS_MULTI

from conch.backends.graphs.openvino import CompileSettings
from conch.backends.tasks.whisper import load_model
from conch.convert.libraries import silence_libraries
from conch.convert.speech import export
from conch.machine.facts import usable_cores

#: Width, layers and heads.
SIZES = {"smallest": (64, 1, 1), "tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
#: Seconds of sound in a window.
WINDOW = 30


def checkpoint(size: str) -> Any:
    """Return a network with random weights, and the generation configuration of OpenAI's checkpoints."""
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    settings = transformers.WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
    )  # fmt: skip
    network = transformers.WhisperForConditionalGeneration(settings).eval()
    network.generation_config = transformers.GenerationConfig(
        max_length=448, is_multilingual=True, decoder_start_token_id=50258, eos_token_id=50257, pad_token_id=50257,
        bos_token_id=50257, no_timestamps_token_id=50363, lang_to_id={"<|en|>": 50259}, return_timestamps=False,
        task_to_id={"transcribe": 50359, "translate": 50358}, begin_suppress_tokens=[220, 50257],
        suppress_tokens=[*NON_SPEECH_TOKENS_MULTI, 50257],  # without an end, all tokens are written
    )  # fmt: skip
    return network


def write(network: Any, tokens: int) -> Callable[[Any], None]:
    """Return a function that writes ``tokens`` tokens for the features of a window."""

    def run(features: Any) -> None:
        with silence_libraries():
            network.generate(features, max_new_tokens=tokens, language="en")

    return run


def measure(size: str, tokens: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Return the processor time per second of sound of each round, by engine and precision."""
    network = checkpoint(size)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        with silence_libraries():
            network.save_pretrained(folder)
        runs = {"torch fp32": write(network, tokens)}
        graphs = export.export(network)
        for precision in ("fp32", "int8"):
            (folder / precision).mkdir()
            decoder = export.write(graphs, folder / precision, precision)
            settings = CompileSettings(threads=threads, precision=precision)
            runs[f"openvino {precision}"] = write(load_model(folder, decoder, settings), tokens)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):  # the first one warms up
            features = torch.randn((1, network.config.num_mel_bins, 100 * WINDOW))
            for name, run in runs.items():
                start = process_time()
                run(features)
                if number:
                    times[name].append((process_time() - start) / WINDOW)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "base"])
    parser.add_argument("--tokens", type=int, default=100, help="written for each window")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| size | engine | CPU ms per second of sound | PyTorch's over it | range |\n|---|---|---|---|---|")
    for size in options.size:
        times = measure(size, options.tokens, options.rounds, options.threads)
        for name, values in times.items():
            ratios = [base / value for base, value in zip(times["torch fp32"], values, strict=True)]
            figures = f"{1000 * statistics.median(values):.1f} | **{statistics.median(ratios):.2f}**"
            print(f"| {size} | {name} | {figures} | {min(ratios):.2f} to {max(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
