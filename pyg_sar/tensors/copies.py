"""Copies where torch has views, and backward passes.

[Note: copies for views] Some of torch's views are copies here: runs of rows, say, which lie
anywhere. What is written into such a copy is written into the tensor that it is a view of, too. To
use a copy after that tensor was written raises: the copy knows its origin, and how often was
written into that. Writes are counted here, for all tensors that share memory: PyTorch's versions
leave out those by ``x.data``, and those in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors.nested import mapped, tensors_in


class Origin:
    """The tensor that another is a copy of, where torch has a view. See [Note: copies for views].

    Args:
        copy: The copy's rows; of a plain copy all of it.
        source: What it is a view of.
        view: Returns the same view of another tensor with the source's rows.
        row: The number of the one row that it is a copy of, if so.
        back: Of a copy whose rows have changed places: returns the source's rows of it.
    """

    def __init__(
        self,
        copy: Tensor,
        source: Any,
        view: Callable[[Any], Any] | None = None,
        row: int | None = None,
        back: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.copy, self.source, self._view, self.row, self._back = copy, source, view, row, back
        self._seen = source.writes.count

    def stale(self) -> bool:
        """Returns whether the source, or what that is a copy of, was written since."""
        above = self.source.origin
        return self._seen != self.source.writes.count or (above is not None and above.stale())

    def put(self) -> None:
        """Writes the copy where it was taken from."""
        source, local = self.source, self.source.local
        if self.row is not None:
            source[self.row] = self.copy
            self._seen = source.writes.count
            return
        if self._back is not None:
            local.copy_(self._back(self.copy))
        elif self._view is not None:
            places = torch.arange(local.numel(), device=local.device).view(local.shape)
            local.put_(self._view(type(source)(places, source.rows, source.axis)).local, self.copy)
        source.writes.add()
        self._seen = source.writes.count
        if source.origin is not None:
            source.origin.put()


class RowCopy(Tensor):
    """A plain copy where torch gives a view. See [Note: copies for views].

    Attributes:
        origin: What it, or the copy that it is a part of, is a copy of. Of one row it is written
            there, too.
    """

    origin: Origin
    goes_first = True  # before node tensors, which don't look whether it is stale

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(_plain(self), memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PASSES_BACK:
            return pass_back(func, args, kwargs)
        if func is Tensor.view_as and _finds_leaf(*args, **kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name not in _OF_ITSELF
        writes = writes or name in _IN_PLACE or kwargs.get("inplace") is True
        copies = [t for t in tensors_in(args, kwargs) if isinstance(t, cls)]
        written = tensors_in([*args, *kwargs.values()][: int(writes)], kwargs.get("out"))
        targets = [t for t in written if isinstance(t, cls)]
        if name != "__get__" and any(t.origin.stale() for t in copies):
            raise DistributedIndexError(
                f"'{name}' takes a view of a node tensor that was written since: take it again"
            )
        row = targets and args and targets[0] is args[0] and targets[0].origin.row is not None
        if targets and not row:
            raise DistributedIndexError(
                f"'{name}' would write into a copy of rows, not into the node tensor that they are "
                "of: assign to it, x[3] = x[3] + 1, say"
            )
        if name in _OF_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
        else:
            out = func(*mapped(_plain, args), **mapped(_plain, kwargs))
        if row:
            targets[0].origin.put()
            return args[0]
        if isinstance(out, np.ndarray) and copies:
            out.flags.writeable = False  # In one process it would be written into the tensor, too.
        return mapped(lambda t: _view_of(copies, t), out)


def _finds_leaf(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether a leaf is viewed as itself: so PyTorch asks where its gradient ends."""
    return tensor is other and tensor.requires_grad and tensor.is_leaf


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, RowCopy) else tensor


def _view_of(copies: list[Any], out: Tensor) -> Tensor:
    """Returns a result, as a copy of rows where it is a view of one."""
    with torch._C.DisableTorchFunctionSubclass():
        origins = [t.origin for t in copies if shares_memory(out, t)]
        return row_copy(out, origins[0]) if origins and type(out) is Tensor else out


def row_copy(copy: Tensor, origin: Origin) -> Tensor:
    """Returns a plain copy that knows what it is a copy of."""
    found = copy.as_subclass(RowCopy)
    found.origin = origin
    return found


_HOOKS = "retain_grad", "register_hook", "register_post_accumulate_grad_hook"
_OF_ITSELF = frozenset(("__get__", "__set__", "requires_grad_", "detach_", *_HOOKS))
"""Functions of the tensor, not of its numbers."""

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "iand", "ior", "ixor"),
        *("ilshift", "irshift", "setitem"),
    )
)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors lie in the same memory."""
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


# Functions that autograd doesn't see ##########################################

PASSES_BACK = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_NAMES = {func: tuple(signature(func).parameters) for func in PASSES_BACK}


def pass_back(func: Any, args: Any, kwargs: Any) -> Any:
    """Backward passes, with which all tensors of subclasses stay what they are.

    Messages, and layers under a checkpoint, run again in them. So what is called here isn't
    called with functions of subclasses switched off: it gets edges of autograd's graph instead of
    tensors.
    """
    if func is Tensor.backward:
        func, kwargs = torch.autograd.backward, {**kwargs, "grad_tensors": kwargs["gradient"]}
        del kwargs["gradient"]
    kwargs = {**dict(zip(_NAMES[func], args, strict=False)), **kwargs}
    ends = "tensors" if func is torch.autograd.backward else "outputs"
    given = tensors_in(kwargs[ends], kwargs.get("inputs"))
    if not all(tensor.requires_grad for tensor in given):
        with torch._C.DisableTorchFunctionSubclass():  # It says so.
            return func(**kwargs)
    inputs = kwargs.get("inputs")
    fills = kwargs.get("materialize_grads") and kwargs.get("allow_unused") is not False
    if fills:  # PyTorch fills in zeros for tensors, not for edges.
        kwargs = {**kwargs, "materialize_grads": False, "allow_unused": True}
    kwargs[ends] = mapped(get_gradient_edge, kwargs[ends])
    if inputs is not None:
        kwargs["inputs"] = mapped(get_gradient_edge, inputs)
    found = func(**kwargs)
    if not fills:
        return found
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    pairs = zip(inputs, found, strict=True)
    recorded = bool(kwargs.get("create_graph"))
    return tuple(torch.zeros_like(x, requires_grad=recorded) if g is None else g for x, g in pairs)
