"""The options of servers in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import conch
from conch.core.errors import Code, ConchError
from conch.library.flags import plan
from conch.options.settings import OPTIONS, Settings
from conch.options.triton_values import Setting


def settings(*, ports: bool = False, **flags: Any) -> Settings:
    return plan(None, "/models", flags, ports=ports).settings


def test_no_port_is_opened_unless_it_is_asked_for() -> None:
    made = settings()
    assert (made.allow_http, made.allow_grpc, made.allow_metrics, made.openai_port) == (False, False, False, -1)
    made = settings(grpc_port=0)
    assert (made.allow_http, made.allow_grpc, made.grpc_port, made.allow_metrics) == (False, True, 0, False)
    made = settings(ports=True, allow_grpc=False)
    assert (made.allow_http, made.http_port, made.allow_grpc, made.allow_metrics) == (True, 8000, False, True)
    assert settings(http_port=8001).http_port == 8001  # which is not gRPC's, as that has no port


def test_options_are_those_of_the_command_with_values_of_python() -> None:
    made = settings(
        model_control_mode="explicit", load_model=["a", "b"], exit_on_error=False, backend_config="python,x=1",
        metrics_interval_ms=10.5, max_pending_requests=7, default_temperature=0.7,
    )  # fmt: skip
    assert made.load_model == ("a", "b")
    assert made.exit_on_error is False
    assert made.backend_config == (Setting("python", "x", "1"),)
    assert (made.metrics_interval_ms, made.max_pending_requests, made.default_temperature) == (10.5, 7, 0.7)


def test_repositories_are_paths_or_texts() -> None:
    assert plan(None, Path("/a"), {}, ports=False).settings.model_repository == ("/a",)
    assert plan(None, [Path("/a"), "/b"], {}, ports=False).settings.model_repository == ("/a", "/b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"htp_port": 1}, "a server has no option 'htp_port': did you mean 'http_port'?"),
        ({"colour": 1}, "a server has no option 'colour': conch serve --help-all lists them"),
        ({"http_port": "x"}, 'Bad option: "--http-port". Invalid option value. Got x'),
        ({"http_port": 70000}, "out of bound"),
        ({"default_temperature": 2.5}, "out of bound. Got 2.5"),
        ({"default_temperature": "nan"}, "out of bound. Got nan"),
        ({"exit_on_error": "perhaps"}, "invalid value for bool option: perhaps"),
        ({"load_model": 3.5j}, "load_model takes a text or a list of texts, as --load-model does; got 3.5j"),
        ({"http_port": [1, 2]}, "http_port takes an integer, as --http-port does"),
        ({"load_model": "a"}, "requires setting '--model-control-mode=explicit'"),
        ({"task": "embedding"}, "task= is for a single model"),
    ],
)
def test_wrong_option_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as raised:
        settings(**flags)
    assert raised.value.code is Code.INVALID_ARG
    assert message in raised.value.message


def test_a_model_or_a_repository_is_given() -> None:
    with pytest.raises(ConchError, match="pass either the model 'a' or model_repository"):
        plan("a", "/b", {}, ports=False)
    with pytest.raises(ConchError, match="pass a model, or model_repository="):
        conch.Server()


def test_misspelt_repository_is_named_before_it_is_missed() -> None:
    with pytest.raises(ConchError, match="no option 'model_repositry': did you mean 'model_repository'"):
        conch.Server(model_repositry="models")


def test_one_model_is_served_under_its_name_from_a_repository_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    wanted = plan(tmp_path, None, {"name": "mine", "engine": "torch"}, ports=False)
    with wanted.open() as (made, name):
        (repository,) = map(Path, made.model_repository)
        assert name == "mine"
        assert '"engine": "torch"' in (repository / "mine" / "1" / "model.json").read_text()
    assert not repository.exists()


def test_only_options_of_logging_ask_for_log_lines() -> None:
    assert not plan(None, "/models", {"http_port": 0}, ports=False).logs
    assert plan(None, "/models", {"log_verbose": 1}, ports=False).logs


def test_every_option_of_the_command_is_an_option_of_the_library() -> None:
    for option in OPTIONS.values():
        if not option.repeatable and option.default != "":
            assert settings(ports=True, **{option.name: option.default}) == settings(ports=True), option.name
