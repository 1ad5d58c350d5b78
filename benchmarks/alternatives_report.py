"""Tables and the picture of ``alternatives.py``.

python benchmarks/alternatives_report.py alternatives.md alternatives.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from torch_geometric.data import Data

PLAIN = "plain PyG"
Found = dict[str, list[dict[str, Any]]]  # By way and seed.


def first(curve: list[list[float]], target: float) -> list[float] | None:
    """The first evaluation that reaches the target."""
    return next((at for at in curve if at[2] >= target), None)


def compared(found: Found) -> tuple[float, dict[str, dict[str, Any]]]:
    """The validation metric to reach, and what the table says of each way."""
    plain = found[PLAIN]
    target = 0.99 * median(max(at[2] for at in run["curve"]) for run in plain)
    table: dict[str, dict[str, Any]] = {}
    for way, runs in found.items():
        row = table[way] = {name: [] for name in ("test", "until", "time", "epoch", "MiB", "apart")}
        for run, base in zip(runs, plain, strict=True):
            if not run:
                continue
            curve = run["curve"] or base["curve"]
            each = run["epoch"] / base["epoch"]
            end, other = first(curve, target), first(base["curve"], target)
            row["test"].append(max(curve, key=lambda at: at[2])[3])
            row["until"] += [end[0]] if end else []
            if end and other:
                row["time"].append(end[1] / other[1] if run["curve"] else each)
            row["epoch"].append(each)
            row["MiB"].append(run["peak"] / 2**20)
            if not run["curve"]:
                pairs = zip(run["losses"], base["losses"], strict=False)
                row["apart"].append(max(abs(a - b) for a, b in pairs))
    return target, table


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def report(name: str, graph: Data, found: Found) -> str:
    target, table = compared(found)
    base, kind = table[PLAIN], "area under the ROC curve" if int(graph.y.max()) == 1 else "accuracy"
    each = median(run["epoch"] for run in found[PLAIN])
    text = (
        f"### {name}\n\n{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_features} "
        f"features; {kind} in percent. Validation to reach: {target:.1f}. Plain PyG: {each:.2f} s "
        "of processors an epoch.\n\n| | test | seeds that reach it | epochs until | time until, to "
        "plain | an epoch, to plain | MiB | MiB, to plain | losses apart |\n|---"
        + "|---" * 8
        + "|\n"
    )
    for way, row in table.items():
        test, until, apart = row["test"], row["until"], max(row["apart"], default=None)
        if not test:
            text += f"| {way} |" + " - |" * 8 + "\n"
            continue
        score = f"{mean(test):.1f} ± {stdev(test) if len(test) > 1 else 0:.1f}"
        score = "as plain" if apart is not None else score
        text += (
            f"| {way} | {score} | {len(until)} of {len(test)} | "
            f"{f'{median(until):.0f}' if until else '-'} | {spread(row['time'])} | "
            f"{spread(row['epoch'])} | {max(row['MiB']):.0f} | "
            f"{max(row['MiB']) / max(base['MiB']):.2f} | "
            f"{'' if apart is None else f'{apart:.0e}'} |\n"
        )
    return text


def plot(path: str, text: str) -> None:
    """Memory and time of each way, in shares of plain PyG's, from a report; a column a graph."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part.split("\n## ")[0] for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]]
    figure, axes = plt.subplots(2, len(parts), figsize=(10, 5), sharey=True, squeeze=False)
    for (upper, lower), part in zip(axes.T, parts, strict=True):
        cells = [[cell.strip() for cell in line.split("|")] for line in part.splitlines()]
        cells = [row for row in cells if len(row) > 9 and row[1].strip("-")]
        upper.set_title(part.splitlines()[0], size=9)
        for axis, column, label in (
            (upper, 8, "memory of a process"),
            (lower, 5, "time to the same metric"),
        ):
            found = {row[1]: re.match(r"[\d.]+", row[column]) for row in cells}
            values = [float(match[0]) if match else 0 for match in found.values()]
            bars = axis.barh(
                list(found), values, color=["C0" if "pyg_sar," in w else "C7" for w in found]
            )
            empty = {row[1]: "refused" if row[8] == "-" else "not reached" for row in cells}
            labels = [f"{v:.2f}" if v else empty[w] for w, v in zip(found, values, strict=True)]
            axis.bar_label(bars, labels, padding=2, size=7)
            axis.axvline(1, color="k", lw=0.6, ls=":")
            axis.margins(x=0.25)
            axis.set_xlabel(f"{label}, to plain PyG", size=8)
            axis.tick_params(labelsize=8)
    axes[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    plot(sys.argv[2], Path(sys.argv[1]).read_text())
