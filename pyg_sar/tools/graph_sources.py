r"""Graphs from files and from a random model.

Files are NumPy archives, and saved ``Data`` objects, which are read without running their code.

[Note: the synthetic graph] It has power-law degrees and planted classes, any size, and is the same
for a seed.
The degree-corrected planted partition model, drawn edge by edge (all at once):

1. Node :math:`i` has class :math:`y_i` and weight :math:`w_i = u_i^{-1 / (\gamma - 1)}` with
   :math:`u_i` uniform in (0, 1), so that :math:`P(w > t) = t^{1 - \gamma}`: degrees follow a power
   law with exponent :math:`\gamma`. Weights are cut so that no node expects to be joined to more
   than a quarter of all.
2. An edge takes its first end with probability proportional to the weight, and its second end in
   the same way, among the first's class for a fraction h of the edges, else among the others.
3. Self loops and duplicates are thrown away and drawn again until the numbers are reached.
4. Features are the class's centroid times ``signal`` plus standard normal noise.

Source: Karrer and Newman, "Stochastic blockmodels and community structure in networks", Phys. Rev.
E 2011; Chung and Lu, "Connected components in random graphs with given expected degree sequences",
2002.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import (
    AttrType,
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
)

from pyg_sar.files import check_regular
from pyg_sar.partition.attributes import MASKS, ascends, compressed_rows
from pyg_sar.wording import counted

# Files ########################################################################

FILE_SUFFIXES = (".npz", ".pt", ".pth")
CSR_KEYS = ("x_indptr", "x_indices", "x_values", "x_shape")


def load_npz(path: str | os.PathLike[str]) -> Data | HeteroData:
    """Reads a graph from a NumPy archive.

    ==============================  =======================================================
    key                             content
    ==============================  =======================================================
    ``edge_index``                  integers ``[2, E]`` (source, target); required
    ``num_nodes``                   one integer; default: rows of ``x``, or the largest node id
                                    and one
    ``x``                           features ``[N, F]``; or, as a CSR matrix, ``x_indptr``,
                                    ``x_indices``, ``x_values``, ``x_shape``
    ``y``                           labels; -1: none
    ``train_mask``, ...             bool ``[N]``, or ``[N, k]`` for k splits
    ``meta``                        left out
    any other                       kept: numbers as tensors, texts as lists
    ==============================  =======================================================

    A heterogeneous graph has the keys ``num_nodes__TYPE`` for each node type,
    ``edge_index__SRC__REL__DST`` for each relation, and ``NAME__TYPE`` or
    ``NAME__SRC__REL__DST`` for their attributes.

    Raises:
        ValueError: When the file is not such an archive: names the key, and its dtype or value.
        OSError: When there is no such file.
    """
    check_regular(path)
    try:
        with open(path, "rb") as opened, np.lib.npyio.NpzFile(opened) as file:
            arrays = {key: file[key] for key in file.files if key != "meta"}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"'{path}' is not a NumPy archive of plain arrays: {error}") from error
    if any(key.startswith("num_nodes__") for key in arrays):
        return _hetero_data(path, arrays)
    if "edge_index" not in arrays:
        raise ValueError(f"'{path}' has no 'edge_index'; it holds {', '.join(sorted(arrays))}")
    data = Data(edge_index=_integers(path, "edge_index", arrays.pop("edge_index"), (2, -1)))
    given = [key for key in CSR_KEYS if key in arrays]
    if given:
        missing = [key for key in CSR_KEYS if key not in arrays]
        if missing:
            raise ValueError(f"'{path}' holds {', '.join(given)}, but not {', '.join(missing)}")
        data.x = _csr_matrix(path, *(arrays.pop(key) for key in CSR_KEYS))
    num_nodes = arrays.pop("num_nodes", None)
    for key, array in arrays.items():
        data[key] = _value(path, key, array)
    if num_nodes is not None:
        data.num_nodes = _count(path, "num_nodes", num_nodes)
    elif data.get("x") is None:
        data.num_nodes = int(data.edge_index.max()) + 1 if data.edge_index.numel() else 0
    return data


def _hetero_data(path: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> HeteroData:
    data = HeteroData()
    for key in arrays:
        if key.startswith("num_nodes__"):
            data[key.removeprefix("num_nodes__")].num_nodes = _count(path, key, arrays[key])
    for key, array in arrays.items():
        name, *owner = key.split("__")
        if name == "num_nodes":
            continue
        if not owner:
            data[name] = _value(path, key, array)
        elif len(owner) == 1 and owner[0] in data.node_types:
            data[owner[0]][name] = _value(path, key, array)
        elif len(owner) == 3 and name == "edge_index":
            data[tuple(owner)].edge_index = _integers(path, key, array, (2, -1))
        elif len(owner) == 3:
            data[tuple(owner)][name] = _value(path, key, array)
        else:
            raise ValueError(
                f"'{path}' holds '{key}', which belongs to no node type (num_nodes__TYPE: "
                f"{', '.join(data.node_types)}) and no relation (NAME__SRC__REL__DST)"
            )
    return data


_Array = np.ndarray[Any, Any]


def _integers(path: Any, key: str, array: _Array, shape: tuple[int, ...]) -> Tensor:
    """Returns an array of integers as int64, of this shape; -1 is any size."""
    fits = array.ndim == len(shape) and all(
        n in (-1, m) for n, m in zip(shape, array.shape, strict=True)
    )
    whole = array.dtype.kind in "iu"
    if not whole or not fits or (array.size and int(array.max()) >= 2**63):
        sizes = ", ".join("*" if n < 0 else str(n) for n in shape)
        remedy = "" if whole else f"; save {key}.astype(numpy.int64) if all values are whole"
        raise ValueError(
            f"Expected '{key}' of '{path}' to hold 64-bit integers of shape [{sizes}] (got dtype "
            f"{array.dtype}, shape {list(array.shape)}){remedy}"
        )
    return torch.from_numpy(array.astype(np.int64))


def _count(path: Any, key: str, array: _Array) -> int:
    if array.ndim or array.dtype.kind not in "iu" or int(array) < 0:
        value = array.tolist() if array.size == 1 else f"shape {list(array.shape)}"
        raise ValueError(
            f"Expected '{key}' of '{path}' to be one integer of at least 0 (got {value}, dtype "
            f"{array.dtype}); save int({key})"
        )
    return int(array)


def _value(path: Any, key: str, array: _Array) -> Any:
    if key.split("__")[0] in MASKS and array.dtype != np.bool_:
        raise ValueError(
            f"Expected the mask '{key}' of '{path}' to be bool (got dtype {array.dtype}); save "
            f"{key}.astype(bool), or of node numbers a mask that is True there"
        )
    if array.dtype.kind == "U" or array.ndim == 0:
        return array.tolist()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"'{key}' of '{path}' can't be a tensor (dtype {array.dtype}): {error}; save it in "
            "another dtype, or leave it out"
        ) from None


def _csr_matrix(
    path: Any, starts: _Array, columns: _Array, values: _Array, shape: _Array
) -> Tensor:
    rows, width = _integers(path, "x_shape", shape, (2,)).tolist()
    offsets = _integers(path, "x_indptr", starts, (rows + 1,))
    column = _integers(path, "x_indices", columns, (-1,))
    if not ascends(offsets, column.numel()):
        raise ValueError(
            f"'x' of '{path}' is not a CSR matrix: expected 'x_indptr' to ascend from 0 to the "
            f"{column.numel()} entries of 'x_indices'"
        )
    row = torch.repeat_interleave(torch.arange(rows), offsets.diff())
    try:
        entries, index = _value(path, "x_values", values), torch.stack([row, column])
        if entries.shape[:1] != column.shape:
            raise ValueError(f"expected a value for each of {len(column)} entries of the matrix")
        matrix = torch.sparse_coo_tensor(index, entries, (rows, width))
        return torch.sparse_csr_tensor(*compressed_rows(matrix), matrix.shape)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"'x' of '{path}' is not a CSR matrix: {error}") from error


@contextmanager
def safe_data_classes() -> Iterator[None]:
    """Lets ``torch.load(weights_only=True)`` build PyG's ``Data`` and NumPy arrays as well.

    These classes hold plain values: building one runs no code of the file's choosing. The list of
    safe classes is the process's; afterwards it is as it was before.
    """
    before = torch.serialization.get_safe_globals()
    reconstruct: Any = np.empty(0).__reduce__()[0]  # Moved between NumPy's versions.
    numpy_types = {type(np.dtype(code)) for code in np.typecodes["All"]}
    classes = [Data, DataEdgeAttr, DataTensorAttr, AttrType, BaseStorage, GlobalStorage, set]
    classes += [HeteroData, NodeStorage, EdgeStorage]
    # PyG's cache of attribute levels is a defaultdict, which torch reads only as a dict.
    plain_dict: Any = (_empty_dict, "collections.defaultdict")
    level: Any = (_level, "builtins.getattr")  # By which some Pythons save it.
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [known for known in before if known is not defaultdict]
        + [*classes, *numpy_types, np.ndarray, np.dtype, reconstruct, plain_dict, level]
    )
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _empty_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _level(kind: Any, name: str) -> AttrType:
    if kind is not AttrType:
        raise pickle.UnpicklingError("Unsupported global: GLOBAL getattr")
    return AttrType[name]


def load_saved(path: str | os.PathLike[str]) -> Data | HeteroData:
    """Reads a ``Data`` or ``HeteroData`` written by ``torch.save(data, path)``.

    ``data.to_dict()`` and the processed file of a PyG dataset of one graph will do as well. A file
    with anything but tensors, arrays, plain values and these classes is refused, so that it can't
    run code.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file '{path}'")
    try:
        with safe_data_classes():
            value = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # Bytes that are no pickle make torch raise any.
        names = sorted(set(re.findall(r"GLOBAL ([\w.]+)", str(error))))
        reason = f"it needs {', '.join(names)}" if names else "it is damaged or of another kind"
        raise ValueError(
            f"'{path}' can't be loaded safely: {reason}. Only tensors, arrays, plain values and "
            "Data or HeteroData are read; save torch.save(data.to_dict(), path) with plain "
            "attributes, or an .npz"
        ) from error
    if isinstance(value, tuple) and len(value) > 1 and value[1] is None:
        value = value[0]  # A dataset's processed file: (data, slices=None, class).
    if isinstance(value, dict):
        hetero = any(isinstance(key, tuple) for key in value) or "_global_store" in value
        value = HeteroData.from_dict(value) if hetero else Data.from_dict(value)
    if type(value) not in (Data, HeteroData):
        raise ValueError(
            f"'{path}' does not hold one Data or HeteroData (got {type(value).__name__})"
        )
    return copy.copy(value)  # Drops PyG's cache of levels.


