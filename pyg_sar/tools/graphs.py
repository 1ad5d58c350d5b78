"""Reads the graphs of the command line: one string names a source and its options.

Sources are ``synthetic``, datasets of PyG and OGB by name, files and folders: docs/partitioning.md
has a table of them. Options follow a colon, as in ``synthetic:nodes=200000,degree=50`` or
``wikics:split=3``. They are the fields of :class:`GraphOptions` and, for ``synthetic``, of
:class:`~pyg_sar.tools.graph_sources.SyntheticGraph`; for a table of edges ``nodes``, a table of
nodes.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import os
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToUndirected

from pyg_sar.files import check_argument
from pyg_sar.partition.assignment import check_graph, check_seed, count_nodes, edges_of_relations
from pyg_sar.tools.graph_folders import is_graph_folder, load_folder, load_table
from pyg_sar.tools.graph_sources import (
    FILE_SUFFIXES,
    SyntheticGraph,
    load_npz,
    load_saved,
    safe_data_classes,
    synthetic_graph,
)
from pyg_sar.tools.ogb_folders import find_ogb_folder, is_ogb_folder, load_ogb_folder, official_name
from pyg_sar.tools.tables import TABLES
from pyg_sar.wording import counted

T = TypeVar("T")

DATASETS: dict[str, tuple[str, str | None]] = {
    "actor": ("Actor", None),
    "amazonphoto": ("Amazon", "Photo"),
    "amazoncomputers": ("Amazon", "Computers"),
    "amazonratings": ("HeterophilousGraphDataset", "Amazon-ratings"),
    "citeseer": ("Planetoid", "CiteSeer"),
    "coauthorcs": ("Coauthor", "CS"),
    "coauthorphysics": ("Coauthor", "Physics"),
    "computers": ("Amazon", "Computers"),
    "cora": ("Planetoid", "Cora"),
    "corafull": ("CitationFull", "Cora"),
    "cs": ("Coauthor", "CS"),
    "dblp": ("CitationFull", "DBLP"),
    "flickr": ("Flickr", None),
    "karateclub": ("KarateClub", None),
    "minesweeper": ("HeterophilousGraphDataset", "Minesweeper"),
    "photo": ("Amazon", "Photo"),
    "physics": ("Coauthor", "Physics"),
    "pubmed": ("Planetoid", "PubMed"),
    "questions": ("HeterophilousGraphDataset", "Questions"),
    "reddit": ("Reddit", None),
    "reddit2": ("Reddit2", None),
    "romanempire": ("HeterophilousGraphDataset", "Roman-empire"),
    "tolokers": ("HeterophilousGraphDataset", "Tolokers"),
    "wikics": ("WikiCS", None),
    "yelp": ("Yelp", None),
}
"""Short names, in lower case without punctuation: the class in ``torch_geometric.datasets``, and
the dataset's name where one class holds several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """The option of a table of edges: the table of nodes."""

    nodes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOptions:
    """The options that apply to any graph after it is read.

    Attributes:
        split: ``'auto'``: the masks of the source (also ``[N, k]``), or ``'random'`` without any.
            A number: that column of masks ``[N, k]``. ``'random'``: 60% of the labelled nodes for
            training, 20% for validation, 20% for testing. ``'per_class'``: 20 of each class for
            training, 30 for validation, the others for testing (Shchur et al., "Pitfalls of graph
            neural network evaluation", 2018). Both are drawn by seed.
        undirected: Add the reverse of each edge and drop duplicates; edge attributes of edges
            that become one are combined by their maximum.
        remove_self_loops: Drop edges from a node to itself, as PyG's own datasets mostly do.
        normalize: Scale each row of ``x`` to sum 1 (PyG's ``NormalizeFeatures``).
        sparse: Keep or make ``x`` a CSR matrix.
        random_features: So many standard normal features where the source has no ``x``.
        feature_columns: Names of attributes with a number per node, or patterns (``f*``),
            separated by blanks: they become the columns of ``x``, in this order and as float32, in
            place of attributes of their own.
    """

    split: str = "auto"
    undirected: bool = False
    remove_self_loops: bool = False
    normalize: bool = False
    sparse: bool = False
    random_features: int = 0
    feature_columns: str = ""

    def __post_init__(self) -> None:
        known = self.split in ("auto", "random", "per_class") or self.split.isdecimal()
        wanted = "'auto', 'random', 'per_class' or the number of a split"
        check_argument(known, "split", self.split, wanted)
        number = self.random_features
        check_argument(number >= 0, "random_features", number, "at least 0")


