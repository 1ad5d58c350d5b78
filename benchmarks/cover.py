"""Rows and bytes on the wire: pulling alone, pulling and pushing by a cover, and the bound.

    python benchmarks/cover.py --data ../shared/data --out cover.md

One layer on METIS parts; the ledger counts what each worker receives in one forward and one
backward pass. Sums: a SAGEConv layer; the bound is the sum of the largest matchings of all cuts: no
choice of pulled rows and pushed sums takes fewer. Attention: the bound is the sum of the largest
flows at the bytes that a row of each kind takes, over both passes (:mod:`pyg_sar.exchange.cover`).
Edge lists are made undirected where the file says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
from command_line import command
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv
from torch_geometric.utils import to_undirected
from tqdm import tqdm

import pyg_sar
from pyg_sar.engine.kernels.attention import row_bytes
from pyg_sar.exchange.cover import COSTS, minimum_cover, stored_covers
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.ledger import HALO_KINDS
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.storage import read_part

GRAPHS = {  # name: to be made undirected
    "pkg_npm_2016": False,
    "web_cnr_2000": False,
    "snap_ego_twitter_undirected": True,
    "tolokers": True,
    "law_dblp_2010": False,
    "amazon_computers": True,
    "coauthor_physics": False,
    "snap_soc_slashdot0902": False,
}
WIDTH = 4


def read(path: Path, undirected: bool) -> Data:
    """The graph of a file, with drawn features."""
    with np.load(path, allow_pickle=False) as file:
        edge_index = torch.from_numpy(file["edge_index"].astype(np.int64))
        nodes = int(file["num_nodes"])
    edge_index = to_undirected(edge_index, num_nodes=nodes) if undirected else edge_index
    x = torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(0))
    return Data(x=x, edge_index=edge_index, num_nodes=nodes)


CHANNELS = 32
LAYERS = {  # one head; bytes are in proportion to the heads
    "GATConv": lambda: GATConv(WIDTH, CHANNELS, add_self_loops=False),
    "GATv2Conv": lambda: GATv2Conv(WIDTH, CHANNELS, add_self_loops=False),
    "TransformerConv": lambda: TransformerConv(WIDTH, CHANNELS),
}


def costs(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of a pulled row and of a pushed target, forward and backward, in mode 1."""
    row = torch.empty(1, 1, CHANNELS)
    narrow = row[..., 0]
    if name == "GATConv":
        return row_bytes(Attention(kind="additive", value=row, key=narrow, query=narrow), 1)
    if name == "GATv2Conv":
        return row_bytes(Attention(kind="gatv2", value=row, query=row), 1)
    return row_bytes(Attention(kind="dot", value=row, key=row, query=row), 1)


def attention(root: str, push: str) -> dict[str, tuple[int, ...]]:
    """Bytes that this worker receives, forward and backward, by layer."""
    data = pyg_sar.load_partition(root)
    policy = pyg_sar.SARPolicy(prefetch=0, push=push)  # type: ignore[arg-type]
    x, found = data.x.clone().requires_grad_(), {}
    for name, make in LAYERS.items():
        layer = pyg_sar.distribute(make(), policy)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            layer(x, data.edge_index).sum().backward()
        found[name] = tuple(
            sum(ledger.received_bytes(phase=phase, kind=kind) for kind in HALO_KINDS)
            for phase in ("forward", "backward")
        )
    return found


def rows(root: str, push: str) -> tuple[int, int]:
    """Rows that this worker receives, forward and backward."""
    data = pyg_sar.load_partition(root)
    policy = pyg_sar.SARPolicy(prefetch=0, push=push)  # type: ignore[arg-type]
    torch.manual_seed(0)
    layer = pyg_sar.distribute(SAGEConv(WIDTH, WIDTH, aggr="sum"), policy)
    x = data.x.clone().requires_grad_()
    layer(x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(x, data.edge_index).sum().backward()
    size = WIDTH * data.x.element_size()
    forward, backward = (ledger.received_bytes(kind=kind) for kind in ("fetch", "gradient"))
    return forward // size, backward // size


def bound(data: Data, part: Tensor, parts: int, names: Sequence[str]) -> dict[str, int]:
    """The sum of the largest matchings of the cuts, and of the largest flows by layer."""
    total, (j, i) = Counter({"sums": 0}), data.edge_index.numpy()
    q, p = part.numpy()[j], part.numpy()[i]
    for pair in np.unique(q[q != p] * parts + p[q != p]):
        here = (q == pair // parts) & (p == pair % parts)
        sources, a = np.unique(j[here], return_inverse=True)
        targets, b = np.unique(i[here], return_inverse=True)
        cut = csr_array((np.ones(a.size, np.int8), (a, b)), shape=(sources.size, targets.size))
        total["sums"] += int((maximum_bipartite_matching(cut, perm_type="column") >= 0).sum())
        for name in names:
            ends = torch.from_numpy(a), torch.from_numpy(b), sources.size, targets.size
            total[name] += sum(minimum_cover(*ends, *cost).bound for cost in costs(name))
    return dict(total)


def seconds(root: str, data: Data, parts: int) -> tuple[float, float]:
    """CPU time of METIS, and of the covers that go with the partition."""
    start = time.process_time()
    assign_nodes(data.edge_index, data.num_nodes, parts)
    metis, covers = time.process_time() - start, 0.0
    for p in range(parts):
        part = read_part(root, p)
        row = part["edge_index"][0] - part["n_id"].numel()
        ends = row[row >= 0], part["edge_index"][1, row >= 0]
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), part["halo_counts"].cumsum(0)])
        start = time.process_time()
        stored_covers(*ends, offsets.tolist())
        covers += time.process_time() - start
    return metis, covers


