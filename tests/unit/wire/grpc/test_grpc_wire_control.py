"""Messages of everything but inference."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.core.errors import Code, ConchError
from conch.machine.logs import LogSettings
from conch.wire.control import LoadParameters
from conch.wire.grpc import control


def refusal(function, *arguments) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        function(*arguments)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("text", "version"), [("", -1), ("1", 1), ("007", 7), (" 2", 2), ("+3", 3), ("4x", 4), ("0", 0), ("5.9", 5)]
)
def test_version_is_read_as_c_does(text, version):
    assert control.read_version(text) == version


@pytest.mark.parametrize("text", ["x", " ", "-", "99999999999999999999", "9" * 5000])
def test_version_that_is_no_number_is_refused(text):
    code, message = refusal(control.read_version, text)
    assert code is Code.INVALID_ARG
    assert message == (
        f"failed to get model version from specified version string '{text}' (details: stol),"
        " version should be an integral value > 0"
    )


def test_negative_version_is_refused():
    assert refusal(control.read_version, "-1") == (
        Code.INVALID_ARG, "invalid model version specified '-1' , version should be an integral value > 0",
    )  # fmt: skip


def test_load_parameters_are_taken_apart():
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.py"].bytes_param = b"\0"
    assert control.read_load(request) == LoadParameters("{}", {"1/model.py": b"\0"})


@pytest.mark.parametrize(
    ("key", "kind", "value", "text"),
    [
        ("config", "bool_param", True, "invalid value type for load parameter 'config', expected string_param."),
        ("file:a", "string_param", "x", "invalid value type for load parameter 'file:a', expected bytes_param."),
        ("other", "bool_param", True, "unrecognized load parameter 'other'."),
    ],
)
def test_wrong_load_parameters_are_refused(key, kind, value, text):
    request = pb.RepositoryModelLoadRequest(model_name="m")
    setattr(request.parameters[key], kind, value)
    assert refusal(control.read_load, request) == (Code.INVALID_ARG, text)


def test_unload_dependents_is_a_bool():
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    assert control.read_unload(request) == (False, "")
    request.parameters["unload_dependents"].bool_param = True
    request.parameters["lora_name"].string_param = "pirate"
    assert control.read_unload(request) == (True, "pirate")
    request.parameters["unload_dependents"].string_param = "true"
    assert refusal(control.read_unload, request) == (
        Code.INVALID_ARG, "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    )  # fmt: skip


def log_request(key: str, **value: object) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    request.settings[key].MergeFrom(pb.LogSettingsRequest.SettingValue(**value))
    return request


def test_log_settings_are_read():
    request = log_request("log_info", bool_param=False)
    request.settings["log_verbose_level"].uint32_param = 3
    request.settings["log_format"].string_param = "ISO8601"
    request.settings["unknown"].bool_param = True
    assert control.read_log_settings(request) == {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"}


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (log_request("log_info", string_param="x"), Code.INVALID_ARG, "expect boolean for 'log_info'"),
        (log_request("log_verbose_level", bool_param=True), Code.INVALID_ARG, "expect int32 for 'log_verbose_level'"),
        (log_request("log_format", bool_param=True), Code.INVALID_ARG, "expect string for 'log_format'"),
        (log_request("log_format", string_param="x"), Code.INVALID_ARG, "invalid argument for log_format, got: x"),
        (
            log_request("log_file", string_param="x"),
            Code.UNSUPPORTED,
            "log file location can not be updated through network protocol",
        ),
    ],
)
def test_wrong_log_settings_are_refused(request_, code, text):
    assert refusal(control.read_log_settings, request_) == (code, text)


def test_log_settings_are_shown_by_type():
    settings = control.log_settings(LogSettings(log_verbose_level=2)).settings
    assert settings["log_verbose_level"].uint32_param == 2
    assert settings["log_error"].WhichOneof("parameter_choice") == "bool_param"
    assert settings["log_file"].WhichOneof("parameter_choice") == "string_param"
    assert len(settings) == 6
