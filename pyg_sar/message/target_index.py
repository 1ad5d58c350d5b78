r"""The ``index`` that a message sees while only a tile of the in-edges is present.

[Note: softmax over targets] PyG's attention layers call ``softmax(alpha, index, ptr, num_nodes)``
inside ``message`` or ``edge_update``: a scatter-maximum, an exponential, a scatter-sum. Over a
tile these give the tile's own maximum :math:`m_t` and normaliser :math:`s_t`, so the message comes
out normalised over the tile alone. :class:`TargetIndex` sees both reductions pass by and keeps
them; the reducer then weighs tile t by :math:`s_t e^{m_t - M} / S`, which gives exactly the global
softmax wherever the message is linear in the normalised weights (FlashAttention's split over keys;
SAR, section 3.4). The analysis checks the linearity by running the message with scaled normalisers.

The normaliser is handed to the message as a constant and its own gradient is restored afterwards:
with :math:`out_i = \\sum_e p_e v_e` homogeneous of degree -1 in :math:`S_i`,
:math:`\\partial L/\\partial S_i = -\\langle g_i, out_i\\rangle / S_i`, which is at hand locally,
so that no second pass over the shards is needed.

[Note: reads of nodes] ``x_j`` and ``x_i`` are read by the edges' ends, over workers too. A message
that indexes a tensor of this worker's nodes itself, with ids that came with an edge or that it
computed, would read this worker's rows where it means another's. Such a tensor can't be told from a
table of something else but by its number of rows: it is one of nodes if it has this worker's number
on every worker. Parameters and buffers are the same everywhere, and therefore tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.distributed_index import METADATA, RESHAPE, builtin, name_of


class NeedsAllEdges(DistributedIndexError):
    """A message does what is right only where all in-edges of a target are present.

    Args:
        reason: What it does.
        collective: All edges of the graph have a part in it; one shot is right.
        forbidden: All edges of the graph have a part in it, and no way is right over workers.
    """

    def __init__(self, reason: str, *, collective: bool = False, forbidden: bool = False) -> None:
        super().__init__(reason)
        self.severity = 3 if forbidden else 2 if collective else 1


@dataclass(slots=True)
class Reductions:
    """The reductions over targets that a message made, in their order.

    Attributes:
        pattern: ``'max'`` and ``'sum'``, as they came.
        maximum: Tile maximum per target, ``[U, *]``, detached.
        total: Tile normaliser per target with its graph, ``[U, *]``.
        shift, scale: Set by the analysis: added to maxima, multiplied to normalisers.
    """

    pattern: tuple[str, ...] = ()
    maximum: Tensor | None = None
    total: Tensor | None = None
    shift: float = 0.0
    scale: Callable[[Tensor], Tensor] | None = None
    _seen: list[Tensor] = field(default_factory=list)

    def saw_maximum(self, value: Tensor) -> Tensor:
        self.pattern += ("max",)
        self.maximum = value + self.shift if self.shift else value
        return self.maximum

    def saw_sum(self, value: Tensor) -> Tensor:
        self.pattern += ("sum",)
        self.total = value
        constant = value.detach()
        return constant if self.scale is None else constant * self.scale(constant)


class TargetIndex(Tensor):
    """Positions of a tile's edges among its targets, ``[E_tile]``; notes reductions over it.

    Attributes:
        flat: The plain one-dimensional index.
        target_rows: Local node id of each edge's target.
        num_targets: Targets of the tile.
        num_local: The worker's nodes of the targets' type.
        reductions: Where they are noted.
        complete: All in-edges of the targets are present: reductions are right as they are.
    """

    flat: Tensor
    target_rows: Tensor
    num_targets: int
    num_local: int
    reductions: Reductions
    complete: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in RESHAPE and isinstance(args[0], cls):
            source = args[0]
            args = (_plain(source), *[_plain(a) for a in args[1:]])
            return target_index(func(*args, **kwargs), source)
        reads = func in _READ
        if reads and not isinstance(args[0], cls):
            return _read(func, args, kwargs)
        if next(a for a in tree_leaves((args, kwargs)) if isinstance(a, cls)).complete:
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if func in _REDUCE:
            return _reduce(func, args, kwargs)
        raise NeedsAllEdges(f"the message calls '{name_of(func)}' on its targets' index")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TargetIndex({_plain(self)!r})"


_READ = {
    Tensor.index_select,
    torch.index_select,
    builtin(torch.index_select),
    Tensor.__getitem__,
}
_REDUCE = {
    Tensor.scatter_add_: "sum",
    Tensor.scatter_add: "sum",
    torch.scatter_add: "sum",
    Tensor.index_add_: "sum",
    Tensor.scatter_reduce_: "max",
    Tensor.scatter_reduce: "max",
    torch.scatter_reduce: "max",
}


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, TargetIndex) else value


def target_index(index: Tensor, like: TargetIndex) -> TargetIndex:
    """Returns a view or expansion of ``like``."""
    out = index.as_subclass(TargetIndex)
    out.flat, out.target_rows, out.reductions = like.flat, like.target_rows, like.reductions
    out.num_targets, out.num_local, out.complete = like.num_targets, like.num_local, like.complete
    return out


def make_target_index(
    index: Tensor,
    target_rows: Tensor,
    num_targets: int,
    num_local: int,
    reductions: Reductions,
    complete: bool = False,
) -> TargetIndex:
    """Wraps a tile's index. Shapes: ``index``, ``target_rows`` ``[E_tile]``."""
    out = index.view_as(index).as_subclass(TargetIndex)
    out.flat, out.target_rows, out.reductions = index, target_rows, reductions
    out.num_targets, out.num_local, out.complete = num_targets, num_local, complete
    return out


