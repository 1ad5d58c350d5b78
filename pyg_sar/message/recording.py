"""The operators of a run of a message, and the questions that they answer.

They are those below autograd (``aten``), of which every other is composed, with their arguments and
results, in inference mode as well. Tensors are followed by their memory, so that views and writes
in place need no care.

[Note: reads of nodes] ``x_j`` and ``x_i`` are read by the edges' ends, over workers too. A message
that indexes a tensor of this worker's nodes itself, with ids that came with an edge or that it
computed, would read this worker's rows where it means another's. Such a tensor can't be told from a
table of something else but by its number of rows: it is one of nodes if it has this worker's number
on every worker. Parameters and buffers are the same everywhere, and therefore tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.space.distributed_index import storage_of
from pyg_sar.tensors.nested import mapped, tensors_in

_READERS = frozenset({"_unsafe_index", "embedding", "gather", "index", "index_select", "take"})
_REDUCES = ("index_add", "scatter")


class Operators(TorchDispatchMode):
    """Sees the operators of which all others are composed. In inference mode these come as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return self.called(func, args, kwargs)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls one of them and returns its result."""
        raise NotImplementedError


class Recording(Operators):
    """Keeps what runs meanwhile, and what autograd saves of it.

    Args:
        before: What was recorded already, if it goes on from there.

    Attributes:
        calls: Operators, their arguments by place and by name, and their results.
        saved: Aliases of what autograd has saved, but for parameters.
    """

    def __init__(self, before: Recording | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = [] if before is None else [*before.calls]
        self.saved: list[Tensor] = [] if before is None else [*before.saved]

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator and keeps the call."""
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Returns what keeps the tensors that autograd saves meanwhile."""
        saved = self.saved  # Graphs hold their hooks, which must hold no graph.

        def pack(tensor: Tensor) -> Tensor:
            alias = tensor.detach()  # or an operator's output would own itself
            if not isinstance(tensor, torch.nn.Parameter):
                saved.append(alias)
            return alias

        return torch.autograd.graph.saved_tensors_hooks(pack, _same)

    def saved_bytes(self, known: Iterable[Tensor]) -> int:
        """Returns the bytes that autograd keeps, but for tensors that are there anyway."""
        held = {storage_of(t) for t in known}
        kept: dict[int, int] = {}
        for t in self.saved:
            if storage_of(t) not in held:
                most = t.untyped_storage().nbytes()
                kept[storage_of(t)] = min(t.numel() * t.element_size(), most)
        return sum(kept.values())

    def needs_values(self, sources: Iterable[Tensor], read: Iterable[Tensor] = ()) -> bool:
        """Returns whether anything that derives from these is saved, or leaves the operators.

        Args:
            sources: The tensors.
            read: What was read below the operators.
        """
        derived = {storage_of(t) for t in sources}
        for _, args, kwargs, out in self.calls:
            if any(storage_of(t) in derived for t in dense_in(args, kwargs)):
                if any(r is not None and not isinstance(r, Tensor) for r in tree_leaves(out)):
                    return True
                derived |= {storage_of(t) for t in dense_in(out)}
        return any(storage_of(t) in derived for t in (*self.saved, *read))

    def reads_nodes(self, counts: Iterable[int], own: Iterable[Tensor], targets: Tensor) -> bool:
        """Returns whether rows of a node tensor are read by others than the targets' index.

        See [Note: reads of nodes].

        Args:
            counts: This worker's numbers of nodes (of the sources, of the targets).
            own: Values of the edges at hand, and tables.
            targets: The index.
        """
        lengths, index = set(counts) - {0}, storage_of(targets)
        made, nodes = {storage_of(t) for t in (*own, targets)}, set[int]()
        for func, args, kwargs, out in self.calls:
            inputs = dense_in(args, kwargs)
            outside = (t for t in inputs if storage_of(t) not in made)
            nodes |= {storage_of(t) for t in outside if _is_long(t, lengths)}
            if _name(func) in _READERS and storage_of(args[0]) in nodes:
                ids = [t for t in inputs[1:] if t.dtype in (torch.int64, torch.int32) and t.dim()]
                if ids and all(storage_of(t) != index for t in ids):
                    return True
            of_nodes = any(storage_of(t) in nodes for t in inputs)
            for t in dense_in(out):
                if of_nodes and _is_long(t, lengths):
                    nodes.add(storage_of(t))
                elif storage_of(t) not in nodes:
                    made.add(storage_of(t))
        return False

    def replayed(
        self,
        first: Mapping[int, Tensor],
        changes: Mapping[int, Callable[[Tensor], Any]],
        wanted: Sequence[Tensor],
    ) -> list[Tensor]:
        """Runs the operators again, and returns what stands for some of their results.

        Args:
            first: Contents of memory before the first of them, by number; other memory holds what
                it held.
            changes: What to do with a reduction over targets after it, by its memory's number.
            wanted: The results, of which those that are changed are returned as before.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        before: dict[int, Tensor] = {}

        def now(old: Tensor) -> Tensor:
            key = storage_of(old)
            if key not in memory:
                memory[key] = first.get(key, old).untyped_storage().clone()
            place = old.storage_offset(), old.shape, old.stride()
            return old.new_empty(0).set_(memory[key], *place)

        for func, args, kwargs, out in self.calls:
            again = func(*mapped(now, args), **{k: mapped(now, v) for k, v in kwargs.items()})
            for old, new in zip(dense_in(out), dense_in(again), strict=True):
                key = storage_of(old)
                memory.setdefault(key, new.untyped_storage())
                if key in changes and _name(func).startswith(_REDUCES):
                    before[key] = now(old).clone()
                    changes[key](now(old))
        return [before.get(storage_of(tensor), now(tensor)) for tensor in wanted]


def dense_in(*values: Any) -> list[Tensor]:
    """Returns the tensors with memory in nested lists, tuples and dicts."""
    return [tensor for tensor in tensors_in(*values) if tensor.layout == torch.strided]


def _name(func: Any) -> str:
    return str(func._schema.name.rpartition("::")[2])


def _is_long(tensor: Tensor, lengths: set[int]) -> bool:
    return tensor.dim() > 0 and tensor.size(0) in lengths


def _same(tensor: Tensor) -> Tensor:
    return tensor
