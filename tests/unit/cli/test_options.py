"""The command line as tritonserver understands it; the refusals were seen on Triton 2.51."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import click
import pytest

from conch.cli import conch, main
from conch.core.errors import ConchError
from conch.options.settings import OPTIONS, Settings, parse
from conch.options.triton_values import Resource, Restriction, Setting


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What a fake server was started with."""
    settings: list[Settings] = []

    def run(given: Settings, explain: object) -> int:
        settings.append(given)
        return 0

    app = ModuleType("conch.library.app")
    app.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "conch.library.app", app)
    return settings


def serve(started: list[Settings], *arguments: str) -> Settings:
    assert main(["serve", "--model-repository=/r", *arguments]) == 0
    return started[-1]


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_value_may_follow_or_be_joined(started: list[Settings]) -> None:
    settings = serve(started, "--http-port", "9000", "--grpc-port=9001", "--id=a=b")
    assert (settings.http_port, settings.grpc_port, settings.id) == (9000, 9001, "a=b")


def test_last_of_an_option_given_twice_counts(started: list[Settings]) -> None:
    assert serve(started, "--http-port=1", "--http-port=2").http_port == 2


def test_repeatable_options_accumulate(started: list[Settings]) -> None:
    settings = serve(
        started, "--model-store", "/s", "--model-control-mode=explicit", "--load-model=a", "--load-model=b"
    )
    assert sorted(settings.model_repository) == ["/r", "/s"]
    assert settings.load_model == ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("ON", True), ("1", True), ("False", False), ("off", False), ("0", False)]
)
def test_booleans_in_any_case(started: list[Settings], text: str, value: bool) -> None:
    assert serve(started, f"--exit-on-error={text}").exit_on_error is value


def test_auto_complete_is_disabled_by_a_bare_flag(started: list[Settings]) -> None:
    assert not serve(started).disable_auto_complete_config
    assert serve(started, "--disable-auto-complete-config").disable_auto_complete_config
    assert serve(started, "--strict-model-config=true").disable_auto_complete_config


def test_switch_without_a_default_may_be_turned_on_and_off(started: list[Settings]) -> None:
    assert [serve(started, *words).console for words in ([], ["--console"], ["--no-console"])] == [None, True, False]


def test_modes_in_any_case(started: list[Settings]) -> None:
    settings = serve(started, "--model-control-mode=EXPLICIT", "--rate-limit=Execution_Count", "--log-format=ISO8601")
    assert (settings.model_control_mode, settings.rate_limit, settings.log_format) == (
        "explicit",
        "execution_count",
        "ISO8601",
    )


def test_settings_with_and_without_a_scope(started: list[Settings]) -> None:
    settings = serve(
        started,
        "--backend-config=default-max-batch-size=8",
        "--backend-config=python,shm-region-prefix-name=a,b=c",
        "--cache-config=local,size=1048576",
        "--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=opentelemetry,resource=service.name=x",
    )
    assert settings.backend_config == (
        Setting("", "default-max-batch-size", "8"),
        Setting("python", "shm-region-prefix-name", "a,b=c"),
    )
    assert settings.cache_config == (Setting("local", "size", "1048576"),)
    assert settings.metrics_config == (Setting("", "summary_quantiles", "0.5:0.05,0.9:0.01"),)
    assert settings.trace_config == (
        Setting("", "level", "TIMESTAMPS"),
        Setting("opentelemetry", "resource", "service.name=x"),
    )


def test_deprecated_options_become_today_s(started: list[Settings]) -> None:
    settings = serve(started, "--trace-rate=5", "--trace-file=/t", "--response-cache-byte-size=64")
    assert set(settings.trace_config) == {Setting("", "rate", "5"), Setting("triton", "file", "/t")}
    assert settings.cache_config == (Setting("local", "size", "64"),)


def test_today_s_option_overrides_a_deprecated_one(started: list[Settings]) -> None:
    settings = serve(started, "--trace-config=rate=7", "--trace-rate=5")
    assert settings.trace_config[-1] == Setting("", "rate", "7")


