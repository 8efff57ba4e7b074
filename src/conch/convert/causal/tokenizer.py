"""The tokenizer of a language model in OpenVINO's form, which the server's engine needs for structured output.

Grammars are about texts, and the engine sees tokens.  With these files it needs neither transformers nor the seconds
that the conversion takes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from conch.backends.engines.openvino import pipelines, vocabulary
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.convert.libraries import describe_error, silence_libraries
from conch.errors import internal

#: Texts whose tokens must mean the same.
COMPARED: Final = 8


def write(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, texts: Sequence[Sequence[int]], logits: int, folder: Path
) -> str:
    """Write the tokenizer into ``folder``; if that is impossible, leave it empty and return why.

    ``texts`` are token ids, which must mean the same text to ``tokenizer``; ``logits`` is the size of the network's
    vocabulary.
    """
    folder.mkdir()
    try:
        with silence_libraries():
            trusted = checkpoint.options.trust_remote_code
            pipelines.write_tokenizer(checkpoint.directory, folder, trust_remote_code=trusted)
            problem = vocabulary.misfit(folder, logits)
            if problem:
                raise internal(problem)
            verify(folder, tokenizer, texts[:COMPARED])
    except Exception as error:  # whatever transformers, OpenVINO and the checkpoint's own code raise
        shutil.rmtree(folder)
        folder.mkdir()
        return describe_error(error)
    return ""


def verify(folder: Path, tokenizer: TextTokenizer, texts: Sequence[Sequence[int]]) -> None:
    """Raise INTERNAL unless both decode tokens to the same text, apart from spaces, which libraries clean up."""
    import openvino_genai

    made: Any = openvino_genai.Tokenizer(folder)
    for ids in texts:
        text: str = made.decode(list(ids))
        if "".join(text.split()) != "".join(tokenizer.decode(ids).split()):
            raise internal("OpenVINO's tokenizer reads tokens as another text")
