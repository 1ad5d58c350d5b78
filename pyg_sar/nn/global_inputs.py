"""Hooks of layers on the whole graph, and ``adj_t``: what their calls take besides node tensors.

Hooks of a layer get tensors of the whole graph. In the place of ``adj_t`` a layer gets its edges
and their weights.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    GatedGraphConv,
    GCN2Conv,
    GCNConv,
    GraphConv,
    LabelPropagation,
    LGConv,
    MessagePassing,
    SGConv,
    SimpleConv,
    SSGConv,
    TAGConv,
)
from torch_geometric.typing import SparseTensor

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError, OneShotWarning
from pyg_sar.message.layer_facts import MODULE_HOOKS, hook_names, hooks_of
from pyg_sar.message.row_modules import (
    changes_of,
    hooks_within,
    is_compiled,
    is_of_forward,
    replaced_entry,
)
from pyg_sar.tensors import NodeMatrix, is_shared_matrix, mapped, node_tensors
from pyg_sar.tensors.sparse import edges_of_matrix

_ENTRIES = frozenset({"propagate", "edge_updater", "forward"})
_METHODS = "message", "aggregate", "edge_update", "propagate", "message_and_aggregate"
WITHIN = tuple(hook_names(*_METHODS))
"""Attributes of a layer that hold hooks within its call."""


def is_explained(layer: MessagePassing) -> bool:
    """Returns whether a user sees what a layer computes for edges, or changes it.

    Hooks of ``to_hetero_with_bases`` weigh each message alone.
    """
    messages = layer._message_forward_hooks.values()
    alone = [str(hook.__module__).startswith("torch_geometric.nn.") for hook in messages]
    return bool(layer.explain) or len(hooks_of(layer, *_METHODS)) > sum(alone)


def is_watched(layer: MessagePassing, forward: bool = True) -> bool:
    """Returns whether a user looks into a layer by hooks within it, or explains it.

    So do methods and functions of the user's in the place of those by which a layer runs on several
    workers, or of PyG's own (:func:`~pyg_sar.message.row_modules.changes_of`). PyG's compiled one
    is taken away: it puts that on a layer that is explained, and leaves it there.

    Args:
        layer: The layer.
        forward: Another ``forward`` of its class counts, too.

    Raises:
        DistributedIndexError: By a function in the place of one of ``torch.nn.functional``.
    """
    own = vars(layer)
    if layer.explain or (any(map(own.get, WITHIN)) and is_explained(layer)):
        return True
    if not _ENTRIES.isdisjoint(own):
        if replaced_entry(layer):
            return True
        if "propagate" in own and is_compiled(own["propagate"], type(layer), "propagate"):
            del own["propagate"]
    changes = changes_of(layer)
    if changes:
        refuse_replaced(layer, changes)
    return bool(changes) and (forward or not all(is_of_forward(layer, c) for c in changes))


def refuse_replaced(module: torch.nn.Module, changes: Sequence[str]) -> None:
    """Refuses functions in the place of some of ``torch.nn.functional``.

    PyTorch calls what stands there twice for tensors that are no plain ones: the second time by its
    name, for what the function that it replaced is.

    Raises:
        DistributedIndexError: Naming the function.
    """
    for change in changes:
        if change.startswith("torch.nn.functional."):
            raise DistributedIndexError(
                f"{type(module).__name__} {getattr(module, 'ledger_name', '')!r} calls {change}, "
                f"in whose place there is a function of the user's (rank {current().rank}), which "
                "PyTorch would call twice for a tensor of the whole graph: derive a layer that "
                "calls your function"
            )


def warn_of_memory(why: str) -> None:
    """Warns that a layer runs in one shot, on tensors of the whole graph, and why."""
    warnings.warn(
        f"{why}. So it runs on tensors of the whole graph: each worker holds the messages of all "
        "its edges, as with SARPolicy(mode=3), or more",
        OneShotWarning,
        stacklevel=4,
    )


def refuse_watched(module: torch.nn.Module, rank: int) -> None:
    """Refuses hooks within a norm, say, and methods in the place of its own.

    Raises:
        DistributedIndexError: Naming the module and what would see this worker's rows only.
    """
    kind = type(module).__name__
    own = "" if _ENTRIES.isdisjoint(vars(module)) else replaced_entry(module)
    for name, hooks in hooks_within(module):
        own = f"a hook in '{hooks}' of its {name!r}"
    if own:
        raise DistributedIndexError(
            f"{kind} {getattr(module, 'ledger_name', '')!r} has {own} of the user's, which would "
            f"see the rows of rank {rank} only: put a forward or backward hook on the {kind}, or "
            "do that in the model's forward()"
        )


def with_hooks(module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a module's own hooks around ``call``, within which it has none.

    Args:
        module: The module.
        call: Takes the arguments, as the hooks have left them, and gives the module's result.
        args: What the module is called with.
        kwargs: The same by name.
    """
    own = module.__dict__
    hooks = {name: own[name] for name in MODULE_HOOKS if own.get(name)}
    if not hooks:
        return call(*args, **kwargs)
    before = {"forward": own["forward"]} if "forward" in own else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        own.update({name: OrderedDict() for name in hooks})
        del own["forward"]
        own.update(before)
        try:
            return call(*args, **kwargs)
        finally:
            own.update(hooks, forward=forward)

    own["forward"] = forward
    try:
        return torch.nn.Module.__call__(module, *args, **kwargs)
    finally:
        del own["forward"]
        own.update(before)


