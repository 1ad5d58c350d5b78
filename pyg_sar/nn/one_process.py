"""One process, a plain ``edge_index``: layers that have a fused way take it there, too.

[Note: for as long as the user's tensor lives] A graph's structure (edges sorted by target, and by
source) is made once per ``edge_index`` and kept for as long as that tensor lives unchanged; all
layers of a model share it. A checksum tells whether it is unchanged: 3 to 8 % of the time of a
layer with 16 channels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels.ops import made_for, why_missing_on
from pyg_sar.message.layer_facts import facts_of, is_users
from pyg_sar.message.layer_state import OtherGenerators, Snapshot, put_back
from pyg_sar.space.distributed_index import DistEdgeIndex, Order, dist_edge_index, version_of
from pyg_sar.space.edge_ids import Given
from pyg_sar.tensors.rows import unchanged_as


class NothingFused(Exception):
    """A call on a single worker's graph, of a layer that no kernel is for."""


def must_be_fused(layer: Any) -> None:
    """Ends a call that was worth it for the kernels alone. See :func:`unless_fused`."""
    if facts_of(layer).only_fused:
        raise NothingFused


@contextmanager
def unless_fused(layer: Any) -> Iterator[None]:
    """Makes as if a call had not begun where it turns out that nothing in it is fused.

    The layer then runs as PyG's, to the bit, now and from now on in its present mode.

    Raises:
        NothingFused: In that case.
    """
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    facts = facts_of(layer)
    undo = _ways_back(layer)
    facts.only_fused = True
    try:
        yield
    except (NothingFused, DistributedIndexError) as error:
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        for way in undo:
            way()
        facts.not_fused.add(layer.training)
        raise NothingFused from error
    finally:
        facts.only_fused = False


def _ways_back(layer: Any) -> Sequence[Callable[[], Any]]:
    """Returns functions that make a layer, and generators but PyTorch's, what they are now."""
    if any(is_users(type(module)) for module in layer.modules()):
        return Snapshot(layer).restore, OtherGenerators(layer).put_back
    buffers = [(buffer, version_of(buffer), buffer.clone()) for buffer in layer.buffers()]
    cached = {name: value for name, value in layer.__dict__.items() if name[:7] == "_cached"}

    def of_pygs_own() -> None:
        for buffer, known in zip(layer.buffers(), buffers, strict=True):
            put_back(buffer, *known)
        layer.__dict__.update(cached)

    return (of_pygs_own,)


FEWEST_EDGES = 2**14  # with fewer, looking a call up takes longer than the kernels save
_MEMORY = 8  # edge lists of a model, beside the last one of each layer


class OwnGraphs:
    """The distributed edge indices, of a single worker, that stand for plain ones.

    A copy starts empty.
    """

    def __init__(self) -> None:
        self._found: list[tuple[weakref.ref[Tensor], int, int, int | None, DistEdgeIndex]] = []
        self._last: weakref.WeakKeyDictionary[Any, weakref.ref[DistEdgeIndex]]
        self._last = weakref.WeakKeyDictionary()

    def stand_in(
        self, layer: Any, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, DistEdgeIndex] | None:
        """The plain edges among a layer's arguments, and the graph that stands for them.

        Returns:
            ``None`` where the kernels are missing, not made for the arguments, or not worth it.
        """
        if torch.compiler.is_compiling():
            return None
        edges = arguments.get("edge_index")
        counts = node_counts(arguments.get("x"), int(layer.node_dim))
        asked = [arguments.get(name) for name in ("size", "return_attention_weights")]
        if not isinstance(edges, Tensor) or not plain_edges(edges) or counts is None:
            return None
        if why_missing_on(edges.device) is not None:
            return None
        if edges.size(1) < FEWEST_EDGES:
            return None
        if asked != [None, None]:
            return None
        graph = self.find(edges, *counts)
        self._last[layer] = weakref.ref(graph)
        return edges, graph

    def find(self, edge_index: Tensor, sources: int, targets: int | None) -> DistEdgeIndex:
        """The graph of ``edge_index``, with all its nodes on this worker.

        Args:
            edge_index: ``[2, E]``, int64.
            sources: Source nodes.
            targets: Target nodes of another type; ``None``: the same nodes.
        """
        self._found = [entry for entry in self._found if entry[0]() is not None]
        content = unchanged_as(edge_index, 1)
        for ref, *known, graph in self._found:
            if ref() is edge_index and known == [content, sources, targets]:
                return graph
        with torch.inference_mode(False):
            nothing = torch.empty(0, dtype=torch.long, device=edge_index.device)
            numbers = torch.arange(sources, device=edge_index.device)
            plan = HaloPlan(current(), sources, [0], nothing, [0], n_id=numbers)
            graph = dist_edge_index(edge_index.detach(), plan, targets=targets)
            count, device = edge_index.size(1), edge_index.device
            order = Order(lambda: torch.arange(count, device=device))  # made when it is asked for
            order.recipe = Given(order.find)
            graph.ordered(order)
        self._found.append((weakref.ref(edge_index), content, sources, targets, graph))
        last = {id(made()) for made in self._last.values()}
        older = [entry for entry in self._found[:-_MEMORY] if id(entry[-1]) in last]
        self._found = [*older, *self._found[-_MEMORY:]]
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnGraphs:
        return OwnGraphs()

    def __reduce__(self) -> Any:
        return OwnGraphs, ()


def node_counts(x: Any, axis: int) -> tuple[int, int | None] | None:
    """Source nodes, and target nodes where they are others, of a layer's features.

    ``None`` where the kernels are not made for them.
    """
    parts: Sequence[Any] = x if isinstance(x, tuple | list) else (x,)
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, Tensor) for part in parts):
        return None
    if not all(type(p) is not Tensor or made_for(p) for p in parts) or axis not in (0, -2):
        return None
    if any(part.dim() != 2 for part in parts):
        return None
    counts = [int(part.size(0)) for part in parts]
    return counts[0], (counts[1] if len(counts) == 2 and parts[1] is not parts[0] else None)


def plain_edges(value: Any) -> bool:
    """Says if it is an ordinary edge list ``[2, E]`` in memory."""
    return (
        type(value) is Tensor
        and value.dtype == torch.long
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and value.dim() == 2
        and value.size(0) == 2
    )
