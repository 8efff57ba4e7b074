"""JSON bodies other than inference: metadata, repository, statistics, log and trace settings, shared memory, errors.

Called by the HTTP front end on the event loop. ``read_…`` functions parse requests. Does no I/O.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from conch.core.errors import internal, invalid, unavailable, unsupported
from conch.core.tensors import Buffer
from conch.machine.logs import FORMATS
from conch.wire import control
from conch.wire.control import ADAPTER_PARAMETERS, LoadParameters, check_adapter
from conch.wire.json import text

_FILE: Final = "file:"
#: The size of ``cudaIpcMemHandle_t`` (bytes).
_HANDLE_SIZE: Final = 64


def error_body(message: str) -> bytes:
    """Return the body of an error response."""
    return text.dumps({"error": text.error_message(message)})


def statistics_body(entries: Iterable[bytes]) -> bytes:
    """Return the body of a statistics response from its encoded entries."""
    return b'{"model_stats":[' + b",".join(entries) + b"]}"


def read_index(body: Buffer) -> bool:
    """Whether to list only ready models."""
    ready = _object(body).get("ready", False)
    if type(ready) is not bool:
        raise invalid("Invalid value for 'ready': expected a boolean")
    return ready


def read_load(body: Buffer) -> LoadParameters:
    """Return the parameters of a load; raises INTERNAL for unknown ones, as Triton does, INVALID_ARG for bad base64."""
    config: str | None = None
    files: dict[str, bytes] = {}
    adapter: dict[str, str] = {}
    for key, value in text.as_members(_object(body).get("parameters", {})).items():
        string = text.as_string(value)
        if key == "config":
            config = string
        elif key in ADAPTER_PARAMETERS:
            adapter[key] = string
        elif key.startswith(_FILE):
            files[text.as_string(key).removeprefix(_FILE)] = _base64(key, string)
        else:
            raise internal("unexpected error on creating Triton parameter")
    check_adapter(adapter, alone=config is None and not files)
    return LoadParameters(config, files, **adapter)


def _base64(key: str, value: str) -> bytes:
    try:
        return base64.b64decode(value.encode("ascii", "replace"), validate=True)
    except binascii.Error as error:
        raise invalid(f"load parameter '{key}' is not valid base64: {error}") from None


def read_unload(body: Buffer) -> tuple[bool, str]:
    """Return whether to unload the steps of an ensemble too, and the LoRA adapter to unload instead of the model."""
    parameters = text.optional_object(_object(body), "parameters")
    dependents = text.as_bool(parameters.get("unload_dependents", False), "Unable to parse 'unload_dependents'")
    return dependents, text.as_string(parameters.get("lora_name", ""))


class SystemRegionParameters(NamedTuple):
    """A part of shared memory to register; ``offset`` and ``size`` are in bytes."""

    key: str
    offset: int
    size: int


class CudaRegionParameters(NamedTuple):
    """GPU memory to register; ``size`` is in bytes."""

    handle: bytes
    device: int
    size: int


def read_system_region(body: Buffer) -> SystemRegionParameters:
    """Return the parameters of a request to register shared memory."""
    document = _region(body, "key")
    key = text.as_string(document["key"])
    offset = text.as_unsigned(document["offset"]) if "offset" in document else 0
    if "byte_size" not in document:
        raise invalid("Shared memory register request has no 'byte_size' field")
    return SystemRegionParameters(key, offset, text.as_unsigned(document["byte_size"]))


def read_cuda_region(body: Buffer) -> CudaRegionParameters:
    """Return the parameters of a request to register GPU memory."""
    document = _region(body, "raw_handle")
    encoded = text.as_string(text.member(document["raw_handle"], "b64"))
    size = text.as_unsigned(text.member(document, "byte_size"))
    device = text.as_unsigned(text.member(document, "device_id"))
    try:
        handle = base64.b64decode(encoded, validate=True)
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_SIZE:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return CudaRegionParameters(handle, device, size)


def read_sagemaker_model(body: Buffer) -> tuple[str, str]:
    """Return the name and path of a model that SageMaker has downloaded."""
    document = text.loads(body)
    name, url = (text.as_string(text.member(document, key)) for key in ("model_name", "url"))
    return name, url


def _region(body: Buffer, required: str) -> dict[str, Any]:
    document = text.loads(body)
    if type(document) is not dict or required not in document:
        raise invalid(f"Shared memory register request has no '{required}' field")
    return document


def read_log_settings(body: Buffer) -> dict[str, bool | int | str]:
    """Return the settings to change by name (``log_info``, ``log_verbose_level`` …), without ``null`` and others."""
    document = text.loads(body)
    settings: dict[str, bool | int | str] = {}
    for key, value in document.items() if type(document) is dict else ():
        if value is None:
            continue
        if key == "log_file":
            raise unsupported("log file location can not be updated through network protocol")
        if key in ("log_info", "log_warning", "log_error"):
            settings[key] = text.as_bool(value)
        elif key == "log_verbose_level":
            # Triton converts the number to INT32, and takes a negative one as 0.
            settings[key] = max(0, (text.as_unsigned(value) + 2**31) % 2**32 - 2**31)
        elif key == "log_format":
            settings[key] = text.as_string(value)
            if value not in FORMATS:
                raise unavailable(f"invalid argument for --log_format, got: {value}")
    return settings


def read_trace_setting(body: Buffer) -> dict[str, Any]:
    """Return the fields to change, None for cleared ones; raises INTERNAL, INVALID_ARG or UNSUPPORTED."""
    document = text.loads(body)
    if type(document) is not dict:
        return {}
    changes: dict[str, Any] = {}
    if document.get("trace_file") is not None:
        control.refuse_file()
    if "trace_level" in document:
        levels = document["trace_level"]
        changes["level"] = None if levels is None else control.read_levels(map(text.as_string, text.as_array(levels)))
    for setting in control.NUMBERS:
        if setting in document:
            value = document[setting]
            changes[control.trace_field(setting)] = (
                None if value is None else control.read_number(setting, text.as_string(value))
            )
    return changes


def _object(body: Buffer) -> dict[str, Any]:
    """Return the object in a body that may be empty; other JSON counts as an empty object, as in Triton."""
    document = text.loads(body) if len(body) else {}
    return document if type(document) is dict else {}
