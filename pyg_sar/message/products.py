"""Messages that are source rows times a number per edge, recognised by their operators.

[Note: products] ``edge_weight.view(-1, 1) * x_j`` is the message of GCNConv, GraphConv and many
others. That a message is one is read off what it does: one multiplication, of the source rows and
of a view of a tensor with one number per edge, and nothing else that touches any of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.message.program import Mapped, TileProgram

_VIEWS = frozenset(
    f"aten::{name}"
    for name in ("_reshape_alias", "_unsafe_view", "alias", "detach", "slice", "unsqueeze", "view")
)


class Products(TorchDispatchMode):
    """Watches a run of a message on some edges.

    Args:
        program: The message.
        values: The operands' rows that it is run on.

    Attributes:
        changed: Source rows or numbers of edges were written to.
    """

    def __init__(self, program: TileProgram, values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._sources, self._weights = (
            {k: values[k] for k in program.numbers(role) if program.operands[k].axis == 0}
            for role in ("source", "edge")
        )
        kept = [*self._sources.values(), *self._weights.values()]
        self._alive = [value for value in kept if value is not None]
        self._storages = {_storage(value) for value in self._alive}
        self._found: tuple[int, int] | None = None
        self._product: Tensor | None = None
        self._other = self.changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._schema.name
        if name in _VIEWS or not any(_storage(t) in self._storages for t in inputs):
            return out
        self.changed |= func._schema.is_mutable
        if name == "aten::mul" and func._overloadname == "Tensor" and self._product is None:
            self._found = self._factors(*inputs) if len(inputs) == 2 else None
            self._product = out
            self._storages.add(_storage(out))
        else:
            self._other = True
        return out

    def _factors(self, a: Tensor, b: Tensor) -> tuple[int, int] | None:
        for rows, factor in ((a, b), (b, a)):
            for k, source in self._sources.items():
                for n, weight in self._weights.items():
                    if _is(rows, source) and _is_column(factor, weight, rows):
                        return k, n
        return None

    def is_source(self, mapped: Sequence[Mapped], rows: Tensor | None) -> bool:
        """Whether all messages are ``rows``, the source rows as they were."""
        return not self.changed and all(m.messages is rows for m in mapped)

    def found(self, mapped: Sequence[Mapped]) -> tuple[int, int] | None:
        """The operands whose product all messages are: source rows, and numbers of edges."""
        product = self._product
        if self._other or product is None:
            return None
        if not all(_is(m.messages, product) for m in mapped):
            return None
        return self._found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors are the same memory, read in the same way."""
    return (
        b is not None
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and (_storage(a), a.storage_offset()) == (_storage(b), b.storage_offset())
    )


def _is_column(factor: Tensor, weight: Tensor | None, rows: Tensor) -> bool:
    """Whether a factor of rows is a number per edge: ``weight [E, 1, ...]`` as a view."""
    if weight is None or weight.dim() == 0 or weight.dtype != rows.dtype:
        return False
    column = torch.Size([rows.size(0), *[1] * (rows.dim() - 1)])
    return (
        rows.dim() > 1
        and factor.shape == column
        and weight.numel() == weight.size(0) == column[0]
        and factor.dtype == weight.dtype
        and factor.stride(0) == weight.stride(0)
        and (_storage(factor), factor.storage_offset())
        == (_storage(weight), weight.storage_offset())
    )
