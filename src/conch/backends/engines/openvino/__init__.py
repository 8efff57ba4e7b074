"""The engine ``openvino``: runs OpenVINO exports and GGUF files on the CPU, over OpenVINO's paged attention.

OpenVINO is imported when ``open`` is called, in a worker.
"""

from __future__ import annotations

from conch.backends.batching.batcher import InFlightBatcher
from conch.backends.batching.decoder import Decoder
from conch.backends.generation.draft import draft_spec
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.checkpoints.gguf import openvino_problem, other_engines
from conch.core.errors import invalid
from conch.machine import extras


class OpenVinoGenerationEngine(InFlightBatcher):
    """The in-flight batcher over a decoder of OpenVINO."""

    name = "openvino"


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.

    Raises INVALID_ARG for a model that cannot be loaded, UNSUPPORTED if openvino is not installed, or openvino-genai
    for a GGUF file.
    """
    if spec.device != "cpu":
        raise invalid("engine 'openvino' runs on the CPU only")
    decoder = _open(spec)
    draft = _open(draft_spec(spec, "openvino")) if spec.speculative == "draft_model" else None
    return OpenVinoGenerationEngine(decoder, spec, draft=draft)


def _open(spec: EngineSpec) -> Decoder:
    if spec.gguf is not None:
        if problem := openvino_problem(
            spec.gguf, str(spec.config.get("model_type", "")), bool(spec.adapters or spec.adapter_folders)
        ):
            others = other_engines(spec.gguf, spec.adapters.values(), without="openvino")
            raise invalid(
                f"engine 'openvino' cannot serve {spec.source}: {problem}; set parameter 'engine' to {others}"
            )
        extras.require("engine 'openvino' for a GGUF file", "openvino", "openvino_genai")
    elif not (spec.directory / "openvino_model.xml").is_file():
        raise invalid(f"engine 'openvino' needs an exported model: {spec.directory} has no openvino_model.xml")
    extras.require("engine 'openvino'", "openvino")
    from conch.backends.engines.openvino.decoder import OpenVinoDecoder

    return OpenVinoDecoder(spec)
