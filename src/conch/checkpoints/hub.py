"""Locates a checkpoint in the version directory, in another folder, or on the Hugging Face Hub (through its cache).

Runs in workers and in ``conch convert``. Imports ``huggingface_hub`` only for models from the Hub. A ``model.json`` in
a checkpoint's own folder is restricted: the publisher of a checkpoint may have written any file in its folder.
Therefore only ``config.pbtxt`` and the command line can allow the checkpoint's code to run, or other files of the
machine to be read.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.checkpoints import files
from conch.checkpoints.files import GGUF
from conch.checkpoints.options import Options, extra_of
from conch.config.reading import gguf_models, gguf_stem, read_json
from conch.core.errors import ConchError, invalid, unavailable, why_unreadable
from conch.machine import extras

MODEL_FILE: Final = "model.json"
#: A prefix of paths in parameters that denotes the model's directory.
MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*(:[\w.-]+)?)?", re.ASCII)
#: The type of the GGUF file that is served if a repository has several and the id names none, as in llama.cpp.
_QUANTISATION: Final = "Q4_K_M"

#: The files of a checkpoint except its weights.
SMALL_FILES: Final = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "*.vocab",
    "README.md",
    "artifact.metadata",
)
#: The maximum number of GGUF files that an error names.
_MOST_NAMED: Final = 12
_WEIGHTS: Final = {
    # Further modules of sentence-transformers may be pickled even if the encoder is not.
    "torch": ("*.safetensors", "[0-9]_*/pytorch_model.bin"),
    "onnxruntime": ("model.onnx*", "onnx/model.onnx*"),
    "openvino": ("openvino_model.*", "openvino/openvino_model.*"),
}
_PICKLED: Final = ("pytorch_model*.bin",)
#: Copies of the weights in other formats and precisions.
_OTHER: Final = (
    "original/*", "consolidated*", "*.fp16.*", "*.fp16-*", "*.fp32.*", "*.fp32-*", "*.bf16.*", "*.bf16-*",
    "flax_model*", "tf_model*", "rust_model*", "coreml/*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a checkpoint.

    ``source`` is the name that the user gave; ``revision`` is the commit on the Hub, or empty. ``gguf`` is the file in
    ``folder`` that contains the model, None for a checkpoint of several files. ``projector`` is a file that was
    downloaded with it.
    """

    folder: Path
    source: str
    revision: str = ""
    gguf: Path | None = None
    projector: Path | None = None


def read_model_file(version_directory: Path) -> dict[str, Any]:
    """Return the content of ``model.json``, empty if none. Raises INVALID_ARG if it is not a JSON object."""
    path = version_directory / MODEL_FILE
    try:
        document = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {why_unreadable(error)}") from None
    if not isinstance(document, dict):
        raise invalid(f'{path} must hold a JSON object such as {{"model": "org/name"}}')
    return document


def resolve(version_directory: Path, options: Options) -> Location:
    """Locate the checkpoint of a version, downloading it from the Hub if necessary.

    ``options`` are the effective options, including those of ``model.json``. Raises INVALID_ARG for a model that does
    not exist or is not accessible, UNAVAILABLE if the Hub cannot be reached and the cache has no copy.
    """
    model = options.model
    if not model:
        return Location(version_directory, str(version_directory), gguf=files.gguf_file(version_directory))
    path = local_path(version_directory, model)
    if path is not None and path.is_file():
        return Location(path.parent, model, gguf=path)
    if path is not None:
        return Location(path, model, gguf=files.gguf_file(path))
    if not is_hub_id(model):
        raise invalid(f"model '{model}' is neither a folder, a .gguf file nor an id on the Hugging Face Hub (org/name)")
    return _download(model, options, _cache(version_directory, options))


def is_hub_id(text: str) -> bool:
    """Whether ``text`` has the form of a Hub id: ``org/name``, or ``org/name:Q8_0`` for one of its GGUF files."""
    return bool(_HUB_ID.fullmatch(text)) and ".." not in text and "--" not in text


