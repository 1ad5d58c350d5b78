"""Bytes of tensors that are alive: what a pass holds at its peak."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators of this thread make, until they are freed.

    Storages that were there before are not counted, nor those of other threads.

    Attributes:
        now: Bytes alive.
        peak: The most that ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def known(self, *tensors: Tensor) -> LiveBytes:
        """Leaves the memory of these out."""
        for tensor in tensors:
            self._follow(tensor, counted=False)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in given:
            self._follow(tensor, counted=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor, counted=True)
        return out

    def _follow(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes() if counted else 0
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]
