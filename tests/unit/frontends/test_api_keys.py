"""API keys: what a file and the environment may have, and which requests have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.frontends import api_keys
from conch.frontends.api_keys import NO_KEYS, ApiKeys


def read(folder: Path, text: str, **environment: str) -> ApiKeys:
    (folder / "keys").write_text(text)
    return ApiKeys.read(str(folder / "keys"), environment)


def test_keys_have_the_names_of_the_file_and_the_environment(tmp_path: Path) -> None:
    keys = read(tmp_path, "# ours\n\n ada=k1 \nada=k2==\nbob=k3\n", CONCH_API_KEY="k4")
    names = [keys.name_of(f"Bearer {key}".encode()) for key in ("k1", "k2==", "k3", "k4", "k5", "", "ada")]
    assert names == ["ada", "ada", "bob", "default", "", "", ""]
    assert (keys.name_of(b"bearer  k1"), keys.name_of(b"", b"k3"), keys.name_of(b"Basic k1")) == ("ada", "bob", "")
    assert keys.name_of(b"Bearer wrong", b"k1") == ""


def test_no_key_is_required_without_any() -> None:
    assert not ApiKeys.read("", {})
    assert not NO_KEYS
    assert ApiKeys.read("", {"CONCH_API_KEY": "a"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# ada=secret", "has no keys"),
        ("ada=1\nsecret", "line 2 of .* is not '<name>=<key>'"),
        ("ada=", "line 1"),
        ("=secret", "line 1"),
        ("ada=my secret", "line 1"),
        ("a/b=secret", "line 1"),
        ("ada=secret\nbob=secret", "line 2 of .* has the key of another name"),
    ],
)
def test_file_that_would_admit_others_is_refused_without_its_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConchError, match=message) as caught:
        read(tmp_path, text)
    assert "secret" not in caught.value.message


def test_missing_file_and_empty_variable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="cannot be read"):
        ApiKeys.read(str(tmp_path / "none"), {})
    with pytest.raises(ConchError, match="CONCH_API_KEY must be a key"):
        ApiKeys.read("", {"CONCH_API_KEY": ""})


def test_changed_file_is_read_again_and_keys_stay_while_it_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_SECONDS", 0.0)
    keys = read(tmp_path, "ada=k1\n", CONCH_API_KEY="k4")

    def names() -> list[str]:
        return [keys.name_of(b"", key) for key in (b"k1", b"k2", b"k4")]

    assert names() == ["ada", "", "default"]
    (tmp_path / "keys").write_text("bob=k2 # rotated\n")
    assert names() == ["ada", "", "default"]
    assert "line 1 of" in caplog.text
    (tmp_path / "keys").write_text("bob=k2\n")
    assert names() == ["", "bob", "default"]
    (tmp_path / "keys").unlink()
    assert names() == ["", "bob", "default"]
    assert "k2" not in caplog.text


def test_file_is_not_looked_at_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "LOOK_SECONDS", 60.0)
    keys = read(tmp_path, "ada=k1\n")
    (tmp_path / "keys").write_text("bob=k1\n")
    assert keys.name_of(b"", b"k1") == "ada"