def _expanded(version_directory: Path, text: str) -> Path:
    return Path(text.replace(MODEL_DIRECTORY, str(version_directory.parent))).expanduser()


def local_path(version_directory: Path, model: str) -> Path | None:
    """Return the folder or GGUF file ``model``, relative to the version's or the model's directory; None for a Hub id.

    Raises INVALID_ARG for a path that does not exist or cannot be opened.
    """
    try:
        path = _expanded(version_directory, model)
        candidates = (version_directory / path, version_directory.parent / path)
        for candidate in candidates:
            if candidate.is_dir():
                return candidate.resolve()
            if candidate.suffix == GGUF and candidate.is_file():
                # The Hub's cache has links to files with other names; the other parts of a model are beside the link.
                return candidate.parent.resolve() / candidate.name
    except (OSError, RuntimeError) as error:
        # An invalid file name, a folder without permission, or a home directory that does not exist.
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid(f"model folder '{shortened(model)}' cannot be opened: {reason}") from None
    if path.suffix == GGUF:
        present = any(candidate.exists() for candidate in candidates)
        raise invalid(f"model file '{shortened(model)}' {'is not a regular file' if present else 'does not exist'}")
    if path.is_absolute() or model.startswith("."):
        raise invalid(f"model folder '{model}' does not exist")
    return None


def named_path(parameter: str, text: str, version_directory: Path, checkpoint: Path) -> Path:
    """Return the file or folder in a parameter, relative to the version's, the model's or the checkpoint's directory.

    The path may begin with ``$$TRITON_MODEL_DIRECTORY``. Raises INVALID_ARG for a path that does not exist.
    """
    try:
        path = _expanded(version_directory, text)
        for candidate in (version_directory / path, version_directory.parent / path, checkpoint / path):
            if candidate.exists():
                return candidate
    except (OSError, RuntimeError, ValueError):
        pass  # an invalid file name
    raise invalid(f"parameter '{parameter}' names {shortened(text)}, which does not exist")


def shortened(text: str) -> str:
    """Shorten a name to 100 characters for messages."""
    return text if len(text) <= 100 else f"{text[:100]} …"


def _cache(version_directory: Path, options: Options) -> Path | None:
    """Return the model's own cache folder, relative to the model's directory; None for the shared cache."""
    return version_directory.parent / _expanded(version_directory, options.cache_dir) if options.cache_dir else None


def _download(model: str, options: Options, cache: Path | None) -> Location:
    """Download a snapshot with the files of the engine; pickled weights only if there are no safetensors.

    If there are none of these, or the id names a quantisation, downloads a GGUF file.
    """
    engine = options.engine if options.engine in ("onnxruntime", "openvino") else "torch"
    weights = () if ":" in model or options.engine == "llamacpp" else _WEIGHTS[engine]
    snapshot = _snapshot(model, options, cache, weights)
    if weights and engine == "torch" and not any(snapshot.glob("*.safetensors")):
        snapshot = _snapshot(model, options, cache, (*weights, *_PICKLED))
    if weights and files.engines_of(snapshot):
        return Location(snapshot, model, snapshot.name)
    names = _gguf_on_hub(snapshot.name, model, options)
    cached = [path.relative_to(snapshot) for path in snapshot.rglob(f"*{GGUF}")]
    models, projectors = gguf_models(cached if names is None else map(Path, names))
    if not models and weights:
        return Location(snapshot, model, snapshot.name)
    try:
        chosen = _choose_gguf(models, model)
    except ConchError:
        if names is None:
            raise _not_cached(model, options, cache) from None
        raise
    projector = _choose_projector(projectors, options)
    wanted = [*chosen, *([projector] if projector else [])]
    snapshot = _snapshot(model, options, cache, tuple(glob.escape(str(path)) for path in wanted), ignored=())
    return Location(snapshot, model, snapshot.name, snapshot / chosen[0], projector and snapshot / projector)


