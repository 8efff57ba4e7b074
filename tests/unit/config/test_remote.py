"""What the configuration of a remote model may say."""

from __future__ import annotations

import pytest

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.remote import ONLY_VERSION, RemoteSettings, RemoteUrl, is_remote, read_remote, read_url
from conch.core.errors import Code, ConchError
from conch.repository.override import Override, needs_no_directory

IO = 'input { name: "text_input" data_type: TYPE_STRING dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 } '


def settings(more: str = "", **given: object) -> RemoteSettings:
    """What is read from a configuration with these parameters, and ``more`` text."""
    given = {"url": "grpc://host:1", **given}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()]
    config = parse("\n".join(['backend: "remote"', *lines, more]), "config.pbtxt")
    return read_remote(complete(config, "m", ()))


def test_what_is_not_said_has_a_default() -> None:
    assert settings() == RemoteSettings(("grpc://host:1",), "m")


def test_everything_is_read() -> None:
    read = settings(
        IO,
        url=" http://a:8000/base , grpcs://b,http://a:8000/base",
        model="other",
        version=3,
        connect_timeout_secs=0.5,
        timeout_secs=20,
        health_interval_secs=1,
        affinity="text_input",
        affinity_bytes=64,
        sticky="true",
        repeat_lost="true",
        authorization_env="TOKEN",
        headers_env="HEADERS",
        ca_file="ca.pem",
        certificate_file="own.pem",
        key_file="own.key",
    )
    assert read == RemoteSettings(
        ("http://a:8000/base", "grpcs://b"), "other", 3, 0.5, 20.0, 1.0, "text_input", 64, True, True,
        "TOKEN", "HEADERS", "ca.pem", "own.pem", "own.key",
    )  # fmt: skip


def test_the_version_asked_for_may_be_that_of_the_request() -> None:
    read = settings(IO, url="http://a", version="same")
    assert [read.of_version(version).version for version in (3, 1, -1)] == [3, 1, -1]
    assert settings(IO, url="http://a", version="2").of_version(3).version == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"url": "host:1"},
            "url 'host:1' is not the address of a server; it must begin with http://, https://, grpc:// or grpcs://",
        ),
        ({"url": "http://"}, "url 'http://' has no host: write http://host:port"),
        ({"url": "http://a:port"}, "url 'http://a:port' cannot be read: "),
        (
            {"url": "grpc://a:1/base"},
            "url 'grpc://a:1/base' has a path, but gRPC addresses have none: write grpc://a:1",
        ),
        ({"url": "http://me:secret@a:1"}, "url contains a user name or a password: set 'authorization_env'"),
        ({"url": "http://a:1/?x=1"}, "url 'http://a:1/?x=1' must end after its path"),
        ({"version": "one"}, "parameter 'version' is 'one'; it must be a whole number, 0 or more"),
        (
            {"affinity_bytes": "9" * 400},
            f"parameter 'affinity_bytes' is '{'9' * 400}'; it must be a whole number, more",
        ),
        ({"timeout_secs": "-1"}, "parameter 'timeout_secs' is '-1'; it must be a number of seconds, 0 or more"),
        (
            {"connect_timeout_secs": "0"},
            "parameter 'connect_timeout_secs' is '0'; it must be a number of seconds, more",
        ),
        ({"health_interval_secs": "nan"}, "parameter 'health_interval_secs' is 'nan'; it must be a number"),
        ({"repeat_lost": "often"}, "parameter 'repeat_lost' is 'often'; it must be true or false"),
        ({"affinity": "y"}, "parameter 'affinity' is 'y'; it must be an input of type TYPE_STRING of model 'm'"),
        ({"key_file": "own.key"}, "parameter 'key_file' requires 'certificate_file'"),
        ({"timeout_sec": "1"}, "parameter 'timeout_sec' is not known; did you mean 'timeout_secs'?"),
        ({"token": "secret"}, "parameter 'token' is unknown to backend 'remote'; it has "),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConchError) as raised:
        settings(IO, **given)
    assert raised.value.code is Code.INVALID_ARG
    assert raised.value.message.startswith(message), raised.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_batching { }", "remote model 'm' may not have 'dynamic_batching': the remote server batches"),
        ("instance_group { count: 2 }", "remote model 'm' may not have 'instance_group'"),
        ('model_warmup { name: "w" }', "remote model 'm' may not have 'model_warmup'"),
        (IO + 'output { name: "z" data_type: TYPE_FP32 dims: 1 reshape { shape: [ ] } }', "output 'z' of remote model"),
        (IO + "model_transaction_policy { decoupled: true }", "model 'm' is decoupled, and its responses can be"),
    ],
)
def test_what_means_nothing_for_a_remote_model_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConchError) as raised:
        settings(text, url="http://host:1")
    assert raised.value.message.startswith(message), raised.value.message


def test_the_address_must_be_given_and_may_be_empty() -> None:
    assert settings(url="").urls == ()
    with pytest.raises(ConchError, match="remote model 'm' has no parameter 'url'"):
        read_remote(complete(parse('backend: "remote"', "x"), "m", ()))


@pytest.mark.parametrize(
    ("text", "url", "address"),
    [
        ("http://a", RemoteUrl("http://a", "http", "a", 8000), "a:8000"),
        ("https://a/x/", RemoteUrl("https://a/x/", "https", "a", 443, "/x"), "a:443"),
        ("grpc://[::1]", RemoteUrl("grpc://[::1]", "grpc", "::1", 8001), "[::1]:8001"),
    ],
)
def test_addresses_have_their_usual_ports(text: str, url: RemoteUrl, address: str) -> None:
    assert (read_url(text), read_url(text).address) == (url, address)


def test_a_remote_model_gets_no_instances() -> None:
    config = complete(parse('backend: "remote"', "x"), "m", ())
    assert is_remote(config)
    assert not config.instance_group
    assert ONLY_VERSION == 1


@pytest.mark.parametrize(
    ("config", "alone"),
    [('{"backend": "remote"}', True), ('{"backend": "python"}', False), ("{", False), (None, False)],
)
def test_only_a_remote_model_needs_no_directory(config: str | None, alone: bool) -> None:
    assert needs_no_directory(Override(config)) is alone
