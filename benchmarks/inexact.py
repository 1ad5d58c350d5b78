"""What inexact policies cost: the gradients' error and the accuracy against the bytes they save.

    python benchmarks/inexact.py --out inexact.md

Trains the same model under each policy and measures the true error of the gradients as it goes.
Prints a table; with ``--out`` also draws a picture beside it.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.tools import load_graph
from pyg_sar.tools.models import build_model
from pyg_sar.usage import MODELS

POLICIES: dict[str, dict[str, Any]] = {
    "exact": {},
    **{wire: {"wire": wire} for wire in ("bfloat16", "float16", "int8", "int4", "int2")},
    **{f"every {k}": {"refresh_every": k} for k in (2, 4, 8, 16)},
    "int4, every 2": {"wire": "int4", "refresh_every": 2},
}


def measured(root: str, given: argparse.Namespace, options: dict[str, Any]) -> list[Any]:
    """For each seed: bytes of all training steps, mean error of the gradients, test accuracy."""
    comm, data = pyg_sar.comm.current(), pyg_sar.load_partition(root)
    classes = int(data.y.max()) + 1
    found = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        sizes = data.num_features, given.hidden, classes
        model = build_model(given.model, *sizes, layers=given.layers, dropout=0.0)
        model = pyg_sar.distribute(model, SARPolicy(mode=3, **options))
        optimizer = torch.optim.Adam(model.parameters(), lr=given.lr, weight_decay=5e-4)
        received, errors, best = 0, [], (-1.0, 0.0)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)[data.train_mask]
            F.cross_entropy(out, data.y[data.train_mask]).backward()

        for epoch in range(given.epochs):
            model.train()
            if epoch % given.measure_every == given.measure_every - 1:
                errors.append(pyg_sar.train.gradient_error(model, step)["all parameters"])
            with pyg_sar.Ledger(comm) as ledger:
                step()
            received += ledger.received_bytes()
            optimizer.step()
            if epoch % 5 == 4:
                model.eval()
                with torch.no_grad():
                    out = model(data.x, data.edge_index)
                right = (out.argmax(1) == data.y).double()
                scores = (right[data[f"{s}_mask"]].mean().item() for s in ("val", "test"))
                best = max(best, tuple(scores))
        total = int(comm.all_reduce(torch.tensor(received)))
        found.append((total, statistics.mean(errors), 100 * best[1]))
    return found


def draw(rows: list[tuple[str, float, float, float, float]], path: Path) -> None:
    """Draws errors and accuracies against bytes."""
    from matplotlib.colors import TABLEAU_COLORS
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    colors = [*TABLEAU_COLORS, "black"]
    for number, (name, share, error, accuracy, spread) in enumerate(rows):
        style = {"color": colors[number], "marker": "s" if "every" in name else "o"}
        if error > 0:
            above.loglog(share, error, **style)
        below.errorbar(share, accuracy, spread, capsize=3, label=name, linestyle="", **style)
    figure.legend(*below.get_legend_handles_labels(), loc="outside right upper", title="policy")
    above.set_ylabel("error of the gradients, relative")
    below.set_ylabel("test accuracy, %")
    below.set_xlabel("bytes of the training steps, as a share of the exact ones")
    least = min(share for _, share, *_ in rows)
    ticks = [share for share in (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1) if share >= 0.9 * least]
    below.set_xticks(ticks, [f"{share:g}" for share in ticks])
    below.set_xticks([], minor=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="synthetic:nodes=3000,degree=15,features=64,signal=0.1")
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--method", default="balanced", help="how the graph is partitioned")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--measure-every", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    graph = given.graph.rpartition("/")[2]
    settings = (
        f"{given.layers} layers of {given.model}, width {given.hidden}, {given.epochs} epochs"
    )
    settings += f", {given.seeds} seeds"
    lines = [
        "# What inexact policies cost",
        "",
        f"{datetime.date.today()}, `{command(given)}`, torch {torch.__version__}.",
        f"`{graph}` on {given.workers} workers ({given.method} parts), {settings}. Bytes are those "
        "of all training steps, the sums of gradients included, as a share of the exact ones; "
        f"errors are means over every {given.measure_every}th epoch.",
        "",
        "| policy | bytes | error of the gradients | test accuracy |",
        "|---|---|---|---|",
    ]
    rows, whole = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "parts")
        pyg_sar.write_partitions(load_graph(given.graph), given.workers, root, given.method)
        print("\n".join(lines))
        for name in given.policies:
            task = measured, given.workers, root, given, POLICIES[name]
            found = pyg_sar.launch(*task)[0]
            whole = whole or found[0][0]
            accuracies = [accuracy for *_, accuracy in found]
            error = statistics.mean(error for _, error, _ in found)
            spread = statistics.stdev(accuracies) if given.seeds > 1 else 0.0
            rows.append((name, found[0][0] / whole, error, statistics.mean(accuracies), spread))
            _, share, error, accuracy, spread = rows[-1]
            lines.append(f"| {name} | {share:.3f} | {error:.1e} | {accuracy:.2f} ± {spread:.2f} |")
            print(lines[-1], flush=True)
    if given.out:
        draw(rows, given.out.with_suffix(".png"))
        picture = f"![errors and accuracies against bytes]({given.out.stem}.png)"
        given.out.write_text("\n".join([*lines, "", picture]) + "\n")


if __name__ == "__main__":
    main()
