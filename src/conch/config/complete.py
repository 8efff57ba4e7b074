"""Completes a configuration with defaults: backend, file name, version policy, batching and instances.

Does no I/O: callers pass the names of files. The server calls :func:`complete` when it reads a model, and
:func:`merge_completion` when a backend has completed the rest after inspecting the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from conch.config.reading import Problem, shown_name
from conch.config.remote import is_remote
from conch.config.schema import (
    PYTHON_RUNTIME,
    InstanceGroup,
    ModelConfig,
    copied,
    implementation,
    is_ensemble,
    scheduler,
)
from conch.core.errors import invalid

DEFAULT_SEQUENCE_IDLE_MICROSECONDS: Final = 1_000_000
#: The prefix of parameters that report runtime facts about a model.
RUNTIME_FACT_PREFIX: Final = "conch."

#: The runtime fact of text models: ``yes`` if the model accepts conversations, else ``none``.
CHAT_TEMPLATE: Final = "chat_template"
#: The runtime fact of text models with LoRA adapters: a JSON list of their names.
ADAPTERS: Final = "adapters"
#: The runtime fact of text models: ``yes`` if clients may load LoRA adapters.
LOADS_ADAPTERS: Final = "loads_adapters"
#: The runtime fact of text models: their output format, see ``conch.wire.output.formats``.
OUTPUT_FORMAT: Final = "output_format"


#: Kind and number of the instances of a model without an instance group. Others run on GPUs if there are any, in the
#: default number; a Python model has one process, and no GPU unless configured.
_INSTANCES: Final = {"python": ("KIND_CPU", 1), "openvino": ("KIND_CPU", 0)}


@dataclass(frozen=True)
class _Recognised:
    """A file name in a version directory that identifies the model's backend."""

    filename: str
    backend: str
    platform: str


