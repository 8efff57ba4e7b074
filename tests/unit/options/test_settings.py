"""Declarations of the options, and the combinations that are refused."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import conch
from conch.core.errors import Code, ConchError
from conch.options.settings import OPTIONS, RENAMED, Settings, by_scope, parse
from conch.options.triton_values import Restriction, Setting
from tests.refusals import refused

#: What `tritonserver --help` lists (2.51 and later).
TRITONSERVER = """
    id model-repository model-store exit-timeout-secs exit-on-error disable-auto-complete-config strict-model-config
    strict-readiness model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
    model-load-retry-count model-namespacing allow-http http-address http-port reuse-http-port http-thread-count
    http-header-forward-pattern http-restricted-api http-max-input-size allow-grpc grpc-address grpc-port
    reuse-grpc-port grpc-header-forward-pattern grpc-restricted-protocol grpc-use-ssl grpc-use-ssl-mutual
    grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
    grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
    grpc-max-connection-age-grace log-verbose log-info log-warning log-error log-format log-file allow-metrics
    allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config trace-config
    trace-file trace-level trace-rate trace-count trace-log-frequency cache-config response-cache-byte-size
    rate-limit rate-limit-resource backend-config backend-directory allow-client-shm grpc-infer-thread-count
    grpc-infer-allocation-pool-size grpc-max-response-pool-size pinned-memory-pool-byte-size
    cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability
    buffer-manager-thread-count host-policy model-load-gpu-limit enable-peer-access repoagent-directory
    cache-directory allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count allow-vertex-ai
    vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
