"""The texts that variants are compared on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conch.convert.sentences import MAX_SAMPLES, TextSample, label_indices, load, search_texts, split
from conch.core.errors import ConchError


def test_built_in_sentences_are_varied() -> None:
    samples = load("feature-extraction")

    lengths = [len(sample.text.split()) for sample in samples]
    assert len({sample.text for sample in samples}) == len(samples) >= 140
    assert min(lengths) <= 4 and max(lengths) >= 120
    assert any(not sample.text.isascii() for sample in samples)
    assert all(sample.pair is None for sample in samples)


@pytest.mark.parametrize("task", ["question-answering", "text-ranking", "zero-shot-classification"])
def test_tasks_over_pairs_get_pairs(task: str) -> None:
    assert all(sample.text and sample.pair for sample in load(task))


def test_built_in_questions_are_ranked_against_several_passages() -> None:
    groups: dict[int, set[str | None]] = {}
    for sample in load("text-ranking"):
        groups.setdefault(sample.group, set()).add(sample.pair)

    assert all(len(passages) > 3 for passages in groups.values())


def test_fill_mask_hides_one_word_of_each_text() -> None:
    samples = load("fill-mask", mask="<mask>")

    assert all(sample.text.count("<mask>") == 1 for sample in samples)
    assert len(samples) > 100


def test_fill_mask_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ConchError, match="mask token"):
        load("fill-mask")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one two\n\n  three \n"),
        ("a.jsonl", '{"text": "one two", "other": 1}\n{"text": "three"}\n'),
        ("b.jsonl", '"one two"\n"three"\n'),
        ("a.csv", 'label,text\n1,"one two"\n0,three\n'),
        ("a.tsv", "text\tlabel\none two\t1\nthree\t0\n"),
    ],
)
def test_file_is_read_in_every_form(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)

    assert [sample.text for sample in load("text-classification", tmp_path / name)] == ["one two", "three"]


def test_file_of_pairs_groups_the_passages_of_a_query(tmp_path: Path) -> None:
    rows = [{"query": "q", "passage": "a"}, {"query": "r", "passage": "b"}, {"query": "q", "passage": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    assert load("text-ranking", tmp_path / "a.jsonl") == [
        TextSample("q", "a", 0),
        TextSample("r", "b", 1),
        TextSample("q", "c", 0),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"title\nx\n", "needs a column one of text, sentence"),
        ("a.jsonl", b'{"text": 1', "line 1: expected one JSON value"),
        ("a.jsonl", b"[1]", "line 1: neither an object nor a string"),
        ("a.jsonl", b"[" * 100_000, "line 1: expected one JSON value"),
        ("a.csv", b"text\n" + b"a" * 200_000, "cannot be read as CSV: field larger than field limit"),
        ("a.txt", b"\xff\xfe", "is not UTF-8: byte 0"),
        ("a.txt", b"\n \n", "has no texts"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConchError, match=message) as raised:
        load("feature-extraction", tmp_path / name)
    assert name in raised.value.message


def test_file_without_the_second_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only questions\n")

    with pytest.raises(ConchError, match="question-answering needs a column 'question'; it has text"):
        load("question-answering", tmp_path / "a.txt")


def test_large_file_is_thinned_evenly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"text {n}" for n in range(5000)))

    texts = [sample.text for sample in load("feature-extraction", tmp_path / "a.txt")]

    assert len(texts) == MAX_SAMPLES
    assert texts[0] == "text 0" and int(texts[-1].split()[1]) > 4900


def test_texts_for_calibration_are_not_those_for_comparison() -> None:
    for task in ("feature-extraction", "text-ranking", "question-answering"):
        fitted, compared = split(load(task))
        assert not {(one.text, one.pair) for one in fitted} & {(one.text, one.pair) for one in compared}
        assert len(compared) > len(fitted) > 0


def test_too_few_texts_serve_for_both() -> None:
    few = [TextSample(str(n)) for n in range(9)]

    assert split(few) == (few, few)


def test_labels_are_names_or_numbers() -> None:
    samples = [TextSample("a", label="positive"), TextSample("b", label="0")]

    assert label_indices(samples, ["negative", "positive"]) == [1, 0]
    assert label_indices([*samples, TextSample("c")], ["negative", "positive"]) is None
    with pytest.raises(ConchError, match="label 'x'; the model has negative, positive"):
        label_indices([TextSample("a", label="x")], ["negative", "positive"])


def test_built_in_queries_and_passages_are_enough_for_a_verdict() -> None:
    fitted, compared = search_texts()

    assert len(compared.queries) >= 35 and len(compared.passages) >= 167
    assert not {*fitted.queries, *fitted.passages} & {*compared.queries, *compared.passages}


def test_a_file_has_queries_with_passages_or_texts_for_both(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("question,answer\n" + "".join(f"q{n // 2},a{n}\n" for n in range(60)))
    _, compared = search_texts(pairs)
    assert (len(compared.queries), len(compared.passages)) == (20, 40)
    assert {text[0] for text in compared.queries} == {"q"}

    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"text {n}\n" for n in range(300)))
    _, compared = search_texts(texts)
    assert (len(compared.queries), len(compared.passages)) == (50, 200)
    assert {*compared.queries} <= {f"text {n}" for n in range(300)}
