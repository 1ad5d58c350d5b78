"""The table of ``benchmarks/before_after.py``: its ratios, and what it marks."""

from __future__ import annotations

from benchmark_scripts import benchmark


def pair(seconds: tuple[float, float], mib: tuple[float, float]) -> dict[str, dict[str, float]]:
    names = ("epoch, s", "peak, MiB", "received, MB")
    figures = zip(seconds, mib, (0, 0), strict=True)
    rows = (dict(zip(names, row, strict=True)) for row in figures)
    return dict(zip(("before", "after"), rows, strict=True))


def test_ratios_are_within_pairs_and_what_is_above_the_goal_is_marked() -> None:
    pairs = [pair((2, 2.2), (100, 101)), pair((1, 1.06), (100, 99)), pair((4, 4), (100, 101))]
    results = {"wire, sage, 2": pairs, "attention": []}
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in benchmark("before_after").table(results)[2:]
    ]
    # The ratio of the medians would be 1.10; where nothing was received there is no row.
    assert rows == [
        ["wire", "sage, 2", "epoch, s", "2", "2.2", "1.06", "1.03 to 1.08", "3", "above"],
        ["wire", "sage, 2", "peak, MiB", "100", "101", "1.01", "1.00 to 1.01", "3", ""],
    ]
