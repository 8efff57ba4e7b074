"""Word error rates, and the verdict on them."""

from __future__ import annotations

import pytest

from conch.convert.speech.agreement import compare, reasons, word_errors, words_of

TEXTS = ["The quick brown fox.", "It's a dog, isn't it?", "Ende"]


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of("It's a — DOG, isn't it? 3_5 Äpfel…") == ["it's", "a", "dog", "isn't", "it", "3", "5", "äpfel"]


@pytest.mark.parametrize(
    ("written", "errors"),
    [
        ("the quick brown fox", 0),
        ("the brown fox", 1),
        ("the very quick brown fox", 1),
        ("a quick red fox", 2),
        ("", 4),
    ],
)
def test_errors_are_missing_added_and_replaced_words(written: str, errors: int) -> None:
    found = word_errors(TEXTS[:1], [written])
    assert (found.errors, found.words) == ([errors], [4])
    assert found.rate == errors / 4


def test_words_where_none_were_spoken_are_errors_without_a_bound() -> None:
    assert word_errors([""], ["you"]).rate == float("inf")
    assert word_errors([""], [""]).rate == 0


def test_same_transcripts_pass_at_every_precision() -> None:
    figures = compare(TEXTS, TEXTS, TEXTS)
    assert (figures.value, figures.delta, figures.changed, figures.identical, figures.words) == (0, 0, 0, 1, 10)
    assert [reasons(precision, figures) for precision in ("fp32", "bf16", "int8")] == [(), (), ()]


def test_rise_of_the_rate_and_other_words_are_refused() -> None:
    figures = compare(TEXTS, TEXTS, [*TEXTS[:2], "Wende"])
    assert reasons("int8", figures) == (
        "word error rate 10.00% is 10.00% above the reference's, more than 1.00%",
        "10.00% of the words differ from the reference's transcripts, more than 4.00%",
    )


def test_other_errors_at_the_same_rate_are_refused() -> None:
    figures = compare(TEXTS, [*TEXTS[:2], "Wende"], ["A quick brown fox.", *TEXTS[1:]])
    assert figures.delta == 0
    assert len(reasons("int8", figures)) == 1


def test_without_texts_only_changes_are_judged() -> None:
    figures = compare([], TEXTS, [*TEXTS[:2], ""])
    assert list(figures.to_json()) == ["transcripts"]
    assert reasons("int8", figures) == ("10.00% of the words differ from the reference's transcripts, more than 4.00%",)