_PYG = "torch_geometric."
_TAKE_WEIGHTS = (
    *(APPNP, GatedGraphConv, GCN2Conv, GCNConv, GraphConv, SGConv, SimpleConv, SSGConv),
    TAGConv,
)
"""Layers to which a matrix is its entries' places, and their values as ``edge_weight``."""

_KEEP_LOOPS = (ARMAConv, LabelPropagation, LGConv, TAGConv)
"""Layers that normalise weights without loops of their own."""


def without_matrix(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call with edges and weights in the place of a matrix.

    Raises:
        DistributedIndexError: PyG's layer would do something else with a matrix.
    """
    given = (*args, *kwargs.values())
    matrices = [v for v in given if isinstance(v, NodeMatrix | SparseTensor) or _is_sparse(v)]
    if not matrices:
        return args, kwargs
    kind: Any = type(layer)
    matrix, title = matrices[0], f"{kind.__name__} (rank {current().rank})"
    edges, weight = _edges_and_weight(matrix)
    args = tuple(edges if v is matrix else v for v in args)
    kwargs = {name: edges if v is matrix else v for name, v in kwargs.items()}
    known = isinstance(layer, _TAKE_WEIGHTS) and kind.forward.__module__.startswith(_PYG)
    if weight is not None and known:
        args, kwargs = (), dict(inspect.signature(layer.forward).bind(*args, **kwargs).arguments)
        known = kwargs.get("edge_weight") is None and weight.dim() == 1
        kwargs["edge_weight"] = weight
    if len(matrices) > 1 or not (weight is None or known):
        raise DistributedIndexError(
            f"{title} got an 'adj_t' with weights, and may take them in another way than "
            "'edge_weight': leave ToSparseTensor out, and pass data.edge_index and weights"
        )
    normalizes = getattr(layer, "normalize", True) and _uses_gcn_norm(kind)
    adds = getattr(layer, "add_self_loops", not isinstance(layer, _KEEP_LOOPS))
    if normalizes and adds:
        source, target = edges.unbind(0)
        if bool((target == source).any()):
            raise DistributedIndexError(
                f"{title} would add self-loops to those of 'adj_t', and PyG does so in another way "
                "for matrices than for edges: leave ToSparseTensor out, or pass normalize=False"
            )
    return args, kwargs


def _is_sparse(value: Any) -> bool:
    """Returns whether a value is a plain sparse matrix of torch, which all workers hold."""
    return type(value) is Tensor and value.layout != torch.strided


def _edges_and_weight(matrix: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(matrix, NodeMatrix):
        return matrix.places.flip(0), None if matrix.ones else matrix.entries
    if isinstance(matrix, Tensor):
        entries = matrix.to_sparse_coo().coalesce()
        weight = entries.values()
        ones = not weight.requires_grad and bool((weight == 1).all())
        return entries.indices().flip(0), None if ones else weight
    edges = edges_of_matrix(matrix)
    if edges is None:
        raise DistributedIndexError("a SparseTensor that was computed")
    return edges, matrix.storage.value()


_TORCH = frozenset({Tensor, NodeMatrix})


def with_edges_of_matrix(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Returns the arguments of a call that has edges where it had a matrix.

    A layer does with a matrix what its ``message_and_aggregate`` says, where it has one. That and
    what is done with other matrices is left to PyG's own ``propagate``, between tensors of the
    whole graph: products are exact there, and each worker computes its rows of them. Of equal
    maxima a product gives one the gradient, and an aggregation of messages all.

    Returns:
        The arguments, and whether a matrix is left among them.
    """
    given = (*args, *kwargs.values())
    if any(isinstance(v, NodeMatrix) and v.made for v in given):
        take = lambda v: v.whole() if isinstance(v, NodeMatrix) and v.made else v  # noqa: E731
        return with_edges_of_matrix(layer, mapped(take, args), mapped(take, kwargs))
    if not _TORCH.isdisjoint(map(type, given)) and node_tensors(args, kwargs):
        plain = any(map(_is_sparse, given))
        product = torch.is_grad_enabled() and layer.fuse and layer.aggr in ("min", "max")
        if product and (plain or any(isinstance(v, NodeMatrix) for v in given)):
            take = lambda v: v.whole() if isinstance(v, NodeMatrix) else v  # noqa: E731
            return mapped(take, args), mapped(take, kwargs), True
        if plain:
            return *without_matrix(layer, args, kwargs), False
    matrices = [v for v in given if isinstance(v, SparseTensor)]
    if not any(is_shared_matrix(m) or node_tensors(args, kwargs) for m in matrices):
        return args, kwargs, False
    own, message = (_definer(type(layer), name) for name in ("message_and_aggregate", "message"))
    as_edges = issubclass(own, message) and layer.aggr not in ("min", "max")
    if own is MessagePassing or (own.__module__.startswith(_PYG) and as_edges):
        with suppress(DistributedIndexError):
            return *without_matrix(layer, args, kwargs), False
    return args, kwargs, True


def _definer(kind: type, name: str) -> type:
    """Returns the class that defines a method of another."""
    return next(base for base in kind.__mro__ if name in vars(base))


@cache
def _uses_gcn_norm(kind: Any) -> bool:
    """Returns whether a layer's module normalises weights as GCN does."""
    return any("gcn_norm" in vars(sys.modules.get(c.__module__, c)) for c in kind.__mro__)
