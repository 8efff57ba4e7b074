"""Writes a tiny checkpoint with random weights for any architecture of transformers' auto classes.

``architectures`` lists those of a task, ``write`` creates a checkpoint's folder: configuration, weights, and the
tokenizer or processor that its inputs need. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.day_zero.sizes import VOCABULARY, shrink
from benchmarks.day_zero.tokenizer import make_tokenizer
from conch.core.errors import one_line

#: The auto class mapping of each task.
TASKS: Final[Mapping[str, str]] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
#: Maximum number of parameters of a tiny model.
_MOST_PARAMETERS: Final = 30_000_000
#: The standard deviation of weights: as large as trained ones, so that a wrong mask or position shows.
_SPREAD: Final = 0.2
#: Models with a language head that cannot be created without ``is_decoder``.
_NEEDS_DECODER: Final = frozenset({"reformer"})
_ROLES: Final = ("pad", "bos", "eos", "cls", "sep", "mask", "unk")


class CannotMake(Exception):
    """No tiny checkpoint can be created for an architecture; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True, order=True)
class Architecture:
    """A class of transformers (``name``) for models of one ``model_type`` (``kind``)."""

    task: str
    kind: str
    name: str


def architectures(task: str) -> list[Architecture]:
    """The architectures of a task of ``TASKS``, by ``model_type``."""
    from transformers.models.auto import modeling_auto

    classes = getattr(modeling_auto, TASKS[task]).items()
    return sorted(
        Architecture(task, kind, name)
        for kind, names in classes
        for name in ((names,) if isinstance(names, str) else names)
    )


def write(folder: Path, architecture: Architecture, seed: int = 0) -> None:
    """Write the checkpoint of an architecture to ``folder``. Raises CannotMake."""
    import torch
    import transformers

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    media = architecture.task.startswith(("image", "audio"))
    try:
        model_class = getattr(transformers, architecture.name)
        tokenizer = None if media else make_tokenizer(architecture.kind, VOCABULARY)
        config = _configuration(architecture, model_class, tokenizer)
        (tokenizer or _processor(architecture, config)).save_pretrained(folder)
        model = model_class(config).eval()
        _spread(model)
        model.save_pretrained(folder)
    except CannotMake:
        raise
    except Exception as error:  # a library may raise anything for a configuration that it does not expect
        raise CannotMake(f"{type(error).__name__}: {one_line(error)[:200]}") from error


def _configuration(architecture: Architecture, model_class: Any, tokenizer: Any) -> Any:
    """Return a small configuration that a model can be created from. Raises CannotMake if even that is large."""
    import torch
    from transformers import CONFIG_MAPPING

    configuration = getattr(model_class, "config_class", None) or CONFIG_MAPPING[architecture.kind]
    for filled in (False, True):
        try:
            config = shrink(configuration, filled=filled)
            if architecture.task == "causal" and architecture.kind in _NEEDS_DECODER:
                config.is_decoder = True
            if tokenizer is not None:
                _agree(config, tokenizer)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            break
        except Exception:
            if filled:
                raise
    if size > _MOST_PARAMETERS:
        raise CannotMake(f"{size / 1e6:.0f} million parameters although its configuration was shrunk")
    return config


def _agree(config: Any, tokenizer: Any) -> None:
    """Set the special tokens of a tokenizer in a configuration and its nested configurations."""
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    known = {name: value for name, value in ids.items() if value is not None}
    free = VOCABULARY
    values = config.to_dict()
    start = values.get("decoder_start_token_id")
    if start is None and values.get("is_encoder_decoder"):
        config.decoder_start_token_id = known.get("pad_token_id", 0)
    elif start is not None:
        same = next((name for name in ("pad_token_id", "eos_token_id") if values.get(name) == start), "bos_token_id")
        config.decoder_start_token_id = known.get(same, known.get("pad_token_id", 0))
    for name, value in values.items():
        if name in getattr(config, "sub_configs", {}) and isinstance(value, dict):
            _agree(getattr(config, name), tokenizer)
        elif name in known:
            setattr(config, name, known[name])
        elif name.endswith(("_token_id", "_token_index", "_index")) and type(value) is int and value >= VOCABULARY:
            free -= 1
            setattr(config, name, free)
        elif name.endswith("_token_id") and isinstance(value, list):
            setattr(config, name, known.get("eos_token_id"))


def _spread(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() == 2 or (parameter.dim() == 3 and "expert" in name):
                parameter.normal_(0, _SPREAD)
            elif parameter.dim() > 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:  # norms and similar; with equal numbers, a mix-up of weights would not show
                parameter.add_(torch.randn_like(parameter), alpha=_SPREAD / 2)


def _processor(architecture: Architecture, config: Any) -> Any:
    """Return the image processor or feature extractor of a model, for its size of image or spectrum."""
    import transformers

    if architecture.task.startswith("image"):
        from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

        # Some architectures use the processor of another architecture.
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(architecture.kind) or IMAGE_PROCESSOR_MAPPING_NAMES["vit"]
        classes = names.values() if isinstance(names, dict) else (names if isinstance(names, tuple) else (names,))
        make = getattr(transformers, next(name for name in classes if name is not None))
        side = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 64)
        side = max(side) if isinstance(side, list | tuple) else side
        sizes = dict(make().size or {"height": side, "width": side})
        square = {"height": side, "width": side}
        return make(size={name: side for name in sizes if sizes[name] is not None}, crop_size=square)
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(architecture.kind)
    if name is None:
        raise CannotMake("transformers has no feature extractor for it")
    return getattr(transformers, name)()