def test_restrictions_and_resources(started: list[Settings]) -> None:
    settings = serve(
        started,
        "--http-restricted-api=health,model-config:key=va=lue",
        "--grpc-restricted-protocol=inference:k=v",
        "--rate-limit-resource=R1:10:1",
        "--rate-limit-resource=R2:5",
    )
    assert settings.http_restricted_api == (Restriction(("health", "model-config"), "key", "va=lue"),)
    assert settings.grpc_restricted_protocol == (Restriction(("inference",), "k", "v"),)
    assert settings.rate_limit_resource == (Resource("R1", 10, 1), Resource("R2", 5, -1))


def test_ignored_options_are_accepted(started: list[Settings]) -> None:
    assert serve(
        started,
        "--host-policy=gpu_0,numa-node=0",
        "--cuda-memory-pool-byte-size=0:67108864",
        "--model-load-gpu-limit=0:0.8",
        "--min-supported-compute-capability=6.0",
        "--sagemaker-safe-port-range=8000-9000",
        "--allow-vertex-ai=false",
    )


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--exit-on-error=maybe", 'Bad option: "--exit-on-error". invalid value for bool option: maybe'),
        ("--model-control-mode=x", 'Bad option: "--model-control-mode". invalid argument for --model-control-mode'),
        ("--log-format=iso8601", 'Bad option: "--log-format". invalid argument for --log-format'),
        ("--rate-limit=x", 'Bad option: "--rate-limit". invalid argument for --rate-limit'),
        ("--http-port=abc", 'Bad option: "--http-port". Invalid option value. Got abc'),
        ("--http-port=65536", 'Bad option: "--http-port". Provided option value is out of bound. Got 65536'),
        ("--grpc-infer-thread-count=1", "Provided option value is out of bound. Got 1"),
        ("--metrics-interval-ms=x", 'Bad option: "--metrics-interval-ms". Invalid option value. Got x'),
        ("--memory-budget=8GX", "The value must be bytes, a size such as 8GiB, or a share of the memory such as 80%"),
        ("--memory-budget=0", 'Bad option: "--memory-budget". The value must be above 0. Got 0'),
        ("--model-config-name=", "Error: empty argument for --model-config-name"),
        ("--http-header-forward-pattern=(", 'Bad option: "--http-header-forward-pattern". Not a regular expression'),
        (
            "--backend-config=abc",
            "--backend-config option format is '<backend name>,<setting>=<value>'. Got abc",
        ),
        ("--backend-config=,a=b", "No backend specified. --backend-config option format is"),
        ("--cache-config=abc", "No cache specified. --cache-config option format is"),
        (
            "--cache-config=local,size",
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size",
        ),
        ("--metrics-config=a,b=c", "--metrics-config option format is <setting>=<value>. Got a,b=c"),
        ("--trace-config=abc", "--trace-config option format is '<trace mode>,<setting>=<value>'. Got abc"),
        (
            "--trace-config=foo,level=OFF",
            'invalid value for trace mode option: foo. Available options are "triton" and "opentelemetry"',
        ),
        ("--trace-config=mode=foo", "invalid value for trace mode option: foo"),
        ("--trace-config=level=BAD", 'Bad option: "--trace-config level". invalid value for trace level option: bad'),
        ("--trace-config=count=x", 'Bad option: "--trace-config count". Invalid option value. Got x'),
        ("--trace-rate=-1", "Provided option value is out of bound. Got -1"),
        ("--http-restricted-api=foo:k=v", "unknown restricted api 'foo'"),
        ("--grpc-restricted-protocol=foo:k=v", "unknown restricted protocol 'foo'"),
        (
            "--http-restricted-api=health",
            "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health",
        ),
        (
            "--rate-limit-resource=a",
            "option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got a",
        ),
        ("--model-load-gpu-limit=a", "--<pair option> argument requires format <first>:<second>. Found: a"),
        ("--bogus=1", "unrecognized option '--bogus'"),
        ("--http-port", "Option '--http-port' requires an argument."),
        ("--disable-auto-complete-config=false", "Option '--disable-auto-complete-config' does not take a value."),
        (
            "--load-model=a",
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
    ],
)
def test_wrong_argument_is_refused_in_one_line(argument: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(argument, capsys=capsys)
    assert text in error
    assert error.count("\n") == 1


def test_cache_configured_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal("--response-cache-byte-size=1", "--cache-config=local,size=1", capsys=capsys)
    assert error.startswith("Error: Incompatible flags --response-cache-byte-size and --cache-config both provided.")


def test_every_option_has_a_parser() -> None:
    assert all(callable(option.read) for option in OPTIONS.values())


def test_default_of_every_scalar_option_is_a_value_that_it_takes() -> None:
    for flag, option in OPTIONS.items():
        if not option.repeatable and option.default not in ("", None):
            assert parse({flag: [str(option.default)]}) == Settings(), flag


def test_refused_value_leaves_no_settings() -> None:
    with pytest.raises(ConchError, match="Bad option"):
        parse({"id": ["a"], "http-port": ["x"]})


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["serve", "--help-all"]) == 0
    full = capsys.readouterr().out
    assert [flag for flag in OPTIONS if flag not in short] == []
    assert [flag for flag in OPTIONS if f"--{flag}" not in full] == []


