"""Rows on the wire: pulling alone, pulling and pushing by a minimum vertex cover, and its bound.

    python benchmarks/cover.py --data ../shared/data --out docs/benchmarks/cover.md

A SAGEConv layer (sum) on METIS parts; the ledger counts what each worker receives in one forward
and one backward pass. The bound is the sum of the largest matchings of all cuts: no choice of
pulled rows and pushed sums takes fewer. Edge lists are made undirected where the file says so.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import to_undirected
from tqdm import tqdm

import pyg_sar

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


def rows(root: str, push: str) -> tuple[int, int]:
    """Rows that this worker receives, forward and backward."""
    data = pyg_sar.load_partition(root)
    policy = pyg_sar.SARPolicy(prefetch=0, push=push)  # type: ignore[arg-type]
    torch.manual_seed(0)
    layer = pyg_sar.distribute(SAGEConv(WIDTH, WIDTH, aggr="sum"), policy)
    x = data.x.clone().requires_grad_()
    layer(x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(pyg_sar.current()) as ledger:
        layer(x, data.edge_index).sum().backward()
    size = WIDTH * data.x.element_size()
    forward, backward = (ledger.received_bytes(kind=kind) for kind in ("fetch", "gradient"))
    return forward // size, backward // size


def bound(data: Data, part: Tensor, parts: int) -> int:
    """The sum of the largest matchings of the cuts."""
    total, (j, i) = 0, data.edge_index.numpy()
    q, p = part.numpy()[j], part.numpy()[i]
    for pair in np.unique(q[q != p] * parts + p[q != p]):
        here = (q == pair // parts) & (p == pair % parts)
        sources, a = np.unique(j[here], return_inverse=True)
        targets, b = np.unique(i[here], return_inverse=True)
        cut = csr_array((np.ones(a.size, np.int8), (a, b)), shape=(sources.size, targets.size))
        total += int((maximum_bipartite_matching(cut, perm_type="column") >= 0).sum())
    return total


def measure(path: Path, undirected: bool, parts: int) -> dict[str, Any]:
    data = read(path, undirected)
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/parts"
        pyg_sar.write_partitions(data, parts, root, "metis")
        part = torch.empty(data.num_nodes, dtype=torch.long)
        for rank, ids in enumerate(pyg_sar.launch(_ids, parts, root, backend="threads")):
            part[ids] = rank
        found = {}
        for push in ("off", "auto"):
            counts = pyg_sar.launch(rows, parts, root, push, backend="threads", timeout=600.0)
            found[push] = [sum(column) for column in zip(*counts, strict=True)]
    return {"pull": found["off"], "cover": found["auto"], "bound": bound(data, part, parts)}


def _ids(root: str) -> Tensor:
    ids: Tensor = pyg_sar.load_partition(root).n_id
    return ids


def document(results: dict[str, dict[str, Any]], parts: int, command: str) -> str:
    lines = [
        "# Rows on the wire",
        "",
        f"{date.today()}, `{command}`, {platform.machine()}, torch {torch.__version__}, "
        f"torch-geometric {torch_geometric.__version__}. METIS, {parts} parts, one SAGEConv layer. "
        "Rows that all workers receive; backward: rows of gradients. Bound: the sum of the largest "
        "matchings of all cuts.",
        "",
        "| graph | pull, forward | cover, forward | cover, backward | bound | cover / pull "
        "| cover / bound |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        (pull, _), (forward, backward) = found["pull"], found["cover"]
        lines.append(
            f"| {name} | {pull:,} | {forward:,} | {backward:,} | {found['bound']:,} "
            f"| {forward / pull:.2f} | {forward / found['bound']:.3f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        name: measure(args.data / f"{name}.npz", GRAPHS[name], args.parts)
        for name in tqdm(args.graphs)
    }
    command = "python benchmarks/cover.py --data ../shared/data"
    text = document(results, args.parts, command)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
