"""Sums of parameters' gradients over the workers, in one message per dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Label
from pyg_sar.reduction.parameters import LIMBS, differ, marks, reconcile

_LABEL: Label = ("", "backward", "gradient sum")


def post_totals(
    named: Sequence[tuple[str, Tensor]],
    own: Sequence[Tensor | None],
    comm: Communicator,
    settings: Sequence[str] = (),
    label: Label = _LABEL,
) -> Callable[[], dict[int, Tensor]]:
    """Begins to sum gradients over the workers, in one message per dtype.

    The message carries checksums of the parameters, too: see [Note: marks].

    Args:
        named: All parameters and their names, alike on every worker.
        own: The gradients that count here, ``None`` in the places of the others.
        comm: The communicator.
        settings: Of the model's layers, to compare.
        label: (layer, phase, kind) for the ledgers.

    Returns:
        Waits for the sums and returns them by ``id(parameter)``, for those parameters to which
        any worker contributed.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]]
    groups, names = defaultdict(list), {id(p): name for name, p in named}
    for (_, parameter), gradient in zip(named, own, strict=True):
        if parameter.requires_grad:
            groups[parameter.dtype, parameter.device].append((parameter, gradient))
    posted = []
    for group in groups.values():
        parts = [torch.zeros_like(p) if g is None else g.resolve_conj() for p, g in group]
        present = parts[0].new_tensor([float(gradient is not None) for _, gradient in group])
        ours = marks([p for p, _ in group], comm, present, settings)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present, ours])
        posted.append((group, flat, comm.all_reduce_async(flat, label=label)))

    def arrive() -> dict[int, Tensor]:
        totals: dict[int, Tensor] = {}
        for group, flat, work in posted:
            work.wait()
            tail = len(group) + LIMBS * comm.world_size
            holders, found = flat[-tail:].split([len(group), tail - len(group)])
            if differ(found.tolist()):
                reconcile([(names[id(p)], p) for p, _ in group], comm, settings)
            sums = flat[:-tail].split([p.numel() for p, _ in group])
            for (p, _), total, count in zip(group, sums, holders.tolist(), strict=True):
                if count:
                    totals[id(p)] = total.view_as(p).clone()
        return totals

    return arrive
