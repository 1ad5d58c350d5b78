"""Node-, edge- and graph-level attributes of a ``Data`` as plain tensors, and back.

A partition file holds tensors only. So every attribute is *encoded* as one or more tensors whose
rows can be selected, and an :class:`Attribute` that says how to *decode* them.

=========  ==========================================  ==================================
layout     tensors                                     attributes
=========  ==========================================  ==================================
dense      one, named by the attribute itself          tensors, graph-level arrays
csr        ``crow`` [rows + 1], ``col``, ``values``    sparse matrices
json       none: the value is in the metadata          graph-level plain Python values
=========  ==========================================  ==================================

[Note: no check_invariants] PyTorch's ``check_invariants=True`` switches the check on for all
threads while a matrix is made, and of two calls that overlap one may leave it on. So sparse
matrices are checked here, where they are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_sar.files import from_json, to_json
from pyg_sar.wording import counted


def _check_range(name: str, place: Tensor, bound: int) -> None:
    if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < bound:
        raise ValueError(
            f"expected {name} 0 to {bound - 1} of a sparse matrix (got {int(place.min())} to "
            f"{int(place.max())})"
        )


def ascends(offsets: Tensor, count: int) -> bool:
    """Returns whether offsets ascend from 0 to a number of entries."""
    ends = int(offsets[0]), int(offsets[-1])
    return ends == (0, count) and not bool((offsets.diff() < 0).any())


def check_compressed(matrix: Tensor) -> None:
    """Checks that offsets ascend from 0 to the number of entries: torch makes CSR and CSC matrices
    of any, and reads beyond their ends.
    """
    if matrix.layout == torch.sparse_csr:
        offsets, entries, rows = matrix.crow_indices(), matrix.col_indices(), matrix.size(0)
    elif matrix.layout == torch.sparse_csc:
        offsets, entries, rows = matrix.ccol_indices(), matrix.row_indices(), matrix.size(1)
    else:
        return
    good = offsets.numel() == rows + 1 and entries.numel() == matrix.values().size(0)
    if not good or not ascends(offsets, entries.numel()):
        raise ValueError(
            f"expected the offsets of a sparse matrix to ascend from 0 to its {entries.numel()} "
            f"entries, {rows + 1} offsets in all"
        )


def compressed_rows(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns row offsets, columns and values, ascending within each row and without duplicates, of
    a matrix in COO, CSR or CSC layout.
    """
    check_compressed(matrix)
    coo = matrix.detach().to_sparse_coo()
    row, column = coo._indices()
    entries = coo._values()
    key = row * matrix.size(1) + column
    _check_range("rows", row, matrix.size(0))
    _check_range("columns", column, matrix.size(1))
    if bool((key[1:] <= key[:-1]).any()):  # to_sparse_coo() and is_coalesced() don't look.
        coo = torch.sparse_coo_tensor(coo._indices(), entries, coo.shape).coalesce()
        (row, column), entries = coo.indices(), coo.values()
    counts = torch.bincount(row, minlength=matrix.size(0))
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), column, entries


def matrix_of(
    crow: Tensor, column: Tensor, entries: Tensor, size: tuple[int, int], form: str
) -> Tensor:
    """Returns the matrix that :func:`compressed_rows` took apart, in the layout ``form``
    (``'sparse_coo'``, ...); ``part_checks.py`` has seen that it is one.
    """
    if form == "sparse_coo":
        row = torch.repeat_interleave(torch.arange(size[0]), crow.diff())
        index = torch.stack([row, column])
        return torch.sparse_coo_tensor(index, entries, size, is_coalesced=True)
    matrix = torch.sparse_csr_tensor(crow, column, entries, size)
    return matrix.to_sparse_csc() if form == "sparse_csc" else matrix


