r"""Softmax attention among all nodes of a graph, keys and values streamed from worker to worker.

.. math::
    o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \exp(s_{ij} - \ell_i), \qquad
    s_{ij} = \frac{q_i^\top k_j}{\sqrt{d}}, \qquad \ell_i = \log \sum_j \exp(s_{ij})

over all nodes :math:`j` of node :math:`i`'s graph, on whichever worker. Worker p keeps its queries,
and in unit u takes the keys and values of worker p + u; a running maximum and normaliser per query
join the units (Milakov and Gimelshein, 2018; Liu et al., 2023: ring attention). The backward pass
streams them again, with :math:`D_i = \langle \bar o_i, o_i \rangle`

.. math::
    \bar v_j = \sum_i p_{ij} \bar o_i, \quad
    \bar s_{ij} = p_{ij} (\langle \bar o_i, v_j \rangle - D_i), \quad
    \bar q_i = \sum_j \bar s_{ij} k_j / \sqrt{d}, \quad \bar k_j = \sum_i \bar s_{ij} q_i / \sqrt{d}

and returns the gradients of keys and values to their owner (Dao et al., 2022). Never more than one
worker's keys and values are resident besides the own ones (two with prefetch), nor more scores than
a tile's; one number per query and head is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator, current
from pyg_sar.engine.run import Kernel, Pass, run
from pyg_sar.engine.schedule import Schedule, Stage
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.halo_rows import HaloRows, Published
from pyg_sar.exchange.rows import UnitRows

QUERIES, KEYS = 256, 1024
"""Rows of a tile: ``heads * QUERIES * KEYS`` scores are resident."""


class AllRows(HaloPlan):
    """The plan by which every worker needs every row of every other, of which each has so many."""

    def __init__(self, comm: Communicator, counts: list[int], device: torch.device) -> None:
        own, rank = counts[comm.rank], comm.rank
        halo = [0 if q == rank else n for q, n in enumerate(counts)]
        none = torch.empty(0, dtype=torch.long, device=device)
        super().__init__(comm, own, halo, none, [0] * comm.world_size)
        every = torch.arange(own, device=device)
        sends = [none if q == rank else every for q in range(comm.world_size)]
        self.send_counts, self._sends = [rows.numel() for rows in sends], sends
        if comm.sharing is not None:
            self.published = Published(
                rows=None,
                count=own,
                readers=dict.fromkeys(comm.sharing.ranks, own),
                counts=dict(enumerate(counts)),
                index={},
            )


@dataclass(frozen=True, slots=True)
class _Call:
    """The same for all tiles of a call. Rows are sorted by graph."""

    graph: Tensor
    several: bool
    scale: float


def _tiles(call: _Call, graph: Tensor, total: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Tiles of queries and keys that share a graph, with the pairs that don't (``None``: none)."""
    count = call.graph.numel()
    for start in range(0, count, QUERIES):
        stop = min(start + QUERIES, count)
        low, high = 0, total
        if call.several and total:
            first, last = call.graph[start : start + 1], call.graph[stop - 1 : stop]
            low = int(torch.searchsorted(graph, first))
            high = int(torch.searchsorted(graph, last, right=True))
        for begin in range(low, high, KEYS):
            end = min(begin + KEYS, high)
            foreign = None
            if call.several:
                foreign = call.graph[start:stop, None] != graph[None, begin:end]
            yield slice(start, stop), slice(begin, end), foreign


def _scores(q: Tensor, k: Tensor, scale: float, foreign: Tensor | None) -> Tensor:
    """``[heads, queries, keys]`` of ``q, k [rows, heads, d]``."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return scores if foreign is None else scores.masked_fill_(foreign, float("-inf"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class DenseAttention(Kernel):
    """Attention among all nodes; its inputs are ``q, k, v [n, heads, d]``, sorted by graph."""

    reads_output = True
    second_derivative = "are not there: its keys are streamed; compute them on one process"

    def __init__(self, name: str, plan: AllRows, call: _Call, prefetch: int) -> None:
        self.name, self.call, self.prefetch = name, call, prefetch
        self.title = f"Attention over all nodes at rank {plan.rank}"
        blocks: Any = range(plan.world_size)  # of all pairs of an owner's nodes and the own ones
        stages = (Stage(HaloRows(plan), blocks),)
        self.schedule = Schedule(plan, call.graph, stages, stages)

    def forward(self, tensors: Sequence[Tensor], record: bool) -> DenseForward:
        return DenseForward(self.call, *tensors)

    def saved(self, tensors: Sequence[Tensor], done: DenseForward) -> list[Tensor]:
        return [*tensors, done.norm]

    def inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        return list(saved[:3])

    def cotangent(
        self, gradients: Sequence[Tensor], saved: Sequence[Tensor], output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The output's gradient, and its product with the output, ``D [heads, n]``."""
        given = gradients[0].to(_wide(saved[0].dtype))
        return given, (given * output.to(given.dtype)).sum(-1).t()

    def backward(
        self,
        cotangent: tuple[Tensor, Tensor],
        saved: Sequence[Tensor],
        wanted: Sequence[bool],
        last: bool,
    ) -> DenseBackward:
        return DenseBackward(self.call, cotangent, saved)


