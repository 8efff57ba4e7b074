"""How many connections are served, and what becomes of those beyond."""

import logging

import pytest

from conch.frontends.admission import FOR_HEALTH, FOR_OTHERS, Admission, AdmissionResult
from conch.telemetry.traffic import ConnectionCounts


def output_targets(
    admission: Admission, counts: ConnectionCounts, number: int, first: int = 10
) -> list[AdmissionResult]:
    """What becomes of ``number`` connections that are opened one after another and stay."""
    found = []
    for descriptor in range(first, first + number):
        counts.opened("http")
        found.append(admission.admit("http", descriptor))
    return found


def test_the_flag_says_how_many_connections_are_served() -> None:
    counts = ConnectionCounts()
    found = output_targets(Admission(5, counts, descriptors=lambda: 10_000), counts, 5 + FOR_HEALTH + 2)
    assert (
        found
        == [AdmissionResult.SERVED] * 5 + [AdmissionResult.HEALTH_ONLY] * FOR_HEALTH + [AdmissionResult.REFUSED] * 2
    )
    counts.ended("http")
    assert dict(counts.families())  # the gauge and the counter


def test_connections_leave_descriptors_to_others() -> None:
    counts = ConnectionCounts()
    limit = 2000
    served = limit - FOR_OTHERS - FOR_HEALTH
    admission = Admission(0, counts, descriptors=lambda: limit)
    assert output_targets(admission, counts, 2, first=served - 1) == [
        AdmissionResult.SERVED,
        AdmissionResult.HEALTH_ONLY,
    ]
    assert output_targets(admission, counts, 2, first=limit - FOR_OTHERS - 1) == [
        AdmissionResult.HEALTH_ONLY,
        AdmissionResult.REFUSED,
    ]


def test_a_small_limit_leaves_room_for_connections() -> None:
    counts = ConnectionCounts()
    assert output_targets(Admission(0, counts, descriptors=lambda: 256), counts, 1, first=200) == [
        AdmissionResult.SERVED
    ]


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    counts = ConnectionCounts()
    admission = Admission(1, counts, descriptors=lambda: 10_000, clock=lambda: now)
    with caplog.at_level(logging.WARNING, "conch"):
        output_targets(admission, counts, 10)
        now = 59.0
        output_targets(admission, counts, 10)
        assert len(caplog.records) == 1
        assert "1 connections are open, as many as --max-connections allows" in caplog.text
        now = 61.0
        output_targets(admission, counts, 10)
    assert len(caplog.records) == 2
