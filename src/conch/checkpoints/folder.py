"""Opens a checkpoint: finds and verifies its folder, and reads its task, labels and maximum length.

Used by workers when a model is loaded and by ``conch convert``; imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from conch.checkpoints import files, hub
from conch.checkpoints.gguf import GgufFile, config_of, llamacpp_problem, openvino_problem, read_gguf
from conch.checkpoints.gguf_consistency import require_consistent
from conch.checkpoints.gguf_retrieval import ENCODERS, gguf_task, retrieval_config, retrieval_problem
from conch.checkpoints.hub import counted
from conch.checkpoints.manifest import Companion, Manifest, Variant
from conch.checkpoints.options import ENGINES, TEXT_ENGINES, Options, extra_of, files_for
from conch.checkpoints.task import (
    CONVERSATIONAL,
    MEDIA_TASKS,
    TEXT_TASKS,
    canonical,
    pipeline_tag,
    takes_sound,
    task_of,
)
from conch.config.reading import read_json, read_small
from conch.core.errors import invalid, why_unreadable
from conch.core.sampling import TEXT_GENERATION

#: Suffixes of architectures whose networks output one number per class.
_CLASSIFIERS: Final = (
    "ForSequenceClassification", "ForTokenClassification", "ForImageClassification", "ForAudioClassification",
    "ForVideoClassification",
)  # fmt: skip
#: Names of weights with one row per class.
_HEADS: Final = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
#: The number of classes if the configuration does not specify it, as in transformers.
_DEFAULT_CLASSES: Final = 2


def labels_of(config: Mapping[str, Any], path: str) -> list[str] | None:
    """Return the labels by class index: ``LABEL_0`` … for classes without names, None for a model without classes.

    ``path`` is the file name in errors. Raises INVALID_ARG if the indices have gaps, or if ``num_labels`` or
    ``label2id`` contradict them.
    """
    count = config.get("num_labels")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise invalid(f"{path}: num_labels must be a positive number, not {count!r}")
    names = config.get("id2label")
    if names is None:
        if count is None and not _is_classifier(config):
            return None
        return [f"LABEL_{index}" for index in range(count or _DEFAULT_CLASSES)]
    labels = _in_order(names, path)
    if count is not None and count != len(labels):
        raise invalid(f"{path}: id2label has {len(labels)} labels, but num_labels is {count}")
    _check_inverse(labels, config.get("label2id"), path)
    return labels


def check_head(
    labels: list[str] | None, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], folder: str
) -> None:
    """Raise INVALID_ARG, naming the folder, if the number of labels differs from the classes in the weights."""
    if labels is None or not _is_classifier(config):
        return
    for head in _HEADS:
        if head in shapes and shapes[head] and shapes[head][0] != len(labels):
            raise invalid(
                f"checkpoint {folder} has {len(labels)} labels in config.json, but its weights ({head}) have "
                f"{shapes[head][0]} classes"
            )


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(_CLASSIFIERS) for name in config.get("architectures") or ())


def _in_order(names: Any, path: str) -> list[str]:
    if not isinstance(names, Mapping) or not names:
        raise invalid(f"{path}: id2label must map class indices to labels")
    try:
        by_index = {int(index): str(label) for index, label in names.items()}
    except ValueError:
        raise invalid(f"{path}: id2label has an index that is not a number") from None
    missing = next((index for index in range(len(names)) if index not in by_index), None)
    if missing is not None:
        raise invalid(f"{path}: id2label has {len(names)} labels, but none for class {missing}")
    return [by_index[index] for index in range(len(by_index))]


def _check_inverse(labels: list[str], indices: Any, path: str) -> None:
    """Raise INVALID_ARG if ``label2id`` has another index for a label; labels may be missing, as in transformers."""
    if not isinstance(indices, Mapping):
        return
    for index, label in enumerate(labels):
        other = indices.get(label)
        if other is not None and labels.count(label) == 1 and str(other) != str(index):
            raise invalid(f"{path}: class {index} has the label '{label}' in id2label, but label2id maps it to {other}")


#: The list of a folder's sentence-transformers modules.
MODULES_FILE: Final = "modules.json"
#: Names in the configuration file of a Transformer module, which older versions named after the architecture.
_BACKBONES: Final = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
#: The maximum length if no file specifies one.
DEFAULT_MAX_LENGTH: Final = 512
#: Larger limits mean unlimited; transformers writes 10^30.
_UNLIMITED: Final = 10**9
#: Model types whose positions begin after the id of the padding token.
_AFTER_PADDING: Final = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text", "ibert", "luke",
    "mluke", "markuplm", "layoutlmv3", "lilt", "roberta-prelayernorm", "xmod", "esm", "phobert",
})  # fmt: skip
#: Model types with relative positions; they accept texts longer than the positions in their configuration.
_RELATIVE: Final = ("t5", "mt5", "umt5", "deberta-v2", "xlnet")
#: Names of the number of positions in config.json, in order of precedence.
_POSITIONS: Final = ("max_encoder_position_embeddings", "max_position_embeddings", "n_positions", "max_seq_len")


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the number of token positions of the network in config.json; 0 if it does not specify one."""
    inner = config.get("text_config")
    for document in (config, inner if isinstance(inner, dict) else {}):
        counts = [document[name] for name in _POSITIONS if isinstance(document.get(name), int) and document[name] > 0]
        if counts:
            offset = 0
            if document.get("model_type", config.get("model_type")) in _AFTER_PADDING:
                padding = document.get("pad_token_id")
                offset = (padding if isinstance(padding, int) else 1) + 1
            return max(1, int(counts[0]) - offset)
    return 0