def _reduce(func: Any, args: Any, kwargs: Any) -> Tensor:
    out, dim, index, values = args[:4]
    if not isinstance(index, TargetIndex) or isinstance(out, TargetIndex):
        raise NeedsAllEdges("the message reduces over targets in an unusual way")
    log = index.reductions
    if out.size(dim) != index.num_targets:
        raise NeedsAllEdges("the message reduces over targets into a tensor of another size")
    result = func(out, dim, _plain(index), values, *args[4:], **kwargs)
    if _REDUCE[func] == "sum":
        return log.saw_sum(result)
    reduce = args[4] if len(args) > 4 else kwargs.get("reduce")
    if reduce != "amax" or kwargs.get("include_self", True) or values.requires_grad:
        raise NeedsAllEdges(f"the message reduces over targets by '{reduce}'")
    return log.saw_maximum(result)


def _read(func: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    if func is Tensor.__getitem__:
        dim, index = 0, args[1]
    else:
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        index = args[2] if len(args) > 2 else kwargs["index"]
    if not isinstance(index, TargetIndex) or isinstance(x, TargetIndex):
        raise NeedsAllEdges("the message cuts its targets' index")
    if x.size(dim) == index.num_targets:
        return x.index_select(dim, index.flat)
    if x.size(dim) == index.num_local:
        return x.index_select(dim, index.target_rows)
    if index.complete:  # up to the last target that has an edge
        return x.index_select(dim, index.flat)
    raise NeedsAllEdges(
        f"the message reads a tensor of shape {list(x.shape)} at its targets, which is neither a "
        "reduction over them nor a node tensor"
    )


def trailing(values: Tensor, like: Tensor) -> Tensor:
    """Returns ``values [N, *]`` with axes of size 1 appended, to broadcast with ``like``."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Weights ``[N, *]`` to broadcast against ``like``: per row, or per head of ``like``.

    Heads are leading axes of ``[N, H, C]``, or blocks of the last axis of ``[N, H * C]``, into
    which layers flatten their heads.
    """
    heads, width = weights.size(-1), like.size(-1)
    if weights.dim() == like.dim() > 1 and 1 < heads < width and width % heads == 0:
        return weights.repeat_interleave(width // heads, dim=-1)
    return trailing(weights, like)


# Reads of nodes by ids of a message's own #####################################


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _readers() -> dict[Any, int]:
    """Functions that read rows, and which of their arguments they read from."""
    found: dict[Any, int] = {
        Tensor.__getitem__: 0,
        Tensor.gather: 0,
        Tensor.index_select: 0,
        Tensor.take: 0,
        Tensor.take_along_dim: 0,
        torch.gather: 0,
        torch.index_select: 0,
        torch.take: 0,
        torch.take_along_dim: 0,
        torch.nn.functional.embedding: 1,
        torch.embedding: 0,
    }
    return found | {builtin(function): place for function, place in found.items()}


class NodeReads(TorchFunctionMode):
    """Watches one run of a message.

    Args:
        rows: This worker's numbers of nodes (of the sources, of the targets).
        own: Values of the edges at hand: what derives from them has a row per edge.
        tables: Parameters and buffers.

    Attributes:
        found: The function that read rows of a node tensor, if there was one.
    """

    def __init__(
        self,
        rows: Iterable[int],
        own: Iterable[Tensor],
        tables: Iterable[Tensor],
    ) -> None:
        super().__init__()
        self.found = ""
        self._rows = set(rows) - {0}
        self._readers = _readers()
        self._alive: list[Tensor] = []  # storages must not be freed, or their numbers come again
        self._made = {_storage(t) for t in (*own, *tables)}
        self._nodes: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if _followed(t)]
        for tensor in inputs:
            if _storage(tensor) not in self._made and self._has_node_rows(tensor):
                self._nodes.add(_storage(tensor))
        if not self.found and func in self._readers:
            self._look(func, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(inputs, [t for t in tree_leaves(out) if _followed(t)])
        return out

    def _has_node_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.size(0) in self._rows

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes a read of node rows by ids that aren't those of the edges' targets."""
        place = self._readers[func]
        source: Any = args[place] if len(args) > place else None
        ids = [t for k, t in enumerate(args) if k != place] + list(kwargs.values())
        numbers = [
            t
            for t in tree_leaves(ids)
            if isinstance(t, Tensor) and t.dtype in (torch.int64, torch.int32) and t.dim() > 0
        ]
        if not _followed(source) or not numbers or _storage(source) not in self._nodes:
            return
        if any(isinstance(t, TargetIndex) for t in numbers):
            return
        self.found = name_of(func)

    def _follow(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        nodes = any(_storage(t) in self._nodes for t in inputs)
        for tensor in outputs:
            self._alive.append(tensor)
            key = _storage(tensor)
            if nodes and self._has_node_rows(tensor):
                self._nodes.add(key)
            elif key not in self._nodes:
                self._made.add(key)


def _followed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and type(value) in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)