def _source_rows(call: _Call, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys, values and, where there are several, graphs: these travel."""
    return [k, v, call.graph] if call.several else [k, v]


class DenseForward(Pass):
    r"""Keeps a running maximum, normaliser and sum of values per query.

    Attributes:
        norm: :math:`\ell`, ``[heads, n]``, once it is finished.
    """

    def __init__(self, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._call, self._dtype = call, q.dtype
        self.sources = _source_rows(call, k, v)
        self._q = q.to(_wide(q.dtype))
        count, heads = q.size(0), q.size(1)
        self._most = self._q.new_full((heads, count), torch.finfo(self._q.dtype).min)
        self._sum = torch.zeros_like(self._most)
        self._out = self._q.new_zeros(heads, count, v.size(2))
        self.norm = self._most

    def add_(self, block: Any, rows: UnitRows, into: list[Tensor]) -> None:
        call, wide, most, total = self._call, self._q, self._most, self._sum
        keys, values, *graph = rows.tensors
        for here, there, foreign in _tiles(call, graph[0] if graph else call.graph, keys.size(0)):
            score = _scores(wide[here], keys[there].to(wide.dtype), call.scale, foreign)
            now = torch.maximum(most[:, here], score.amax(-1))
            weight = (score - now.unsqueeze(-1)).exp_()
            shrink = (most[:, here] - now).exp_()
            total[:, here] = total[:, here] * shrink + weight.sum(-1)
            part = torch.einsum("hnm,mhd->hnd", weight, values[there].to(wide.dtype))
            self._out[:, here] = self._out[:, here] * shrink.unsqueeze(-1) + part
            most[:, here] = now

    def finish(self) -> list[Tensor]:
        """The output ``[n, heads, d]``."""
        self.norm = self._most + self._sum.log()
        out = self._out / self._sum.unsqueeze(-1)
        return [out.transpose(0, 1).to(self._dtype).contiguous()]


class DenseBackward(Pass):
    """Gradients of queries here, of keys and values at their owners."""

    phase = "backward"
    kinds = ("refetch", "gradient", "query", "gradient")

    def __init__(
        self, call: _Call, cotangent: tuple[Tensor, Tensor], saved: Sequence[Tensor]
    ) -> None:
        q, k, v, self._norm = saved
        self._given, self._inner = cotangent
        dtype = _wide(q.dtype)
        self._call, self._dtypes = call, (q.dtype, k.dtype, v.dtype)
        self.sources = _source_rows(call, k, v)
        self._q = q.to(dtype)
        self._q_grad = torch.zeros_like(self._q)
        self.returned = [torch.zeros_like(t, dtype=dtype) for t in (k, v)]

    def add_(self, block: Any, rows: UnitRows, into: list[Tensor]) -> None:
        call, wide, given = self._call, self._q, self._given
        keys, values, *graph = rows.tensors
        k_grad, v_grad = into
        for here, there, foreign in _tiles(call, graph[0] if graph else call.graph, keys.size(0)):
            key, value = keys[there].to(wide.dtype), values[there].to(wide.dtype)
            score = _scores(wide[here], key, call.scale, foreign)
            weight = (score - self._norm[:, here].unsqueeze(-1)).exp_()
            inward = torch.einsum("nhd,mhd->hnm", given[here], value)
            v_grad[there] += torch.einsum("hnm,nhd->mhd", weight, given[here])
            change = weight * (inward - self._inner[:, here].unsqueeze(-1)) * call.scale
            self._q_grad[here] += torch.einsum("hnm,mhd->nhd", change, key)
            k_grad[there] += torch.einsum("hnm,nhd->mhd", change, wide[here])

    def finish(self) -> list[Tensor]:
        """The gradients of queries, keys and values."""
        found = self._q_grad, *self.returned
        return [part.to(dtype) for part, dtype in zip(found, self._dtypes, strict=True)]


def streamed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: Tensor | None = None,
    *,
    prefetch: int = 1,
    layer: str = "",
) -> Tensor:
    r"""Attention of this worker's nodes to all nodes of their graphs; see this module.

    Traffic per worker: the keys and values of the others once forward, and twice backward (they
    come again, their gradients go). Compute grows with the square of a graph's nodes, divided by
    the number of workers.

    Args:
        q: Queries of this worker's nodes, ``[num_local, heads, d]``.
        k: Keys, ``[num_local, heads, d]``.
        v: Values, ``[num_local, heads, d']``.
        graph: Graph of each node, int64 ``[num_local]``; ``None`` on all workers: they are of one.
        prefetch: Units fetched ahead, 0 or 1.
        layer: Whom the ledger charges.

    Returns:
        ``[num_local, heads, d']``.

    Raises:
        ValueError: When the shapes don't fit.
    """
    comm, rows = current(), q.size(0)
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    if not fits:
        shapes = [list(t.shape) for t in (q, k, v)]
        raise ValueError(
            f"Expected q and k of shape [num_local, heads, d], and v alike (got {shapes} at rank "
            f"{comm.rank})"
        )
    here = torch.tensor([rows], device=q.device)
    counts = [int(n) for n in comm.all_gather(here, label=(layer, "forward", "rows"))]
    several = graph is not None
    graph = here.new_zeros(rows) if graph is None else graph
    order = graph.argsort(stable=True) if several else None
    if order is not None:
        q, k, v, graph = q[order], k[order], v[order], graph[order]
    call = _Call(graph, several, 1 / math.sqrt(max(q.size(2), 1)))
    kernel = DenseAttention(layer, AllRows(comm, counts, q.device), call, prefetch)
    record = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    (out,) = run(kernel, [q, k, v], record)
    if order is None:
        return out
    return out.index_select(0, order.argsort())