RESERVED = ("n_id", "e_id")
MASKS = ("train_mask", "val_mask", "test_mask")
NODE_NAMES = ("x", "pos", *MASKS)
EDGE_NAMES = ("edge_weight", "edge_attr", "edge_type")
STORED_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""Dtypes that are stored as they are; others are stored as integers of the same width."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribute:
    """The description of a stored attribute.

    Attributes:
        level: ``'node'``, ``'edge'`` or ``'graph'``.
        layout: ``'dense'``, ``'csr'`` or ``'json'``.
        dtype: The torch dtype by name (``'float32'``) or ``'json'``, or ``'none'`` for a sparse
            matrix without values.
        shape: The shape in the whole graph.
        dim: The dimension that nodes or edges run along.
        form: The type to decode to: ``'tensor'``, ``'column_major'`` (a matrix whose columns lie
            one after another in memory, as Pandas gives them), ``'numpy'``, ``'list'``,
            ``'tuple'``, ``'sparse_coo'``, ``'sparse_csr'``, ``'sparse_csc'``, ``'SparseTensor'``,
            ``'json'``, ``'coded'`` (JSON of :mod:`pyg_sar.files`).
    """

    level: str
    layout: str
    dtype: str
    shape: list[int]
    dim: int = 0
    form: str = "tensor"


@dataclass(frozen=True, slots=True)
class Column:
    """An attribute of the whole graph: its description, tensors by suffix, or JSON value."""

    attribute: Attribute
    tensors: dict[str, Tensor]
    value: Any = None


def tensor_names(name: str, attribute: Attribute) -> dict[str, str]:
    """Returns the names of an attribute's tensors in a partition file, by suffix."""
    base = f"{attribute.level}.{name}"
    suffixes = {
        "dense": [""],
        "csr": ["crow", "col"] + ["values"] * (attribute.dtype != "none"),
        "json": [],
    }[attribute.layout]
    return {suffix: f"{base}.{suffix}" if suffix else base for suffix in suffixes}


# Encoding ################################################################################


def named_attributes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a graph or store that are stored as such, or are lists of ids."""
    for name, value in values.items():
        if name not in ("edge_index", "num_nodes", *RESERVED) and value is not None:
            yield name, value


def encode_all(
    values: Mapping[str, Any],
    level: Callable[[str, Any], str],
    counts: Mapping[str, int],
    owner: str,
) -> dict[str, Column]:
    """Encodes the attributes of a graph, or of the nodes of one type or edges of one relation.

    ``level`` returns an attribute's level, ``counts`` has the rows of the levels other than the
    graph, ``owner`` is how errors name the store.
    """
    of = "" if owner == "the graph" else f" of {owner}"
    for name in RESERVED:
        if values.get(name) is not None:
            raise ValueError(
                f"The attribute '{name}'{of} has the name of the global ids in a partition; rename "
                f"it, for example to 'orig_{name}'"
            )
    columns = {}
    if values.get("num_nodes") is not None:  # Said, not found by the rows of x, say.
        columns["num_nodes"] = _encode_json(int(values["num_nodes"]))
    for name, value in named_attributes(values):
        found = level(name, value)
        _check_level(name, value, found, counts, of)
        try:
            columns[name] = encode(name, value, found)
        except ValueError as error:
            raise (ValueError(f"'{name}'{of}: {error}") if of else error) from error
    return columns


def _check_level(name: str, value: Any, level: str, counts: Mapping[str, int], of: str) -> None:
    """Raises where an attribute should have a row per node or edge, and has others."""
    for expected, names in (("node", NODE_NAMES), ("edge", EDGE_NAMES)):
        if expected in counts and level != expected and name in names:
            raise ValueError(
                f"Expected '{name}'{of} to have one row per {expected}, "
                f"{counted(counts[expected], 'rows')} (got {type(value).__name__} of shape "
                f"{list(getattr(value, 'shape', []))})"
            )


def rows_of(name: str, value: Any) -> int:
    """Returns the number of nodes or edges that an attribute has rows for; -1: it is one value."""
    if isinstance(value, (list, tuple)):
        return len(value)
    if is_sparse(value):
        return int(value.size(0))
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim == 0:
        return -1
    return int(value.shape[-1 if "index" in name or name == "face" else 0])


def is_sparse(value: Any) -> bool:
    """Returns whether it is a sparse matrix."""
    if isinstance(value, SparseTensor):
        return True
    return isinstance(value, Tensor) and value.layout != torch.strided


def encode(name: str, value: Any, level: str) -> Column:
    """Encodes an attribute; a ``ValueError`` names it when it can't be stored."""
    try:
        if is_sparse(value):
            return _encode_sparse(value, level)
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and level == "graph"):
            return _encode_dense(name, value, level)
        if level == "graph":
            return _encode_json(value)
        whole = f" (of a Data, levels={{{name!r}: 'graph'}} keeps it whole)" * (level != "row")
        raise TypeError(f"rows that are split among parts must be those of a tensor{whole}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The {level}-level attribute '{name}' ({type(value).__name__}) can't be stored: "
            f"{error}; convert it to a tensor or delete it"
        ) from error


