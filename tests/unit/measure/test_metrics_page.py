"""Metrics pages are read line by line; a page of another kind has no samples."""

from __future__ import annotations

from conch.measure.metrics_page import labels_of, samples


def test_samples_have_names_labels_and_values() -> None:
    page = '# HELP up one\nup 1\nratio{model="a \\"b\\"\\n",version="2"} 0.5 1700000000\nempty{} NaN\n'

    (up, ratio, empty) = samples(page)
    assert up == ("up", "", 1.0) and ratio[2] == 0.5 and empty[2] != empty[2]
    assert labels_of(ratio[1]) == {"model": 'a "b"\n', "version": "2"}


def test_a_web_page_has_no_samples() -> None:
    assert list(samples("<html>\nbody {margin: 0}\nno metrics here\n</html>")) == []