def test_common_options_head_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    common = capsys.readouterr().out.partition("\nModels: ")[0]
    assert "--model-repository" in common
    assert "--http-port N" in common
    assert "--host-policy" not in common


def test_a_number_without_a_range_has_none_in_its_description() -> None:
    context = click.Context(conch)
    command = conch.get_command(context, "convert")
    assert command is not None
    records = [parameter.get_help_record(context) for parameter in command.params]
    assert not [text for _, text in filter(None, records) if "None" in text]


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bogus"]) == 1
    assert capsys.readouterr().err.startswith("unrecognized command 'bogus'; ")


def test_status_of_the_server_is_the_status_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    app = ModuleType("conch.library.app")
    app.run = lambda settings, explain: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "conch.library.app", app)
    assert main(["serve", "--model-repository=/r"]) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_imports_no_engine_and_no_numpy(arguments: list[str]) -> None:
    heavy = {
        "numpy",
        "grpc",
        "google.protobuf",
        "uvicorn",
        "torch",
        "transformers",
        "onnxruntime",
        "openvino",
        "psutil",
    }
    code = f"import sys, conch.cli; status = conch.cli.main({arguments!r}); print(status, *sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *modules = result.stdout.splitlines()[-1].split()
    assert status == "0"
    assert heavy & set(modules) == set()


def test_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "conch", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("conch ")


def test_older_names_of_the_limits_of_offloading_work(
    started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = serve(started, "--codec-memory=1000000", "--codec-timeout-secs=7")
    assert (settings.offload_memory, settings.offload_timeout_secs) == (1_000_000, 7)
    assert capsys.readouterr().err.splitlines() == [
        "Warning: '--codec-memory' is deprecated: use '--offload-memory'.",
        "Warning: '--codec-timeout-secs' is deprecated: use '--offload-timeout-secs'.",
    ]


def test_deprecated_flags_work_and_are_reported(started: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    settings = serve(started, "--strict-model-config=true", "--trace-rate=7", "--trace-level=TIMESTAMPS")
    assert settings.disable_auto_complete_config
    assert settings.trace_config == (Setting("", "rate", "7"), Setting("", "level", "TIMESTAMPS"))
    assert capsys.readouterr().err.splitlines() == [
        "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",
        "Warning: '--trace-level' has been deprecated and will be removed in future releases. Please use "
        "'--trace-config level=<OFF|TIMESTAMPS|TENSORS> instead.",
        "Warning: '--trace-rate' has been deprecated and will be removed in future releases. Please use "
        "'--trace-config rate=<rate value> instead.",
    ]


def commands(context: click.Context, group: click.Group) -> Iterator[click.Context]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, context, name)
        yield from commands(inner, command) if isinstance(command, click.Group) else [inner]


def test_help_describes_every_option_and_names_no_types_of_click() -> None:
    seen = list(commands(click.Context(conch, info_name="conch"), conch))
    assert {context.command_path for context in seen} >= {"conch serve", "conch demo", "conch analyze profile"}
    for context in seen:
        text = context.command.get_help(context)
        assert not re.search(r"\b(INTEGER|FLOAT|RANGE)\b", text), context.command_path
        for option in context.command.params:
            if isinstance(option, click.Option) and option.name != "help_all":
                assert option.help or option.hidden, (context.command_path, option.opts)