def encode_ids(name: str, value: Any) -> Column:
    """Encodes node ids: a tensor, an array, or a list or tuple of numbers."""
    if not isinstance(value, (list, tuple)):
        return _encode_dense(name, value, "row")
    column = _encode_dense(name, torch.tensor(value, dtype=torch.int64), "row")
    form = type(value).__name__
    return replace(column, attribute=replace(column.attribute, form=form))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store(value: Tensor) -> Tensor:
    """Returns the value on the CPU, in a dtype that a partition file holds."""
    value = value.detach().cpu()
    if value.is_quantized:
        raise TypeError("quantized tensors are not supported, call .dequantize()")
    value = value.resolve_conj().resolve_neg()
    if value.is_complex():
        return torch.view_as_real(value)
    if value.dtype not in STORED_DTYPES:
        return value.view(INTEGERS[value.element_size()])
    return value


def stored_dtype(name: str) -> tuple[torch.dtype, list[int]]:
    """Returns the dtype that a partition file holds for a dtype, and the axes that it adds."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype.is_complex:
        return dtype.to_real(), [2]
    return (dtype if dtype in STORED_DTYPES else INTEGERS[dtype.itemsize]), []


def _unstore(value: Tensor, dtype_name: str) -> Tensor:
    dtype = getattr(torch, dtype_name)
    if dtype.is_complex:
        return torch.view_as_complex(value)
    return value if value.dtype == dtype else value.view(dtype)


def _encode_dense(name: str, value: Tensor | np.ndarray[Any, Any], level: str) -> Column:
    form = "tensor"
    if isinstance(value, np.ndarray):
        form, tensor = "numpy", torch.from_numpy(value)
    else:  # PyG's Index and EdgeIndex have as_tensor().
        tensor = value.as_tensor() if hasattr(value, "as_tensor") else value
        if tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous():
            form = "column_major"
    if name in MASKS and tensor.dtype != torch.bool:
        raise TypeError(f"a mask is bool, this is {tensor.dtype}: call .bool()")
    dim = tensor.dim() - 1 if level != "graph" and ("index" in name or name == "face") else 0
    dtype, shape = _dtype_name(tensor.dtype), list(tensor.shape)
    attribute = Attribute(level=level, layout="dense", dtype=dtype, shape=shape, dim=dim, form=form)
    return Column(attribute, {"": _store(tensor)})


def _encode_sparse(value: Any, level: str) -> Column:
    if level == "graph":
        raise ValueError(f"its {counted(value.size(0), 'rows')} are not one per node or edge")
    if isinstance(value, SparseTensor):
        crow, column, entries = value.csr()
        form, shape = "SparseTensor", value.sizes()
    else:
        form, shape = str(value.layout).removeprefix("torch."), list(value.shape)
        if value.dim() != 2 or value.layout in (torch.sparse_bsr, torch.sparse_bsc):
            raise ValueError(f"expected a matrix in COO, CSR or CSC layout (got {value.layout})")
        crow, column, entries = compressed_rows(value)
    tensors = {"crow": _store(crow).long(), "col": _store(column).long()}
    dtype = "none"
    if entries is not None:
        tensors["values"], dtype = _store(entries), _dtype_name(entries.dtype)
    attribute = Attribute(level=level, layout="csr", dtype=dtype, shape=list(shape), form=form)
    return Column(attribute, tensors)


def _encode_json(value: Any) -> Column:
    form = "tuple" if isinstance(value, tuple) else "json"
    plain = list(value) if form == "tuple" else value
    if _holds_tuple(plain):  # Such as AddMetaPaths' metapath_dict, whose keys are relations.
        form, plain = "coded", to_json(value)
    text = json.dumps(plain)
    if json.dumps(json.loads(text)) != text:
        raise ValueError("it is not a plain value that JSON gives back unchanged")
    attribute = Attribute(level="graph", layout="json", dtype="json", shape=[], form=form)
    return Column(attribute, {}, plain)


def _holds_tuple(value: Any) -> bool:
    if isinstance(value, dict):
        return any(not isinstance(k, str) or _holds_tuple(v) for k, v in value.items())
    return isinstance(value, tuple) or (isinstance(value, list) and any(map(_holds_tuple, value)))


# Rows ####################################################################################


def select_rows(attribute: Attribute, tensors: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Returns the rows ``ids`` of an encoded node- or edge-level attribute, in that order."""
    if attribute.layout == "dense":
        return {"": tensors[""].index_select(attribute.dim, ids)}
    (first, starts), *entries = tensors.items()
    counts = starts.diff()[ids]
    ends = counts.cumsum(0)
    position = torch.arange(int(ends[-1]) if ids.numel() else 0)
    position += torch.repeat_interleave(starts[:-1][ids] - ends + counts, counts)
    selected = {first: torch.cat([ends.new_zeros(1), ends])}
    selected.update((suffix, entry[position]) for suffix, entry in entries)
    return selected