def _gguf_on_hub(revision: str, model: str, options: Options) -> list[str] | None:
    """Return the names of the GGUF files in a repository; None if the Hub must not be asked or cannot be reached."""
    from huggingface_hub import HfApi

    if not _is_offline(options):
        with contextlib.suppress(Exception):  # errors of its HTTP library, which differs between versions
            names = HfApi().list_repo_files(model.partition(":")[0], revision=revision, token=_token())
            return [name for name in names if name.endswith(GGUF)]
    return None


def _choose_gguf(models: list[list[Path]], model: str) -> list[Path]:
    """Return the parts of the model whose name has the quantisation in the id. Raises INVALID_ARG unless there is one.

    If the id names none, returns the only model, or the one of type Q4_K_M.
    """
    repository, _, named = model.partition(":")
    if not named and len(models) == 1:
        return models[0]
    stems = [gguf_stem(parts[0]) for parts in models]
    prefix = os.path.commonprefix(stems)  # noqa: RUF071 (names, not paths)
    common = re.sub(r"[^-.]*$", "", prefix) if len(stems) > 1 else ""
    types = [stem.removeprefix(common) for stem in stems]
    wanted = named or _QUANTISATION
    pattern = re.compile(rf"(^|[-./]){re.escape(wanted)}($|[-./])", re.IGNORECASE)
    exact = [parts for parts, type in zip(models, types, strict=True) if type.lower() == wanted.lower()]
    matching = exact or [parts for parts in models if pattern.search(str(parts[0].with_suffix("")))]
    if len(matching) == 1:
        return matching[0]
    choice = " or ".join(f"'{repository}:{type}'" for type in types[:_MOST_NAMED])
    if named and not matching:
        problem = f"has no GGUF file of type '{named}'"
    else:
        problem = f"has {len(models)} GGUF files" if models else "has no GGUF file"
    raise invalid(f"model '{repository}' {problem}{f': use {choice}' if choice else ''}")


def _choose_projector(projectors: list[Path], options: Options) -> Path | None:
    """Return the projector that parameter ``mmproj`` names, or else one in float16 or the first; None if unused."""
    if options.engine not in ("auto", "llamacpp"):
        return None
    named = options.text("mmproj")
    if named:
        return next((path for path in projectors if str(path) == named), None)
    return min(projectors, key=lambda path: ("-f16" not in path.name.lower(), path), default=None)


def _snapshot(
    model: str, options: Options, cache: Path | None, weights: tuple[str, ...], ignored: tuple[str, ...] = _OTHER
) -> Path:
    """Download the small files of a repository and those that match ``weights``; returns their folder."""
    extras.require(
        f"model '{model}' is on the Hugging Face Hub, which", "huggingface_hub", extra=extra_of(options.engine)
    )
    from huggingface_hub import errors, snapshot_download

    named = _described(model, options)
    code = ("*.py",) if options.trust_remote_code else ()
    try:
        return Path(
            snapshot_download(
                model.partition(":")[0],
                revision=options.revision or None,
                cache_dir=cache,
                token=_token(),
                local_files_only=_is_offline(options),
                allow_patterns=[*SMALL_FILES, "*.vec", *weights, *code],
                ignore_patterns=list(ignored),
            )
        )
    except errors.GatedRepoError:
        raise invalid(
            f"{named} is gated: accept its conditions on its page, and set HF_TOKEN (or PRIVATE_REPO_TOKEN) "
            "to a token of an account that did"
        ) from None
    except errors.RepositoryNotFoundError:
        raise invalid(
            f"{named} does not exist on the Hugging Face Hub, or it is private: check the name, and set HF_TOKEN "
            "(or PRIVATE_REPO_TOKEN) for a private one"
        ) from None
    except errors.RevisionNotFoundError:
        raise invalid(f"model '{model}' has no revision '{options.revision}' on the Hugging Face Hub") from None
    except errors.HFValidationError as error:
        raise invalid(f"model '{model}' is not an id on the Hugging Face Hub: {error}") from None
    except errors.LocalEntryNotFoundError:
        raise _not_cached(model, options, cache) from None
    except Exception as error:  # errors of its HTTP library, which differs between versions
        raise unavailable(f"{named} could not be fetched from the Hugging Face Hub: {_first_line(error)}") from None


