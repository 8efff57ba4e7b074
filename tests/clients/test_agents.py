"""Coding agents for the terminal: each gets an answer that makes it write a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.record import HERE, OWN_ENVIRONMENTS

NODE = HERE / "node/node_modules/.bin"
CALL = '!say <tool_call>{"name": "%s", "arguments": %s}</tool_call>'
FILE = """As you like:

hello.txt
```
written by aider
```
"""


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Run an agent in ``folder``, a new git repository, which is also its home."""
    subprocess.run(["git", "init", "-q", folder], check=True)
    environment = {**os.environ, "HOME": str(folder), "OPENAI_API_KEY": "any", **environment}
    ended = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.client("aider", "chat", "streaming")
def test_aider(url: str, tmp_path: Path) -> None:
    aider = OWN_ENVIRONMENTS / "aider/bin/aider"
    options = ["--openai-api-base", f"{url}/v1", "--model", "openai/talker", "--edit-format", "whole", "--map-tokens=0"]
    options += ["--yes-always", "--no-pretty", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    output = run([aider, *options, "--message", FILE], tmp_path)
    assert "Applied edit to hello.txt" in output
    assert (tmp_path / "hello.txt").read_text("utf-8") == "written by aider\n"


@pytest.mark.client("Qwen Code", "chat", "streaming", "tools")
def test_qwen_code(url: str, tmp_path: Path) -> None:
    call = CALL % ("run_shell_command", '{"command": "echo qwen > hello.txt", "is_background": false}')
    options = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "talker"}
    output = run([NODE / "qwen", "--auth-type", "openai", "--yolo", "-p", call], tmp_path, **options)
    assert "echo qwen > hello.txt" in output  # the model says the result of the tool
    assert (tmp_path / "hello.txt").read_text("utf-8") == "qwen\n"


@pytest.mark.client("Codex", "responses", "streaming", "tools")
def test_codex(url: str, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(f"""
model = "talker"
model_provider = "conch"
web_search = "disabled"
[model_providers.conch]
name = "conch"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
""")
    call = CALL % ("exec_command", '{"cmd": "echo codex > hello.txt; echo done"}')
    options: list[str | Path] = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    output = run([NODE / "codex", "exec", *options, call], tmp_path)
    assert "done" in output  # the model says the result of the tool
    assert (tmp_path / "hello.txt").read_text("utf-8") == "codex\n"
