"""The plan of a conversion, checked before any step that takes long."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from conch.checkpoints.options import Options
from conch.convert.layout import EnsembleModels
from conch.convert.options import BACKENDS, PRECISIONS, ConversionOptions
from conch.convert.verdict import check_mix
from conch.core.errors import invalid
from conch.measure.texts.shapes import Mix, Shape, parse_mix
from conch.options.declaration import words_of

BATCH_SIZES: Final = (1, 8, 32)
SEQUENCE_LENGTHS: Final = (16, 128, 384)
#: Backend names of other converters.
_ALIASES: Final = {"pytorch": "torch", "onnxruntime": "onnx"}


class Plan(ConversionOptions):
    """The options of one conversion, with the defaults that depend on other options."""

    @property
    def engines(self) -> tuple[str, ...]:
        """The backends to build, each by its canonical name."""
        usual = ("torch", "onnx", "openvino") if self.layout == "huggingface" else ("torch", "onnx")
        return tuple(dict.fromkeys(_ALIASES.get(name, name) for name in self.backends or usual))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions to build in addition to fp32."""
        if not self.quantize:
            return ("int8",) if {"onnx", "openvino"} & set(self.engines) else ()
        return tuple(precision for precision in self.quantize if precision != "none")

    @property
    def mix(self) -> Mix:
        """The expected requests; empty if unknown."""
        return parse_mix(self.expect)

    @property
    def command(self) -> str:
        """The shell command that repeats this conversion."""
        return shlex.join(["conch", "convert", *words_of(self)])

    @property
    def served_name(self) -> str:
        """The model's name on the server."""
        return self.name or default_name(self.model)

    @property
    def folders(self) -> tuple[str, ...]:
        """The model directories that the conversion creates."""
        models = EnsembleModels(self.served_name, self.task)
        return models.names if self.layout == "triton" else (self.served_name,)

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of the ``huggingface`` model that are not in the checkpoint's files."""
        parameters = {"task": self.task} if self.task else {}
        if self.trust_remote_code:
            parameters["trust_remote_code"] = "true"
        if self.threads:
            parameters["threads"] = str(self.threads)
        return parameters

    def options(self) -> Options:
        """Return the options for reading the checkpoint, as the server's backend does."""
        folder = Path(self.model).expanduser()
        return Options(
            model=str(folder.resolve()) if folder.is_dir() else self.model,
            revision=self.revision,
            task=self.task,
            engine="torch",
            threads=self.threads,
            trust_remote_code=self.trust_remote_code,
        )

    def shapes(self, max_length: int) -> list[Shape]:
        """Return the shapes to measure: all combinations of batch size and length.

        Raises INVALID_ARG for a requested length that the model does not support; default lengths are reduced.
        """
        for length in self.sequence_lengths:
            if length > max_length:
                raise invalid(f"--seq-len {length} is more than the model accepts: at most {max_length} tokens")
        lengths: Sequence[int] = self.sequence_lengths or [min(length, max_length) for length in SEQUENCE_LENGTHS]
        shapes = sorted({Shape(batch, length) for batch in self.batch_sizes or BATCH_SIZES for length in lengths})
        check_mix(self.mix, shapes)
        return shapes

    def check(self) -> None:
        """Raise INVALID_ARG for invalid or contradictory options."""
        for kind, names, known in (("backend", self.engines, BACKENDS), ("precision", self.quantize, PRECISIONS)):
            for name in names:
                if name not in known:
                    raise invalid(f"{kind} '{name}' is unknown: choose from {', '.join(known)}")
        parse_mix(self.expect)
        name = self.served_name
        if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII):
            raise invalid(f"--name '{name}' must be letters, digits, '_', '-' and '.', and not begin with a dot")
        for numbers, flag in ((self.batch_sizes, "--batch-size"), (self.sequence_lengths, "--seq-len")):
            if any(number < 1 for number in numbers):
                raise invalid(f"{flag} must be at least 1")
        if any(length < 2 for length in self.sequence_lengths):
            raise invalid("--seq-len must be at least 2: a text has a first and a last token")
        if self.layout == "triton" and "onnx" not in self.engines:
            raise invalid("--layout triton serves an ONNX graph: add onnx to --backend")


def default_name(model: str) -> str:
    """Return the last part of a Hub id or a path, without characters that model names must not contain."""
    last = Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model.rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", last, flags=re.ASCII).strip(".-") or "model"
