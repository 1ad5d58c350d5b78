"""Which modules reduce over nodes, what becomes of them, and which are refused.

[Note: tables] Each module of this package exports ``MODULES`` (a plain class and the distributed
class that takes its place), ``MIXINS`` (a message passing class and what goes before
:class:`~pyg_sar.nn.DistMessagePassing` in its bases) and ``REFUSED`` (a class and the reason). A
subclass of a listed class that isn't listed itself may override anything: it is refused too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch_geometric.nn import (
    Aggregation,
    DeepSetsAggregation,
    GraphMultisetTransformer,
    MessagePassing,
    SetTransformerAggregation,
)

from pyg_sar.comm import current
from pyg_sar.nn import attention, models, pool, set_attention

MODULES: dict[type, type] = {
    **pool.MODULES,
    **attention.MODULES,
    **set_attention.MODULES,
    **models.MODULES,
}
MIXINS: dict[type, type] = {**models.MIXINS}
REFUSED: dict[type, str] = {**pool.REFUSED, **set_attention.REFUSED, **models.REFUSED}


def mixin_of(kind: type) -> tuple[type, ...]:
    """What goes before :class:`DistMessagePassing` in a layer's bases."""
    found = next((base for base in kind.__mro__ if base in MIXINS), None)
    return () if found is None else (MIXINS[found],)


def _inside(name: str, roots: Collection[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _kept(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Names of submodules of which everything stays as it is."""
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if isinstance(module, MessagePassing):
            yield f"{prefix}aggr_module"  # DistMessagePassing sees to it.
        elif isinstance(module, GraphMultisetTransformer | SetTransformerAggregation):
            yield from (f"{prefix}{child}" for child, _ in module.named_children())
        elif isinstance(module, DeepSetsAggregation):
            yield from (f"{prefix}global_nn", f"{prefix}global_mlp")  # After the reduction.


def distributed_modules(
    model: torch.nn.Module, replicated: Collection[str]
) -> dict[str, torch.nn.Module]:
    """The modules that see nodes, by name: all but layers' aggregations and what is replicated.

    Raises:
        ValueError: When ``replicated`` names no submodule.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in replicated if name not in modules or not name]
    if isinstance(replicated, str) or unknown:
        raise ValueError(
            f"'replicated' must be names of submodules (got {replicated!r}); the model has "
            f"{[name for name in modules if name]}"
        )
    roots = {*replicated, *_kept(modules)}
    return {name: module for name, module in modules.items() if not _inside(name, roots)}


def check_modules(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuses modules that would reduce over this worker's nodes only.

    Raises:
        ValueError: Names the module, its class, the rank and the reason.
    """
    rank = current().rank
    done = tuple(MODULES.values())
    for name, module in modules.items():
        if type(module) in MODULES or isinstance(module, done):
            continue
        what = f"'{name}'" if name else "The model"
        title = f"{what} ({type(module).__name__}) can't be distributed (rank {rank})"
        for kind in type(module).__mro__:
            if kind in REFUSED:
                raise ValueError(f"{title}: {REFUSED[kind]}")
            if kind in MODULES or kind is Aggregation:
                raise ValueError(
                    f"{title}: what it overrides of {kind.__name__} may reduce over each worker's "
                    "own nodes. Reduce with torch_geometric.utils.scatter(x, data.batch) or "
                    "pyg_sar.nn.global_mean_pool(x) in the model's own code"
                )