#: In search order.
_RECOGNISED: Final = (
    _Recognised("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    _Recognised("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    _Recognised("model.plan", "tensorrt", "tensorrt_plan"),
    _Recognised("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    _Recognised("model.xml", "openvino", ""),
    _Recognised("model.pt", "pytorch", "pytorch_libtorch"),
    _Recognised("model.pt2", "pytorch", "torch_aoti"),
    _Recognised("model.py", "python", ""),
)

#: The manifest of ``conch convert``; it takes precedence over the files above, which precede plain checkpoint files.
_CONVERTED: Final = "conch.json"
#: Files that make a version a checkpoint; models of sentence-transformers without a network have no config.json.
_CHECKPOINT: Final = ("model.json", "config.json", "modules.json")
#: Backends with model files that are programs.
_PROGRAMS: Final = frozenset({"python", "pytorch"})
_GGUF: Final = ".gguf"


def complete(
    config: ModelConfig,
    name: str,
    artefacts: Collection[str],
    *,
    gpus: Sequence[int] = (),
    python_based: bool = False,
) -> ModelConfig:
    """Return a completed copy of ``config`` for the model in directory ``name``.

    ``artefacts`` are the names in the first version directory, and ``gpus`` the ids of usable devices. ``python_based``
    means that a Python-based backend runs the model. Raises INVALID_ARG if the backend cannot be determined.
    """
    completed = copied(config)
    complete_backend(completed, name, artefacts)
    if python_based:
        completed.runtime = PYTHON_RUNTIME
    if implementation(completed) != "python":
        # Clients may send back a configuration that they read from the server.
        for parameter in [parameter for parameter in completed.parameters if parameter.startswith(RUNTIME_FACT_PREFIX)]:
            del completed.parameters[parameter]
    normalise(completed)
    complete_instances(completed, gpus)
    return completed


def complete_backend(config: ModelConfig, name: str, artefacts: Collection[str]) -> None:
    """Fill in ``name``, ``backend``, ``platform`` and ``default_model_filename`` in place."""
    config.name = config.name or name
    if is_ensemble(config):
        return
    if not config.backend:
        config.backend = _backend_of(config, artefacts)
    if config.backend:
        _fill_backend_fields(config, artefacts)
    elif not config.platform and not config.default_model_filename:
        _, dot, backend = name.rpartition(".")
        if not dot:
            raise Problem(
                f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
                "configuration. Expected model name of the form 'model.<backend_name>'.",
                hint="put a model file into the version directory, or set 'backend'",
            )
        config.backend = backend
        config.default_model_filename = f"model.{backend}"


def _backend_of(config: ModelConfig, artefacts: Collection[str]) -> str:
    by_files = not config.platform and not config.default_model_filename
    if by_files and _CONVERTED in artefacts:
        return "huggingface"
    for known in _RECOGNISED:
        if config.platform:
            fits = config.platform == known.platform
        elif config.default_model_filename:
            fits = config.default_model_filename == known.filename
        else:
            fits = known.filename in artefacts
        if fits:
            if by_files and known.backend in _PROGRAMS:
                _refuse_downloaded(config.name, known, artefacts)
            return known.backend
    checkpoint = any(name in _CHECKPOINT or name.endswith(_GGUF) for name in artefacts)
    return "huggingface" if by_files and checkpoint else ""


def _refuse_downloaded(name: str, program: _Recognised, artefacts: Collection[str]) -> None:
    """Raise INVALID_ARG for a program beside a checkpoint: downloaded programs must not run without consent."""
    beside = next(
        (artefact for artefact in sorted(artefacts) if artefact in _CHECKPOINT[1:] or artefact.endswith(_GGUF)), ""
    )
    if beside:
        raise Problem(
            f"model '{name}' has both {program.filename} and {shown_name(beside)}, which belongs to a checkpoint "
            f"that may include {program.filename}: set 'backend' in config.pbtxt, "
            f'to "{program.backend}" to run {program.filename}, or to "huggingface" to serve the checkpoint',
            hint="set 'backend'",
        )


def _fill_backend_fields(config: ModelConfig, artefacts: Collection[str]) -> None:
    candidates = [known for known in _RECOGNISED if known.backend == config.backend]
    if not candidates:
        return
    chosen = next(
        (
            known
            for known in candidates
            if (config.platform and known.platform == config.platform)
            or (not config.platform and (config.default_model_filename or known.filename) == known.filename
                and (config.default_model_filename or known.filename in artefacts))
        ),
        candidates[0],
    )  # fmt: skip
    config.platform = config.platform or chosen.platform
    config.default_model_filename = config.default_model_filename or chosen.filename


def normalise(config: ModelConfig) -> None:
    """Fill in place the defaults that depend only on the configuration itself."""
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    chosen = scheduler(config)
    if chosen == "dynamic_batching":
        _prefer_full_batches(config.dynamic_batching.preferred_batch_size, config.max_batch_size)
    elif chosen == "sequence_batching":
        sequences = config.sequence_batching
        if not sequences.max_sequence_idle_microseconds:
            sequences.max_sequence_idle_microseconds = DEFAULT_SEQUENCE_IDLE_MICROSECONDS
        if sequences.HasField("oldest"):
            _prefer_full_batches(sequences.oldest.preferred_batch_size, config.max_batch_size)
    if chosen != "ensemble_scheduling":
        for memory in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(memory):
                getattr(config.optimization, memory).enable = True


def _prefer_full_batches(sizes: list[int], max_batch_size: int) -> None:
    if not sizes and max_batch_size > 0:
        sizes.append(max_batch_size)


def complete_instances(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Fill the instance groups in place: names, kinds, counts and devices. ``gpus`` are the ids of usable devices."""
    if scheduler(config) == "ensemble_scheduling" or is_remote(config):
        return
    if not config.instance_group:
        kind, count = _INSTANCES.get(implementation(config), ("KIND_AUTO", 0))
        config.instance_group.add(name=config.name, kind=InstanceGroup.Kind.Value(kind), count=count)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == InstanceGroup.KIND_AUTO:
            on_gpu = gpus and all(gpu in gpus for gpu in group.gpus)
            group.kind = InstanceGroup.KIND_GPU if on_gpu else InstanceGroup.KIND_CPU
        if group.count < 1:
            two = group.kind == InstanceGroup.KIND_CPU and config.backend in ("onnxruntime", "tensorflow")
            group.count = 2 if two else 1
        if group.kind == InstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def complete_ensemble(config: ModelConfig, step_configs: Iterable[ModelConfig]) -> None:
    """Fill an ensemble's transaction policy in place: the ensemble is decoupled if the model of any step is."""
    config.model_transaction_policy.decoupled = any(step.model_transaction_policy.decoupled for step in step_configs)


def merge_completion(config: ModelConfig, completion: ModelConfig) -> None:
    """Merge fields that a backend completed in place: batch size, tensors, scheduler, transaction policy.

    Adds only parameters that the configuration lacks. Raises INVALID_ARG if the backend changes the configured
    scheduler.
    """
    before, after = scheduler(config), scheduler(completion)
    if before and after and before != after:
        raise invalid(f"Cannot update scheduling choice from {before} to {after} when auto-completing.")
    config.max_batch_size = completion.max_batch_size
    for tensors in ("input", "output"):
        config.ClearField(tensors)
        getattr(config, tensors).extend(getattr(completion, tensors))
    if after and not before:
        getattr(config, after).CopyFrom(getattr(completion, after))
    if completion.HasField("model_transaction_policy"):
        config.model_transaction_policy.CopyFrom(completion.model_transaction_policy)
    for name, value in completion.parameters.items():
        if name not in config.parameters:
            config.parameters[name].CopyFrom(value)
    normalise(config)
