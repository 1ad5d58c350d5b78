"""The tables of ``accuracy.py`` as Markdown."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import torch
import torch_geometric
from real_graphs import GRAPHS, MODELS, SOURCES, Published, RealGraph, Setting

import pyg_sar

Row = dict[str, Any]
NAMES = {"gcn": "GCN", "sage": "SAGE", "gat": "GAT"}


def report(rows: list[Row], command: str, workers: list[int], exact_epochs: int) -> str:
    """The whole document."""
    graphs = [name for name in GRAPHS if any(row["graph"] == name for row in rows)]
    parts = [
        _header(rows, command),
        _trained(rows, graphs, workers),
        _exact(rows, graphs, workers, exact_epochs),
        _settings(rows, graphs),
        _sources(graphs),
    ]
    return "\n".join(parts)


def _header(rows: list[Row], command: str) -> str:
    minutes = sum(row["seconds"] for row in rows) / 60
    return f"""# Results on real graphs

Made by

    {command}

on {datetime.date.today()}.

- Hardware: {os.cpu_count()} CPU cores ({platform.machine()}) shared with other work, no GPU; one
  thread per process.
- Versions: Python {platform.python_version()}, torch {torch.__version__},
  torch-geometric {torch_geometric.__version__}, pyg_sar {pyg_sar.__version__}.
- pyg_sar: backend gloo, METIS partitions, `SARPolicy()` (mode 1, prefetch 1).
- {len(rows)} training runs; the times of all runs add up to {minutes:.0f} minutes. The single
  process trains beside the one worker, so that the command took less.

"Plain PyG" is a single process in which no code of pyg_sar takes part: PyG's own layers on PyG's
own `Data`. The pyg_sar runs train the same model from the same initial parameters.

Labels as inputs, Correct and Smooth, and longer training:
[benchmarks/results/accuracy.md](../benchmarks/results/accuracy.md#labels-as-inputs-correct-and-smooth).
"""


def report_recipes(rows: list[Row], command: str, shown: float, smoothing: Sequence[float]) -> str:
    """The document of the recipes."""
    workers = sorted({row["workers"] for row in rows})
    head = ["graph", "model", "workers", "runs", "published, plain", "plain", "labels as inputs"]
    head += ["C&S", "labels and C&S", "epochs, plain", "plain reaches published"]
    lines = [_line(head), _line(["---"] * len(head))]
    graphs = [name for name in GRAPHS if any(row["graph"] == name for row in rows)]
    plain = [row for row in rows if row["recipe"] == "plain"]
    for name, model in _cases(plain, graphs):
        for w in workers:
            lines.append(_line(_recipe_row(rows, name, model, w)))
    of_published = {
        name: replace(
            GRAPHS[name],
            settings={r["model"]: Setting(**r["setting"]) for r in rows if r["graph"] == name},
        )
        for name in graphs
    }
    correct, alpha, smooth, beta = smoothing
    return f"""# Labels as inputs, Correct and Smooth

Made by

    {command}

on {datetime.date.today()}, torch {torch.__version__}, torch-geometric
{torch_geometric.__version__}, through pyg_sar (`SARPolicy()`), one thread per worker, on
{os.cpu_count()} CPU cores shared with other work; {len(rows)} training runs, together
{sum(row["seconds"] for row in rows) / 60:.0f} minutes.

Test accuracy in percent (Tolokers: area under the ROC curve), mean ± standard deviation over runs
with different initial parameters (and splits, where there are several), at the epoch with the best
validation, after as many epochs as published. "Labels as inputs" shows the model the labels of a
random share of {shown:g} of the training nodes in each epoch, as columns behind the features, and
takes the loss of the others; all training labels are shown in evaluation. "C&S" is PyG's
`CorrectAndSmooth({correct}, {alpha:g}, {smooth}, {beta:g})` of the same model's softmax, not tuned.
The published figures are of plain training; for the recipes on these splits we know of none.
{_missing(graphs)}

{_table(lines)}

{_settings(rows, graphs, of_published, _RECIPE_NOTES)}
{_sources(graphs)}"""


_RECIPE_NOTES = (
    (
        (),
        """\
- Adam, no weight decay on biases. "Stop": the most epochs, and after how many epochs without a
  lower validation loss training ends before. Validation by loss, on Tolokers by the metric.
- Splits and SAGE's normalisation are those of [results.md](../../docs/results.md#settings).""",
    ),
    (
        ("photo", "computers", "cs"),
        """\
- Amazon and Coauthor: evaluated in every 5th epoch. SAGE's outputs have a length of at most 1, so
  that their softmax is nearly even, and labels weigh more in C&S than its predictions.""",
    ),
    (
        ("cora", "citeseer"),
        """\
- With 20 labels a class, labels as inputs take half of the few targets, and the residuals that C&S
  spreads are those of nodes that the model was fitted to. Accuracy is that of the public split.""",
    ),
)


