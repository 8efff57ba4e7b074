"""Converts a GGUF file to a checkpoint folder: ``python -m benchmarks.generation.unpack FILE FOLDER``.

Run once, in a separate process, because it needs PyTorch, half a minute and a gigabyte of memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def unpack(file: Path, folder: Path) -> None:
    """Write the model (bfloat16) and the tokenizer of ``file`` in the format of transformers."""
    transformers = import_module("transformers")
    bfloat16 = import_module("torch").bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=bfloat16)
    # The weights are not quantised any more, but newer versions refuse to save a model that is marked as quantised.
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
