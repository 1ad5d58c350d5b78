"""Random numbers of messages that don't depend on the number of workers: in ``propagate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.analysis import Key, title_of
from pyg_sar.engine.kernels.relational import RelationalTerms
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.message.edge_draws import EdgeDraws, out_of_order
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.message.program import DeferredEdge
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.space.draws import generator_mark

_MOST_HEADS = 32  # bits of a word


@contextmanager
def drawing(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], key: Key
) -> Iterator[EdgeDraws]:
    """Lets the layer's message, which may draw, do so meanwhile as ``SARPolicy(random=...)`` says.

    All workers come here together. Gives what draws.
    """
    silent, strength = facts_of(layer).silent, layer.policy.random
    known = key in silent
    draws = EdgeDraws(edge_index, strength, title_of(layer), silent=known)
    yield draws
    draws.settle()
    if draws.drew_nothing and not known:
        silent.add(key)
    for value in kwargs.values():
        if isinstance(value, DeferredEdge) and value.mark is not None:
            draws.check_start(value.mark)


def of_all_edges(
    draws: EdgeDraws | None, edge_index: DistEdgeIndex, columns: Tensor | None, padding: int
) -> AbstractContextManager[None]:
    """Takes what is drawn meanwhile for numbers of all edges, in the order of ``columns`` if given.

    Args:
        draws: What draws; ``None``: each worker for itself.
        edge_index: Distributed edges, for which they draw: before they were put in that order.
        columns: Their order, ``[E]``.
        padding: How many edges stand in for those of a worker without.
    """
    if draws is None:
        return nullcontext()
    places = slice(None) if columns is None else columns
    return draws.of_edges(places, edge_index.size(1), padding)


def mark_deferred(layer: Any, deferred: DeferredEdge, device: torch.device) -> DeferredEdge:
    """Notes where one process would have drawn the random numbers of an edge update."""
    if layer.policy.random == "same":
        deferred.mark = generator_mark(device)
    return deferred


def computed(layer: Any, deferred: DeferredEdge, device: torch.device) -> Tensor:
    """Computes an edge update of all edges that was put off.

    Raises:
        DistributedIndexError: When one process would have drawn its random numbers before others.
    """
    mark, now = deferred.mark, generator_mark(device)
    found = deferred.compute_now()
    if mark not in (None, now) and generator_mark(device) != now:
        raise out_of_order(title_of(layer), layer.policy.random)
    return found


def with_kept_weights(
    attention: Attention | RelationalTerms, draws: EdgeDraws | None
) -> Attention | RelationalTerms | None:
    """An attention whose dropped weights are drawn; ``None`` where it has too many heads."""
    if draws is None or attention.p == 0:
        return attention
    if isinstance(attention, RelationalTerms):
        rows, heads = attention.x, attention.query.size(2)
    else:
        rows, heads = attention.value, attention.value.size(1)
    if heads > _MOST_HEADS:
        return None
    return replace(attention, drop_key=draws.kept(attention.p, heads, rows.dtype))
