"""The whole halo at once, differentiable any number of times; or that of an earlier step.

[Note: what is stale] With ``SARPolicy(refresh_every=k)`` halo rows are exchanged in every k-th step
only. In a step with an exchange rows and their gradients travel as ever, and are
kept. In the others a layer takes the kept rows for its halo, and adds the gradients that came for
its own rows last to those of its own edges; nothing is sent. Gradients then differ from the true
ones. These are the stale features and gradients of Wan et al., "PipeGCN", ICLR 2022, the skipped
broadcasts of Peng et al., "Sancus", VLDB 2022, and, as every target's remote part of a sum stays
as it was, the delayed aggregates (cd-r) of Md et al., "DistGNN", SC 2021.

[Note: a step] A step is a training call of the layer whose parameters have changed since the one
before. All workers count alike, and so exchange in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_sar.exchange.halo import CallContext, HaloPlan
from pyg_sar.exchange.rows import add_rows, flat_rows
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label, tracked_buffer


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
        """Begins a call, whose ``step`` tells this step from the one before. See [Note: a step].

        ``title`` names the layer and the rank, in errors.

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

    ``fetch(x)`` exchanges rows, and ``give_back(gradient)`` returns their gradients.
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
            rows = tracked_buffer(plan.comm.ledgers, layer, plan.num_halo, shape, x.dtype, x.device)
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
        out = tracked_buffer(plan.comm.ledgers, layer, plan.num_halo, shape, x.dtype, x.device)
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


if TYPE_CHECKING:
    from pyg_sar.comm.group import Work


def _fetch_halo(x: Tensor, plan: HaloPlan, label: Label, wire: Wire) -> Tensor:
    """Own rows followed by the halo's: ``[num_local, *]`` to ``[num_ids, *]``."""
    x = x.detach()
    flat = flat_rows(x)
    out = tracked_buffer(
        plan.comm.ledgers, label[0], plan.num_halo, (plan.num_ids, flat.size(1)), x.dtype, x.device
    )
    out[: plan.num_local] = flat
    halo = out[plan.num_local :]

    def packer(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: wire.encode(flat.index_select(0, rows))

    sends = [packer(plan.send_rows(q)) for q in range(plan.world_size)]
    landing = wire.landing(halo)
    receives = [landing[plan.halo_slice(q)] for q in range(plan.world_size)]
    post_all(plan, sends, receives, label).wait()
    wire.land(halo)
    return out.view(plan.num_ids, *x.shape[1:])


def _return_halo(
    ext: Tensor,
    plan: HaloPlan,
    label: Label,
    reduce: Callable[[Tensor, Tensor, Tensor], None],
    wire: Wire,
) -> Tensor:
    """Halo rows go to their owners, which ``reduce(out, rows, values)`` them into their own."""
    flat = flat_rows(ext.detach())
    out = flat[: plan.num_local].clone()
    halo = flat[plan.num_local :]
    sends = [wire.encode(halo[plan.halo_slice(q)]) for q in range(plan.world_size)]
    rows = [flat.new_empty(count, flat.size(1)) for count in plan.send_counts]
    post_all(plan, sends, [wire.landing(part) for part in rows], label).wait()
    for q, part in enumerate(rows):
        wire.land(part)
        if part.numel():
            reduce(out, plan.send_rows(q), part)
    return out.view(plan.num_local, *ext.shape[1:])


def post_all(
    plan: HaloPlan,
    sends: Sequence[Tensor | Callable[[], Tensor] | None],
    receives: Sequence[Tensor],
    label: Label,
) -> Work:
    """Exchanges with all peers at once; the worker's own entries are left out."""
    own = plan.rank
    return plan.comm.exchange_all(
        [None if q == own else send for q, send in enumerate(sends)],
        [None if q == own else receive for q, receive in enumerate(receives)],
        label=label,
    )


class _Halo(torch.autograd.Function):
    """``[num_local, *]`` to ``[num_ids, *]``, or ``back`` by sums.

    Each way is the other's adjoint, so both can be differentiated any number of times.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: HaloPlan, label: Label, wire: Wire, back: bool
    ) -> Tensor:
        ctx.given = plan, (label[0], "backward", "fetch" if back else "gradient"), wire, not back
        if back:
            return _return_halo(x.contiguous(), plan, label, add_rows, wire)
        return _fetch_halo(x, plan, label, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Halo.apply(grad, *ctx.given), None, None, None, None


def halo_gather(x: Tensor, plan: HaloPlan, layer: str = "", wire: Wire | None = None) -> Tensor:
    """Own rows ``[num_local, *]`` followed by all halo rows, ``[num_ids, *]``, differentiable any
    number of times.

    Rows travel exactly by default.
    """
    for ledger in plan.comm.ledgers:
        ledger.count("halo_gather")
    wire, label = wire or Wire(), (layer, "forward", "fetch")
    if wire.kept is None:
        return _Halo.apply(x, plan, label, wire, False)
    back: Label = (layer, "backward", "gradient")

    def give_back(gradient: Tensor) -> Tensor:
        return _return_halo(gradient, plan, back, add_rows, wire)

    fetch = partial(_fetch_halo, plan=plan, label=label, wire=wire)
    return KeptGather.apply(x, plan, wire.kept, layer, fetch, give_back)


def halo_reduce(ext: Tensor, plan: HaloPlan, reduce: str = "sum", layer: str = "") -> Tensor:
    """Adds (or takes the maximum, minimum of) halo rows of ``[num_ids, *]`` to their owners' rows,
    ``[num_local, *]``.

    Adjoint of :func:`halo_gather`. Differentiable for ``'sum'`` only, not for ``'amax'`` and
    ``'amin'``, any number of times.
    """
    for ledger in plan.comm.ledgers:
        ledger.count("halo_reduce")
    label = (layer, "forward", "reduce")
    if reduce == "sum":
        return _Halo.apply(ext, plan, label, Wire(), True)
    if reduce not in ("amax", "amin"):
        raise ValueError(f"Expected 'reduce' to be 'sum', 'amax' or 'amin' (got {reduce!r})")

    def merge(out: Tensor, rows: Tensor, values: Tensor) -> None:
        out.scatter_reduce_(0, rows.view(-1, 1).expand_as(values), values, reduce=reduce)

    return _return_halo(ext.contiguous(), plan, label, merge, Wire())


def plans_of_subsets(
    plan: HaloPlan, used: Tensor, place: Tensor, sizes: Sequence[int], n_id: Tensor
) -> list[HaloPlan]:
    """Plans of the first own rows in another order, and of the halo rows that are used with them,
    which keep their order.

    Args:
        plan: The plan of all rows.
        used: Which halo rows each new plan has, uint8 ``[num_halo, len(sizes)]``.
        place: The new number of each own row, int64 ``[num_local]``; what peers use of a new plan
            is below its size.
        sizes: Own rows of each new plan.
        n_id: Global ids of the own rows in that order.
    """
    used = used.contiguous()
    asked = [used.new_empty(count, len(sizes)) for count in plan.send_counts]
    sends = [used[plan.halo_slice(q)] for q in range(plan.world_size)]
    post_all(plan, sends, asked, ("", "", "plan")).wait()
    plans = []
    for k, size in enumerate(sizes):
        sent = [place[plan.send_rows(q)[rows[:, k] > 0]] for q, rows in enumerate(asked)]
        halo = [int(used[plan.halo_slice(q), k].sum()) for q in range(plan.world_size)]
        counts = [rows.numel() for rows in sent]
        plans.append(HaloPlan(plan.comm, size, halo, torch.cat(sent), counts, n_id[:size]))
    return plans
