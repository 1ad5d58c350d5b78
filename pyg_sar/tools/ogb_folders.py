"""OGB's node datasets, read from files in OGB's own raw layout.

.. code-block:: text

    ogbn_arxiv/raw/edge.csv.gz                   source, target
                   num-node-list.csv.gz          one number
                   node-feat.csv.gz              a row per node; also node_year, node_species
                   edge-feat.csv.gz              a row per edge
                   node-label.csv.gz             a row per node
               split/time/train.csv.gz           node ids; also valid, test; or split_dict.pt

    ogbn_papers100M/raw/data.npz                 edge_index, num_nodes_list, node_feat, node_year
                        node-label.npz           node_label; NaN: none

    ogbn_mag/raw/triplet-type-list.csv.gz        head, relation, tail
                 num-node-dict.csv.gz            a header of node types, one row of numbers
                 nodetype-has-label.csv.gz       a header of node types, one row of True and False
                 relations/HEAD___RELATION___TAIL/edge.csv.gz, edge_reltype.csv.gz
                 node-feat/TYPE/node-feat.csv.gz, node_year.csv.gz
                 node-label/TYPE/node-label.csv.gz
             split/time/TYPE/train.csv.gz

Files are read in pieces and written as arrays to files without a name in the system's temporary
folder (``TMPDIR``), as tables are (:mod:`~pyg_sar.tools.graph_folders`). Attributes have the names
that ogb gives them; labels are int64, -1 where there is none; the split is masks.

Source: Hu et al., "Open Graph Benchmark: datasets for machine learning on graphs", NeurIPS 2020;
``ogb.io.read_graph_raw`` and ``master.csv`` of ``ogb.nodeproppred``, version 1.3.6.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.files import check_regular
from pyg_sar.tools.graph_sources import safe_data_classes
from pyg_sar.tools.tables import Array, ColumnFile, arrow, joined_ends, mapped_array
from pyg_sar.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class OgbDataset:
    """The facts that OGB tells of a dataset beside its files.

    Attributes:
        split: The folder of the split.
        download: The folder's name in the downloaded archive.
        both_directions: The files hold an undirected edge once; ogb puts its reverse behind it.
        version: Of the release.
    """

    split: str
    download: str
    both_directions: bool = False
    version: int = 1


OGB_DATASETS = {
    "ogbn-arxiv": OgbDataset(split="time", download="arxiv"),
    "ogbn-mag": OgbDataset(split="time", download="mag", version=2),
    "ogbn-papers100M": OgbDataset(split="time", download="papers100M-bin"),
    "ogbn-products": OgbDataset(split="sales_ranking", download="products", both_directions=True),
    "ogbn-proteins": OgbDataset(split="species", download="proteins", both_directions=True),
}
_ATTRIBUTES = {
    "node-feat": "x",
    "node_feat": "x",
    "edge-feat": "edge_attr",
    "edge_feat": "edge_attr",
}
_FEATURES = ("x", "edge_attr")  # float32; anything else holds whole numbers
_RAW = ("edge.csv.gz", "data.npz", "triplet-type-list.csv.gz")
_BYTES = 2**22  # of a piece of an array


def official_name(name: str) -> str | None:
    """Returns OGB's name of a dataset from that of a folder, or of a source, or ``None``."""
    plain = name.lower().replace("_", "-").removesuffix("-pyg")
    for official, dataset in OGB_DATASETS.items():
        if plain in (official.lower(), dataset.download.lower()):
            return official
    return None


def is_ogb_folder(path: Path) -> bool:
    """Says if a path is a folder in OGB's raw layout."""
    return any((path / "raw" / name).is_file() for name in _RAW)


def find_ogb_folder(name: str, root: Path) -> Path | None:
    """Returns the folder in which ogb keeps the raw files of a dataset; ``None``: there is none."""
    official = official_name(name)
    names = [] if official is None else [official.replace("-", "_"), official]
    folders = [root / f"{one}{end}" for one in names for end in ("_pyg", "")]
    return next((folder for folder in folders if is_ogb_folder(folder)), None)


def load_ogb_folder(folder: Path) -> Data | HeteroData:
    """Returns the graph of a folder; see this module. Errors name the file.

    A folder whose name tells no dataset of OGB, and another release of one, are refused.
    """
    name = official_name(folder.resolve().name)
    if name is None:
        raise ValueError(
            f"The name of '{folder}' tells no dataset of OGB, and so not if its edges have both "
            f"directions: rename it to one of {', '.join(OGB_DATASETS)}"
        )
    dataset = OGB_DATASETS[name]
    releases = [path.name for path in folder.glob("RELEASE_v*.txt")]
    if releases and f"RELEASE_v{dataset.version}.txt" not in releases:
        raise ValueError(
            f"'{folder}' holds {releases[0]}, but {name} is at version {dataset.version}: "
            "download it again"
        )
    raw, split = folder / "raw", folder / "split" / dataset.split
    if (raw / _RAW[2]).is_file():
        return _hetero(raw, split)
    data = _binary(raw) if (raw / _RAW[1]).is_file() else _tables(raw, dataset.both_directions)
    _add_split(data, split, int(cast(int, data.num_nodes)))
    return data


