"""The table of modules that reduce over nodes, of what becomes of them, and of those refused.

[Note: tables] Each module of this package exports ``MODULES`` (a plain class and the distributed
class that takes its place), ``MIXINS`` (a message passing class and what goes before
:class:`~pyg_sar.nn.DistMessagePassing` in its bases) and ``REFUSED`` (a class and the reason). A
subclass of a listed class is distributed alike, unless it overrides what the distributed class
overrides: then it is refused, as are aggregations that aren't listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch_geometric import nn
from torch_geometric.nn import (
    Aggregation,
    DeepSetsAggregation,
    GraphMultisetTransformer,
    MessagePassing,
    MultiAggregation,
    SetTransformerAggregation,
)

from pyg_sar.comm.group import current
from pyg_sar.nn import attention, models, newer, pool
from pyg_sar.nn.norm import NORMS

MODULES: dict[type, type] = {
    **pool.MODULES,
    **attention.MODULES,
    **models.MODULES,
}
MIXINS: dict[type, type] = {**models.MIXINS}
# Convolutions that no partition of nodes makes right: they would compute with one worker's nodes or
# edges and say nothing, or fail with an error of something else. What else can't run distributed is
# found when a layer is called.
_NEIGHBOURS = (
    "it builds a graph of k nearest neighbours in every pass, among this worker's nodes only. "
    "Build the graph once, before write_partitions(), and use {instead}"
)
_CONVS: dict[type, str] = {
    nn.DynamicEdgeConv: _NEIGHBOURS.format(instead="EdgeConv"),
    nn.GravNetConv: _NEIGHBOURS.format(instead="GraphConv with weights"),
    nn.XConv: _NEIGHBOURS.format(instead="PointNetConv or PointTransformerConv"),
    nn.HypergraphConv: (
        "its hyperedges are no edges between nodes, so that no worker owns them. Make hyperedges "
        "nodes of a type of their own (HeteroData), with SAGEConv or GATConv both ways"
    ),
    nn.PANConv: (
        "it multiplies adjacency matrices, of which a worker holds some rows only. Sum several "
        "steps of propagation instead: TAGConv, MixHopConv"
    ),
    newer.MeshCNNConv: (
        "it tells the four neighbours of a mesh's edge apart by their places in the edge list, "
        "which a partition changes"
    ),
}
REFUSED: dict[type, str] = {**_CONVS, **pool.REFUSED, **models.REFUSED}


def mixin_of(kind: type) -> tuple[type, ...]:
    """Returns the classes that go before :class:`DistMessagePassing` in a layer's bases."""
    found = next((base for base in kind.__mro__ if base in MIXINS), None)
    return () if found is None else (MIXINS[found],)


@cache
def distributed_class(kind: type) -> type | None:
    """Returns the class that takes the place of ``kind``, or ``None`` if it stays as it is.

    Raises:
        ValueError: With the reason, when it is refused.
    """
    if kind in MODULES:
        return MODULES[kind]
    if kind in MODULES.values():
        return None
    for base in kind.__mro__:
        if base in REFUSED:
            raise ValueError(REFUSED[base])
        if base in MODULES.values():
            return None
        if base in MODULES and base not in pool.MODULES:
            return _joined(kind, base, MODULES[base])
        if base is Aggregation:
            raise ValueError(
                "its own forward() may reduce over each worker's nodes only. Reduce with "
                "torch_geometric.utils.scatter(x, data.batch) or pyg_sar.nn.global_mean_pool(x) "
                "in the model's code"
            )
    return None


def class_after(kind: type) -> type:
    """Returns the class that a module of class ``kind`` has after :func:`pyg_sar.distribute`."""
    try:
        found = distributed_class(kind)
        return kind if found is None else named_as(found, kind)
    except ValueError:  # Got past check_modules(): one process, which needs no other class.
        return kind


def _joined(kind: type, base: type, dist: type) -> type:
    """Returns the distributed class of a subclass of ``base``."""
    own = {name for c in kind.__mro__[: kind.__mro__.index(base)] for name in vars(c)}
    added = dist.__mro__[: dist.__mro__.index(base)]
    clash = sorted({name for c in added for name in vars(c) if callable(vars(c)[name])} & own)
    if clash and base not in attention.SEQUENCES:
        raise ValueError(
            f"it overrides {', '.join(clash)} of {base.__name__}, which over workers must reduce "
            f"over all their nodes; derive it from {dist.__module__}.{dist.__name__} and do so"
        )
    return type(kind.__name__, (dist, kind), names_of(kind))


def names_of(kind: type) -> dict[str, Any]:
    """Returns what a class that takes the place of another one has by its body: its names, and it.

    So a model prints as PyG's, and errors name the user's class. ``isinstance`` tells.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return {**names, "replaced": kind}


@cache
def named_as(dist: type, kind: type) -> type:
    """Returns ``dist``, which takes the place of ``kind``, under the name of that."""
    return type(kind.__name__, (dist,), names_of(kind))


# Which modules see nodes #####################################################


def _inside(name: str, roots: Collection[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _of_layers(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Returns names of the aggregations of message passing layers, which these see to."""
    for name, module in modules.items():
        if isinstance(module, MessagePassing):
            yield f"{name}.aggr_module" if name else "aggr_module"


def _of_norms(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Returns names of the parts of norms, which see to them (HeteroBatchNorm aggregates)."""
    for name, module in modules.items():
        if isinstance(module, (*NORMS, *NORMS.values())):
            yield from (f"{name}.{part}" if name else part for part, _ in module.named_children())


def _after_readouts(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Returns names of parts of readouts that see graphs instead of nodes."""
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if isinstance(module, GraphMultisetTransformer | SetTransformerAggregation):
            yield from (f"{prefix}{child}" for child, _ in module.named_children())
        elif isinstance(module, DeepSetsAggregation):
            yield from (f"{prefix}global_nn", f"{prefix}global_mlp")
        elif isinstance(module, MultiAggregation):
            yield f"{prefix}multihead_attn"


class Seeing:
    """Tells modules that see nodes or edges from those that see graphs, which all workers have.

    Args:
        model: The model.
        replicated: Names of submodules whose inputs are the same on all workers.

    Attributes:
        rows: Modules by name that see this worker's nodes or edges: norms count over all workers.
        nodes: Those of them that aren't part of a layer's aggregation or of a norm.

    Raises:
        ValueError: When ``replicated`` names no submodule.
    """

    def __init__(self, model: torch.nn.Module, replicated: Collection[str]) -> None:
        modules = dict(model.named_modules())
        unknown = [name for name in replicated if name not in modules or not name]
        if isinstance(replicated, str) or unknown:
            raise ValueError(
                f"'replicated' must be names of submodules (got {replicated!r}); the model has "
                f"{[name for name in modules if name]}"
            )
        layers = list(_of_layers(modules))
        after = [name for name in _after_readouts(modules) if not _inside(name, layers)]
        copies = [*replicated, *after]
        self.rows = {name: m for name, m in modules.items() if not _inside(name, copies)}
        parts = [*layers, *_of_norms(modules)]
        self.nodes = {name: m for name, m in self.rows.items() if not _inside(name, parts)}


def check_modules(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuses modules that would reduce over this worker's nodes only.

    Raises:
        ValueError: Names the module, its class, the rank and the reason.
    """
    for name, module in modules.items():
        kind: Any = type(module)
        try:
            distributed_class(kind)
        except ValueError as error:
            what = f"'{name}'" if name else "The model"
            raise ValueError(
                f"{what} ({kind.__name__}) can't be distributed (rank {current().rank}): {error}"
            ) from None
