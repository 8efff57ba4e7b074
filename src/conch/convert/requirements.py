"""The packages that a conversion needs, required before it begins.

Without one of them variants could not be built, and the conversion would publish what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from conch import extras
from conch.convert.libraries import silence_libraries
from conch.convert.plan import Plan
from conch.sampling import TEXT_GENERATION

#: What the report's charts are made with.
_REPORT: Final = ("altair", "vl_convert")
_ALWAYS: Final = ("torch", "transformers", "tokenizers", *_REPORT)
#: The exporters, and ONNX Runtime, in which a graph is compared with the network whichever engine it is for.
_GRAPHS: Final = ("onnx", "onnxscript", "onnxruntime")
#: What variants of encoders are made with and run on, by backend.
_ENCODERS: Final[Mapping[str, Sequence[str]]] = {
    "onnx": _GRAPHS,
    "tensorrt": _GRAPHS,
    "openvino": (*_GRAPHS, "openvino"),
}
#: The same for language models.
_LANGUAGE_MODELS: Final[Mapping[str, Sequence[str]]] = {"openvino": ("openvino", "openvino_genai")}


def needed(plan: Plan, task: str) -> list[str]:
    """The modules that the plan's variants need for ``task``."""
    writes = task == TEXT_GENERATION
    by_backend = _LANGUAGE_MODELS if writes else _ENCODERS
    backends = ("openvino",) if writes and not plan.backends else plan.engines
    modules = [*_ALWAYS, *(module for backend in backends for module in by_backend.get(backend, ()))]
    usual = plan.quantize is None
    if "openvino" in backends and (usual or any(precision.startswith("int") for precision in plan.precisions)):
        modules.append("nncf")
    return list(dict.fromkeys(modules))


def require_packages(plan: Plan, task: str = "") -> None:
    """Raise UNSUPPORTED for modules that are needed and not there, all in one, with the command that installs them.

    While the task is not known, these are the modules that every kind of model needs that takes the plan's backends.
    """
    tasks = (task,) if task else _possible(plan)
    first, *others = (needed(plan, one) for one in tasks)
    with silence_libraries():
        extras.require("conch convert", *(module for module in first if all(module in other for other in others)))


def _possible(plan: Plan) -> tuple[str, ...]:
    """A task of each kind of model that the plan fits."""
    writes = not plan.backends or ("openvino" in plan.engines and {"openvino", "torch"} >= set(plan.engines))
    return ("feature-extraction", TEXT_GENERATION) if writes and plan.layout != "triton" else ("feature-extraction",)
