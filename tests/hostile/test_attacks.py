"""Every attack leaves conch running and responsive for other clients, and its memory is released."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.hostile.attacks  # noqa: F401 (declares them)
from tests.conftest import Server
from tests.hostile.attack import ATTACKS, Attack, measure
from tests.hostile.servers import start

#: Maximum wait of a health request (s), without waiting for a core. The goal is 0.1 (``python -m tests.hostile``
#: measures it); this limit only detects a blocked server, on machines that do other work too.
STANDSTILL = 1.0
#: Maximum growth of the server's memory (MiB).
KEPT = 32.0


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    with start("conch", folder) as server:
        yield server


#: The server handles all of its 120,000 requests, one after the other.
LONG = {"unpaced_stream"}


def test_page_has_every_attack() -> None:
    page = Path("SECURITY.md").read_text("utf-8")
    _, section = page.split("## What one client does to the others")
    section, _ = section.split("\n## ", 1)
    lines = re.findall(r"^(?:\| (?!attack \|)(.+?) \|.*|- (.+))$", section, re.MULTILINE)
    assert sorted("".join(line) for line in lines) == sorted(attack.title for attack in ATTACKS.values())


@pytest.mark.parametrize(
    "attack",
    [pytest.param(attack, marks=pytest.mark.slow if name in LONG else ()) for name, attack in ATTACKS.items()],
    ids=ATTACKS,
)
def test_others_are_not_affected(attacked: Server, attack: Attack) -> None:
    outcome = measure(attack, attacked, enough=KEPT - 1)
    assert outcome.longest_wait < STANDSTILL, outcome
    assert outcome.kept < KEPT, outcome
    with urllib.request.urlopen(f"http://{attacked.http}/v2/models/add_sub", timeout=60) as reply:
        assert json.load(reply)["name"] == "add_sub"