def _missing(graphs: list[str]) -> str:
    titles = [graph.title for name, graph in GRAPHS.items() if name not in graphs]
    return f"Not run with the recipes: {', '.join(titles)}." if titles else ""


def _recipe_row(rows: list[Row], name: str, model: str, workers: int) -> list[str]:
    wanted = {"graph": name, "model": model, "workers": workers}
    rows = [row for row in rows if wanted.items() <= row.items()]
    found = {r: [row for row in rows if row["recipe"] == r] for r in ("plain", "labels")}
    values = [
        [100 * row[key] for row in found[recipe]]
        for key in ("metric", "smoothed")
        for recipe in found
    ]
    published = GRAPHS[name].published.get(model, ())
    return [
        *(GRAPHS[name].title, NAMES[model], str(workers), str(len(values[0]))),
        "; ".join(map(str, published)) or "not published for this setting",
        *[_mean_and_spread(group) for group in values],
        f"{mean(len(row['losses']) for row in rows if row['recipe'] == 'plain'):.0f}",
        "; ".join(f"[{p.source}] {_verdict(p, values[0])}" for p in published),
    ]


# With dropout ############################################################################


def _trained(rows: list[Row], graphs: list[str], workers: list[int]) -> str:
    head = ["graph", "model", "runs", "published", "plain PyG"]
    head += [_name(w) for w in workers] + ["largest difference of means", "published reached"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, model in _cases(rows, graphs):
        lines.append(_line(_trained_row(rows, name, model, workers)))
    return f"""## Training as published, with dropout

Test accuracy in percent (Tolokers: area under the ROC curve), mean ± standard deviation over runs
with different initial parameters (and splits, where there are several), at the epoch with the best
validation. Dropout draws the same random numbers on any number of workers, and others in plain PyG,
so that column agrees within its spread, not digit by digit; the next table is about the digits.

"Published reached": the published interval, mean ± spread, and that of all runs of this row overlap
(yes), or ours lies above it (above) or below it (below). A letter names the source, listed at the
end.

{_table(lines)}
"""


def _trained_row(rows: list[Row], name: str, model: str, workers: list[int]) -> list[str]:
    graph = GRAPHS[name]
    cells = [graph.title, NAMES[model]]
    values = {
        w: [100 * row["metric"] for row in _select(rows, name, model, w, exact=False)]
        for w in [0, *workers]
    }
    published = graph.published.get(model, ())
    cells.append(str(len(values[0])))
    cells.append("; ".join(map(str, published)) or "not published for this setting")
    cells += [f"{mean(values[w]):.2f} ± {_spread(values[w]):.2f}" for w in values]
    cells.append(f"{max(abs(mean(values[w]) - mean(values[0])) for w in workers):.2f}")
    everything = [value for group in values.values() for value in group]
    cells.append("; ".join(f"[{p.source}] {_verdict(p, everything)}" for p in published))
    return cells


def _verdict(published: Published, values: list[float]) -> str:
    gap, room = mean(values) - published.mean, _spread(values) + (published.std or 0.0)
    if abs(gap) <= room:
        return "yes"
    return f"{'above' if gap > 0 else 'below'} by {abs(gap):.2f}"


def _mean_and_spread(values: list[float]) -> str:
    """Nothing of a recipe that has not been run; no spread of one run."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ± {_spread(values):.2f}"


def _spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


# Without dropout #########################################################################


def _exact(rows: list[Row], graphs: list[str], workers: list[int], epochs: int) -> str:
    head = ["graph", "model", "dtype", "plain PyG: test", "loss, first to last epoch"]
    head += [f"{_name(w)}: loss, any epoch" for w in workers]
    head += ["loss, last epoch", "test"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, model in _cases(rows, graphs):
        for dtype in ("float32", "float64"):
            plain = _select(rows, name, model, 0, exact=True, dtype=dtype)
            if plain:
                others = [_select(rows, name, model, w, exact=True, dtype=dtype) for w in workers]
                cells = _exact_cells(plain[0], [other[0] for other in others])
                lines.append(_line([GRAPHS[name].title, NAMES[model], dtype, *cells]))
    return f"""## The same without dropout: exactness

{epochs} epochs of the same training, dropout off, one run each. Columns "any epoch", "last epoch"
and "test" give the largest absolute difference to plain PyG: of the training loss, and of the test
metric in percentage points; the last two over all numbers of workers. In float32 sums in another
order round differently, and training carries such a difference on from epoch to epoch; float64
shows that nothing else differs.

{_table(lines)}
"""


def _exact_cells(plain: Row, others: list[Row]) -> list[str]:
    reference = plain["losses"]
    curves = [[abs(a - b) for a, b in zip(row["losses"], reference, strict=True)] for row in others]
    test = max(abs(row["metric"] - plain["metric"]) for row in others)
    return [
        f"{100 * plain['metric']:.2f}",
        f"{reference[0]:.4f} to {reference[-1]:.4f}",
        *[_small(max(curve)) for curve in curves],
        _small(max(curve[-1] for curve in curves)),
        _small(100 * test),
    ]


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


# Settings and sources ####################################################################

# Which graphs a note is about (none: all), and the note.
_NOTES = (
    (
        (),
        """\
- Adam, no weight decay on biases. "Stop": the most epochs, and after how many epochs without a
  lower validation loss training ends before. Validation by loss, on Tolokers by the metric.""",
    ),
    (
        ("cora", "citeseer"),
        """\
- Cora and CiteSeer: the public split, rows of features scaled to sum 1, settings of [K] and [V].
  [V] trains until 100 epochs bring no improvement; here at most the epochs given. SAGE, for which
  there is no figure of this kind, uses the settings of GCN.""",
    ),
    (
        ("photo", "computers", "cs"),
        """\
- Amazon and Coauthor: undirected, largest connected component, 20 nodes per class for training and
  30 for validation, drawn by seed; the settings that [S] found best for each model, but fewer
  epochs: [S] trains until 50 bring no improvement. SAGE is theirs in that rows longer than 1 are
  scaled to length 1; their mean includes the node itself, PyG's does not.""",
    ),
    (
        ("computers",),
        """\
- GCN on Amazon Computers has dropout 0.8: the loss stays near its first value for tens of epochs in
  some draws, in plain PyG too, so that it is trained for longer. A run that started late is still
  falling when it ends.""",
    ),
    (
        ("cora", "citeseer", "photo", "computers", "cs"),
        """\
- SAGE computes mean(W x_j) for W mean(x_j): the same function, fewer values to aggregate.""",
    ),
    (
        ("tolokers",),
        """\
- Tolokers: the first public splits. The networks of [P], residual blocks with LayerNorm and a
  feed-forward part, not plain GCN, SAGE and GAT; made of PyG's `GCNConv`, `SAGEConv` and `GATConv`,
  narrower and trained for fewer steps at a higher rate than in [P] (width 512, 1 to 5 blocks chosen
  by validation, 8 heads, 1,000 steps, learning rate 3e-5), so that a CPU can do it, and therefore
  below the published figures, plain PyG too. The learning rate is chosen by validation
  (`benchmarks/choose_settings.py`). Two outputs and cross entropy for one output and its binary
  form.""",
    ),
)


