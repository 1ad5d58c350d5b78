"""What a message leaves on its layer: attributes and buffers, and whether workers agree on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyg_sar.space.distributed_index import version_of

_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (bool, int, float, complex, str, bytes, tuple, type(None))
_OWN = frozenset({"_edge_type", "_identity", "_not_fused", "_verdicts", "_warned", "own_graphs"})


class Snapshot:
    """State of a layer and its submodules before a message runs.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        internal = {*vars(torch.nn.Module()), *_OWN}
        self._modules = [(name, module) for name, module in layer.named_modules()]
        self._attributes = [dict(module.__dict__) for _, module in self._modules]
        self._contents = [
            {
                key: _copied(value)
                for key, value in module.__dict__.items()
                if isinstance(value, _CONTAINERS) and key not in internal
            }
            for _, module in self._modules
        ]
        self._buffers = [dict(module._buffers) for _, module in self._modules]
        self._values = {
            id(b): (b, b.clone(), version_of(b))
            for kept in self._buffers
            for b in kept.values()
            if b is not None
        }
        self._internal = internal

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """What changed: names, values before and values now."""
        for (title, module), before, contents, buffers in zip(
            self._modules, self._attributes, self._contents, self._buffers, strict=True
        ):
            prefix = f"{title}." if title else ""
            for key, value in module.__dict__.items():
                if key in self._internal:
                    continue
                old: Any = before.get(key)
                if key in contents and value is before[key]:
                    if not _alike(value, contents[key]):
                        yield prefix + key, contents[key], _copied(value)
                elif isinstance(value, Tensor) and value is not old:
                    yield prefix + key, old, value
                elif isinstance(value, (*_NUMBERS, *_CONTAINERS)) and not _alike(value, old):
                    yield prefix + key, old, _copied(value)
            for key, buffer in module._buffers.items():
                old = buffers.get(key)
                if buffer is None or (buffer is old and not self._written(buffer)):
                    continue
                saved = None if old is None else self._values[id(old)][1]
                if buffer is not old or not _alike(buffer, saved):
                    yield prefix + key, saved, buffer

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for (_, module), before, contents, buffers in zip(
            self._modules, self._attributes, self._contents, self._buffers, strict=True
        ):
            for key in [key for key in module.__dict__ if key not in before]:
                del module.__dict__[key]
            module.__dict__.update(before)
            for key, value in contents.items():
                _refill(before[key], value)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, saved, _ in self._values.values():
            if self._written(buffer):
                buffer.copy_(saved)

    def _written(self, buffer: Tensor) -> bool:
        """Whether somebody wrote into a buffer."""
        _, saved, version = self._values[id(buffer)]
        return version_of(buffer) != version or (version < 0 and not _alike(buffer, saved))


def _copied(value: Any) -> Any:
    """A copy of a container, of whatever depth; tensors stay the same."""
    return tree_map(lambda leaf: leaf, value) if isinstance(value, list | dict) else (
        type(value)(value) if isinstance(value, _CONTAINERS) else value
    )  # fmt: skip


def _refill(container: Any, contents: Any) -> None:
    if _alike(container, contents):
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(contents)
    else:
        container.update(contents)


def _alike(left: Any, right: Any) -> bool:
    """Equal, tensors by their values."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return False
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple | dict | deque):
        mine, theirs = tree_leaves(left), tree_leaves(right)
        if isinstance(left, dict) and list(left) != list(right):
            return False
        if isinstance(left, deque) or len(mine) != len(theirs):
            return len(left) == len(right) and all(map(_alike, left, right))
        return all(_alike(a, b) for a, b in zip(mine, theirs, strict=True))
    try:
        return bool(left == right)
    except (RuntimeError, TypeError, ValueError):
        return False


class Changes:
    """What two runs of a message changed.

    Attributes:
        updates: What it changed alike in both: counters of calls.
        refused: What depends on the edges, and is another on every worker.
    """

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.refused = ""

    def judge(
        self,
        first: dict[str, Any],
        second: Iterator[tuple[str, Any, Any]],
        mixed: Callable[[Any], str],
    ) -> None:
        """Compares them.

        Args:
            first: What the first run changed, by name.
            second: What the second changed.
            mixed: Says of a tensor whether it is made of no edge (``''``), has a row per edge
                (``'rows'``), or holds something else (``'mixed'``).
        """
        for name, before, now in second:
            kinds = {mixed(leaf) for leaf in tree_leaves(now) if isinstance(leaf, Tensor)}
            if "mixed" in kinds:
                self.refused = name
            elif kinds == {"rows"}:
                if isinstance(now, _CONTAINERS):
                    self.updates.append(name)
            elif not _alike(first.get(name), now):
                self.refused = name
            elif not isinstance(now, Tensor) or before is not None:
                self.updates.append(name)
