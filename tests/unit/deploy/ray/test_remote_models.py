"""The remote models of an ingress, from what replicas say of theirs; and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from conch.config.remote import read_remote
from conch.config.schema import ModelConfig
from conch.deploy.ray import ingress as remote_models
from conch.deploy.ray.ingress import ClusterModel, IngressRepository, cluster_models, remote_config
from conch.deploy.ray.registry import ServedModel
from tests.unit.deploy.ray.records import replica, served

TEXT = {"data_type": "TYPE_STRING", "dims": [1]}
NUMBER = {"data_type": "TYPE_FP32", "dims": [4]}


def config(model: ServedModel, *urls: str) -> ModelConfig:
    """The configuration in an ingress, which conch would load."""
    found = text_format.Parse(remote_config(model, urls or ("grpc://a:1",)), ModelConfig())
    read_remote(found)
    return found


def parameters(model: ServedModel) -> dict[str, str]:
    return {key: value.string_value for key, value in config(model).parameters.items()}


def test_what_requests_look_like_is_taken_over_and_nothing_else() -> None:
    found = config(
        served(
            max_batch_size=8,
            instance_group=[{"count": 2, "kind": "KIND_GPU"}],
            dynamic_batching={"max_queue_delay_microseconds": 100},
            model_warmup=[{"name": "w", "batch_size": 1}],
            parameters={"secret": {"string_value": "x"}},
            output=[{"name": "OUT", **NUMBER, "label_filename": "labels.txt", "reshape": {"shape": [2, 2]}}],
        )
    )
    assert (found.name, found.backend, found.max_batch_size) == ("echo", "remote", 8)
    assert [(one.name, list(one.dims)) for one in (*found.input, *found.output)] == [("IN", [1]), ("OUT", [4])]
    assert not found.instance_group and not found.model_warmup and not found.HasField("dynamic_batching")
    assert not found.output[0].label_filename and not found.output[0].HasField("reshape")
    assert "secret" not in found.parameters


def test_fields_of_a_newer_version_of_conch_are_left_out() -> None:
    output = {"name": "OUT", **NUMBER, "invented_later": True}
    assert config(served(output=[output])).output[0].name == "OUT"


def test_the_ingress_has_the_versions_that_the_replicas_have() -> None:
    assert list(config(served(versions=(2, 5))).version_policy.specific.versions) == [2, 5]
    assert not config(ServedModel("echo")).HasField("version_policy")
    assert parameters(served())["version"] == "same"


def test_a_decoupled_model_stays_decoupled_and_is_never_repeated() -> None:
    model = served(model_transaction_policy={"decoupled": True})
    assert config(model).model_transaction_policy.decoupled
    assert "repeat_lost" not in parameters(model)
    assert parameters(served())["repeat_lost"] == "true"


@pytest.mark.parametrize("idle", [None, 5_000_000])
def test_of_sequences_the_ingress_knows_how_long_they_may_be_idle(idle: int | None) -> None:
    batching: dict[str, Any] = {"control_input": [{"name": "START"}], "oldest": {"max_candidate_sequences": 4}}
    if idle:
        batching["max_sequence_idle_microseconds"] = idle
    found = config(served(sequence_batching=batching))
    assert found.HasField("sequence_batching")
    assert not found.sequence_batching.control_input and not found.sequence_batching.HasField("oldest")
    assert found.sequence_batching.max_sequence_idle_microseconds == (idle or 0)
    assert "repeat_lost" not in parameters(served(sequence_batching=batching))


@pytest.mark.parametrize(
    ("inputs", "affinity"),
    [
        ({"text_input": TEXT, "prompt": TEXT}, "text_input"),
        ({"x": TEXT, "QUERY": TEXT}, "QUERY"),
        ({"prompt": NUMBER}, None),  # which would be refused
        ({"prompt": NUMBER, "QUERY": TEXT}, "QUERY"),
        ({"x": TEXT}, None),
    ],
)
def test_requests_go_where_their_prompts_went(inputs: dict[str, dict[str, Any]], affinity: str | None) -> None:
    model = served(input=[{"name": name, **tensor} for name, tensor in inputs.items()])
    assert parameters(model).get("affinity") == affinity


def test_a_model_that_is_not_loaded_yet_stays_where_it_is_loaded() -> None:
    found = parameters(ServedModel("echo"))
    assert found == {"url": "grpc://a:1", "model": "echo", "sticky": "true"}


@pytest.mark.parametrize("name", ["a.b", "a b", 'a"b', "a\\b", "ä", "a%2Fb", "a,b"])
def test_a_model_may_have_any_name(name: str) -> None:
    found = config(served(name))
    assert (found.name, read_remote(found).model) == (name, name)


def test_a_model_is_asked_of_all_replicas_that_have_it() -> None:
    found = cluster_models([replica("a", served("x"), served("y")), replica("b", served("y"))])
    assert found["x"].urls == ("http://a:1",)
    assert found["y"].urls == ("http://a:1", "http://b:1")
    assert read_remote(text_format.Parse(found["y"].config, ModelConfig())).urls == found["y"].urls
    assert cluster_models([]) == {}


def test_a_model_that_may_have_several_responses_is_asked_over_grpc() -> None:
    decoupled = served(model_transaction_policy={"decoupled": True})
    assert cluster_models([replica("a", decoupled)])["echo"].urls == ("grpc://a:1",)


def test_while_one_signature_replaces_another_the_newest_counts() -> None:
    old, new = served(), served(max_batch_size=4)
    before = replica("a", old, started=1)
    found = cluster_models([before, replica("b", new, started=3), replica("c", new, started=2)])["echo"]
    assert found.urls == ("http://b:1", "http://c:1")
    assert "max_batch_size: 4" in found.config
    rolled_back = cluster_models([replica("b", new, started=3), replica("d", old, started=4)])["echo"]
    assert rolled_back.urls == ("http://d:1",)


def test_while_one_set_of_versions_replaces_another_the_newest_counts() -> None:
    found = cluster_models(
        [replica("a", served(versions=(1,)), started=1), replica("b", served(versions=(2,)), started=2)]
    )
    assert (found["echo"].urls, found["echo"].versions) == (("http://b:1",), (2,))


def test_replicas_that_differ_in_what_clients_do_not_see_share_the_requests() -> None:
    found = cluster_models([replica("a", served()), replica("b", served(instance_group=[{"count": 2}]), started=1)])
    assert found["echo"].urls == ("http://a:1", "http://b:1")


def test_a_replica_that_came_back_at_the_same_port_is_asked_once() -> None:
    gone, back = replica("a", served(), grpc="grpc://n:1"), replica("b", served(), grpc="grpc://n:1", started=1)
    assert cluster_models([gone, back])["echo"].urls == ("http://n:1",)


def test_a_configuration_that_many_replicas_have_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(model: ServedModel, urls: Any) -> str:
        read.append(model)
        return remote_config(model, urls)

    monkeypatch.setattr(remote_models, "remote_config", counted)
    found = cluster_models([replica(str(number), served()) for number in range(100)])
    assert len(found["echo"].urls) == 100
    assert len(read) <= 3


def on(*urls: str, **said: Any) -> dict[str, ClusterModel]:
    """The model ``echo`` on replicas at ``urls``."""
    return cluster_models([replica(url, served(**said), grpc=url) for url in urls])


def written(folder: Path) -> ModelConfig:
    found: ModelConfig = text_format.Parse((folder / "echo" / "config.pbtxt").read_text("utf-8"), ModelConfig())
    return found


def test_a_new_model_is_written_with_its_versions(tmp_path: Path) -> None:
    repository = IngressRepository(tmp_path)
    assert repository.write(on("http://a:1", versions=(2, 5))) == ["echo"]
    assert sorted(path.name for path in (tmp_path / "echo").iterdir()) == ["2", "5", "config.pbtxt"]
    assert written(tmp_path).parameters["url"].string_value == "http://a:1"
    assert repository.write(on("http://a:1", versions=(2, 5))) == []


def labelled(*labels: str) -> dict[str, ClusterModel]:
    return cluster_models([replica("a", replace(served(), labels=(("OUT", labels),)))])


def test_the_labels_of_classes_are_written_and_others_have_the_model_loaded_again(tmp_path: Path) -> None:
    repository = IngressRepository(tmp_path)
    repository.write(labelled("cat", "dog"))
    (output,) = written(tmp_path).output
    assert (tmp_path / "echo" / output.label_filename).read_text("utf-8") == "cat\ndog\n"
    assert repository.write(labelled("cat", "dog")) == []
    assert repository.write(labelled("cat", "hound")) == ["echo"]
    assert (tmp_path / "echo" / output.label_filename).read_text("utf-8") == "cat\nhound\n"
    repository.remove("echo")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_only_moves_is_written_and_not_loaded_again(tmp_path: Path) -> None:
    repository = IngressRepository(tmp_path)
    repository.write(on("http://a:1"))
    assert repository.write(on("http://b:1", "http://c:1")) == []
    # one that is loaded later is asked for where it is by then
    assert written(tmp_path).parameters["url"].string_value == "http://b:1,http://c:1"


@pytest.mark.parametrize("change", [{"versions": (1, 2)}, {"max_batch_size": 4}])
def test_a_model_that_takes_something_else_is_loaded_again(tmp_path: Path, change: dict[str, Any]) -> None:
    repository = IngressRepository(tmp_path)
    repository.write(on("http://a:1"))
    assert repository.write(on("http://a:1", **change)) == ["echo"]
    assert repository.write(on("http://a:1")) == ["echo"]


def test_a_model_unknown_to_the_ingress_may_change_with_its_replicas(tmp_path: Path) -> None:
    repository = IngressRepository(tmp_path)
    old, new = replica("a", ServedModel("echo"), version="1"), replica("b", ServedModel("echo"), version="2")
    assert repository.write(cluster_models([old])) == ["echo"]
    assert repository.write(cluster_models([old, replica("c", ServedModel("echo"), version="1")])) == []
    assert repository.write(cluster_models([old, new])) == ["echo"]
    assert repository.write(cluster_models([new])) == ["echo"]  # only now it is certain who answers


def test_a_model_that_is_removed_leaves_nothing_and_may_come_back(tmp_path: Path) -> None:
    repository = IngressRepository(tmp_path)
    repository.write(on("http://a:1"))
    repository.remove("echo")
    assert list(tmp_path.iterdir()) == []
    assert repository.write(on("http://a:1")) == ["echo"]