# The synthetic graph ##########################################################

Array = np.ndarray[Any, Any]
MAX_ROUNDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticGraph:
    """The settings of a synthetic graph.

    Attributes:
        nodes: The number of nodes.
        degree: Mean number of edges per node (columns of ``edge_index`` over nodes).
        edges: Columns of ``edge_index``, instead of ``degree``. Undirected: an even number.
        features: The number of features; 0: no ``x``.
        classes: The number of classes, of equal size up to one node.
        homophily: The fraction h of edges that join nodes of one class.
        exponent: The exponent of the degrees' power law, above 1. Real graphs: 2 to 3.
        signal: Length of the class centroids' coordinates against noise of 1.
        directed: One direction per edge, drawn; otherwise both.

    Raises:
        ValueError: When a number is out of range.
    """

    nodes: int = 10_000
    degree: float = 20.0
    edges: int | None = None
    features: int = 64
    classes: int = 8
    homophily: float = 0.7
    exponent: float = 2.5
    signal: float = 0.2
    directed: bool = False

    def __post_init__(self) -> None:
        _check(self.nodes >= 1, "nodes", self.nodes, "at least 1")
        _check(self.degree >= 0, "degree", self.degree, "at least 0")
        _check(self.features >= 0, "features", self.features, "at least 0")
        _check(1 <= self.classes <= self.nodes, "classes", self.classes, "1 to 'nodes'")
        _check(0 <= self.homophily <= 1, "homophily", self.homophily, "0 to 1")
        _check(self.exponent > 1, "exponent", self.exponent, "above 1")
        if self.edges is not None:
            fits = self.edges >= 0 and (self.directed or self.edges % 2 == 0)
            _check(fits, "edges", self.edges, "at least 0, and even unless 'directed'")
        largest = self.nodes * (self.nodes - 1) // (1 if self.directed else 2)
        if self.num_pairs > largest // 2:
            raise ValueError(
                f"{counted(self.num_pairs, 'edges')} are more than half of the {largest} that "
                f"{self.nodes} nodes can have; ask for fewer 'edges' or a smaller 'degree'"
            )

    @property
    def num_pairs(self) -> int:
        """Distinct edges to draw; an undirected one counts once."""
        columns = self.edges if self.edges is not None else round(self.nodes * self.degree)
        return columns if self.directed else columns // 2


