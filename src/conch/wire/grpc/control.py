"""gRPC messages other than inference: metadata, repository, statistics, log and trace settings.

Called by the gRPC front end on the event loop. ``read_…`` functions read requests; the others create responses from the
server's documents, which have the form of HTTP responses. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format

from conch.core.errors import invalid, unsupported
from conch.core.protocol import grpc_service
from conch.machine.logs import FORMATS, LogSettings
from conch.wire.control import (
    ADAPTER_PARAMETERS,
    C_NUMBER,
    NUMBERS,
    LoadParameters,
    check_adapter,
    read_levels,
    read_number,
    refuse_file,
    trace_field,
)


def read_trace_setting(request: grpc_service.TraceSettingRequest) -> dict[str, Any]:
    """Return the fields to change, None for cleared ones; raises INVALID_ARG or UNSUPPORTED."""
    settings = {name: list(setting.value) for name, setting in request.settings.items()}
    changes: dict[str, Any] = {}
    if settings.get("trace_file"):
        refuse_file()
    if "trace_level" in settings:
        changes["level"] = read_levels(settings["trace_level"]) if settings["trace_level"] else None
    for setting in NUMBERS:
        if setting in settings:
            values = settings[setting]
            if len(values) > 1:
                raise invalid(f"expect only 1 value for '{setting}'")
            changes[trace_field(setting)] = read_number(setting, values[0]) if values else None
    return changes


def trace_setting(shown: Mapping[str, Any]) -> grpc_service.TraceSettingResponse:
    response = grpc_service.TraceSettingResponse()
    for name, value in shown.items():
        response.settings[name].value.extend(value if isinstance(value, list) else [value])
    return response


_FILE: Final = "file:"


def read_version(text: str) -> int:
    """Return a model version: -1 for an empty text (any), otherwise a number in the format of C's ``strtol``.

    Raises INVALID_ARG for an invalid or negative number.
    """
    if not text:
        return -1
    match = C_NUMBER.match(text)
    version = int(match.group()) if match else 2**63
    if not -(2**63) <= version < 2**63:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol),"
            " version should be an integral value > 0"
        )
    if version < 0:
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return version


#: The fields of the gRPC message; the server's entries also have generation fields, which only JSON shows.
_STATISTICS: Final = frozenset(grpc_service.ModelStatistics.DESCRIPTOR.fields_by_name)


def model_statistics(entry: Mapping[str, Any]) -> grpc_service.ModelStatistics:
    shared = {name: value for name, value in entry.items() if name in _STATISTICS}
    # Constructors of protobuf 5 do not accept mappings as the values of a map.
    return json_format.ParseDict(shared, grpc_service.ModelStatistics())


def read_load(request: grpc_service.RepositoryModelLoadRequest) -> LoadParameters:
    """Return the parameters of a load. Raises INVALID_ARG or UNSUPPORTED."""
    check_repository_name(request.repository_name)
    config: str | None = None
    files: dict[str, bytes] = {}
    adapter: dict[str, str] = {}
    for key, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key == "config" or key in ADAPTER_PARAMETERS:
            if kind != "string_param":
                raise invalid(f"invalid value type for load parameter '{key}', expected string_param.")
            if key == "config":
                config = parameter.string_param
            else:
                adapter[key] = parameter.string_param
        elif key.startswith(_FILE):
            if kind != "bytes_param":
                raise invalid(f"invalid value type for load parameter '{key}', expected bytes_param.")
            files[key.removeprefix(_FILE)] = parameter.bytes_param
        else:
            raise invalid(f"unrecognized load parameter '{key}'.")
    check_adapter(adapter, alone=config is None and not files)
    return LoadParameters(config, files, **adapter)


def read_unload(request: grpc_service.RepositoryModelUnloadRequest) -> tuple[bool, str]:
    """Return whether to unload the steps of an ensemble too, and the LoRA adapter to unload instead of the model."""
    check_repository_name(request.repository_name)
    dependents, adapter = request.parameters.get("unload_dependents"), request.parameters.get("lora_name")
    if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
        raise invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    if adapter is not None and adapter.WhichOneof("parameter_choice") != "string_param":
        raise invalid("invalid value type for 'lora_name' parameter, expected string_param.")
    return dependents is not None and dependents.bool_param, "" if adapter is None else adapter.string_param


def check_repository_name(name: str) -> None:
    if name:
        raise unsupported("'repository_name' specification is not supported")


def read_log_settings(request: grpc_service.LogSettingsRequest) -> dict[str, bool | int | str]:
    """Return the settings to change by name (``log_info``, ``log_verbose_level`` …)."""
    changes: dict[str, bool | int | str] = {}
    for key, setting in request.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        if key == "log_file":
            raise unsupported("log file location can not be updated through network protocol")
        if key in ("log_info", "log_warning", "log_error"):
            if kind != "bool_param":
                raise invalid(f"expect boolean for '{key}'")
            changes[key] = setting.bool_param
        elif key == "log_verbose_level":
            if kind != "uint32_param":
                raise invalid(f"expect int32 for '{key}'")
            changes[key] = setting.uint32_param
        elif key == "log_format":
            if kind != "string_param":
                raise invalid(f"expect string for '{key}'")
            if setting.string_param not in FORMATS:
                raise invalid(f"invalid argument for log_format, got: {setting.string_param}")
            changes[key] = setting.string_param
    return changes


def log_settings(settings: LogSettings) -> grpc_service.LogSettingsResponse:
    response = grpc_service.LogSettingsResponse()
    for name, value in settings.extension.items():
        if isinstance(value, bool):
            response.settings[name].bool_param = value
        elif isinstance(value, int):
            response.settings[name].uint32_param = value
        else:
            response.settings[name].string_param = value
    return response