"""


def refusal(**options: object) -> ConchError:
    return refused(Settings, **options)


def names_read() -> set[str]:
    """The attributes of anything called ``settings`` that some module reads."""
    return {
        node.attr
        for path in Path(conch.__file__).parent.rglob("*.py")
        if "settings." in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("settings")
    }


def test_option_has_an_effect_or_says_that_it_has_none() -> None:
    read = names_read()
    sources = (Settings.log_settings.fget, Settings.listeners.fget)  # type: ignore[attr-defined]
    settings = "".join(inspect.getsource(source) for source in sources)
    idle = [option.name for option in OPTIONS.values() if option.name not in read and option.name not in settings]
    assert idle == [option.name for option in OPTIONS.values() if option.no_effect and option.name in idle]
    assert [option.name for option in OPTIONS.values() if option.no_effect and option.name in read] == []


def test_option_without_effect_is_reported_where_it_is_given() -> None:
    settings = Settings(http_thread_count=3, http_port=8500)
    assert settings.without_effect == {"http-thread-count": "it applies only to tritonserver"}
    assert Settings(http_thread_count=8).without_effect == {}


def test_servers_listen_on_loopback_unless_told_otherwise() -> None:
    settings = Settings()
    assert (settings.http_address, settings.grpc_address, settings.metrics_address) == ("127.0.0.1",) * 3
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (8000, 8001, 8002)


def test_metrics_listen_where_http_does() -> None:
    assert Settings(http_address="0.0.0.0").metrics_address == "0.0.0.0"
    assert Settings(http_address="0.0.0.0", metrics_address="::1").metrics_address == "::1"


def test_repository_given_twice_counts_once() -> None:
    assert Settings(model_repository=("b", "a", "b")).model_repository == ("b", "a")


def test_load_model_without_explicit_mode_is_refused() -> None:
    error = refusal(load_model=("a",), model_control_mode="poll")
    assert str(error) == "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    assert error.code is Code.INVALID_ARG


def test_wildcard_beside_another_startup_model_is_refused() -> None:
    error = refusal(load_model=("*", "a"), model_control_mode="explicit")
    assert str(error) == "Wildcard model name '*' must be the ONLY startup model if specified at all."


def test_wildcard_alone_is_accepted() -> None:
    assert Settings(load_model=("*",), model_control_mode="explicit").load_model == ("*",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loaded_models": 2}, "--max-loaded-models requires --model-control-mode=on-demand"),
        ({"memory_budget": "50%"}, "--memory-budget requires --model-control-mode=on-demand"),
        (
            {"model_namespacing": True, "model_control_mode": "on-demand"},
            "--model-namespacing cannot be combined with --model-control-mode=on-demand",
        ),
        (
            {"load_model": ("*",), "model_control_mode": "on-demand"},
            "--load-model=* would keep all models loaded: with --model-control-mode=on-demand, name some",
        ),
        (
            {"load_model": ("a", "b"), "model_control_mode": "on-demand", "max_loaded_models": 1},
            "--load-model keeps 2 models loaded, more than --max-loaded-models=1",
        ),
    ],
)
def test_limits_that_cannot_hold_are_refused(options: dict[str, object], message: str) -> None:
    assert str(refusal(**options)) == message


@pytest.mark.parametrize(
    ("ports", "names"),
    [
        ({"http_port": 9, "grpc_port": 9}, ("HTTP", "GRPC")),
        ({"http_port": 9, "metrics_port": 9}, ("HTTP", "metrics")),
        ({"grpc_port": 9, "metrics_port": 9}, ("GRPC", "metrics")),
    ],
)
def test_two_services_at_one_port_are_refused(ports: dict[str, int], names: tuple[str, str]) -> None:
    text = "The server cannot listen to {} requests and {} requests at the same address and port 127.0.0.1:9"
    assert str(refusal(**ports)) == text.format(*names)


def test_every_port_belongs_to_a_listener() -> None:
    ports = {flag for flag in OPTIONS if flag.endswith("-port") and not flag.startswith("reuse-")}
    assert ports == {f"{name}-port" for name in Settings().listeners}


@pytest.mark.parametrize(
    "apart",
    [
        {"http_port": 9, "grpc_port": 9, "allow_grpc": False},
        {"http_port": 9, "grpc_port": 9, "grpc_address": "127.0.0.2"},
        {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    ],
    ids=["one is off", "two addresses", "free ports"],
)
def test_services_that_do_not_meet_are_accepted(apart: dict[str, object]) -> None:
    assert Settings(**apart)  # type: ignore[arg-type]


def test_api_in_two_restrictions_is_refused() -> None:
    twice = (Restriction(("health", "trace"), "k", "v"), Restriction(("trace",), "k", "w"))
    text = "restricted {} 'trace' can not be specified in multiple config groups"
    assert str(refusal(http_restricted_api=twice)) == text.format("api")
    assert str(refusal(grpc_restricted_protocol=twice)) == text.format("protocol")


def test_settings_are_grouped_by_scope_and_the_last_wins() -> None:
    given = [Setting("", "a", "1"), Setting("python", "a", "2"), Setting("", "a", "3"), Setting("", "b", "4")]
    assert by_scope(given) == {"": {"a": "3", "b": "4"}, "python": {"a": "2"}}


def test_log_settings_carry_the_options() -> None:
    log = Settings(log_verbose=2, log_info=False, log_format="ISO8601", log_file="x").log_settings
    assert (log.log_verbose_level, log.log_info, log.log_format, log.log_file) == (2, False, "ISO8601", "x")


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("OFF", "OFF"), ("false", "OFF"), ("true", "TIMESTAMPS"), ("on", "TIMESTAMPS"), ("MIN", "TIMESTAMPS"),
        ("max", "TIMESTAMPS"), ("timestamps", "TIMESTAMPS"), ("Tensors", "TENSORS"),
    ],
)  # fmt: skip
def test_trace_level_has_the_values_of_tritonserver(value: str, level: str) -> None:
    for texts in ({"trace-config": [f"level={value}"]}, {"trace-level": [value]}):
        assert parse(texts).trace_config == (Setting("", "level", level),)


def test_trace_level_that_tritonserver_has_not_is_refused() -> None:
    with pytest.raises(ConchError, match="invalid value for trace level option: yes"):
        parse({"trace-level": ["yes"]})


def test_interval_of_metrics_is_a_number_of_at_least_zero() -> None:
    for text in ("nan", "-1"):
        with pytest.raises(ConchError, match=f"out of bound. Got {text}"):
            parse({"metrics-interval-ms": [text]})
    assert parse({"metrics-interval-ms": ["0"]}).metrics_interval_ms == 0


def test_every_option_of_tritonserver_is_declared() -> None:
    assert set(TRITONSERVER.split()) <= {*OPTIONS, *RENAMED}


def test_every_renamed_option_becomes_a_declared_one() -> None:
    assert {older.option for older in RENAMED.values()} <= set(OPTIONS)


def test_every_option_has_help_without_a_line_break() -> None:
    assert [option.flag for option in OPTIONS.values() if not option.help or "\n" in option.help] == []
