"""The error that clients in other processes receive for a model that cannot be loaded."""

from __future__ import annotations

import pytest

from conch.repository.errors import without_directories


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("checkpoint /srv/models/m/1 lacks config.json", "checkpoint m/1 lacks config.json"),
        ("'/srv/models/m/config.pbtxt', line 3: no", "'m/config.pbtxt', line 3: no"),
        ("[Errno 2] No such file: '/weights/model.gguf'.", "[Errno 2] No such file: 'model.gguf'."),
        ("x=/srv/a/b;/srv/c/d/", "x=a/b;c/d"),
        ("/srv/modèles/m/1: nothing there", "m/1: nothing there"),
        ("nothing at s3://bucket/models/m, http://host:8000/a/b", "nothing at s3://bucket/models/m, http://host:8000/a/b"),
        ("send it to /v1/chat/completions", "send it to /v1/chat/completions"),
        ("1/model.py and ../m/1/model.py, or read/write", "1/model.py and ../m/1/model.py, or read/write"),
        ("'/srv/a/b'\n\nAt:\n  /srv/m/1/model.py(3): f\n", "'a/b'\n\nAt:\n  /srv/m/1/model.py(3): f\n"),
        ("searched: '/srv/m/1' '/srv/m' ;", "searched: '/srv/m/1' '/srv/m' ;"),
        ("'../x.py' escapes backend directory '/srv/m/1'", "'../x.py' escapes backend directory '/srv/m/1'"),
    ],
)  # fmt: skip
def test_paths_keep_their_ends(text: str, shown: str) -> None:
    assert without_directories(text) == shown
