"""Control messages in both protocols: the parameters of a load over the repository API, and trace settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from conch.core.errors import invalid, unsupported


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """The parameters of a load: a configuration (JSON) and files by relative path, in place of the repository's.

    With ``lora_name``, the load is that of a LoRA adapter of the model, at ``lora_path``.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    lora_name: str = ""
    lora_path: str = ""


#: The parameters of a load of a LoRA adapter.
ADAPTER_PARAMETERS: Final = ("lora_name", "lora_path")


def check_adapter(parameters: Mapping[str, str], *, alone: bool) -> None:
    """Raise INVALID_ARG for parameters of a load that has only some of an adapter, or is not ``alone`` its own."""
    if parameters and not (alone and all(parameters.get(name) for name in ADAPTER_PARAMETERS)):
        raise invalid("the load of a LoRA adapter has the parameters 'lora_name' and 'lora_path', and no others")


# Trace settings; the functions raise INVALID_ARG with Triton's messages.


LEVELS: Final = ("TIMESTAMPS", "TENSORS")
#: The numeric settings in the order in which they are read, and the maximum of each.
NUMBERS: Final = {"trace_rate": 2**32 - 1, "trace_count": 2**31 - 1, "log_frequency": 2**32 - 1}

#: The beginning of a text that C's ``strtol`` reads; a longer number is out of every range, too.
C_NUMBER: Final = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]{1,100}")


def read_levels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the levels of a setting, none for OFF; unknown names are ignored, as in Triton."""
    names = list(names)
    if "OFF" in names:
        if len(names) > 1:
            raise invalid("Expect only one trace level 'OFF' is specified")
        return ()
    return tuple(level for level in LEVELS if level in names)


def read_number(setting: str, text: str) -> int:
    """Return the number of ``trace_rate``, ``trace_count`` or ``log_frequency``, parsed as in C."""
    match = C_NUMBER.match(text)
    if match is None:
        raise invalid(f"Unable to parse '{setting}', got: {text}")
    number, low, high = int(match.group()), -1 if setting == "trace_count" else 0, NUMBERS[setting]
    if setting == "trace_count" and -(2**31) <= number < low:
        raise invalid(f"Unable to parse '{setting}'. Expecting value >= {low}, got:{number}")
    if not low <= number <= high:
        raise invalid(f"Unable to parse '{setting}', value is out of range [ {low}, {high} ], got: {text}")
    return number


def refuse_file() -> Any:
    """Raise UNSUPPORTED: clients may not choose the file to which the server writes."""
    raise unsupported("trace file location can not be updated through network protocol")


def trace_field(setting: str) -> str:
    """Return the setting's field name in :class:`conch.telemetry.tracing.values.OwnValues`."""
    return setting.removeprefix("trace_")
