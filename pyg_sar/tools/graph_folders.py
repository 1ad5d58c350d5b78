"""Graphs in folders of arrays and tables, which are memory mapped and may exceed the memory.

docs/partitioning.md lists the files. A heterogeneous graph has a folder of this kind for each node
type (``TYPE``, without edges) and for each relation (``SOURCE__RELATION__TARGET``, without nodes).
Tables are read in pieces and written as arrays to files without a name in the system's temporary
folder (``TMPDIR``), which go with the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.files import check_regular
from pyg_sar.tools.tables import TABLES, read_tables


def is_graph_folder(path: Path) -> bool:
    """Says if a path is a folder with edges, or with relations that have some."""
    names = ("edge_index.npy", *(f"edges{suffix}" for suffix in TABLES))
    folders = [path, *path.glob("*__*__*")] if path.is_dir() else []
    return any((folder / name).is_file() for folder in folders for name in names)


def load_folder(folder: str | os.PathLike[str]) -> Data | HeteroData:
    """Returns the graph of a folder; see this module. Errors name the file."""
    root = Path(folder)
    inner = sorted(path for path in root.iterdir() if path.is_dir())
    if any(path.suffix in (".npy", *TABLES) for path in root.iterdir()):
        found = _attributes(root, alone=True)
        if "edge_index" not in found:
            raise ValueError(f"'{root}' has no edge_index.npy, edges.parquet or edges.csv")
        if "num_nodes" not in found and "x" not in found:
            raise ValueError(f"'{root}' has no x.npy, no nodes table and no num_nodes.npy")
        return Data(**found)
    if not inner:
        raise ValueError(f"'{root}' holds no graph: expected edge_index.npy or edges.parquet in it")
    data = HeteroData()
    for path in inner:
        name = path.name.split("__")
        if len(name) not in (1, 3):
            raise ValueError(
                f"'{path}' is neither a node type (TYPE) nor a relation (SOURCE__RELATION__TARGET)"
            )
        key = name[0] if len(name) == 1 else tuple(name)
        store = data[key]
        for attribute, value in _attributes(path).items():
            if attribute == "node_name":
                raise ValueError(
                    f"Expected the ids of the nodes in '{path}' to be 0, 1, 2, ... in this order, "
                    "as the relations of a heterogeneous graph name them: number them"
                )
            store[attribute] = value
        if len(name) == 3 and "edge_index" not in store:
            raise ValueError(f"'{path}' has no edge_index.npy, edges.parquet or edges.csv")
        if len(name) == 1 and store.num_nodes is None:
            raise ValueError(f"'{path}' has no x.npy and no num_nodes.npy")
    return data


def load_table(edges: str | os.PathLike[str], nodes: str | None = None) -> Data:
    """Returns the graph of a table of edges, and of one of nodes; see this module.

    Without a table of nodes they are those that the edges name: integers in ascending order, text
    in any order.
    """
    paths = [None if path is None else Path(path) for path in (nodes, edges)]
    for path in paths:
        if path is not None and not path.is_file():
            raise FileNotFoundError(2, "No such file", str(path))
        if path is not None and path.suffix not in TABLES:
            raise ValueError(f"Expected a table, {' or '.join(TABLES)} (got '{path}')")
    found = read_tables(*paths, alone=True)
    return Data(**found | {"num_nodes": int(found["num_nodes"])})


def _attributes(folder: Path, *, alone: bool = False) -> dict[str, Any]:
    """Returns what the files of a folder hold, by attribute."""
    found: dict[str, Any] = {}

    def take(file: Path, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in found:
                raise ValueError(f"'{file}' gives '{name}', which another file of it gives as well")
            found[name] = value

    tables: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".npy":
            take(path, {path.stem: _mapped(path)})
        elif path.suffix in TABLES:
            if path.stem not in ("nodes", "edges"):
                raise ValueError(f"Expected a table to be named nodes or edges (got '{path}')")
            if path.stem in tables:
                raise ValueError(f"'{path}' and '{tables[path.stem]}' are both tables of it")
            tables[path.stem] = path
    if tables:
        alone = alone and not {"x", "num_nodes"} & set(found)
        values = read_tables(tables.get("nodes"), tables.get("edges"), alone=alone)
        take(next(iter(tables.values())), values)
    if "num_nodes" in found:
        number = found["num_nodes"]
        if number.dim() or number.is_floating_point():
            raise ValueError(f"Expected '{folder}/num_nodes.npy' to hold one integer")
        found["num_nodes"] = int(number)
    return found


def _mapped(path: Path) -> Tensor:
    check_regular(path)
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(array)
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is not an array of numbers: {error}") from error
