r"""Softmax attention among all nodes of a graph, keys and values streamed from worker to worker.

.. math::
    o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \exp(s_{ij} - \ell_i), \qquad
    s_{ij} = \frac{q_i^\top k_j}{\sqrt{d}}, \qquad \ell_i = \log \sum_j \exp(s_{ij})

over all nodes :math:`j` of node :math:`i`'s graph, on whichever worker. Worker p keeps its queries,
and in round r takes the keys and values of worker p + r; a running maximum and normaliser per query
join the rounds (Milakov and Gimelshein, 2018; Liu et al., 2023: ring attention). The backward pass
streams them again, with :math:`D_i = \langle \bar o_i, o_i \rangle`

.. math::
    \bar v_j = \sum_i p_{ij} \bar o_i, \quad
    \bar s_{ij} = p_{ij} (\langle \bar o_i, v_j \rangle - D_i), \quad
    \bar q_i = \sum_j \bar s_{ij} k_j / \sqrt{d}, \quad \bar k_j = \sum_i \bar s_{ij} q_i / \sqrt{d}

and returns the gradients of keys and values to their owner (Dao et al., 2022). Never more than one
worker's keys and values are resident besides the own ones (two with prefetch), nor more scores than
a tile's; one number per query and head is kept.

[Note: dropout of attention weights] A tile's mask comes from a generator of its own, seeded by the
call's seed (drawn once from torch's), the unit of the keys and the tile's place. So the backward
pass draws the very same mask. Masks of different workers' queries are independent; they can't be
those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import refuse_second_derivative
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.shared_rows import SharedRows
from pyg_sar.exchange.streams import GradientReturn, ShardStream
from pyg_sar.ledger import Label
from pyg_sar.space.graph_index import DistBatch, plain_batch

QUERIES, KEYS = 256, 1024
"""Rows of a tile: ``heads * QUERIES * KEYS`` scores are resident."""


class AllRows(HaloPlan):
    """The plan by which every worker needs every row of every other.

    Args:
        comm: The communicator.
        counts: Rows of each worker.
        device: Where the rows are.
    """

    def __init__(self, comm: Communicator, counts: list[int], device: torch.device) -> None:
        halo = [0 if rank == comm.rank else n for rank, n in enumerate(counts)]
        none = torch.empty(0, dtype=torch.long, device=device)
        super().__init__(comm, counts[comm.rank], halo, none, [0] * comm.world_size)
        self._every = torch.arange(counts[comm.rank], device=device)
        self.send_counts = [0 if r == comm.rank else counts[comm.rank] for r in range(len(counts))]
        if comm.sharing is not None:
            own = counts[comm.rank]
            self.shared = SharedRows(
                rows=None,
                count=own,
                readers=dict.fromkeys(comm.sharing.ranks, own),
                counts=dict(enumerate(counts)),
                index={},
            )

    def send_rows(self, peer: int) -> Tensor:
        return self._every[:0] if peer == self.rank else self._every


@dataclass(frozen=True, slots=True)
class _Call:
    """What all tiles of a call share. Rows are sorted by graph."""

    plan: AllRows
    graph: Tensor
    several: bool
    scale: float
    dropout: float
    seed: int
    prefetch: int
    layer: str


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


def _kept(call: _Call, unit: int, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
    """What dropout multiplies a tile's weights by. See [Note: dropout of attention weights]."""
    if call.dropout == 0:
        return None
    draw = torch.Generator(device=like.device)
    mark = (call.seed, unit, rows.start, columns.start)
    draw.manual_seed(hash(mark) % 2**63)
    kept = torch.rand(like.shape, generator=draw, dtype=torch.float32, device=like.device)
    return (kept >= call.dropout).to(like.dtype) / max(1 - call.dropout, 1e-12)


