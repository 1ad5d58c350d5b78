r"""The ``index`` that a message sees while only a tile of the in-edges is present.

[Note: softmax over targets] PyG's attention layers call ``softmax(alpha, index, ptr, num_nodes)``
inside ``message`` or ``edge_update``: a scatter-maximum, an exponential, a scatter-sum. Over a
tile these give the tile's own maximum :math:`m_t` and normaliser :math:`s_t`, so the message comes
out normalised over the tile alone. :class:`TargetIndex` sees both reductions pass by and keeps
them; the reducer then weighs tile t by :math:`s_t e^{m_t - M} / S`, which gives exactly the global
softmax wherever the message is linear in the normalised weights (FlashAttention's split over keys;
SAR, section 3.4). The analysis checks the linearity with scaled normalisers.

The normaliser is handed to the message as a constant and its own gradient is restored afterwards:
with :math:`out_i = \\sum_e p_e v_e` homogeneous of degree -1 in :math:`S_i`,
:math:`\\partial L/\\partial S_i = -\\langle g_i, out_i\\rangle / S_i`, which is at hand locally,
so that no second pass over the shards is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.distributed_index import METADATA, RESHAPE, builtin, name_of
from pyg_sar.tensors.nested import mapped, tensors_in


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


class _CutIndex(NeedsAllEdges):
    """A message cuts its targets' index, which no tile can stand for."""


@dataclass(slots=True)
class Reductions:
    """The reductions over targets that a message made, in their order.

    Attributes:
        pattern: ``'max'`` and ``'sum'``, as they came.
        maximum: Tile maximum per target, ``[U, *]``, detached.
        total: Tile normaliser per target with its graph, ``[U, *]``.
        watched: All in-edges are there, and the message is looked at: what it does with its
            targets' index is noted, and gives what it gives in one process.
        problems: What can't be done tile by tile, of a message that is looked at, and whether it
            can't be done with all in-edges of each target either.
    """

    pattern: tuple[str, ...] = ()
    maximum: Tensor | None = None
    total: Tensor | None = None
    watched: bool = False
    problems: list[tuple[NeedsAllEdges, bool]] = field(default_factory=list)

    def saw_maximum(self, value: Tensor) -> Tensor:
        self.pattern += ("max",)
        self.maximum = value
        return value

    def saw_sum(self, value: Tensor) -> Tensor:
        self.pattern += ("sum",)
        self.total = value
        return value if self.watched else value.detach()

    def refuse(self, problem: NeedsAllEdges, always: bool = False) -> None:
        """Notes a problem where the message is looked at.

        Raises:
            NeedsAllEdges: Where it is not.
        """
        if not self.watched:
            raise problem
        self.problems.append((problem, always))


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
        own = next(a for a in tensors_in(args, kwargs) if isinstance(a, cls))
        plain = lambda: func(*mapped(_plain, args), **mapped(_plain, kwargs))  # noqa: E731
        try:
            if func in _READ and not isinstance(args[0], cls):
                return _read(func, args, kwargs)
            if own.complete:
                return plain()
            if func not in _REDUCE:
                problem = f"the message calls '{name_of(func)}' on its targets' index"
                raise NeedsAllEdges(problem)
            see = _reduction(func, args, kwargs)
        except NeedsAllEdges as problem:
            own.reductions.refuse(problem, always=isinstance(problem, _CutIndex))
            return plain()
        return see(plain())

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


def _reduction(func: Any, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """Returns what takes note of the result of a reduction over targets."""
    out, dim, index, values = args[:4]
    if not isinstance(index, TargetIndex) or isinstance(out, TargetIndex):
        raise NeedsAllEdges("the message reduces over targets in an unusual way")
    log = index.reductions
    if out.size(dim) != index.num_targets:
        raise NeedsAllEdges("the message reduces over targets into a tensor of another size")
    if _REDUCE[func] == "sum":
        return log.saw_sum
    reduce = args[4] if len(args) > 4 else kwargs.get("reduce")
    if reduce != "amax" or kwargs.get("include_self", True) or values.requires_grad:
        raise NeedsAllEdges(f"the message reduces over targets by '{reduce}'")
    return log.saw_maximum


def _read(func: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    if func is Tensor.__getitem__:
        dim, index = 0, args[1]
    else:
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        index = args[2] if len(args) > 2 else kwargs["index"]
    if not isinstance(index, TargetIndex) or isinstance(x, TargetIndex):
        raise _CutIndex("the message cuts its targets' index")
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
