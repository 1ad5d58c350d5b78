"""Graphs in files: NumPy archives, and saved ``Data`` objects read without running their code."""

from __future__ import annotations

import copy
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

from pyg_sar.partition.attributes import MASKS, coo_matrix

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
    """An array of integers as int64, of this shape; -1 is any size."""
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
    if int(offsets[0]) != 0 or int(offsets[-1]) != column.numel() or (offsets.diff() < 0).any():
        raise ValueError(
            f"'x' of '{path}' is not a CSR matrix: expected 'x_indptr' to ascend from 0 to the "
            f"{column.numel()} entries of 'x_indices'"
        )
    row = torch.repeat_interleave(torch.arange(rows), offsets.diff())
    try:
        entries = _value(path, "x_values", values)
        matrix = coo_matrix(torch.stack([row, column]), entries, (rows, width), coalesced=False)
        return matrix.coalesce().to_sparse_csr()  # Columns come in any order.
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
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [known for known in before if known is not defaultdict]
        + [*classes, *numpy_types, np.ndarray, np.dtype, reconstruct, plain_dict]
    )
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _empty_dict(*_: Any) -> dict[Any, Any]:
    return {}


def load_saved(path: str | os.PathLike[str]) -> Data | HeteroData:
    """Reads a ``Data`` or ``HeteroData`` written by ``torch.save(data, path)``.

    ``data.to_dict()`` and the processed file of a PyG dataset of one graph will do as well.
    Only tensors, arrays, plain values and these classes are read, so that the file can't run
    code.

    Raises:
        ValueError: When the file holds anything else.
        OSError: When there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file '{path}'")
    try:
        with safe_data_classes():
            value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
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
