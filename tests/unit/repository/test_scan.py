"""What is found in repositories on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.config.pbtxt import parse
from conch.config.reading import ConfigError
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError
from conch.repository import fingerprint
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.model_files import read_labels
from conch.repository.names import check_model_name
from conch.repository.scan import ModelRepository


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_models_are_the_directories_that_are_not_hidden(tmp_path: Path) -> None:
    for name in ("b", "a", ".git"):
        put(tmp_path / name / "1" / "model.py")
    put(tmp_path / "README.md")

    assert ModelRepository([tmp_path]).names() == ["a", "b"]


def test_model_is_described_by_its_files(tmp_path: Path) -> None:
    put(tmp_path / "m" / "config.pbtxt", "max_batch_size: 3")
    put(tmp_path / "m" / "10" / "model.py")
    put(tmp_path / "m" / "9" / "model.onnx")
    put(tmp_path / "m" / "01" / "model.pt")
    (tmp_path / "m" / "warmup").mkdir()

    files = ModelRepository([tmp_path]).describe("m")

    assert (files.name, files.directory, files.config.max_batch_size) == ("m", tmp_path / "m", 3)
    assert files.config_path == tmp_path / "m" / "config.pbtxt"
    assert files.versions == (9, 10)
    assert files.artefacts == {"model.py"}
    assert files.version_directory(9) == tmp_path / "m" / "9"
    assert files.warnings == ("ignore version directory '01' which contains leading zeros in its directory name",)


def test_model_without_configuration_has_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()

    files = ModelRepository([tmp_path]).describe("m")

    assert (files.config_path, files.config.ByteSize(), files.versions, files.artefacts) == (None, 0, (), frozenset())


def test_named_configuration_is_taken_where_a_model_has_it(tmp_path: Path) -> None:
    for model in ("both", "plain"):
        put(tmp_path / model / "config.pbtxt", "max_batch_size: 1")
    put(tmp_path / "both" / "configs" / "big.pbtxt", "max_batch_size: 64")

    named, unnamed = ModelRepository([tmp_path], "big"), ModelRepository([tmp_path])

    assert [named.describe(model).config.max_batch_size for model in ("both", "plain")] == [64, 1]
    assert unnamed.describe("both").config.max_batch_size == 1


def test_unreadable_configuration_fails_the_poll_and_keeps_its_cause(tmp_path: Path) -> None:
    put(tmp_path / "m" / "config.pbtxt", "\nnam: 1")

    with pytest.raises(PollError) as caught:
        ModelRepository([tmp_path]).describe("m")

    assert caught.value.public == "failed to load 'm', failed to poll from model repository"
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith(
        f"Poll failed for model directory 'm': failed to read text proto from {tmp_path / 'm' / 'config.pbtxt'}: 2:1: "
    )
    assert isinstance(caught.value.__cause__, ConfigError)


def test_configuration_that_is_no_text_fails_the_poll(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_bytes(b'name: "\xff"')

    with pytest.raises(PollError) as caught:
        ModelRepository([tmp_path]).describe("m")
    assert "not UTF-8 at byte 7" in caught.value.message


def test_model_in_two_repositories_is_refused_and_still_listed(tmp_path: Path) -> None:
    for repository in ("one", "two"):
        (tmp_path / repository / "m").mkdir(parents=True)
    repository = ModelRepository([tmp_path / "one", tmp_path / "two"])

    assert repository.names() == ["m"]
    with pytest.raises(NotUniqueError) as caught:
        repository.describe("m")
    assert caught.value.index_reason == "model appears in two or more repositories"
    assert caught.value.message == "failed to poll model 'm': not unique across all model repositories"


def test_repository_given_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)

    assert ModelRepository([tmp_path, tmp_path / ".", tmp_path / "link"]).describe("m").name == "m"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../m", "/etc", "m/1", "a\\b", "m\0", ".hidden", "x" * 300, "nope", "file"]
)
def test_name_that_is_no_model_directory_is_not_found(tmp_path: Path, name: str) -> None:
    repository = tmp_path / "repository"
    put(repository / "m" / "1" / "model.py")
    put(repository / ".hidden" / "1" / "model.py")
    put(repository / "file")
    put(tmp_path / "m" / "1" / "model.py")

    with pytest.raises(NotFoundError) as caught:
        ModelRepository([repository]).describe(name)
    assert caught.value.message.endswith("model not found in any model repository.")


@pytest.mark.parametrize("name", ["x..y", "...", "....."])
def test_name_with_dots_is_a_directory_like_any_other(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    repository = ModelRepository([tmp_path])

    assert repository.describe(name).name == name
    assert repository.names() == [name]


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_blank_name_of_a_client_is_refused(name: str) -> None:
    with pytest.raises(
        ConchError, match=r"^Model name cannot be empty\. Please enter a valid name to deploy\.$"
    ) as caught:
        check_model_name(name)
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("name", ["..", ".", "../m", "a/b", "/", "a\\b", "a\0b"])
def test_name_of_a_client_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ConchError, match=r"model name must not contain path traversal characters$") as caught:
        check_model_name(name)
    assert caught.value.code is Code.INVALID_ARG
    assert "\0" not in caught.value.message


@pytest.mark.parametrize("name", ["m", "m.1", "ünïcode", "with space", "-", "x..y", "..."])
def test_other_names_are_accepted(name: str) -> None:
    check_model_name(name)


def test_repository_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"^repository path is not a valid directory"):
        ModelRepository([tmp_path / "nope"])


def test_labels_are_the_lines_of_the_file(tmp_path: Path) -> None:
    put(tmp_path / "m" / "labels.txt", "cat\ndog\n")
    put(tmp_path / "m" / "config.pbtxt", 'output { name: "O" label_filename: "labels.txt" } output { name: "P" }')

    assert ModelRepository([tmp_path]).describe("m").labels() == {"O": ["cat", "dog"]}


def test_label_file_that_is_missing_or_outside_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "secret.txt", "x")
    (tmp_path / "m").mkdir()

    with pytest.raises(ConchError) as caught:
        read_labels(tmp_path / "m", "nope.txt")
    assert caught.value.message == (
        f"failed to open text file for read {tmp_path / 'm' / 'nope.txt'}: No such file or directory"
    )
    for outside in ("../secret.txt", str(tmp_path / "secret.txt")):
        with pytest.raises(ConchError, match=r"must be inside the model directory"):
            read_labels(tmp_path / "m", outside)


def test_label_file_may_be_a_link_to_elsewhere_inside(tmp_path: Path) -> None:
    put(tmp_path / "m" / "real.txt", "a")
    (tmp_path / "m" / "labels.txt").symlink_to("real.txt")

    assert read_labels(tmp_path / "m", "labels.txt") == ["a"]


def test_what_is_no_readable_directory_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "m" / "2").symlink_to("2")
    os.mkfifo(tmp_path / "pipe")
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    repository = ModelRepository([tmp_path])
    assert repository.names() == ["m"]
    assert [path.name for path in repository.unnameable()] == ["bad\udcff"]
    assert repository.describe("m").versions == (1,)
    assert set(repository.fingerprint("m").versions) == {1}


def test_label_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "labels.txt")
    with pytest.raises(ConchError, match=r"labels\.txt: it is not a regular file$"):
        read_labels(tmp_path, "labels.txt")


def test_link_to_the_whole_machine_is_not_followed_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MOST_FILES", 50)
    put(tmp_path / "m" / "1" / "model.py")
    (tmp_path / "m" / "1" / "all").symlink_to("/usr")
    with pytest.raises(OSError, match="it has more than 50 files: does a link lead elsewhere"):
        ModelRepository([tmp_path]).fingerprint("m")


def test_with_namespacing_models_are_known_by_repository_and_name(tmp_path: Path) -> None:
    for place in ("two/m", "two/alone", "one/m"):
        put(tmp_path / place / "1" / "model.py")
    one, two = tmp_path / "one", tmp_path / "two"
    repository = ModelRepository([two, one], namespacing=True)
    assert repository.names() == [f"{two}::alone", f"{two}::m", f"{one}::m"]
    files = repository.describe(f"{one}::m")
    assert (files.name, files.namespace, files.key, files.directory) == ("m", str(one), f"{one}::m", one / "m")
    assert repository.keys("m") == [f"{two}::m", f"{one}::m"]
    assert repository.keys("alone") == [f"{two}::alone"]
    assert repository.keys_of(["alone", "nowhere"]) == [f"{two}::alone", "nowhere"]
    for name in ("m", f"{one}::alone", f"{one}::../two/m", f"{tmp_path}::one"):
        with pytest.raises(PollError):
            repository.describe(name)
    repository.registered["m"] = one / "m"
    assert repository.keys("m") == [f"{two}::m", f"{one}::m", "m"]


def test_models_of_an_ensembles_steps_come_from_its_own_repository_first(tmp_path: Path) -> None:
    for place in ("one/m", "two/m", "two/alone", "two/many", "three/many"):
        put(tmp_path / place / "1" / "model.py")
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    repository = ModelRepository([Path(one), Path(two), Path(three)], namespacing=True)

    def step_key(step: str, namespace: str = "") -> str:
        return repository.step_keys(ensemble(step, namespace), f"{one}::e")[step]

    assert step_key("m") == step_key("m", two) == f"{one}::m"
    assert step_key("alone") == f"{two}::alone"
    assert step_key("many", three) == f"{three}::many"
    assert step_key("many") == f"{one}::many"  # which does not exist
    assert ModelRepository([Path(one)]).step_keys(ensemble("m"), "e") == {"m": "m"}


def ensemble(step: str, namespace: str = "") -> ModelConfig:
    chosen = f'model_namespace: "{namespace}"' if namespace else ""
    return parse(f'ensemble_scheduling {{step [{{model_name: "{step}" {chosen}}}]}}', "config.pbtxt")
