"""Attributes that hold ids of nodes: a part numbers its nodes anew, so these have to be split.

[Note: node ids] PyG's convention is the name: what has 'index' in it (or the word 'idx') is
shifted by the number of nodes when graphs are batched. A list of node ids ``[K]`` goes to the
nodes' owners, pairs of them ``[2, K]`` are edges of their own, with a halo of their own. What the
name does not tell is asked: an integer tensor with no row per node or edge, whose values could be
node ids, is refused until the caller says whether it holds any (``node_ids`` of
:func:`~pyg_sar.partition.storage.write_partitions`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.partition.attributes import (
    Attribute,
    Column,
    encode,
    encode_ids,
    named_attributes,
    rows_of,
)
from pyg_sar.partition.levels import Levels
from pyg_sar.wording import counted

NodeIds = Sequence[str] | Mapping[str, bool]
"""Names of attributes that hold node ids; or for each name whether it does."""

_NAMED = re.compile(r"index|indices|(^|_)idx(_|\d*$)", re.IGNORECASE)
_LABELS = re.compile(r"(^|_)(y|labels?)(_|$)")
"""Names of attributes that go along with a list of node ids though they are integers."""

UNSURE = "unsure"
"""The kind of integers that may be node ids, which the caller has to say."""


@dataclass(frozen=True, slots=True)
class Space:
    """The nodes that the ids of a store may name: their numbers, of the sources' and of the
    targets' type.

    ``owner`` is how errors name the store. ``vectors`` and ``pairs`` say whether lists of ids, and
    pairs, can be split: only where their node type is known.
    """

    owner: str
    sources: int
    targets: int
    vectors: bool = True
    pairs: bool = True

    def holds(self, ids: Tensor) -> bool:
        """Returns True where all values could be ids."""
        if ids.numel() == 0:
            return True
        if int(ids.min()) < 0:
            return False
        if ids.dim() == 2 and ids.size(0) == 2:
            return int(ids[0].max()) < self.sources and int(ids[1].max()) < self.targets
        return int(ids.max()) < max(self.sources, self.targets)


def said_of(node_ids: NodeIds | None, names: Iterable[str]) -> dict[str, bool]:
    """Returns ``node_ids`` as a dict, whose names must be among ``names``."""
    said: dict[Any, bool]
    if isinstance(node_ids, Mapping):
        said = dict(node_ids)
    elif isinstance(node_ids, str) or not isinstance(node_ids or (), Iterable):
        said = {node_ids: True}
    else:
        said = dict.fromkeys(node_ids or (), True)
    wrong = [k for k, v in said.items() if not isinstance(k, str) or not isinstance(v, bool)]
    if wrong:
        raise TypeError(
            "Expected 'node_ids' to be a list of attribute names, or a dict {name: True or False} "
            f"(got {node_ids!r})"
        )
    unknown = sorted(set(said) - set(names))
    if unknown:
        raise ValueError(f"'node_ids' names {unknown}, which 'data' does not have")
    return said


def is_named(name: str) -> bool:
    """Returns True where an attribute of that name holds node ids by PyG's convention."""
    return _NAMED.search(name) is not None or name == "face"


def integers(value: Any) -> Tensor | None:
    """Returns an attribute's integers as int64 on the CPU; ``None`` where it holds others."""
    if type(value) is int and abs(value) < 2**63:
        return torch.tensor(value)
    if isinstance(value, list | tuple):
        whole = bool(value) and all(type(n) is int and abs(n) < 2**63 for n in value)
        return torch.tensor(value) if whole else None
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64)) if value.dtype.kind in "iu" else None
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        return None
    value = value.as_tensor() if hasattr(value, "as_tensor") else value
    return value.detach().cpu().long()


def kind_of(name: str, value: Any, level: str, space: Space, said: bool | None) -> str:
    """Returns ``'nodes'`` for a list of node ids, ``'links'`` for pairs, ``''`` for neither.

    ``level`` is what the attribute's rows would be without ids, ``said`` what the caller says.
    What can't be told is :data:`UNSURE`; ids that can't be split are refused.
    """
    if said is False or (level != "graph" and not said and not is_named(name)):
        return ""
    ids = integers(value)
    if ids is None:
        is_bool = str(getattr(value, "dtype", "")).endswith("bool")
        if said or (is_bool and level == "graph" and is_named(name)):
            raise _refused(name, space, f"should hold integers (got {_described(value)})")
        return ""
    if not (said or is_named(name)):
        array = isinstance(value, Tensor | np.ndarray) and ids.numel() > 0
        if array and name != "y" and space.holds(ids):
            return UNSURE
        return ""
    if said is None and ids.dim() == 0 and not space.holds(ids):
        return ""
    pairs = ids.dim() == 2 and ids.size(0) == 2
    if said is None and level != "graph" and ids.numel() and not (pairs and "edge" in name):
        if not space.holds(ids):
            return ""
        return UNSURE
    _check_ids(name, ids, space, said)
    return "links" if pairs else "nodes"