def load_graph(
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Data | HeteroData:
    """Loads a graph from a source: a name, a file or a folder (docs/partitioning.md has the table).

    .. code-block:: python

        graph = load_graph("synthetic:nodes=2000,classes=8")  # drawn at random
        graph = load_graph("cora", root="data")  # of PyG: read from there, or downloaded
        graph = load_graph("links.csv:nodes=people.csv")  # tables; also .npz, .pt and folders

    Args:
        source: The source and, after a colon, its options; a path, too.
        root: The folder that holds downloaded datasets, or gets them. Default: ``data``. Of a
            PyG dataset with several names, PyG's own ``root`` is taken as well.
        seed: Seed of synthetic graphs, drawn splits and random features.
        **options: More options; fields of :class:`GraphOptions` or, for ``synthetic``, also of
            :class:`~pyg_sar.tools.graph_sources.SyntheticGraph`.

    Returns:
        The graph, on the CPU.

    Raises:
        ValueError: When the source or an option is unknown, or the file can't be used.
        ImportError: When the source needs an extra that is not installed.
        OSError: When a file is missing or a dataset can't be downloaded.
    """
    check_seed(seed)
    name, written = parse_source(os.fspath(source))
    given = {**written, **options}
    allowed: list[type] = [GraphOptions]
    if name == "synthetic":
        allowed.append(SyntheticGraph)
    if Path(name).suffix in TABLES:
        allowed.append(TableOptions)
    common, *special = _choose(given, allowed, name)
    settings = GraphOptions(**common)
    data: Data | HeteroData
    if name == "synthetic":
        data = synthetic_graph(SyntheticGraph(**special[0]), seed)
    elif Path(name).suffix in FILE_SUFFIXES:
        data = load_npz(name) if Path(name).suffix == ".npz" else load_saved(name)
    elif Path(name).suffix in TABLES:
        data = load_table(name, TableOptions(**special[0]).nodes or None)
    elif is_graph_folder(Path(name)):
        data = load_folder(name)
    elif is_ogb_folder(Path(name)):
        data = load_ogb_folder(Path(name))
    elif name.lower().startswith("ogbn-"):
        data = _load_ogb(official_name(name) or name.lower(), Path(root or "data"))
    else:
        data = _load_dataset(name, Path(root or "data"))
    try:
        return _finish(data, settings, seed)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from error


def parse_source(source: str) -> tuple[str, dict[str, str]]:
    """Returns the name and the options of ``'name:key=value,...'``."""
    name, colon, text = source.partition(":")
    if not colon or "=" not in text:
        return source, {}
    options = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(
                f"Expected options 'key=value,key=value' after '{name}:' (got {item!r})"
            )
        if key.strip() in options:
            raise ValueError(f"'{source}' gives '{key.strip()}' twice; leave one out")
        options[key.strip()] = value.strip()
    return name, options


def settings_of(kind: Callable[..., T], given: Namespace, /, **others: Any) -> T:
    """Returns a dataclass of the options that have its fields' names, and of ``others``."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{n: v for n, v in vars(given).items() if n in names} | others)


def _choose(given: Mapping[str, Any], classes: list[type], name: str) -> list[dict[str, Any]]:
    """Sorts options by the class that has the field, and converts what came as text."""
    chosen: list[dict[str, Any]] = [{} for _ in classes]
    kinds = [{field.name: str(field.type) for field in fields(cls)} for cls in classes]
    for key, value in given.items():
        for kind, options in zip(kinds, chosen, strict=True):
            if key in kind:
                options[key] = _convert(key, value, kind[key])
                break
        else:
            known = [field for kind in kinds for field in kind]
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise ValueError(
                f"Unknown option '{key}' of '{name}'{hint} Choose from {', '.join(known)}"
            )
    return chosen


def _convert(key: str, value: Any, kind: str) -> Any:
    """Returns an option's value as its field's type."""
    if kind == "str":
        return str(value)
    if kind == "bool":
        text = str(value).lower()
        known = ("true", "1", "yes", "false", "0", "no")
        check_argument(text in known, key, value, "true or false")
        return text in known[:3]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"Expected '{key}' to be a number (got {value!r})") from None
    if kind == "float":
        return number
    check_argument(number.is_integer(), key, value, "a whole number")
    return int(value) if isinstance(value, int) else int(number)


# Datasets ################################################################################


def _load_dataset(name: str, root: Path) -> Data | HeteroData:
    """Returns a graph of ``torch_geometric.datasets``."""
    import torch_geometric.datasets as datasets

    short = re.sub("[^a-z0-9]", "", name.lower())
    family, _, member = name.partition("/")
    if short in DATASETS:
        family, member = DATASETS[short][0], DATASETS[short][1] or ""
    kind = getattr(datasets, family, None)
    if not inspect.isclass(kind):
        raise ValueError(_unknown_source(name))
    parameters = inspect.signature(kind).parameters
    if "name" in parameters and not member:
        raise ValueError(f"'{family}' holds several datasets; write '{family}/NAME'")
    folder = root if member and (root / member).is_dir() else root / family
    arguments: dict[str, Any] = {"root": str(folder)} if "root" in parameters else {}
    if member:
        arguments["name"] = member
    if "root" in arguments:
        sys.stderr.write(
            f"PyG's {family} reads '{folder}', and may unpickle files there, which can run code: "
            "take them from a source that you trust\n"
        )
    try:
        dataset: Any = kind(**arguments)
    except ImportError as error:
        raise ImportError(
            f"PyG reads the dataset '{name}' with '{error.name}', which is not installed: "
            f"pip install {error.name}"
        ) from error
    except OSError as error:
        raise OSError(_unavailable(name, folder, error)) from error
    if len(dataset) != 1:
        raise ValueError(
            f"'{name}' holds {counted(len(dataset), 'graphs')}; only single graphs are supported"
        )
    data: Data | HeteroData = dataset[0]
    if type(data) not in (Data, HeteroData):
        raise ValueError(f"'{name}' is neither a Data nor a HeteroData ({type(data).__name__})")
    return data


def _unavailable(name: str, folder: Path, error: OSError) -> str:
    return (
        f"The dataset '{name}' is not in '{folder}', and could not be downloaded and processed "
        f"there: {error}; set 'root' (--data-root) to a writable folder that holds it"
    )


def _unknown_source(name: str) -> str:
    known = ["synthetic", *DATASETS]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return (
        f"There is no file or folder '{name}', nor a dataset of this name{hint} Choose "
        f"'synthetic', a dataset ({', '.join(DATASETS)}), "
        "'Class/Name' of torch_geometric.datasets, 'ogbn-NAME', a file ending in "
        f"{', '.join((*FILE_SUFFIXES, *TABLES))}, or a folder with edge_index.npy, edges.parquet "
        "or OGB's raw files"
    )


def _load_ogb(name: str, root: Path) -> Data | HeteroData:
    """Returns a node dataset of OGB from its raw files, which ogb downloads if need be."""
    folder = find_ogb_folder(name, root)
    if folder is not None:
        return load_ogb_folder(folder)
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(
            f"'{name}' is not in '{root}', and needs the extra 'ogb' to be downloaded, which is "
            "not installed: pip install 'pyg_sar[ogb]'"
        ) from error
    try:
        # ogb pickles what it processed; only its raw files are needed.
        with safe_data_classes(), suppress(pickle.UnpicklingError):
            PygNodePropPredDataset(name=name, root=str(root))
    except OSError as error:
        raise OSError(_unavailable(name, root, error)) from error
    folder = find_ogb_folder(name, root)
    if folder is None:
        raise OSError(_unavailable(name, root, OSError("ogb left no raw files of it")))
    return load_ogb_folder(folder)


# After reading ###########################################################################


def _finish(data: Data | HeteroData, options: GraphOptions, seed: int) -> Data | HeteroData:
    """Applies :class:`GraphOptions`, in a ``HeteroData`` to each node type and relation."""
    rng = np.random.default_rng([seed, 1])  # Not the stream that a synthetic graph was drawn by.
    stores = (
        _checked_hetero(data, options) if isinstance(data, HeteroData) else _checked(data, options)
    )
    for store, count in stores:
        if store.get("x") is None and options.random_features:
            x = rng.standard_normal((count, options.random_features), dtype=np.float32)
            store.x = torch.from_numpy(x)
        if store.get("x") is not None:
            store.x = _prepare_features(store.x, options)
        store.num_nodes = count
        if store is data or store.get("y") is not None:
            _apply_split(store, options.split, rng)
    for edges in data.edge_stores if options.remove_self_loops else ():
        if "edge_index" in edges and not edges.is_bipartite():
            kept = edges.edge_index[0] != edges.edge_index[1]
            for name in edges.edge_attrs():
                edges[name] = edges[name][..., kept] if "index" in name else edges[name][kept]
    return ToUndirected(reduce="max")(data) if options.undirected else data


def _checked(data: Data, options: GraphOptions) -> list[tuple[Any, int]]:
    """Returns a graph, and its number of nodes."""
    num_nodes = data.num_nodes
    if num_nodes is None:
        raise ValueError("The graph does not tell its number of nodes: save it with 'num_nodes'")
    y = data.get("y")
    if isinstance(y, Tensor) and y.dim() == 2 and y.size(1) == 1:
        data.y = y.view(-1)
    if options.feature_columns:
        _stack_features(data, options.feature_columns.split(), num_nodes)
    if data.get("edge_index") is not None:
        check_graph(data, whole=False)
    return [(data, num_nodes)]


def _checked_hetero(data: HeteroData, options: GraphOptions) -> list[tuple[Any, int]]:
    """Returns the node types of a graph, and the number of nodes of each."""
    if options.feature_columns:
        raise ValueError(
            f"'feature_columns={options.feature_columns}' is of graphs with one type of nodes only"
        )
    counts = {name: count_nodes(name, data[name]) for name in data.node_types}
    edges_of_relations(data, counts, whole=False)
    return [(data[name], count) for name, count in counts.items()]


def number_columns(data: Data, num_nodes: int) -> list[str]:
    """Returns the names of the attributes that have a real number per node."""
    return [
        name
        for name, value in data.to_dict().items()
        if isinstance(value, Tensor) and value.shape == (num_nodes,) and not value.is_complex()
    ]


def _stack_features(data: Data, patterns: list[str], num_nodes: int) -> None:
    """Makes ``x`` of attributes that have a number per node."""
    if data.get("x") is not None:
        raise ValueError(f"'feature_columns={' '.join(patterns)}' would replace the graph's 'x'")
    columns = number_columns(data, num_nodes)
    chosen: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(columns, pattern)
        if not matching:
            raise ValueError(
                f"'feature_columns' (--features): there is no column {pattern!r} with a number per "
                f"node. Choose from {', '.join(map(repr, columns)) or 'none'}"
            )
        chosen += [name for name in matching if name not in chosen]
    x = torch.empty(num_nodes, len(chosen))
    for column, name in enumerate(chosen):
        x[:, column] = data[name]
        del data[name]
    data.x = x


def _prepare_features(x: Any, options: GraphOptions) -> Tensor:
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                "Expected 'x' to hold numbers, a row per node (got a "
                f"{type(x).__name__}: {str(x)[:40]} ...); keep texts under another name"
            ) from None
    if x.layout != torch.strided:
        x = x.to_sparse_csr() if options.sparse else x.to_dense()
    if options.normalize and x.layout != torch.strided and bool((x.values() < 0).any()):
        x = x.to_dense()  # The lowest number is subtracted from zeros, too.
    if options.normalize and x.layout == torch.strided:
        x = x - x.min() if x.numel() else x
        x = x / x.sum(dim=-1, keepdim=True).clamp(min=1.0)
    elif options.normalize:
        crow, column, values = x.crow_indices(), x.col_indices(), x.values()
        row = torch.repeat_interleave(torch.arange(x.size(0)), crow.diff())
        total = values.new_zeros(x.size(0)).index_add(0, row, values).clamp(min=1.0)
        x = torch.sparse_csr_tensor(crow, column, values / total[row], x.shape)
    return x.to_sparse_csr() if options.sparse and x.layout == torch.strided else x


def _apply_split(data: Any, split: str, rng: np.random.Generator) -> None:
    masks = [name for name in data.keys() if name.endswith("_mask")]  # noqa: SIM118
    if split.isdecimal():
        several = [name for name in masks if data[name].dim() == 2]
        number = min((data[name].size(1) for name in several), default=0)
        if int(split) >= number:
            raise ValueError(
                f"Expected 'split' below {number}, the number of splits of this graph "
                f"(got {split}); or draw one with split=random or split=per_class"
            )
        for name in several:
            data[name] = data[name][:, int(split)].contiguous()
        return
    if split == "auto" and ("train_mask" in masks or data.get("y") is None):
        return
    for name in masks:
        del data[name]
    nodes = rng.permutation(_labelled(data).numpy())
    if split == "per_class":
        chosen = _per_class(data.y, nodes)
    else:
        chosen = np.split(nodes, [nodes.size * 6 // 10, nodes.size * 8 // 10])
    for name, part in zip(("train_mask", "val_mask", "test_mask"), chosen, strict=True):
        data[name] = torch.zeros(data.num_nodes, dtype=torch.bool)
        data[name][torch.from_numpy(part)] = True


def _labelled(data: Data) -> Tensor:
    """Returns the nodes that have a label: y >= 0, or not NaN."""
    y = data.get("y")
    if not isinstance(y, Tensor) or y.dim() == 0 or y.size(0) != data.num_nodes:
        raise ValueError("A split is drawn among labelled nodes, but the graph has no 'y' per node")
    known = ~y.isnan() if y.is_floating_point() else y.long() >= 0  # uint16 compares with none.
    return (known if y.dim() == 1 else known.flatten(1).any(dim=1)).nonzero().view(-1)


def _per_class(y: Tensor, nodes: Any) -> list[Any]:
    """Divides nodes, in random order, by classes: 20 of each, 30 of each, and the others."""
    if y.dim() != 1:
        raise ValueError(
            "split=per_class needs one class per node, 'y' of shape [num_nodes] "
            f"(got {list(y.shape)}); use split=random"
        )
    labels = y[torch.from_numpy(nodes)].numpy()
    order = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place = np.arange(nodes.size) - np.repeat(starts, counts)  # Position within the class.
    nodes = nodes[order]
    return [nodes[place < 20], nodes[(place >= 20) & (place < 50)], nodes[place >= 50]]