def max_length_of(
    requested: int,
    config: Mapping[str, Any],
    positions: int,
    tokenizer_config: Mapping[str, Any],
    sentence_bert_config: Mapping[str, Any],
    *,
    generates: bool,
) -> int:
    """Return the maximum length of a text in tokens: ``requested`` (0: none), or the lowest limit in the files.

    It is 0 if there is no limit. ``max_seq_length`` of sentence-transformers replaces the tokenizer's limit. For a
    model that ``generates`` text the limit is ``positions``. Raises INVALID_ARG if ``requested`` exceeds the positions
    of a model without relative positions.
    """
    if requested:
        if positions and requested > positions and config.get("model_type") not in _RELATIVE:
            raise invalid(f"parameter 'max_length' is {requested}; the model has positions for {positions} tokens")
        return requested
    if generates:
        return positions
    # As in sentence-transformers, whose limit replaces that of the tokenizer.
    own = sentence_bert_config.get("max_seq_length") or tokenizer_config.get("model_max_length")
    limits = (own, positions)
    return min(
        (int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _UNLIMITED),
        default=0,
    )


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint: a folder with ``config.json`` and its other files, or a GGUF file.

    ``source`` is the user's name of the model; ``revision`` is its commit on the Hub, or empty. ``config`` is
    config.json, or the equivalent from a GGUF file. ``options`` are the effective options; ``model.json`` provides
    defaults. ``task`` is the name of a transformers pipeline, ``labels`` the classes by index or None. ``max_length``
    is the maximum length of a text and ``positions`` the number of positions of the network, in tokens (0: unlimited).
    ``refuses_long_texts`` is whether longer texts are refused instead of truncated.
    ``manifest`` is the verified conch.json, ``variant`` the selected variant, and ``gguf`` the parsed GGUF file, None
    for a folder. ``projector`` is the file that reads images and recordings for the language model in a GGUF file.
    ``version_directory`` is the directory in the model repository: ``directory`` itself or the directory that refers to
    it; None outside a repository. ``warning`` describes ignored parts of ``model.json``, or is empty.
    """

    directory: Path
    source: str
    revision: str
    config: dict[str, Any]
    options: Options
    task: str = ""
    labels: list[str] | None = None
    max_length: int = DEFAULT_MAX_LENGTH
    refuses_long_texts: bool = False
    positions: int = 0
    manifest: Manifest | None = None
    variant: Variant | None = None
    gguf: GgufFile | None = None
    projector: Path | None = None
    version_directory: Path | None = None
    warning: str = ""
    #: Dependencies of outputs other than the files of the version, as kinds and texts; see
    #: ``repository/fingerprint.py``.
    dependencies: list[tuple[str, str]] = field(default_factory=list)
    _documents: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        version_directory: Path,
        options: Options = Options(),  # noqa: B008 (immutable)
        *,
        model_file: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Open the checkpoint of a version directory: its own files, or those that its options or ``model.json`` name.

        Any folder with a checkpoint is accepted. ``model_file`` replaces the content of ``model.json``. Raises
        INVALID_ARG for files that are missing, inconsistent or differ from ``conch.json``, and the errors of
        :func:`hub.resolve`.
        """
        written = hub.read_model_file(version_directory) if model_file is None else model_file
        document, warning = counted(written, version_directory)
        if not options.model and (version_directory / "conch.json").is_file():
            document.pop("model", None)
        options = options.over(document)
        location = hub.resolve(version_directory, options)
        folder = location.folder
        if not folder.is_dir():
            raise invalid(f"checkpoint folder {folder} does not exist")
        manifest = Manifest.read(folder)
        if manifest is not None:
            manifest.verify(folder)
        if location.gguf is None and not any((folder / name).is_file() for name in ("config.json", MODULES_FILE)):
            raise invalid(f"checkpoint {folder} lacks config.json")
        gguf = None
        if location.gguf is not None:
            gguf = read_gguf(location.gguf)
        self = cls(folder, location.source, location.revision, {}, options, manifest=manifest, gguf=gguf)
        self.version_directory = version_directory
        if location.revision:
            self.dependencies.append(("revision", f"{location.source}@{location.revision}"))
        else:
            paths = [folder] if gguf is None else gguf.parts
            self.dependencies += [("path", str(path)) for path in paths]
        self.warning = warning
        if gguf is not None:
            self.config = config_of(gguf)
            require_consistent(gguf)
        else:
            self.config = self.json("config.json") or {}
        self._check_architectures()
        self.labels = labels_of(self.config, str(folder / "config.json"))
        self.task = self._task()
        if gguf is not None and self.task != TEXT_GENERATION:
            self.config |= retrieval_config(gguf)
            self.labels = labels_of(self.config, str(gguf.path))
        elif gguf is not None:
            self.projector = self._find_projector(gguf, location.projector)
        self.options = self._with_engine()
        if manifest is not None:
            self.variant = manifest.select(options.variant, files_for(self.options.engine))
        elif options.variant:
            raise invalid(f"parameter 'variant' is '{options.variant}', but {folder} has no conch.json with variants")
        self._require_files()
        self._require_trust()
        self._find_lengths()
        return self

    def _find_projector(self, gguf: GgufFile, downloaded: Path | None) -> Path | None:
        """Return the projector that parameter ``mmproj`` names, that was downloaded, or that is beside the file."""
        named = self.options.text("mmproj")
        projector = self.named_path("mmproj", named) if named else downloaded or files.projector_file(gguf.path)
        if projector is not None and not named:
            self.dependencies.append(("path", str(projector)))
        return projector

    def part(self, path: str) -> Checkpoint:
        """Return the checkpoint in a subfolder, which is a module of sentence-transformers; itself for an empty path.

        Its task is that of the whole. Raises INVALID_ARG for files that are missing or inconsistent.
        """
        if not path:
            return self
        config = self.json(f"{path}/config.json") or {}
        part = replace(self, directory=self.directory / path, config=config, _documents={}, labels=None)
        part.options = replace(self.options, task=self.task)
        part._check_architectures()
        part._require_files()
        part._require_trust()
        part._find_lengths()
        return part

    def _find_lengths(self) -> None:
        self.positions = positions_of(self.config)
        limit = max_length_of(
            self.options.max_length,
            self.config,
            self.positions,
            self.json("tokenizer_config.json") or {},
            self.transformer_config(),
            generates=self.task == TEXT_GENERATION,
        )
        self.max_length = limit or DEFAULT_MAX_LENGTH
        truncation = self.options.truncation
        # If the limit is our own, nothing permits the rest of a text to be left out.
        self.refuses_long_texts = truncation == "refuse" or (truncation == "auto" and not limit)

    def has(self, *names: str) -> bool:
        """Whether all ``names`` are files of the checkpoint."""
        return all((self.directory / name).is_file() for name in names)

    def path(self, name: str) -> Path | None:
        """Return the path of a file of the checkpoint, or None if it does not exist."""
        path = self.directory / name
        return path if path.is_file() else None

    def named_path(self, parameter: str, text: str) -> Path:
        """Resolve the file or folder in ``parameter`` and record it as a dependency; see :func:`hub.named_path`."""
        path = hub.named_path(parameter, text, self.version_directory or self.directory, self.directory)
        self.dependencies.append(("path", str(path)))
        return path

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file of the checkpoint, or None if the file does not exist.

        Raises INVALID_ARG for a file that cannot be read or is not a JSON object.
        """
        document = self._read(name)
        if document is not None and not isinstance(document, dict):
            raise invalid(f"{self.directory / name} must hold a JSON object")
        return document

    def modules(self) -> list[dict[str, Any]]:
        """Return the sentence-transformers modules, in order; empty without ``modules.json``."""
        document = self._read(MODULES_FILE)
        if document is None:
            return []
        if not isinstance(document, list) or not all(isinstance(module, dict) for module in document):
            raise invalid(f"{self.directory / MODULES_FILE} must hold a list of JSON objects")
        return document

    def transformer_config(self, path: str = "") -> Mapping[str, Any]:
        """Return sentence-transformers' configuration of the network in the folder ``path``; empty if none."""
        names = (
            f"{path}/sentence_{name}_config.json" if path else f"sentence_{name}_config.json" for name in _BACKBONES
        )
        return next((config for name in names if (config := self.json(name))), {})

    def graph_file(self, engine: str) -> Path | None:
        """Return the ONNX or OpenVINO file of the variant, or of a checkpoint without variants, or None."""
        if self.variant is not None:
            fits = self.variant.engine == engine and self.variant.path
            return self.directory / self.variant.path if fits else None
        return files.graph_file(self.directory, engine)

    @property
    def engine(self) -> str:
        """The engine that runs the checkpoint: from the variant, the options, or the files in the folder."""
        engine = self.options.engine
        if self.variant is not None and self.variant.engine != files_for(engine):
            engine = self.variant.engine
        if engine == "auto" and self.gguf is not None:
            engine = self._gguf_engine()
        elif engine == "auto":
            engine = next(iter(files.engines_of(self.directory)), "torch")
        return "transformers" if engine == "torch" and self.task == TEXT_GENERATION else engine

    @property
    def openvino_problem(self) -> str:
        """The reason why engine ``openvino`` cannot serve the GGUF file; empty if it can, and for a folder."""
        if self.gguf is None:
            return ""
        return openvino_problem(
            self.gguf,
            str(self.config.get("model_type", "")),
            bool(self.options.adapters or self.options.adapter_folders),
        )

    @property
    def llamacpp_problem(self) -> str:
        """The reason why engine ``llamacpp`` cannot serve the GGUF file; empty for a folder, and if there is none."""
        return "" if self.gguf is None else llamacpp_problem(self.gguf, self.options.adapters.values())

    def _gguf_engine(self) -> str:
        """Return the best engine for the GGUF file on a CPU; only llama.cpp embeds and ranks texts with one."""
        if self.task != TEXT_GENERATION:
            return "llamacpp"
        if importlib.util.find_spec("llama_cpp") is not None and not self.llamacpp_problem:
            return "llamacpp"
        return "transformers" if self.openvino_problem else "openvino"

    @property
    def companion(self) -> Companion | None:
        """The variant for the shapes where it is faster than ``variant``.

        None if the options select a variant or engine, or disable ``by_shape``.
        """
        options = self.options
        fixed = options.variant or options.engine != "auto" or not options.by_shape
        return None if fixed or self.manifest is None else self.manifest.by_shape

    @property
    def reads_media(self) -> bool:
        """Whether it generates text from images or sound, with its own processor or projector."""
        kind = self.config.get("model_type")
        files = ("processor_config.json", "preprocessor_config.json")
        if self.gguf is not None:
            return self.projector is not None
        return self.task == TEXT_GENERATION and kind in CONVERSATIONAL and any(map(self.has, files))

    @property
    def media_extras(self) -> tuple[str, ...]:
        """The pip extras that read the images and recordings of its prompts."""
        if self.projector is not None:
            header = read_gguf(self.projector)
            names = {"image": "clip.has_vision_encoder", "audio": "clip.has_audio_encoder"}
            return tuple(extra for extra, name in names.items() if header.flag(name))
        kinds = {"image": "vision_config", "audio": "audio_config"}
        return tuple(extra for extra, name in kinds.items() if self.reads_media and self.config.get(name))

    @property
    def extra(self) -> str:
        """The pip extra of its engine."""
        return extra_of(self.engine)

    def _read(self, name: str) -> Any:
        if name not in self._documents:
            path = self.directory / name
            try:
                self._documents[name] = read_json(path) if path.is_file() else None
            except (OSError, ValueError) as error:
                raise invalid(f"{path} cannot be read: {why_unreadable(error)}") from None
        return self._documents[name]

    def _text(self, path: Path) -> str:
        try:
            return read_small(path).decode("utf-8", "replace")
        except OSError as error:
            raise invalid(f"{path} cannot be read: {error.strerror}") from None

    def _check_architectures(self) -> None:
        names = self.config.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise invalid(
                f'{self.directory / "config.json"}: architectures must be a list of names such as ["BertModel"], '
                f"not {json.dumps(names)[:80]}"
            )

    def _with_engine(self) -> Options:
        """Return the options with the engine's name for the task: for text generation, ``torch`` is ``transformers``.

        Raises INVALID_ARG for an engine that does not run the task.
        """
        engine = self.options.engine
        if self.task == TEXT_GENERATION:
            if engine not in ("auto", "torch", *TEXT_ENGINES):
                raise invalid(f"engine '{engine}' does not generate text: choose one of {', '.join(TEXT_ENGINES)}")
            if engine == "llamacpp" and self.gguf is None:
                raise invalid(f"engine 'llamacpp' needs a GGUF file: {self.directory} has none")
            if self.gguf is not None and self.gguf.text("general.architecture") in ENCODERS:
                raise invalid(f"{self.gguf.path} is for task '{gguf_task(self.gguf)}', not for '{self.task}'")
            return replace(self.options, engine="transformers") if engine == "torch" else self.options
        if self.gguf is not None:
            if problem := retrieval_problem(self.gguf, self.task):
                raise invalid(f"{self.gguf.path} {problem}")
            if engine not in ("auto", "llamacpp"):
                raise invalid(f"engine '{engine}' does not run task '{self.task}' of a GGUF file: choose llamacpp")
            if self.options.adapters or self.options.adapter_folders:
                raise invalid(f"LoRA adapters are for task '{TEXT_GENERATION}', and the task is '{self.task}'")
            if problem := self.llamacpp_problem:
                raise invalid(f"engine 'llamacpp' cannot serve {self.gguf.path}: {problem}")
            return self.options
        if engine not in ("auto", *ENGINES, "transformers"):
            raise invalid(f"engine '{engine}' is for task '{TEXT_GENERATION}', and the task is '{self.task}'")
        return replace(self.options, engine="torch") if engine == "transformers" else self.options

    def _task(self) -> str:
        """Return the task from the options, the manifest or the files. Raises INVALID_ARG if none determines it."""
        if self.gguf is not None and not self.options.task:
            return gguf_task(self.gguf)
        if self.options.task:
            return canonical(self.options.task)
        if self.manifest is not None and self.manifest.task:
            return canonical(self.manifest.task)
        card = self.path("README.md")
        images = bool((self.json("preprocessor_config.json") or {}).get("image_processor_type"))
        task = task_of(
            self.config,
            labels=len(self.labels) if self.labels is not None else None,
            modules=self.modules(),
            family=str((self.json("config_sentence_transformers.json") or {}).get("model_type") or ""),
            card=pipeline_tag(self._text(card)) if card else "",
            images=images,
        )
        if not task:
            architectures = ", ".join(map(str, self.config.get("architectures") or ())) or "none"
            raise invalid(
                f"the task of checkpoint {self.directory} cannot be determined (architectures: {architectures}): "
                "set parameter 'task' in config.pbtxt or model.json, such as feature-extraction or text-classification"
            )
        return task

    def _require_files(self) -> None:
        """Raise INVALID_ARG unless the folder has the weights and the tokenizer or processor of the task."""
        if self.gguf is not None or not self._has_network():
            return
        if self.variant is None or (self.variant.engine == "torch" and not self.variant.path):
            engine = self.options.engine if self.variant is None else "torch"
            shapes = files.require_weights(self.directory, files_for(engine))
            check_head(self.labels, self.config, shapes, str(self.directory))
        kind = str(self.config.get("model_type", ""))
        if self.task.split("_")[0] in TEXT_TASKS:
            if takes_sound(kind):
                raise invalid(
                    f"task '{self.task}' reads text, but checkpoint {self.directory} is a {kind}, which "
                    f"reads audio: set parameter 'task' to automatic-speech-recognition or audio-classification"
                )
            files.require_tokenizer(self.directory)
        if self.task in MEDIA_TASKS and "pretrained_cfg" not in self.config:  # timm's configuration replaces that file
            files.require_processor(self.directory, self.task)

    def _has_network(self) -> bool:
        """Whether the folder itself has a network, and not only the folders of its sentence-transformers modules."""
        modules = self.modules()
        return not modules or any(
            module.get("path") in ("", ".") and str(module.get("type")).endswith(("Transformer", "CLIPModel"))
            for module in modules
        )

    def _require_trust(self) -> None:
        """Raise INVALID_ARG if the model needs Python code of the checkpoint that the configuration does not trust."""
        code = self.config.get("auto_map") or {}
        if self.options.trust_remote_code and any("--" in str(name) for name in code.values()):
            self.dependencies.append(("unknown", "code of another repository on the Hub, which auto_map names"))
        if self.options.trust_remote_code or files_for(self.engine) != "torch":
            return
        if self.config.get("auto_map") and not _known_to_transformers(str(self.config.get("model_type", ""))):
            raise invalid(
                f"model '{self.source}' needs the Python code of its checkpoint: set parameter 'trust_remote_code' "
                "to true if you trust it" + (f" ({self.warning})" if self.warning else "")
            )


def _known_to_transformers(model_type: str) -> bool:
    """Whether transformers has the architecture; checks its folders, because importing it takes seconds."""
    try:
        package = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return False
    folder = model_type.replace("-", "_")
    return (
        package is not None
        and folder.isidentifier()
        and any((Path(root) / "models" / folder).is_dir() for root in package.submodule_search_locations or ())
    )