def _check_ids(name: str, ids: Tensor, space: Space, said: bool | None) -> None:
    """Raises unless the ids are a vector or pairs, in range."""
    pairs = ids.dim() == 2 and ids.size(0) == 2
    if name == "face" or "hyperedge" in name:
        raise _refused(name, space, "can't be split among workers", splits=False)
    if not pairs and ids.dim() != 1:
        shape = f"should be of shape [K] or [2, K] to be split (got {list(ids.shape)})"
        raise _refused(name, space, shape, splits=False)
    if not pairs and "edge" in name and said is None:
        raise _refused(name, space, "is named after edges, but is no pair of node ids, [2, K]")
    if not (space.pairs if pairs else space.vectors):
        raise _refused(
            name, space, "has no node type; move it to the store of its node type or relation"
        )
    if not space.holds(ids):
        most = space.sources if space.sources == space.targets else (space.sources, space.targets)
        raise _refused(
            name,
            space,
            f"should hold node ids below {most} (got {int(ids.min())} to {int(ids.max())})",
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} of shape {list(value.shape)}"
    return type(value).__name__


def _refused(name: str, space: Space, problem: str, splits: bool = True) -> ValueError:
    """Returns the error for an attribute; might it be split, if it holds node ids?"""
    where = "" if space.owner == "the graph" else f" of {space.owner}"
    listed = f"node_ids=['{name}'] if it holds node ids, " if splits else ""
    return ValueError(
        f"The attribute '{name}'{where} {problem}. Workers number their nodes anew: say "
        f"write_partitions(..., {listed}node_ids={{'{name}': False}}) to keep its values as they "
        "are, or delete it"
    )


def _refuse_unsure(unsure: Mapping[str, tuple[Tensor, str]], space: Space) -> None:
    """Raises one error for all attributes that may hold node ids, if there are any.

    Of each it gets the integers, and what its rows are otherwise.
    """
    if not unsure:
        return
    why = {
        name: f"has one entry per {level}, but is named as if it held node ids"
        if is_named(name)
        else "holds integers that could be node ids"
        for name, (_, level) in unsure.items()
    }
    fitting = [
        name
        for name, (ids, _) in unsure.items()
        if ids.dim() == 1 or (ids.dim() == 2 and ids.size(0) == 2)
    ]
    if len(why) == 1:
        ((name, problem),) = why.items()
        raise _refused(name, space, problem, bool(fitting))
    where = "" if space.owner == "the graph" else f" of {space.owner}"
    told = "; ".join(f"'{name}' {problem}" for name, problem in why.items())
    listed = f"node_ids={fitting} for those that hold node ids, " if fitting else ""
    raise ValueError(
        f"Attributes{where}: {told}. Workers number their nodes anew: say write_partitions(..., "
        f"{listed}node_ids={dict.fromkeys(why, False)}) for those whose values are to stay as they "
        "are, or delete them"
    )


def list_of(name: str, rows: int, level: str, lists: Mapping[str, tuple[str, int]]) -> str:
    """Finds the list whose rows an attribute has: ``edge_label`` those of ``edge_label_index``.

    It has their number of rows, and the list's name but for what stands in the place of 'index'.
    ``level`` is what they would be without lists, of which ``lists`` has the kind and the length.
    Returns the list's name, or ``''``. ``NAME`` with another number of rows than the pairs
    ``NAME_index`` is refused.
    """
    best, longest = "", 0
    for other, (kind, count) in lists.items():
        word = list(_NAMED.finditer(other))
        start = other[: word[-1].start()].rstrip("_") if word else other
        end = other[word[-1].end() :] if word else ""
        if not (start or end) or not (name.startswith(start) and name.endswith(end)):
            continue
        if kind == "links" and name == start + end and rows >= 0 and rows != count:
            raise ValueError(
                f"Expected '{name}' to have one row per column of '{other}', "
                f"{counted(count, 'rows')} (got {rows})"
            )
        size = len(start) + len(end)
        if rows == count and size > longest and (kind == "links" or level == "graph"):
            best, longest = other, size
    return best


@dataclass(frozen=True, slots=True)
class NodeList:
    """A list of node ids, as the metadata describes it: its attribute's name (and the key in the
    dict of that name, if it is a value of one), ``'nodes'`` or ``'links'``, how it was given,
    and the attributes with a row per entry.
    """

    name: str
    kind: str
    attribute: Attribute
    rows: dict[str, Attribute]
    key: str | None = None

    @property
    def count(self) -> int:
        """The number of entries in the whole graph."""
        return self.attribute.shape[-1]


