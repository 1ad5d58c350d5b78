r"""Halo rows that are exchanged in every k-th step only: in between, those of the last exchange.

[Note: what is stale] In a step with an exchange rows and their gradients travel as ever, and are
kept. In the others a layer takes the kept rows for its halo, and adds the gradients that came for
its own rows last to those of its own edges; nothing is sent. Gradients then differ from the true
ones. These are the stale features and gradients of Wan et al., "PipeGCN", ICLR 2022, the skipped
broadcasts of Peng et al., "Sancus", VLDB 2022, and, as every target's remote part of a sum stays
as it was, the delayed aggregates (cd-r) of Md et al., "DistGNN", SC 2021.

[Note: a step] A step is a training call of the layer whose parameters have changed since the one
before. All workers count alike, and so exchange in the same steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_sar.exchange.halo import CallContext, HaloPlan
from pyg_sar.exchange.rows import tracked_buffer


class KeptRows:
    """The state that a layer keeps of its last exchange.

    Attributes:
        active: A call runs that takes part.
        fresh: It exchanges rows.
        number: Tensors that it has gathered so far.
        rows: Halo rows of each, ``[num_halo, width]``.
        sums: Gradients that came for own rows, ``[num_local, *]``.
    """

    def __init__(self) -> None:
        self.active, self.fresh, self.number, self._calls = False, True, 0, 0
        self._step: Any = None
        self._graph: CallContext | None = None
        self.rows: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def __reduce__(self) -> Any:
        return KeptRows, ()  # A copied layer begins with an exchange.

    def copied(self) -> KeptRows:
        """Returns the same state, which changes apart from this one."""
        other = KeptRows()
        vars(other).update(vars(self))
        return other

    def begin(self, title: str, step: Any, graph: CallContext, every: int) -> None:
        """Begins a call. See [Note: a step].

        Args:
            title: The layer and the rank, for errors.
            step: Tells this step from the one before.
            graph: Of the edges' plan.
            every: Steps from one exchange to the next.

        Raises:
            ValueError: For a second call in a step.
        """
        if graph is not self._graph:
            self._calls, self._graph, self._step, self.rows, self.sums = 0, graph, None, {}, {}
        if step == self._step:
            raise ValueError(
                f"{title} has SARPolicy(refresh_every={every}) and was called twice without an "
                "optimizer step in between: which of its kept rows were meant? Set "
                "layer.policy to one with refresh_every=1"
            )
        self._step, self.fresh, self.number = step, self._calls % every == 0, 0
        self._calls += 1


class KeptGather(torch.autograd.Function):
    """``[num_local, *]`` to ``[num_ids, *]``, with the halo rows of the last exchange.

    Args of ``apply``: the node tensor, the plan, the layer's kept rows, and the two functions that
    exchange rows, ``fetch(x)``, and return their gradients, ``give_back(gradient)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: HaloPlan, kept: KeptRows, layer: str, fetch: Any, give_back: Any
    ) -> Tensor:
        number, local = kept.number, plan.num_local
        kept.number += 1
        ctx.given = plan, kept, number, kept.fresh, give_back
        if kept.fresh:
            out: Tensor = fetch(x)
            shape = plan.num_halo, *x.shape[1:]
            rows = tracked_buffer(plan.comm, layer, plan.num_halo, shape, x.dtype, x.device)
            kept.rows = kept.rows | {number: rows.copy_(out[local:])}
            return out
        found = kept.rows.get(number)
        if found is None or found.shape[1:] != x.shape[1:] or found.dtype != x.dtype:
            raise ValueError(
                f"Layer '{layer}' at rank {plan.rank} reads other tensors than in the step whose "
                f"rows it kept (number {number}, {x.dtype} {list(x.shape)}); give it a policy with "
                "refresh_every=1"
            )
        shape = plan.num_ids, *x.shape[1:]
        out = tracked_buffer(plan.comm, layer, plan.num_halo, shape, x.dtype, x.device)
        out[:local], out[local:] = x.detach(), found
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, kept, number, fresh, give_back = ctx.given
        own = grad[: plan.num_local]
        if fresh:
            out = give_back(grad.contiguous())
            kept.sums = kept.sums | {number: out - own}
        else:
            out = own + kept.sums[number] if number in kept.sums else own.clone()
        return out, None, None, None, None, None
