"""Additive attention whose transform depends on the edge's relation, one relation at a time.

The softmax is over all in-edges of a target, of whichever relation, and states merge: so a block's
edges are added relation by relation. Of each relation only those rows of a unit are transformed
that its edges read, one relation's at a time; what travels are the untransformed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.kernels.attention import SoftmaxAttention
from pyg_sar.engine.schedule import by_shards
from pyg_sar.exchange.rows import UnitRows
from pyg_sar.kernels.attention_ops import attention_, attention_backward_sources_
from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    wide_dtype,
)
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Block, Segments, Shards, shards_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationalTerms:
    r"""Scores and values of edges e = (j -> i) of relation r.

    .. math::
        \mathrm{value}_e = x_j W_r, \qquad
        s_e = \mathrm{leaky}(x_j K_r + q_{r,i} + \mathrm{edge\_attr}_e \, \mathrm{edge\_weight})

    Attributes:
        x: ``[M, F]``.
        weight: :math:`W`, ``[R, F, H * C]``.
        key_weight: :math:`K`, ``[R, F, H]``.
        query: :math:`q`, ``[R, N, H]``.
        edge_type: The relation of each edge, ``[E]``, int64.
        edge_attr: ``[E, D]``; ``None``: no edge term.
        edge_weight: ``[D, H]``; goes with ``edge_attr``.
        slope: Leaky ReLU's negative slope.
        seed: Of the dropout.
        p: Probability to drop a weight after the normalisation.
        drop_key: Which heads of each edge are kept, ``[E, 1]``, a bit for each; ``None``: the seed
            tells.
    """

    x: Tensor
    weight: Tensor
    key_weight: Tensor
    query: Tensor
    edge_type: Tensor
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None
    slope: float = 1.0
    seed: int = 0
    p: float = 0.0
    drop_key: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of floating point that are there, by name."""
        names = ("x", "weight", "key_weight", "query", "edge_attr", "edge_weight")
        return {n: t for n in names if (t := getattr(self, n)) is not None}


class RelationalAttention(SoftmaxAttention):
    """One call of a layer, of which ``terms`` has ``x`` of this worker's nodes. Made by all workers
    together.

    Raises:
        IndexError: An edge is of no relation.
    """

    sources = ("x",)
    in_place = False

    def __init__(
        self,
        terms: RelationalTerms,
        edge_index: DistEdgeIndex,
        policy: SARPolicy,
        name: str,
        title: str,
    ) -> None:
        kinds, count = terms.edge_type, terms.weight.size(0)
        if kinds.numel() and not 0 <= int(kinds.min()) <= int(kinds.max()) < count:
            raise IndexError(
                f"{title}: expected 'edge_type' in [0, {count}) (got {int(kinds.min())} to "
                f"{int(kinds.max())})"
            )
        # Of each relation, its edges' columns of the whole ``edge_index``, and their shards.
        self._relations: list[tuple[Tensor, Shards]] = []
        for relation in range(count):
            # Found again in later passes by the mask's content.
            edges: Any = edge_index[:, kinds == relation]
            columns = (kinds == relation).nonzero().view(-1)
            self._relations.append((columns, shards_of(edges)))
        schedule = by_shards(self._relations[0][1])
        super().__init__(terms, schedule, policy, name, title)

    def start(self, given: Any) -> AttentionState:
        heads = given.query.size(2)
        value = given.x.new_empty(0, heads, given.weight.size(2) // heads)
        return AttentionState.start(self.schedule.in_degree.numel(), value)

    def add(self, state: AttentionState, given: Any, block: Block, rows: UnitRows) -> None:
        (every,) = rows.tensors
        for number, (_, shards) in enumerate(self._relations):
            edges = shards.blocks[block.unit].segments
            if edges.source.numel() == 0:
                continue
            used = torch.zeros(every.size(0), dtype=torch.bool, device=every.device)
            used[edges.source.long()] = True
            place = used.cumsum(0).sub_(1).to(edges.source.dtype)
            source = place.index_select(0, edges.source)
            x = every[used]
            shard = self._of_relation(given, number, block.unit, x)
            attention_(state, shard, Segments(source, edges.offsets, edges.targets, edges.edges))

    def add_gradients(
        self,
        sums: dict[str, Tensor],
        given: Any,
        cotangent: Cotangent,
        block: Block,
        rows: UnitRows,
    ) -> None:
        (every,) = rows.tensors
        for number, (_, shards) in enumerate(self._relations):
            numbered = given.edge_attr is not None or given.p > 0
            edges = shards.blocks[block.unit].transposed(numbered)
            if edges.source.numel() == 0:
                continue
            x = every if edges.targets is None else every.index_select(0, edges.targets)
            shard = self._of_relation(given, number, block.unit, x)
            alone = Segments(edges.source, edges.offsets, None, edges.edges)
            found = self._gradients(sums, shard, number)
            attention_backward_sources_(found, shard, cotangent, alone)
            if found.edge_attr is not None:
                sums["edge_attr"][self._columns(number, block.unit)] = found.edge_attr
            wide = wide_dtype(x.dtype)
            for name, part in (("weight", found.value), ("key_weight", found.key)):
                if part is None:
                    continue
                part = part.flatten(1)
                if name in sums:
                    sums[name][number].addmm_(x.to(wide).t(), part)
                if "x" in sums:
                    back = part @ getattr(given, name)[number].to(wide).t()
                    where = slice(None) if edges.targets is None else edges.targets
                    sums["x"][where] += back

    def _of_relation(self, given: Any, number: int, unit: int, x: Tensor) -> Attention:
        """A relation's part of a shard, whose source rows are ``x``."""
        columns = self._columns(number, unit) if given.edge_attr is not None or given.p else None
        return Attention(
            kind="additive",
            value=(x @ given.weight[number]).unflatten(1, (given.query.size(2), -1)),
            key=x @ given.key_weight[number],
            query=given.query[number],
            edge_attr=None if given.edge_attr is None else given.edge_attr[columns],
            edge_weight=given.edge_weight,
            slope=given.slope,
            drop_key=self.drop_keys(columns, x.device) if columns is not None and given.p else None,
            seed=given.seed,
            p=given.p,
        )

    def _columns(self, number: int, unit: int) -> Tensor:
        columns, shards = self._relations[number]
        return columns[shards.blocks[unit].columns]

    @staticmethod
    def _gradients(sums: dict[str, Tensor], shard: Attention, number: int) -> AttentionGradients:
        """The tensors that a relation's gradients are added to."""
        wide = wide_dtype(shard.value.dtype)
        found: dict[str, Tensor] = {}
        for name, through in (("value", "weight"), ("key", "key_weight")):
            if through in sums or "x" in sums:
                found[name] = torch.zeros_like(getattr(shard, name), dtype=wide)
        if "query" in sums:
            found["query"] = sums["query"][number]
        if "edge_attr" in sums and shard.edge_attr is not None:
            found["edge_attr"] = torch.zeros_like(shard.edge_attr, dtype=wide)
        if "edge_weight" in sums:
            found["edge_weight"] = sums["edge_weight"]
        return AttentionGradients(**found)
