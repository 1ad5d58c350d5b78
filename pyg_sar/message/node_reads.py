"""Messages that read rows of a node tensor by ids of their own: found by looking at one.

``x_j`` and ``x_i`` are read by the edges' ends, over workers too. A message that indexes a tensor
of this worker's nodes itself, with ids that came with an edge or that it computed, would read this
worker's rows where it means another's. Such a tensor can't be told from a table of something else
but by its number of rows: it is one of nodes if it has this worker's number on every worker.
Parameters and buffers are the same everywhere, and therefore tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyg_sar.message.target_index import TargetIndex
from pyg_sar.space.distributed_index import builtin, name_of


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _readers() -> dict[Any, int]:
    """Functions that read rows, and which of their arguments they read from."""
    found: dict[Any, int] = {
        Tensor.__getitem__: 0,
        Tensor.gather: 0,
        Tensor.index_select: 0,
        Tensor.take: 0,
        Tensor.take_along_dim: 0,
        torch.gather: 0,
        torch.index_select: 0,
        torch.take: 0,
        torch.take_along_dim: 0,
        torch.nn.functional.embedding: 1,
        torch.embedding: 0,
    }
    return found | {builtin(function): place for function, place in found.items()}


class NodeReads(TorchFunctionMode):
    """Watches one run of a message.

    Args:
        rows: This worker's numbers of nodes (of the sources, of the targets).
        own: Values of the edges at hand: what derives from them has a row per edge.
        at_targets: Those of them that were read at the edges' targets: ids among these are local.
        tables: Parameters and buffers.

    Attributes:
        found: The function that read rows of a node tensor, if there was one.
    """

    def __init__(
        self,
        rows: Iterable[int],
        own: Iterable[Tensor],
        at_targets: Iterable[Tensor],
        tables: Iterable[Tensor],
    ) -> None:
        super().__init__()
        self.found = ""
        self._rows = set(rows) - {0}
        self._readers = _readers()
        self._alive: list[Tensor] = []  # storages must not be freed, or their numbers come again
        self._made = {_storage(t) for t in (*own, *tables)}
        self._local = {_storage(t) for t in at_targets}
        self._nodes: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if _followed(t)]
        for tensor in inputs:
            if _storage(tensor) not in self._made and self._has_node_rows(tensor):
                self._nodes.add(_storage(tensor))
        if not self.found and func in self._readers:
            self._look(func, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(inputs, [t for t in tree_leaves(out) if _followed(t)])
        return out

    def _has_node_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.size(0) in self._rows

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes a read of node rows by ids that aren't those of the edges' targets."""
        place = self._readers[func]
        source: Any = args[place] if len(args) > place else None
        ids = [t for k, t in enumerate(args) if k != place] + list(kwargs.values())
        numbers = [
            t
            for t in tree_leaves(ids)
            if isinstance(t, Tensor) and t.dtype in (torch.int64, torch.int32) and t.dim() > 0
        ]
        if not _followed(source) or not numbers or _storage(source) not in self._nodes:
            return
        if any(isinstance(t, TargetIndex) or _storage(t) in self._local for t in numbers):
            return
        self.found = name_of(func)

    def _follow(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        nodes = any(_storage(t) in self._nodes for t in inputs)
        edges = [t for t in inputs if _storage(t) not in self._nodes]
        local = bool(inputs) and all(_storage(t) in self._local for t in edges) and bool(edges)
        for tensor in outputs:
            self._alive.append(tensor)
            key = _storage(tensor)
            if nodes and self._has_node_rows(tensor):
                self._nodes.add(key)
            elif key not in self._nodes:
                self._made.add(key)
            if local:
                self._local.add(key)


def _followed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and type(value) in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)
