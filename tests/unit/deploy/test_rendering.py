"""What is written of sizes."""

from __future__ import annotations

from conch.deploy.bundle import shown


def test_sizes_have_three_figures_and_no_exponent() -> None:
    sizes = (0, 924, 10_300, 999_499, 999_600, 6 * 10**9, 5 * 10**12)
    assert [shown(size) for size in sizes] == ["0 bytes", "924 bytes", "10.3 kB", "999 kB", "1 MB", "6 GB", "5 TB"]