def measure(path: Path, undirected: bool, parts: int) -> dict[str, Any]:
    data = read(path, undirected)
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/parts"
        pyg_sar.write_partitions(data, parts, root, "metis")
        part = torch.empty(data.num_nodes, dtype=torch.long)
        for rank in range(parts):
            part[read_part(root, rank)["n_id"]] = rank
        found: dict[str, dict[str, Any]] = {}
        for way, push in (("pull", "off"), ("cover", "auto")):
            sums: Any = pyg_sar.launch(rows, parts, root, push, timeout=600.0)
            layers = pyg_sar.launch(attention, parts, root, push, timeout=600.0)
            counts = {"sums": sums, **{n: [worker[n] for worker in layers] for n in LAYERS}}
            found[way] = {
                n: [sum(c) for c in zip(*rows, strict=True)] for n, rows in counts.items()
            }
        found["seconds"] = {"all": list(seconds(root, data, parts))}
    return {**found, "bound": bound(data, part, parts, list(LAYERS))}


def document(results: dict[str, dict[str, Any]], parts: int, shown: str) -> str:
    lines = [
        "# Rows and bytes on the wire",
        "",
        f"{date.today()}, `{shown}`, {platform.machine()}, torch {torch.__version__}, "
        f"torch-geometric {torch_geometric.__version__}. METIS, {parts} parts. What all workers "
        "receive in one forward and one backward pass of one layer, counted by the ledger.",
        "",
        "## Sums",
        "",
        "Rows of a SAGEConv layer; backward: rows of gradients. Bound: the sum of the largest "
        "matchings of all cuts.",
        "",
        "| graph | pull, forward | cover, forward | cover, backward | bound | cover / pull "
        "| cover / bound |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        (pull, _), (forward, backward) = found["pull"]["sums"], found["cover"]["sums"]
        least = found["bound"]["sums"]
        lines.append(
            f"| {name} | {pull:,} | {forward:,} | {backward:,} | {least:,} "
            f"| {forward / pull:.2f} | {forward / least:.3f} |"
        )
    return "\n".join([*lines, *attention_lines(results), *time_lines(results), ""])


def time_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    return [
        "",
        "## Time",
        "",
        f"CPU seconds of one thread, once per partition: METIS, and the covers at the {len(COSTS)} "
        "costs that are stored with it.",
        "",
        "| graph | METIS | covers | covers / METIS |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {metis:.2f} | {covers:.2f} | {covers / metis:.2f} |"
            for name, found in results.items()
            for metis, covers in [found["seconds"]["all"]]
        ),
    ]


def attention_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Attention",
        "",
        f"Kilobytes in mode 1, float32, one head of {CHANNELS} channels; bytes are in proportion "
        "to the heads. Pulling: rows are fetched twice, and their gradients sent. Pushing: queries "
        "go, and states come back; what is known of a target goes, and its query's gradient comes "
        "back (`pyg_sar/engine/kernels/attention.py` has the formulas). Each pass has its own "
        "cover. Bound: "
        "the sum of the largest flows through all cuts, at the exact bytes of both kinds of rows, "
        "pass by pass. Where the cover of a pass saves less than 5%, all its rows are pulled.",
        "",
        "| graph | layer | pull, forward | pull, backward | cover, forward | cover, backward "
        "| bound | cover / pull | cover / bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        for layer in LAYERS:
            pull, cover, least = (found[way][layer] for way in ("pull", "cover", "bound"))
            cells = [f"{n / 1000:,.0f}" for n in (*pull, *cover, least)]
            lines.append(
                f"| {name} | {layer} | {' | '.join(cells)} | {sum(cover) / sum(pull):.2f} "
                f"| {sum(cover) / least:.3f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYG_SAR_SHARED_MEMORY"] = "0"  # as between hosts
    results = {
        name: measure(args.data / f"{name}.npz", GRAPHS[name], args.parts)
        for name in tqdm(args.graphs)
    }
    text = document(results, args.parts, command(args))
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
