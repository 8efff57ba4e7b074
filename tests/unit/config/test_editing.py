"""Changing fields of a config.pbtxt, with everything else left as it was written."""

from __future__ import annotations

from typing import Any

import pytest

from conch.config.editing import edit, merge
from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError

TEXT = """\
# A model.
max_batch_size: 8 # as many as fit
instance_group [
  # on the processor
  { count: 1 kind: KIND_CPU }
]
parameters { key: "threads" value { string_value: "2" } }
parameters: { key: "engine", value: { string_value: "to" "rch" } };
optimization < input_pinned_memory { enable: true } >
"""


def test_only_what_changes_is_rewritten() -> None:
    edited = edit(TEXT, {"max_batch_size": 16, "parameters": {"threads": {"string_value": "4"}}})

    assert edited == TEXT.replace("max_batch_size: 8", "max_batch_size: 16").replace('"2"', '"4"')


def test_comments_within_what_changes_stay() -> None:
    text = """\
dynamic_batching { # for the crawler
  # measured on Monday
  max_queue_delay_microseconds: 100 # short
}
instance_group [
  # on the processor
  { count: 1 kind: KIND_CPU }, # the first
  {
    count: 2 # the second
  }
]
"""
    edited = edit(text, {
        "dynamic_batching": {"max_queue_delay_microseconds": 500, "preferred_batch_size": [4, 8]},
        "instance_group": [{"count": 3}, {"count": 4, "kind": "KIND_GPU"}],
    })  # fmt: skip

    assert (
        edited
        == """\
dynamic_batching { # for the crawler
  # measured on Monday
  max_queue_delay_microseconds: 500 # short
  preferred_batch_size: 4
  preferred_batch_size: 8
}
instance_group [
  # on the processor
  { count: 3 kind: KIND_CPU }, # the first
  {
    count: 4 # the second
    kind: KIND_GPU
  }
]
"""
    )


def test_comments_in_a_list_of_another_length_stand_above_it() -> None:
    text = "max_batch_size: 8\ninstance_group [\n  # on the processor\n  { count: 1 } # one\n]\n"

    edited = edit(text, {"instance_group": [{"count": 1}, {"count": 2}]})

    assert edited == (
        "max_batch_size: 8\n# on the processor\n# one\n"
        "instance_group {\n  count: 1\n}\ninstance_group {\n  count: 2\n}\n"
    )


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("dynamic_batching { }", "dynamic_batching { default_priority_level: 2 }"),
        ("dynamic_batching {}", "dynamic_batching { default_priority_level: 2 }"),
        ("dynamic_batching {\n}\n", "dynamic_batching {\n  default_priority_level: 2\n}\n"),
        (
            "dynamic_batching <\n  priority_levels: 3\n>",
            "dynamic_batching <\n  priority_levels: 3\n  default_priority_level: 2\n>",
        ),
        (
            "dynamic_batching: { priority_levels: 3; };",
            "dynamic_batching: { priority_levels: 3; default_priority_level: 2 };",
        ),
    ],
)
def test_a_new_field_of_a_message_is_written_as_its_others_are(text: str, edited: str) -> None:
    assert edit(text, {"dynamic_batching": {"default_priority_level": 2}}) == edited


def test_values_of_a_map_of_texts_change_in_their_place() -> None:
    text = 'cc_model_filenames [{ key: "7.0" value: "old" }] # why\n'
    assert edit(text, {"cc_model_filenames": {"7.0": "new"}}) == text.replace("old", "new")


def test_a_new_field_comes_at_the_end_and_goes_without_a_trace() -> None:
    edited = edit(TEXT, {"dynamic_batching": {"max_queue_delay_microseconds": 100}})

    assert edited == TEXT + "dynamic_batching {\n  max_queue_delay_microseconds: 100\n}\n"
    assert edit(edited, {"dynamic_batching": None}) == TEXT


def test_an_empty_message_is_set() -> None:
    assert edit("max_batch_size: 4", {"dynamic_batching": {}}) == "max_batch_size: 4\ndynamic_batching {\n}\n"
    assert edit("dynamic_batching {}", {"dynamic_batching": {}}) == "dynamic_batching {}"


def test_instance_groups_change_by_their_place_and_keep_what_is_not_said() -> None:
    config = merge(parse(TEXT, ""), {"instance_group": [{"count": 3}, {"count": 1}]})

    assert [(one.count, one.kind) for one in config.instance_group] == [(3, 2), (1, 0)]
    assert len(merge(config, {"instance_group": [{"count": 2}]}).instance_group) == 1


def test_messages_change_by_field_and_lists_as_a_whole() -> None:
    before = parse("dynamic_batching { preferred_batch_size: [4, 8] preserve_ordering: true }", "")

    after = merge(before, {"dynamic_batching": {"preferred_batch_size": [2]}})

    assert list(after.dynamic_batching.preferred_batch_size) == [2]
    assert after.dynamic_batching.preserve_ordering
    assert list(before.dynamic_batching.preferred_batch_size) == [4, 8]


def test_another_scheduler_takes_the_place_of_the_one_before() -> None:
    edited = edit("sequence_batching { direct { } } # why\nmax_batch_size: 4\n", {"dynamic_batching": {}})

    assert "sequence_batching" not in edited
    assert edited.endswith("max_batch_size: 4\ndynamic_batching {\n}\n")


def test_parameters_in_one_list_are_rewritten_together() -> None:
    text = 'parameters [{ key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "2" } }]\n'

    config = parse(edit(text, {"parameters": {"b": None, "c": {"string_value": "}"}}}), "")

    assert {key: config.parameters[key].string_value for key in config.parameters} == {"a": "1", "c": "}"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dynamic_batching": {"queue": 3}}, "a model configuration has no field 'dynamic_batching.queue'"),
        ({"max_batch_size": "many"}, "max_batch_size: "),
        ({"parameters": ["x"]}, "parameters: expected names and values"),
        ({"instance_group": [3]}, "instance_group[0]: expected an instance group, not 3"),
        ({"instance_group": [{"kind": 99}]}, "kind"),
    ],
)
def test_what_is_no_change_to_a_configuration_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConchError, match=told.replace("[", r"\[")) as caught:
        edit(TEXT, changes)
    assert caught.value.code is Code.INVALID_ARG
