"""llama.cpp in this process, through the functions of llama-cpp-python: its log, its aborts and its parameters.

Runs in workers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from conch.backends.generation.engine import EngineSpec
from conch.core.errors import ConchError, internal, invalid, unsupported
from conch.machine import extras

Returned = TypeVar("Returned")

_logger = logging.getLogger(__name__)

#: ggml's levels of log messages; a message of level ``_CONTINUED`` continues the one before.
_ERROR: Final = 4
_CONTINUED: Final = 5
#: ggml's numbers of the types that a KV cache may have, with their bytes per number.
CACHE_TYPES: Final[Mapping[str, tuple[int, float]]] = {
    "f32": (0, 4), "f16": (1, 2), "bf16": (30, 2), "q8_0": (8, 34 / 32), "q5_1": (7, 24 / 32), "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32), "q4_0": (2, 18 / 32), "iq4_nl": (20, 18 / 32),
}  # fmt: skip
_CACHE_OF_DTYPE: Final = {"auto": "f16", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FLASH_ATTENTION: Final = {"auto": -1, "off": 0, "on": 1}
_FLAGS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of llama.cpp that a model may set, by llama.cpp's names.

    ``n_gpu_layers`` is the number of layers on the GPU (-1: all), ``n_ubatch`` the number of tokens that are computed
    at once (0: the default), ``type_k`` and ``type_v`` are the types of the KV cache, and ``flash_attn`` is a value of
    ``llama_flash_attn_type``. Without ``kv_unified``, each sequence has an equal part of the KV cache. ``cache_ram`` is
    the memory for tokens of ended sequences outside the cache (MiB; None: the size of the cache).
    """

    n_gpu_layers: int
    n_ubatch: int
    type_k: str
    type_v: str
    flash_attn: int
    kv_unified: bool
    cache_ram: int | None

    @classmethod
    def of(cls, spec: EngineSpec) -> Arguments:
        """Read ``spec.arguments``. Raises INVALID_ARG, naming the argument."""
        given = spec.arguments
        layers = _integer(given, "n_gpu_layers", -1 if spec.device == "cuda" else 0)
        if layers and spec.device == "cpu":
            raise invalid(f"n_gpu_layers is {layers}, but the instance runs on the CPU: set its kind to KIND_GPU")
        cache = _CACHE_OF_DTYPE[spec.dtype]
        saved = _integer(given, "cache_ram", 0) if "cache_ram" in given else None
        if saved is not None and saved < 0:
            raise invalid(f"parameter 'cache_ram' is {saved}; it must be at least 0 (MiB)")
        return cls(
            layers,
            _integer(given, "n_ubatch", 0),
            _choice(given, "type_k", cache, CACHE_TYPES),
            _choice(given, "type_v", cache, CACHE_TYPES),
            _FLASH_ATTENTION[_choice(given, "flash_attn", "auto", _FLASH_ATTENTION)],
            _FLAGS[_choice(given, "kv_unified", "true", _FLAGS)] and not spec.batch_invariant,
            saved,
        )


def _integer(given: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(given.get(name, default))
    except (TypeError, ValueError):
        raise invalid(f"parameter '{name}' is '{given[name]}'; it must be a whole number") from None


def _choice(given: Mapping[str, Any], name: str, default: str, choices: Mapping[str, Any]) -> str:
    value = str(given.get(name, default)).lower()
    if value not in choices:
        raise invalid(f"parameter '{name}' is '{given[name]}'; it must be one of {', '.join(choices)}")
    return value


class LlamaLibrary:
    """llama-cpp-python's module, and the errors in llama.cpp's log since the last call of ``checked``.

    The log goes to the logger of this module, at level DEBUG, because llama.cpp's warnings concern its authors.
    """

    def __init__(self) -> None:
        # By default, a failed assertion starts a debugger.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.module = extras.load("engine 'llamacpp'", "llama_cpp")
        self._errors: list[str] = []
        self._level = 0
        self._on_abort: Callable[[ConchError], None] | None = None
        # The library keeps only the addresses of the callbacks.
        self._callbacks: list[Any] = [self.module.llama_log_callback(self._log)]
        self.module.llama_log_set(self._callbacks[0], None)
        self._catch_aborts()
        self.module.llama_backend_init()

    @cached_property
    def mtmd(self) -> Any:
        """The module for images and recordings. Raises UNSUPPORTED if llama-cpp-python was built without libmtmd."""
        try:
            module = import_module("llama_cpp.mtmd_cpp")
        except (ImportError, OSError, RuntimeError, AttributeError):
            raise unsupported(
                "llama-cpp-python was built without libmtmd, which reads images and recordings: reinstall it without "
                "LLAVA_BUILD=OFF"
            ) from None
        module.mtmd_log_set(self._callbacks[0], None)
        return module

    def checked(self, what: str, call: Callable[[], Returned | None]) -> Returned:
        """Return the result of ``call``; raises INVALID_ARG with llama.cpp's reason if it is null or llama.cpp aborts.

        ``what`` begins the message. The call runs in a separate thread: llama.cpp ends the process after a failed
        assertion, unless the thread never continues.
        """
        self._errors.clear()
        results: SimpleQueue[Returned | BaseException | None] = SimpleQueue()

        def run() -> None:
            try:
                results.put(call())
            except BaseException as error:
                results.put(error)

        self._on_abort = results.put
        threading.Thread(target=run, name="conch-llama-load", daemon=True).start()
        result = results.get()
        self._on_abort = None
        if isinstance(result, ConchError):
            raise invalid(f"{what}: {result.message}") from result
        if isinstance(result, BaseException):
            raise result
        if not result:  # None, or a null pointer
            raise invalid(f"{what}: {self.reason()}")
        return result

    def reason(self) -> str:
        """Return the first error in llama.cpp's log, without the names of its functions."""
        if not self._errors:
            return "llama.cpp gives no reason"
        text = self._errors[0].partition(": ")[2] or self._errors[0]
        return re.sub(r"^(error loading model: |error loading model hyperparameters: |\w+: )*", "", text).strip()

    def _log(self, level: int, text: bytes, data: Any) -> None:
        line = text.decode("utf-8", "replace").rstrip("\n")
        continued = level == _CONTINUED
        self._level = self._level if continued else level
        if self._level == _ERROR and line:
            if continued and self._errors:
                self._errors[-1] += line
            else:
                self._errors.append(line)
        _logger.debug("%s", line)

    def _catch_aborts(self) -> None:
        """Let failed assertions of llama.cpp call ``_abort``; by default they print a backtrace of the process."""
        libraries = sorted((Path(self.module.__file__).parent / "lib").glob("*llama.*"))
        if not libraries:
            return
        # The package has copies of ggml's library under several names. This handle leads to the one in use.
        loaded = ctypes.CDLL(str(libraries[0]))
        self._callbacks.append(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._abort))
        loaded.ggml_set_abort_callback.restype = ctypes.c_void_p
        loaded.ggml_set_abort_callback(self._callbacks[-1])

    def _abort(self, message: bytes) -> None:
        """Report a failed assertion. The process ends when this function returns."""
        text = message.decode("utf-8", "replace").strip()
        _logger.error("llama.cpp failed: %s", text)
        if self._on_abort is not None:
            self._on_abort(internal(f"llama.cpp failed: {Path(text).name}"))
            threading.Event().wait()


@cache
def library() -> LlamaLibrary:
    """Return llama.cpp; loads it at the first call. Raises UNSUPPORTED if llama-cpp-python is not installed."""
    return LlamaLibrary()