def _token() -> str | None:
    return os.environ.get("HF_TOKEN") or os.environ.get("PRIVATE_REPO_TOKEN") or None


def _is_offline(options: Options) -> bool:
    from huggingface_hub import constants

    return options.offline or bool(constants.HF_HUB_OFFLINE)


def _described(model: str, options: Options) -> str:
    return f"model '{model}'" + (f" at revision '{options.revision}'" if options.revision else "")


def _not_cached(model: str, options: Options, cache: Path | None) -> ConchError:
    from huggingface_hub import constants

    problem = f"{_described(model, options)} is not complete in the Hub's cache at {cache or constants.HF_HUB_CACHE}"
    if _is_offline(options):
        return unavailable(
            f"{problem}, and offline mode is on: "
            "download it first, or switch offline mode off (parameter 'offline', HF_HUB_OFFLINE)"
        )
    return unavailable(f"{problem}, and the Hub cannot be reached")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


#: Files that identify a version directory as a checkpoint's own folder.
_CHECKPOINT: Final = ("config.json", "conch.json", "modules.json")
_SWITCH: Final = "trust_remote_code"
#: Parameters that name files or folders.
_PATHS: Final = (
    "model", "cache_dir", "chat_template", "mmproj", "speculative_model", "lora_modules", "lora_folders", "token_ids",
)  # fmt: skip


def is_checkpoint_folder(version_directory: Path) -> bool:
    """Whether the version directory itself contains the files of a checkpoint."""
    return any((version_directory / name).exists() for name in _CHECKPOINT) or any(version_directory.glob(f"*{GGUF}"))


def counted(document: Mapping[str, Any], version_directory: Path) -> tuple[dict[str, Any], str]:
    """Return the effective content of a version's ``model.json``, and a warning about ignored content (empty: none).

    A ``model.json`` outside a checkpoint's folder is unrestricted. Raises INVALID_ARG for one inside a checkpoint's
    folder that names files outside the folder.
    """
    values = dict(document)
    if not (is_checkpoint_folder(version_directory) or _names_own_folder(values.get("model"), version_directory)):
        return values, ""
    for name, text in _named(values):
        if _leads_out(text, version_directory):
            raise invalid(
                f"{version_directory / MODEL_FILE} lies in a checkpoint's folder and may not name a file or folder "
                f"outside of it, as '{name}' does with '{shortened(text)}': set parameter '{name}' in config.pbtxt"
            )
    if _SWITCH not in values:
        return values, ""
    ignored = values.pop(_SWITCH)
    trusts = ignored is True or str(ignored).strip().lower() in ("true", "1", "yes", "on")
    warning = (
        f"'{_SWITCH}' of {version_directory / MODEL_FILE} is ignored, because a checkpoint cannot vouch for its own "
        f"code: set parameter '{_SWITCH}' in config.pbtxt if you trust its code, or serve it with "
        f"'conch serve {version_directory} --trust-remote-code'"
    )
    return values, warning if trusts else ""


def _names_own_folder(model: Any, version_directory: Path) -> bool:
    """Whether ``model`` is the version directory or a path inside it."""
    if not isinstance(model, str) or not model:
        return False
    path = local_path(version_directory, model)
    return path is not None and path.is_relative_to(version_directory.resolve())


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that name files, each with its file names."""
    for name in _PATHS:
        value = values.get(name)
        if name in ("lora_modules", "lora_folders") and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                continue  # rejected where it is parsed
        for text in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text:
                yield name, text


def _leads_out(text: str, version_directory: Path) -> bool:
    """Whether a path leads outside the version directory, or exists only in the model's directory above it."""
    if text.startswith(("/", "~", "$")) or ".." in Path(text).parts:
        return True
    return not (version_directory / text).exists() and (version_directory.parent / text).exists()
