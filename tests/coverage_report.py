"""The tables of docs/what-runs.md: what the coverage tests found, as Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from coverage_judge import EXACT, NO_LAYER, REFUSED, UNAVAILABLE, Outcome

HEADINGS = {
    "conv": "Convolutions (`torch_geometric.nn.conv`)",
    "aggr": "Aggregations (`torch_geometric.nn.aggr`), inside a layer",
    "norm": "Norms (`torch_geometric.nn.norm`)",
    "models": "Models (`torch_geometric.nn.models`)",
}
VERDICTS = {EXACT: "yes", REFUSED: "no", UNAVAILABLE: "not here", NO_LAYER: "none"}
COLUMNS = (
    "class", "options", "runs", "strategy", "case", "float64", "float32", "bfloat16",
    "rows / shard", "bytes / one shot",
)  # fmt: skip
TITLE = "## Every class that PyG exports"
INTRODUCTION = f"""{TITLE}

Printed by `make coverage` from the outcomes of `tests/test_coverage.py`; a test checks that its
classes and verdicts are those of the tests.

Every class that PyG exports from `nn.conv`, `nn.aggr`, `nn.norm` and `nn.models` on 3 workers, mode
1 without prefetch, against plain PyG in one process, on a directed graph with self loops,
duplicates and isolated nodes.

* **runs**: *yes*: outputs and gradients of inputs, edge attributes and parameters are those of one
  process. *no*: an error says by name why not. *not here*: PyG itself can't build it without a
  package or a GPU. *none*: no layer. The shares below are of the classes that PyG can build here.
* **strategy**: *sequential* aggregates one source worker at a time; *chunked* goes by chunks of
  targets; *one_shot* fetches the whole halo; *none* exchanges no node rows by message passing.
* **case**: 2 where the backward pass needs the source rows, 1 where not.
* **float64**: the largest relative error. **float32**, **bfloat16**: the error against float64,
  divided by the single process's own error against float64, in the 2-norm of outputs, input
  gradients or parameter gradients, whichever is worst; at most 2 (the median of 25 draws where one
  draw exceeds that). A dash: PyG itself does not run it in that dtype.
* **rows / shard**: the most rows of other workers in memory at once, divided by the rows of the
  largest shard: its sources, or its targets where the sources' worker goes through its edges in the
  backward pass. Sequential aggregation holds one shard. `+` marks layers that also read edge
  scalars or node values by index outside of messages (degrees of learned weights), for which the
  halo is there at once.
* **bytes / one shot**: halo bytes of forward and backward pass, divided by those of mode 3: 1 in
  case 1, 1.5 in case 2; about 1 for softmax attention, where rows of targets are sent in place of
  sources.
"""


def kind_of(name: str) -> str:
    """``'conv'`` of ``'conv:GCNConv, cached'``."""
    return name.partition(":")[0]


def class_of(name: str) -> str:
    """``'GCNConv'`` of ``'conv:GCNConv, cached'``."""
    return name.partition(":")[2].partition(", ")[0]


def verdict_of(outcomes: Sequence[Outcome]) -> str:
    """A class runs where one of its options does."""
    found = {outcome.verdict for outcome in outcomes}
    return next(v for v in (EXACT, REFUSED, UNAVAILABLE, NO_LAYER) if v in found)


def by_class(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes per (kind, class)."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((kind_of(outcome.name), class_of(outcome.name)), []).append(outcome)
    return found


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    classes = by_class(outcomes)
    lines = [INTRODUCTION, *totals(classes), ""]
    for kind, heading in HEADINGS.items():
        lines += [f"## {heading}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for (of, name), found in classes.items():
            if of == kind:
                lines += [row(cells) for cells in class_rows(name, found)]
        lines.append("")
    return "\n".join(lines)


def totals(classes: Mapping[tuple[str, str], Sequence[Outcome]]) -> list[str]:
    """How many classes run, per kind."""
    lines = [row(("kind", "classes", "run", "refused", "not here", "none", "share")),
             row(["---"] * 7)]  # fmt: skip
    for kind, heading in HEADINGS.items():
        counts = Counter(verdict_of(found) for (of, _), found in classes.items() if of == kind)
        layers = counts.total() - counts[NO_LAYER] - counts[UNAVAILABLE]
        share = f"{100 * counts[EXACT] / max(layers, 1):.0f}%"
        refused = [counts[REFUSED], counts[UNAVAILABLE], counts[NO_LAYER]]
        cells = [counts.total(), counts[EXACT], *refused, share]
        lines.append(row([heading.split(" (")[0], *map(str, cells)]))
    inside = [found for (of, _), found in classes.items() if of == "aggr"]
    merge = sum(any(o.strategy == "sequential" for o in found) for found in inside)
    lines += ["", f"Aggregations that merge over shards (sequential): {merge} of {len(inside)}."]
    return lines


def class_rows(name: str, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row for all options that run alike, one for each option that is refused."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.verdict, one.strategy, one.case, one.reason), []).append(one)
    rows = []
    for (verdict, strategy, case, reason), found in groups.items():
        options = "; ".join(o.name.partition(", ")[2] or "defaults" for o in found)
        cells = [f"`{name}`", options, VERDICTS[verdict]]
        if verdict != EXACT:
            rows.append([*cells, first_sentence(reason), *[""] * 6])
            continue
        low = [largest(o.ratios.get(d) for o in found) for d in ("float32", "bfloat16")]
        rows.append([*cells, strategy, case, f"{max(o.error for o in found):.0e}", *low,
                     resident(found), largest(o.traffic for o in found)])  # fmt: skip
    return rows


def resident(found: Sequence[Outcome]) -> str:
    """The most rows by the largest shard's."""
    shares = [o.resident[0] / max(o.resident[1], 1) for o in found if o.strategy != "none"]
    mark = " +" if any(o.gathers for o in found) else ""
    return f"{max(shares):.1f}{mark}" if shares else ""


def largest(numbers: Iterable[float | None]) -> str:
    """The largest number that there is."""
    known = [n for n in numbers if n is not None and not math.isnan(n)]
    return f"{max(known):.2f}" if known else "-"


def first_sentence(text: str) -> str:
    """Up to the first full stop or semicolon, without a table's bars."""
    return re.split(r"[.;] ", text)[0].replace("|", "/")[:160]


def row(cells: Iterable[str]) -> str:
    """A table's row."""
    return "| " + " | ".join(cells) + " |"


def verdicts_in(document: str) -> dict[tuple[str, str, str], str]:
    """(kind, class, options) and verdict of every row of a document that :func:`render` made."""
    kinds = {heading: kind for kind, heading in HEADINGS.items()}
    found, kind = {}, ""
    for line in document.splitlines():
        if line.startswith("## "):
            kind = kinds.get(line[3:], "")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind and line.startswith("| `"):
            found[kind, cells[0].strip("`"), cells[1]] = cells[2]
    return found
