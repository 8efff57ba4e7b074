"""What a model runs with, in the configuration that clients are shown."""

from __future__ import annotations

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.signature import parameters
from conch.server.runtime_facts import merged, sentence, shown

FACTS = {"engine": "swan 1.0", "max_batch_tokens": "64"}
CONFIG = 'name: "m" backend: "huggingface" parameters { key: "task" value { string_value: "fill-mask" } }'


def test_clients_see_it_among_the_parameters() -> None:
    config = parse(CONFIG, "c")
    seen = parameters(shown(config, FACTS))
    assert seen == {"conch.engine": "swan 1.0", "conch.max_batch_tokens": "64", "task": "fill-mask"}
    assert parameters(config) == {"task": "fill-mask"}


def test_python_model_is_shown_as_triton_shows_it() -> None:
    config = parse('name: "m" backend: "python"', "c")
    assert shown(config, FACTS) == config


def test_configuration_that_a_client_gives_back_is_read_without_it() -> None:
    given = shown(parse(CONFIG, "c"), FACTS)
    assert parameters(complete(given, "m", ())) == {"task": "fill-mask"}


def test_workers_that_differ_are_distinguished() -> None:
    assert merged([{"device": "GPU 0", "engine": "e"}, {"device": "GPU 1", "engine": "e"}]) == {
        "device": "GPU 0, GPU 1", "engine": "e",
    }  # fmt: skip


def test_log_has_it_in_words() -> None:
    assert sentence(FACTS) == "engine swan 1.0, max batch tokens 64"