@dataclass(frozen=True, slots=True)
class WholeList:
    """A list of the whole graph: its description, its ids (int64), and the rows of attributes."""

    info: NodeList
    ids: Tensor
    columns: dict[str, Column]


# Writing #####################################################################


def take_lists(
    values: Mapping[str, Any],
    level: Callable[[str, Any], str],
    space: Space,
    said: Mapping[str, bool],
) -> tuple[set[str], list[WholeList]]:
    """Finds the attributes that hold node ids, and those that have a row per id.

    ``level`` returns what an attribute's rows are otherwise, ``said`` is what the caller says.
    Returns the names of all these attributes, and the lists. What can't be told is refused.
    """
    found: _Found = {}
    unsure: dict[str, tuple[Tensor, str]] = {}
    for name, value in named_attributes(values):
        if isinstance(value, Mapping):
            found |= _of_dict(name, value, space, said.get(name))
        elif kind := kind_of(name, value, level(name, value), space, said.get(name)):
            if kind == UNSURE:
                unsure[name] = torch.as_tensor(integers(value)), level(name, value)
            else:
                found[name, None] = kind, value
    taken = {name for name, _ in found}
    columns = _aligned(values, level, found)
    labels = {name for rows in columns.values() for name in rows if _LABELS.search(name)}
    _refuse_unsure({name: one for name, one in unsure.items() if name not in labels}, space)
    whole = []
    for (name, key), (kind, value) in found.items():
        ids = torch.as_tensor(integers(value))
        attribute = replace(encode_ids(name, value).attribute, dim=ids.dim() - 1)
        rows = columns[name] if key is None else {}
        described = {n: column.attribute for n, column in rows.items()}
        whole.append(WholeList(NodeList(name, kind, attribute, described, key), ids, rows))
        taken |= set(rows)
    return taken, whole


_Found = dict[tuple[str, str | None], tuple[str, Any]]
"""Kind and value of each list, by its name and the key in the dict of that name."""


def _of_dict(name: str, value: Mapping[Any, Any], space: Space, said: bool | None) -> _Found:
    """Finds the lists of a dict such as OGB's ``split_idx``."""
    arrays = [item for item in value.values() if isinstance(item, Tensor) or hasattr(item, "dtype")]
    if said is False or not arrays:
        return {}
    if said is None and not is_named(name):
        if len(arrays) == len(value) and all(integers(item) is not None for item in arrays):
            raise ValueError(
                f"The dict '{name}' of integer tensors can't be stored, unless it holds node ids: "
                f"say write_partitions(..., node_ids=['{name}']), or delete it"
            )
        return {}
    if not all(isinstance(key, str) for key in value):
        raise ValueError(f"Expected the dict '{name}' to have strings for keys (got {list(value)})")
    return {
        (name, key): (kind_of(name, item, "graph", space, True), item)
        for key, item in value.items()
    }


def _aligned(
    values: Mapping[str, Any], level: Callable[[str, Any], str], found: _Found
) -> dict[str, dict[str, Column]]:
    """Finds the attributes with a row per entry of a list, by list."""
    counts = {
        name: (kind, rows_of("index", value))
        for (name, key), (kind, value) in found.items()
        if key is None
    }
    columns: dict[str, dict[str, Column]] = {name: {} for name in counts}
    for name, value in named_attributes(values):
        if not counts or name in counts or isinstance(value, str | Mapping):
            continue
        if best := list_of(name, rows_of(name, value), level(name, value), counts):
            columns[best][name] = encode(name, value, "row")
    return columns


def without_lists(
    data: Data, num_nodes: int, said: Mapping[str, bool], levels: Mapping[str, str] | None = None
) -> tuple[Data, list[WholeList]]:
    """Returns the graph without its lists of node ids, and these.

    ``said`` is as of :func:`take_lists`, ``levels`` as of
    :func:`~pyg_sar.partition.levels.Levels`.
    """
    found = Levels(data, num_nodes, levels)
    data = found.data

    def level(name: str, value: Any) -> str:
        own = found.of(name, value)
        return "graph of the batch" if own == "graph" and rows_of(name, value) == graphs else own

    batch = integers(data.get("batch"))
    graphs = int(batch.max()) + 1 if batch is not None and batch.numel() else -2
    space = Space("the graph", num_nodes, num_nodes)
    taken, lists = take_lists(data.to_dict(), level, space, said)
    for name in taken:
        del data[name]
    return data, lists
