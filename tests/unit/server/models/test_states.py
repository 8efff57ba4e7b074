"""What the table of models says of versions in each of their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError
from conch.repository.names import Naming
from conch.server.models.states import MAX_UNLOADED, UNLOADED, ModelState, ModelTable, State, VersionState


class FakeModel:
    """A version; ``steps`` are the members of an ensemble."""

    unavailable_reason = ""

    def __init__(self, name: str = "m", ready: bool = True, *steps: str) -> None:
        text = ", ".join(f'{{model_name: "{step}" model_version: -1}}' for step in steps)
        self.name, self.ready = name, ready
        self.steps = dict(zip(steps, steps, strict=True))
        self.config = parse(f"ensemble_scheduling {{step [{text}]}}" if steps else "", "x")


def table(**models: dict[int, VersionState]) -> ModelTable:
    made = ModelTable()
    for name, versions in models.items():
        made.models[name] = ModelState(name, versions)
    return made


def serving(model: Any = None) -> VersionState:
    return VersionState(State.READY, "", model or FakeModel())


def test_latest_version_that_is_ready_is_found() -> None:
    old, new = FakeModel(), FakeModel()
    models = table(m={1: serving(old), 2: serving(new), 3: VersionState(State.LOADING)})
    assert models.find("m") is new
    assert models.find("m", 1) is old


@pytest.mark.parametrize(
    ("name", "version", "code", "message"),
    [
        ("n", -1, Code.NOT_FOUND, "Request for unknown model: 'n' is not found"),
        ("m", 7, Code.NOT_FOUND, "Request for unknown model: 'm' version 7 is not found"),
        ("m", 1, Code.UNAVAILABLE, "Request for unknown model: 'm' version 1 is not at ready state"),
        ("m", -1, Code.NOT_FOUND, "Request for unknown model: 'm' has no available versions"),
    ],
)
def test_version_that_does_not_serve_is_refused_in_tritons_words(
    name: str, version: int, code: Code, message: str
) -> None:
    with pytest.raises(ConchError) as refused:
        table(m={1: VersionState(State.UNLOADING, "", FakeModel())}).find(name, version)  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.message) == (code, message)


def code_of(models: ModelTable, name: str, version: int = -1) -> Code:
    with pytest.raises(ConchError) as refused:
        models.find(name, version)
    return refused.value.code


def test_model_that_is_being_loaded_for_the_first_time_is_unavailable() -> None:
    models = table(m={1: VersionState(State.UNAVAILABLE, "broken"), 2: VersionState(State.LOADING)})
    assert (code_of(models, "m"), code_of(models, "m", 2)) == (Code.UNAVAILABLE, Code.UNAVAILABLE)
    assert code_of(models, "m", 3) is Code.NOT_FOUND


def test_model_that_the_starting_server_has_not_come_to_is_unavailable() -> None:
    models = table()
    models.starting = None
    with pytest.raises(ConchError, match="'m' is not ready: the server has not read its model repo") as unread:
        models.find("m")
    assert unread.value.code is Code.UNAVAILABLE
    models.starting = frozenset({"m"})
    assert (code_of(models, "m", 1), code_of(models, "n")) == (Code.UNAVAILABLE, Code.NOT_FOUND)
    models.starting = frozenset()
    assert code_of(models, "m") is Code.NOT_FOUND


def test_model_of_two_repositories_is_ambiguous_by_its_name() -> None:
    models = ModelTable(Naming([Path("/a"), Path("/b")]))
    models.starting = frozenset({"/b::m"})
    assert code_of(models, "m") is Code.UNAVAILABLE
    models.models["/a::m"] = ModelState("/a::m", {1: serving()})
    assert models.named("m") is models.find("/a::m")
    assert models.serving_names() == {"m"}
    models.models["/b::m"] = ModelState("/b::m", {1: VersionState(State.UNAVAILABLE, UNLOADED)})
    assert models.named("m") is models.find("/a::m")
    models.models["/b::m"].versions[1] = serving()
    with pytest.raises(ConchError, match="There are 2 identifiers of model 'm' in global map") as refused:
        models.named("m")
    assert refused.value.code is Code.INVALID_ARG
    with pytest.raises(ConchError, match="Request for unknown model: 'm' version 2 is not found"):
        models.find("/b::m", 2)
    assert [models.naming.public(key) for key in ("/b::m", "/a::m", "uploaded")] == ["2::m", "1::m", "uploaded"]
    assert [entry["name"] for entry in models.index(["/b::m", "/b::n", "/a::m"], ready_only=False)] == ["m", "n", "m"]


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (serving(), True),
        (serving(FakeModel("m", False)), False),
        (VersionState(State.UNAVAILABLE, UNLOADED), True),
        (VersionState(State.UNAVAILABLE, "broken"), False),
        (VersionState(State.LOADING), False),
        (VersionState(State.UNLOADING), False),
    ],
)
def test_server_is_ready_when_every_version_serves_or_was_unloaded(state: VersionState, ready: bool) -> None:
    assert table(a={1: serving()}, m={1: state}).all_ready() is ready


def test_server_is_not_ready_with_a_model_that_has_no_version() -> None:
    assert table(m={}).all_ready() is False


def test_ensemble_is_as_ready_as_the_members_of_its_members() -> None:
    leaf = FakeModel("leaf")
    inner, outer = FakeModel("inner", True, "leaf"), FakeModel("outer", True, "inner")
    models = table(leaf={1: serving(leaf)}, inner={1: serving(inner)}, outer={1: serving(outer)})
    assert models.is_ready(outer)  # type: ignore[arg-type]
    leaf.ready = False
    assert not models.is_ready(outer)  # type: ignore[arg-type]
    del models.models["leaf"]
    assert not models.is_ready(outer)  # type: ignore[arg-type]


def test_index_has_directories_that_were_never_loaded_and_why_others_do_not_serve() -> None:
    models = table(m={2: serving(), 1: VersionState(State.UNAVAILABLE, UNLOADED)})
    models.models["twice"] = ModelState("twice", poll_reason="model appears in two or more repositories")
    assert models.index(["new", "m"], ready_only=False) == [
        {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "m", "version": "2", "state": "READY"},
        {"name": "new"},
        {"name": "twice", "reason": "model appears in two or more repositories"},
    ]
    assert models.index([], ready_only=True) == [{"name": "m", "version": "2", "state": "READY"}]


def test_unloaded_models_of_clients_do_not_pile_up() -> None:
    unloaded = {1: VersionState(State.UNAVAILABLE, UNLOADED)}
    models = table(own=dict(unloaded), serving={1: serving()}, **{f"m{n}": dict(unloaded) for n in range(3)})
    for name, model_state in models.models.items():
        model_state.overridden = name != "own"
    models.forget_unloaded(lambda name: False)
    assert len(models.models) == 5
    for number in range(MAX_UNLOADED):
        models.models[f"n{number}"] = ModelState(f"n{number}", dict(unloaded), overridden=True)
    models.forget_unloaded(lambda name: name == "m1")
    assert [name for name in models.models if not name.startswith("n")] == ["own", "serving", "m1"]