def concatenate_rows(attribute: Attribute, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the rows of all parts of an encoded attribute, one part after the other."""
    if attribute.layout == "dense":
        return {"": torch.cat([part[""] for part in parts], dim=attribute.dim)}
    first, *others = parts[0]
    counts = torch.cat([part[first].diff() for part in parts])
    joined = {first: torch.cat([counts.new_zeros(1), counts.cumsum(0)])}
    joined.update((suffix, torch.cat([part[suffix] for part in parts])) for suffix in others)
    return joined


# Decoding ################################################################################


def decode(attribute: Attribute, tensors: dict[str, Tensor], value: Any = None) -> Any:
    """Returns the attribute as ``Data`` held it, for the rows in ``tensors``."""
    if attribute.layout == "json":
        if attribute.form == "coded":
            return from_json(value)
        return tuple(value) if attribute.form == "tuple" else value
    if attribute.layout == "csr":
        return _decode_sparse(attribute, tensors)
    tensor = _unstore(tensors[""], attribute.dtype)
    if attribute.form == "numpy":
        return tensor.numpy()
    if attribute.form in ("list", "tuple"):
        return tensor.tolist() if attribute.form == "list" else tuple(tensor.tolist())
    return tensor.t().contiguous().t() if attribute.form == "column_major" else tensor


def _decode_sparse(attribute: Attribute, tensors: dict[str, Tensor]) -> Any:
    crow, column = tensors["crow"], tensors["col"]
    size = (crow.numel() - 1, attribute.shape[1])
    if attribute.dtype == "none":
        return SparseTensor(rowptr=crow, col=column, sparse_sizes=size)
    entries = _unstore(tensors["values"], attribute.dtype)
    if attribute.form == "SparseTensor":
        return SparseTensor(rowptr=crow, col=column, value=entries, sparse_sizes=size)
    return matrix_of(crow, column, entries, size, attribute.form)