# Kinds of graphs ##############################################################


def _tables(raw: Path, both_directions: bool) -> Data:
    data = Data(num_nodes=_number(raw / "num-node-list.csv.gz"))
    data.edge_index = _edges(raw / "edge.csv.gz", both_directions)
    _add_attributes(data, raw, "node", data.num_nodes)
    _add_attributes(data, raw, "edge", data.edge_index.size(1), 2 if both_directions else 1)
    if (species := raw / "species.csv.gz").is_file():  # So in the archive of ogbn-proteins.
        data.node_species = _matrix(species, "node_species", data.num_nodes)
    if (labels := raw / "node-label.csv.gz").is_file():
        data.y = _labels(labels, data.num_nodes)
    return data


def _add_attributes(
    store: Any, folder: Path, level: str, rows: int | None, copies: int = 1
) -> None:
    """Reads what a folder has of its nodes or edges, but for ids and labels."""
    for path in sorted(folder.glob(f"{level}*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        if name not in ("edge", "node-label"):
            store[_ATTRIBUTES.get(name, name)] = _matrix(path, name, rows, copies)


def _hetero(raw: Path, split: Path) -> HeteroData:
    data = HeteroData()
    for kind, number in _header(raw / "num-node-dict.csv.gz").items():
        data[kind].num_nodes = int(number)
        _add_attributes(data[kind], raw / "node-feat" / kind, "node", int(number))
    for head, relation, tail in _lines(raw / _RAW[2]):
        store = data[head, relation, tail]
        folder = raw / "relations" / "___".join((head, relation, tail))
        store.edge_index = _edges(folder / "edge.csv.gz", False)
        _add_attributes(store, folder, "edge", store.edge_index.size(1))
    for kind, has in _header(raw / "nodetype-has-label.csv.gz").items():
        if has == "True":
            path = raw / "node-label" / kind / "node-label.csv.gz"
            data[kind].y = _labels(path, data[kind].num_nodes)
    for kind, has in _header(split / "nodetype-has-split.csv.gz").items():
        if has == "True":
            _add_split(data[kind], split / kind, data[kind].num_nodes)
    return data


def _binary(raw: Path) -> Data:
    path = raw / "data.npz"
    data = Data()
    with _archive(path) as file:
        names = [name.removesuffix(".npy") for name in file.namelist()]
        for name in names:
            if name not in ("num_nodes_list", "num_edges_list"):
                attribute = "edge_index" if name == "edge_index" else _ATTRIBUTES.get(name, name)
                data[attribute] = torch.from_numpy(_member(path, file, name))
        counts = _member(path, file, "num_nodes_list") if "num_nodes_list" in names else np.empty(0)
    if "edge_index" not in data or counts.size != 1:
        raise ValueError(
            f"Expected '{path}' to hold the edge_index and num_nodes_list of one graph"
        )
    data.num_nodes = int(counts.reshape(-1)[0])
    labels = raw / "node-label.npz"
    with _archive(labels) as file:
        data.y = _whole_labels(labels, torch.from_numpy(_member(labels, file, "node_label")))
    return data


def _add_split(store: Any, folder: Path, num_nodes: int) -> None:
    saved, splits = folder / "split_dict.pt", None
    if saved.is_file():
        with safe_data_classes():
            splits = torch.load(saved, map_location="cpu", weights_only=True)
    for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        path = folder / f"{part}.csv.gz"
        if splits is not None:
            nodes = torch.as_tensor(splits[part])
        else:
            nodes = _matrix(path, part).view(-1)
        if nodes.numel() and not 0 <= int(nodes.min()) <= int(nodes.max()) < num_nodes:
            raise ValueError(
                f"Expected '{path if splits is None else saved}' to hold node ids from 0 to "
                f"{num_nodes - 1:,} (got {int(nodes.min()):,} to {int(nodes.max()):,})"
            )
        store[mask] = torch.zeros(num_nodes, dtype=torch.bool)
        store[mask][nodes] = True


# Files ########################################################################


def _lines(path: Path) -> list[list[str]]:
    check_regular(path)
    with gzip.open(path, "rt") as file:
        return [line.strip().split(",") for line in file if line.strip()]


def _header(path: Path) -> dict[str, str]:
    """Returns the first row below a header, by the header's names."""
    lines = _lines(path)
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise ValueError(f"Expected '{path}' to have a header and one row, that of one graph")
    return dict(zip(*lines, strict=True))


def _number(path: Path) -> int:
    lines = _lines(path)
    if len(lines) != 1 or not lines[0][0].isdecimal():
        raise ValueError(f"Expected '{path}' to hold one number, that of one graph")
    return int(lines[0][0])


def _rows(path: Path) -> Iterator[Array]:
    """Returns pieces of a table without a header, ``[n, columns]`` in float64."""
    pyarrow, csv, _ = arrow(path)
    check_regular(path)
    with gzip.open(path, "rt") as file:
        names = [str(column) for column in range(file.readline().count(",") + 1)]
    try:
        with csv.open_csv(
            path,
            read_options=csv.ReadOptions(column_names=names),
            convert_options=csv.ConvertOptions(
                column_types={name: pyarrow.float64() for name in names}
            ),
            parse_options=csv.ParseOptions(ignore_empty_lines=False),
        ) as reader:
            for piece in reader:
                columns = [column.to_numpy(zero_copy_only=False) for column in piece.columns]
                yield np.stack(columns, axis=1)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error


def _whole(path: Path, values: Array) -> Array:
    if (values != np.trunc(values)).any():  # NaN is not equal to itself.
        raise ValueError(f"Expected '{path}' to hold whole numbers")
    return values.astype(np.int64)


def _copied(path: Path, convert: Callable[[Array], Array]) -> Array:
    """Returns a table's rows, converted piece by piece, memory mapped."""
    writer = None
    with tempfile.TemporaryFile() as file:
        for rows in _rows(path):
            values = convert(rows)
            writer = writer or ColumnFile(path, "the table", values, file)
            writer.add(values)
        if writer is None:
            raise ValueError(f"'{path}' is empty")
        return writer.array()


def _matrix(path: Path, name: str, expected: int | None = None, copies: int = 1) -> Tensor:
    """Returns a table ``[rows, columns]``, each row ``copies`` times."""

    def convert(rows: Array) -> Array:
        if _ATTRIBUTES.get(name) not in _FEATURES:
            values = _whole(path, rows)
        else:
            if np.isnan(rows).any():
                raise ValueError(f"'{path}' has rows without a value")
            values = rows.astype(np.float32)
        return np.repeat(values, copies, axis=0)

    matrix = torch.from_numpy(_copied(path, convert))
    _check_rows(path, matrix, expected)
    return matrix


def _edges(path: Path, both_directions: bool) -> Tensor:
    """Returns ``edge_index``; of both directions an edge's reverse stands behind it."""

    def convert(rows: Array) -> Array:
        if rows.shape[1] != 2:
            raise ValueError(f"Expected '{path}' to have the columns source and target")
        pairs = _whole(path, rows)
        if not both_directions:
            return pairs
        return np.stack([pairs, pairs[:, ::-1]], axis=1).reshape(-1, 2)

    return joined_ends(list(_copied(path, convert).T))


def _labels(path: Path, expected: int | None) -> Tensor:
    labels = _whole_labels(path, torch.from_numpy(_copied(path, np.asarray)))
    _check_rows(path, labels, expected)
    return labels


def _whole_labels(path: Path, labels: Tensor) -> Tensor:
    """Returns labels as int64, -1 where there is none, a single column as ``[num_nodes]``."""
    labels = labels.view(-1) if labels.dim() == 2 and labels.size(1) == 1 else labels
    if labels.is_floating_point():
        labels = labels.nan_to_num(nan=-1.0)
        if (labels != labels.trunc()).any():
            raise ValueError(f"Expected '{path}' to hold whole numbers")
    return labels.long()


def _check_rows(path: Path, values: Tensor, expected: int | None) -> None:
    if expected is not None and len(values) != expected:
        raise ValueError(
            f"Expected '{path}' to give {counted(expected, 'rows')} (got {len(values):,})"
        )


def _archive(path: Path) -> zipfile.ZipFile:
    check_regular(path)
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"'{path}' is not a NumPy archive: {error}") from error


def _member(path: Path, file: zipfile.ZipFile, name: str) -> Array:
    """Returns an array of an archive, memory mapped: np.load would read all of it."""
    readers: Mapping[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with file.open(f"{name}.npy") as member, tempfile.TemporaryFile() as copy:
            shape, fortran, dtype = readers[np.lib.format.read_magic(member)](member)
            if dtype.kind not in "iuf":
                raise ValueError(f"expected numbers (got {dtype})")
            shutil.copyfileobj(member, copy, _BYTES)
            return mapped_array(copy, dtype, shape, "F" if fortran else "C")
    except (KeyError, ValueError) as error:
        raise ValueError(f"'{name}' of '{path}' can't be read: {error}") from error
