"""Bytes of tensors that are alive, and where they were made: what a pass holds at its peak."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators of this thread make, until they are freed.

    Storages that were there before are not counted, nor those of other threads.

    Args:
        inside: Frames whose file name has this are named as the place where memory was made.

    Attributes:
        now: Bytes alive.
        peak: The most that ever were.
        at_peak: Bytes by place, when the most were alive.
    """

    def __init__(self, inside: str = "") -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._inside = inside
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._by_place: Counter[str] = Counter()

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
        place = self._place() if size else ""
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), size, place
        self.now += size
        self._by_place[place] += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, +self._by_place

    def _gone(self, key: int) -> None:
        _, size, place = self._live.pop(key)
        self.now -= size
        self._by_place[place] -= size

    def _place(self) -> str:
        return next((place for place in _frames() if self._inside in place), "")


def _frames() -> Iterator[str]:
    """The callers, innermost first, but for this file's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            yield f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