def _settings(
    rows: list[Row],
    graphs: list[str],
    known: Mapping[str, RealGraph] = GRAPHS,
    about_graphs: Sequence[tuple[Sequence[str], str]] = _NOTES,
) -> str:
    head = ["graph", "model", "layers", "dropout", "learning rate", "weight decay", "stop"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, model in _cases(rows, graphs):
        graph = known[name]
        lines.append(_line([graph.title, NAMES[model], *_setting_cells(graph, model)]))
    chosen = [note for about, note in about_graphs if not about or set(about) & set(graphs)]
    notes = "\n".join(chosen)
    return f"""## Settings

{_table(lines)}

{notes}
"""


def _setting_cells(graph: RealGraph, model: str) -> list[str]:
    setting = graph.settings[model]
    dropout = f"{setting.dropout:g}"
    if model == "gat" and setting.attention_dropout != setting.dropout:
        dropout += f", attention {setting.attention_dropout:g}"
    where = "all layers" if setting.decay_all else "first layer"
    decay = f"{setting.weight_decay:g}, {where}" if setting.weight_decay else "0"
    stop = f"{setting.epochs}, {setting.patience}" if setting.patience else f"{setting.epochs}"
    return [_shape(setting, model), dropout, f"{setting.lr:g}", decay, stop]


def _shape(setting: Setting, model: str) -> str:
    heads = f", {setting.heads} heads" if model == "gat" else ""
    if setting.residual:
        return f"{setting.residual} residual blocks, width {setting.hidden}{heads}"
    if model == "gat":
        return f"2, hidden {setting.heads} heads of {setting.hidden}"
    return f"2, hidden {setting.hidden}"


def _sources(graphs: Iterable[str]) -> str:
    used = {p.source for n in graphs for some in GRAPHS[n].published.values() for p in some}
    lines = [f"- [{key}] {text}." for key, text in SOURCES.items() if key in used]
    return "## Sources of the published figures\n\n" + "\n".join(lines) + "\n"


# Markdown ################################################################################


def _cases(rows: list[Row], graphs: list[str]) -> Iterable[tuple[str, str]]:
    for name in graphs:
        for model in MODELS:
            if any(row["graph"] == name and row["model"] == model for row in rows):
                yield name, model


def _select(
    rows: list[Row], graph: str, model: str, workers: int, *, exact: bool, dtype: str = "float32"
) -> list[Row]:
    wanted = (graph, model, workers, exact, dtype)
    keys = ("graph", "model", "workers", "exact", "dtype")
    return [row for row in rows if tuple(row[key] for key in keys) == wanted]


def _name(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(lines: list[str]) -> str:
    return "\n".join(lines)
