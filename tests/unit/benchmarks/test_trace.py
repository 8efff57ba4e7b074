"""What the benchmark of text generation asks."""

from __future__ import annotations

import json

from benchmarks.generation.dialects import Conch, Llama
from benchmarks.generation.questions import SCHEMA, Scale, questions, seed
from benchmarks.generation.trace import Ask, Load, Prompts

WORDS = [("one", 1), ("three", 3), ("two", 2)]
SIZES = dict(WORDS)


def tokens(prompt: str) -> int:
    return sum(SIZES[word] for word in prompt.split())


def test_a_prompt_has_as_many_tokens_as_were_asked_for() -> None:
    prompts = Prompts(WORDS, 1)
    assert [tokens(prompts.prompt(length)) for length in (1, 2, 30, 1000)] == [1, 2, 30, 1000]


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    first, again, other = (Prompts(WORDS, number).poisson(20, 4.0, 30, 8, 128) for number in (1, 1, 2))
    assert first == again
    assert first != other


def test_arrivals_are_in_order_and_have_answers_of_all_lengths() -> None:
    arrivals = Prompts(WORDS, 1).poisson(400, 4.0, 5, 8, 128)
    moments = [at for at, _ in arrivals]
    assert moments == sorted(moments)
    assert 80 < moments[-1] < 120
    assert {ask.tokens for _, ask in arrivals} <= set(range(8, 129))
    assert len({ask.tokens for _, ask in arrivals}) > 80


def test_mixed_prompts_stay_within_their_bounds() -> None:
    lengths = [tokens(ask.prompt) for ask in Prompts(WORDS, 1).mixed(300, 20, 1000, 8)]
    assert min(lengths) >= 20
    assert max(lengths) <= 1000
    # Half of them are shorter than the geometric mean, 141.
    assert 100 < sorted(lengths)[150] < 200


def test_a_load_survives_being_json() -> None:
    load = Load([Ask("a", 3)], 2, arrivals=[(0.5, Ask("b", 4))])
    assert Load.read(json.loads(json.dumps(load.document()))) == load


def test_a_schema_is_asked_for_in_the_words_of_each_server() -> None:
    [question] = [question for question in questions(Scale()) if question.part == "schema"]
    [ask, *_] = question.load(Prompts(WORDS, 1)).asks
    assert json.loads(Conch("m").body(ask)["sampling_parameters"])["structured_outputs"] == {"json": SCHEMA}
    assert Llama("m").body(ask)["json_schema"] == SCHEMA


def test_no_two_questions_or_rounds_have_the_same_prompts() -> None:
    asked = questions(Scale())
    seeds = {seed(question, number) for question in asked for number in range(5)}
    assert len(seeds) == 5 * len(asked)
