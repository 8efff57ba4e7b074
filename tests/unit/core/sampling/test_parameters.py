"""Sampling parameters are declared once, and documented as they are declared."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from conch.core.sampling.parameters import NAMES, PARAMETERS, Feature, SamplingParameter, SamplingParams
from conch.core.sampling.structures import Structure

DOCUMENT = Path(__file__).parents[4] / "docs" / "generation.md"


def cell(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def documented(parameter: SamplingParameter) -> str:
    also = (*parameter.aliases, *parameter.forms)
    datatype = parameter.type.datatype.replace("BYTES", "STRING")
    own = f"`{parameter.text_input}` {datatype}" if parameter.text_input else ""
    cells = (f"`{parameter.name}`", parameter.description, parameter.type.wanted, cell(also), own)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def table() -> str:
    """The table of sampling parameters that docs/generation.md must have."""
    head = "| name | meaning | value | also called | input of its own |\n|---|---|---|---|---|"
    return "\n".join([head, *map(documented, PARAMETERS)])


def test_the_document_has_the_table_of_parameters() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8"), f"docs/generation.md must hold:\n{table()}"


def test_a_name_means_one_thing_in_each_protocol() -> None:
    assert len(NAMES) == sum(1 + len(one.aliases) + len(one.forms) for one in PARAMETERS)
    inputs = [name for one in PARAMETERS for name in one.inflight_inputs]
    assert len(inputs) == len(set(inputs))
    assert all(one.text_input in NAMES for one in PARAMETERS if one.text_input)


def test_defaults_ask_for_nothing() -> None:
    assert not SamplingParams().features()
    values = SamplingParams()
    assert all(getattr(values, one.name) == one.neutral for one in PARAMETERS if one.neutral is not None)
    assert {field.name for field in fields(SamplingParams)} - {one.name for one in PARAMETERS} == {
        "bad_words_token_ids", "reasoning",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "features"),
    [
        (SamplingParams(logprobs=0), [Feature.LOGPROBS]),
        (SamplingParams(logprobs=2, beam_width=2), [Feature.BEAMS, Feature.LOGPROBS, Feature.TOP_LOGPROBS]),
        (SamplingParams(structured_outputs=Structure("choice", '["a"]')), [Feature.CHOICE]),
        (SamplingParams(presence_penalty=1, frequency_penalty=-1), [Feature.PENALTIES]),
        (SamplingParams(bad_words=("a",)), []),
        (SamplingParams(bad_words_token_ids=((1,),), lora_name="red"), [Feature.BAD_WORDS, Feature.LORA]),
    ],
)
def test_values_need_features(sampling: SamplingParams, features: list[Feature]) -> None:
    assert list(sampling.features()) == features


@pytest.mark.parametrize(
    ("sampling", "end_ids"),
    [
        (SamplingParams(), {2, 3}),
        (SamplingParams(stop_token_ids=(7,)), {2, 3, 7}),
        (SamplingParams(end_id=9, stop_token_ids=(7,)), {7, 9}),
        (SamplingParams(ignore_eos=True, end_id=9, stop_token_ids=(7,)), {7}),
    ],
)
def test_a_sequence_ends_at_its_stop_tokens_and_its_end_tokens(sampling: SamplingParams, end_ids: set[int]) -> None:
    assert sampling.end_ids((2, 3)) == end_ids