def _check(fits: bool, name: str, value: Any, expected: str) -> None:
    if not fits:
        raise ValueError(f"Expected '{name}' of the synthetic graph to be {expected} (got {value})")


def synthetic_graph(graph: SyntheticGraph, seed: int = 0) -> Data:
    """Draws the graph: ``edge_index``, ``y`` and ``x``, without masks; the same for a seed."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(graph.nodes) % graph.classes
    edge_index = torch.from_numpy(_edges(graph, y, rng))
    data = Data(edge_index=edge_index, y=torch.from_numpy(y), num_nodes=graph.nodes)
    if graph.features:
        centroids = rng.standard_normal((graph.classes, graph.features), dtype=np.float32)
        x = rng.standard_normal((graph.nodes, graph.features), dtype=np.float32)
        x += np.float32(graph.signal) * centroids[y]
        data.x = torch.from_numpy(x)
    return data


def _weights(graph: SyntheticGraph, rng: np.random.Generator) -> Array:
    """Returns power-law weights; none above N/4 over the mean degree times the mean weight."""
    weights = (1.0 - rng.random(graph.nodes)) ** (-1.0 / (graph.exponent - 1.0))
    mean_degree = max(2 * graph.num_pairs / graph.nodes, 1.0)
    return np.minimum(weights, weights.mean() * max(graph.nodes / 4 / mean_degree, 1.0))


def _edges(graph: SyntheticGraph, y: Array, rng: np.random.Generator) -> Array:
    """Returns distinct edges without loops, shape ``[2, columns]``, sorted."""
    draw = _EndDrawer(graph, y, rng)
    same = round(graph.num_pairs * (graph.homophily if graph.classes > 1 else 1.0))
    keys = np.concatenate(
        [_distinct(graph, draw, same, True), _distinct(graph, draw, graph.num_pairs - same, False)]
    )
    a, b = keys // graph.nodes, keys % graph.nodes
    if not graph.directed:
        keys = np.concatenate([keys, b * graph.nodes + a])
    keys.sort()
    return np.stack([keys // graph.nodes, keys % graph.nodes])


def _distinct(graph: SyntheticGraph, draw: _EndDrawer, number: int, same: bool) -> Array:
    """Returns ``number`` distinct edges ``source * N + target`` within classes, or between them."""
    keys = np.empty(0, dtype=np.int64)
    for attempt in range(MAX_ROUNDS):
        missing = number - keys.size
        if missing == 0:
            return keys
        surplus = 1.125 if attempt == 0 else 2.0 ** min(attempt, 6)
        a, b = draw.pairs(min(int(missing * surplus), 2 * number) + 16, same)
        if not graph.directed:
            a, b = np.minimum(a, b), np.maximum(a, b)
        fits = (a != b) & ((draw.y[a] == draw.y[b]) == same)  # Sums are rounded at the borders.
        new = np.sort((a * graph.nodes + b)[fits])
        new = new[np.diff(new, prepend=-1) > 0]
        if keys.size:
            position = np.minimum(np.searchsorted(keys, new), keys.size - 1)
            new = new[keys[position] != new]
        if new.size > missing:  # A random choice: the first ones would favour low ids.
            new = new[draw.rng.permutation(new.size)[:missing]]
        keys = np.sort(np.concatenate([keys, new]))
    raise ValueError(
        f"Could not draw {number} distinct edges {'within' if same else 'between'} "
        f"{counted(graph.classes, 'classes')} of {counted(graph.nodes, 'nodes')} (exponent "
        f"{graph.exponent}); ask for fewer edges, a larger 'exponent' or a 'homophily' nearer 1 / "
        "classes"
    )


class _EndDrawer:
    """Draws the two ends of edges by inverse transform sampling of the cumulated weights."""

    def __init__(self, graph: SyntheticGraph, y: Array, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes = np.argsort(y, kind="stable")  # By class: a class is an interval.
        self.y = y
        weights = _weights(graph, rng)[self.nodes]
        self.sums = np.concatenate([[0.0], np.cumsum(weights)])
        starts = np.searchsorted(y[self.nodes], np.arange(graph.classes + 1))
        self.low, self.high = self.sums[starts[:-1]], self.sums[starts[1:]]

    def _at(self, position: Array) -> Array:
        index = np.searchsorted(self.sums, position, side="right") - 1
        return self.nodes[np.clip(index, 0, self.nodes.size - 1)]

    def pairs(self, number: int, same: bool) -> tuple[Array, Array]:
        """Returns ``number`` pairs of nodes of one class, or of two; not all are distinct."""
        total = self.sums[-1]
        # Multinomial counts are as many independent draws, in order, which keeps searches local.
        first = np.repeat(self.nodes, self.rng.multinomial(number, np.diff(self.sums) / total))
        low, high = self.low[self.y[first]], self.high[self.y[first]]
        if same:
            return first, self._at(low + self.rng.random(number) * (high - low))
        position = self.rng.random(number) * (total - (high - low))
        return first, self._at(position + np.where(position >= low, high - low, 0.0))