def _shards(
    call: _Call, k: Tensor, v: Tensor, label: Label
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """Keys, values and graphs by unit; graphs travel where there are several."""
    tensors = [k.detach(), v.detach()] + [call.graph] * call.several
    for unit, rows in ShardStream(call.plan, tensors, label, call.prefetch):
        keys, values, *graph = rows.tensors
        handed = [(keys, values, graph[0] if graph else call.graph[:0])]
        del rows, keys, values, graph
        yield unit, handed.pop()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _GlobalAttention(torch.autograd.Function):
    """``q, k, v [n, heads, d]``, sorted by graph."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        wide = q.detach().to(_wide(q.dtype))
        count, heads = q.size(0), q.size(1)
        most = wide.new_full((heads, count), torch.finfo(wide.dtype).min)
        total = torch.zeros_like(most)
        out = wide.new_zeros(heads, count, v.size(2))
        label = (call.layer, "forward", "fetch")
        for unit, shard in _shards(call, k, v, label):
            keys, values, graph = shard
            for rows, columns, foreign in _tiles(call, graph, keys.size(0)):
                score = _scores(wide[rows], keys[columns].to(wide.dtype), call.scale, foreign)
                now = torch.maximum(most[:, rows], score.amax(-1))
                weight = (score - now.unsqueeze(-1)).exp_()
                shrink = (most[:, rows] - now).exp_()
                total[:, rows] = total[:, rows] * shrink + weight.sum(-1)
                kept = _kept(call, unit, rows, columns, weight)
                weight = weight if kept is None else weight * kept
                part = torch.einsum("hnm,mhd->hnd", weight, values[columns].to(wide.dtype))
                out[:, rows] = out[:, rows] * shrink.unsqueeze(-1) + part
                most[:, rows] = now
            del shard, keys, values, graph  # See [Note: lifetimes] in exchange.
        result = (out / total.unsqueeze(-1)).transpose(0, 1).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, result, most + total.log())
        ctx.call = call
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        refuse_second_derivative(
            f"Attention over all nodes at rank {call.plan.rank}",
            "are not there: its keys are streamed; compute them on one process",
        )
        q, k, v, result, norm = ctx.saved_tensors
        dtype = _wide(q.dtype)
        wide, given = q.to(dtype), gradient.to(dtype)
        inner = (given * result.to(dtype)).sum(-1).t()  # D [heads, n]
        q_grad = torch.zeros_like(wide)
        totals = [torch.zeros_like(t, dtype=dtype) for t in (k, v)]
        back = GradientReturn(call.plan, totals, call.layer, 2 * min(call.prefetch, 1))
        label = (call.layer, "backward", "refetch")
        for unit, shard in _shards(call, k, v, label):
            keys, values, graph = shard
            k_grad, v_grad = back.start(unit)
            for rows, columns, foreign in _tiles(call, graph, keys.size(0)):
                key, value = keys[columns].to(dtype), values[columns].to(dtype)
                score = _scores(wide[rows], key, call.scale, foreign)
                weight = (score - norm[:, rows].unsqueeze(-1)).exp_()
                kept = _kept(call, unit, rows, columns, weight)
                inward = torch.einsum("nhd,mhd->hnm", given[rows], value)
                used = weight if kept is None else weight * kept
                inward = inward if kept is None else inward * kept
                v_grad[columns] += torch.einsum("hnm,nhd->mhd", used, given[rows])
                change = weight * (inward - inner[:, rows].unsqueeze(-1)) * call.scale
                q_grad[rows] += torch.einsum("hnm,mhd->nhd", change, key)
                k_grad[columns] += torch.einsum("hnm,nhd->mhd", change, wide[rows])
                del key, value
            del shard, keys, values, graph, k_grad, v_grad
            back.send(unit)
        back.drain()
        return q_grad.to(q.dtype), totals[0].to(k.dtype), totals[1].to(v.dtype), None


def global_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: DistBatch,
    *,
    dropout: float = 0.0,
    prefetch: int = 1,
    layer: str = "",
) -> Tensor:
    r"""Attention of every node to all nodes of its graph, on all workers; see this module.

    Traffic per worker: the keys and values of the others once forward, and twice backward (they
    come again, their gradients go). Compute grows with the square of a graph's nodes, divided by
    the number of workers.

    Args:
        q: Queries of this worker's nodes, ``[num_local, heads, d]``.
        k: Keys, ``[num_local, heads, d]``.
        v: Values, ``[num_local, heads, d']``.
        batch: Graph of each node (:func:`pyg_sar.space.dist_batch`).
        dropout: Probability by which attention weights are dropped.
        prefetch: Shards fetched ahead, 0 or more.
        layer: Whom the ledger charges.

    Returns:
        ``[num_local, heads, d']``.

    Raises:
        ValueError: When the shapes don't fit.
    """
    comm, rows = batch.comm, q.size(0)
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    if not fits or batch.numel() != rows:
        shapes = [list(t.shape) for t in (q, k, v, batch)]
        raise ValueError(
            "Expected q and k of shape [num_local, heads, d], v alike, and batch [num_local] (got "
            f"{shapes} at rank {comm.rank})"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"'dropout'={dropout} must be from 0 to 1")
    here = torch.tensor([rows], device=q.device)
    counts = [int(n) for n in comm.all_gather(here, label=(layer, "forward", "rows"))]
    seed = int(torch.randint(2**62, ())) if dropout > 0 else 0
    graph, several = plain_batch(batch), batch.num_graphs > 1
    order = graph.argsort(stable=True) if several else None
    if order is not None:
        q, k, v, graph = q[order], k[order], v[order], graph[order]
    call = _Call(
        plan=AllRows(comm, counts, q.device),
        graph=graph,
        several=several,
        scale=1 / math.sqrt(max(q.size(2), 1)),
        dropout=float(dropout),
        seed=seed,
        prefetch=prefetch,
        layer=layer,
    )
    out = _GlobalAttention.apply(q, k, v, call)
    if order is None:
        return out
    return out.index_select(0, order.argsort())
