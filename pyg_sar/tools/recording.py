"""What passes between the modules of a model: recorded in one process, or on each worker.

[Note: levels] A tensor of a whole graph has a row per node, a row per edge, or neither. What one
process holds tells which; a worker then holds its own rows of the former two, and all of the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.nn import MessagePassing

Key = tuple[str, int, str, int]
"""Module, number of its call, ``'input'`` or ``'output'``, number of the tensor."""


def watched(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that a model calls outside of messages, by name.

    What a message passing layer calls may run edge by edge, several times, or not at all.
    """
    inside = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, MessagePassing)
    )
    return {
        name: module
        for name, module in model.named_modules()
        if not any(name.startswith(prefix) and name != prefix[:-1] for prefix in inside)
    }


def floats(value: Any) -> list[Tensor]:
    """The dense floating point tensors in nested lists, tuples and dictionaries, in order."""
    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and leaf.layout == torch.strided
        and leaf.dim() > 0
    ]


@dataclass
class Rows:
    """Which rows of a whole graph's tensors a process holds.

    Attributes:
        num_nodes: Nodes of the whole graph.
        num_edges: Edges of the whole graph.
        n_id: Global ids of the process's nodes.
        e_id: Global ids of its edges.
        lists: By their length, lists of node ids or pairs: the places that the process holds.
    """

    num_nodes: int
    num_edges: int
    n_id: Tensor
    e_id: Tensor
    lists: dict[int, Tensor] = field(default_factory=dict)

    def ids(self, whole: Tensor) -> Tensor | None:
        """Rows of a whole graph's tensor that the process holds (``None``: all)."""
        if whole.dim() and whole.size(0) == self.num_nodes:
            return self.n_id
        if whole.dim() and whole.size(0) == self.num_edges:
            return self.e_id
        return self.lists.get(whole.size(0)) if whole.dim() else None

    def mine(self, whole: Any) -> Any:
        """The process's part of whatever a module returned for the whole graph."""

        def part(leaf: Any) -> Any:
            ids = self.ids(leaf) if isinstance(leaf, Tensor) else None
            return leaf if ids is None else leaf[ids]

        return tree_map(part, whole)


class Recorder:
    """Keeps copies of what goes into and comes out of a model's modules, in order.

    Args:
        model: The model to watch.
        keep_results: Keep whole results as well, for :class:`StandIn`.
    """

    def __init__(self, model: nn.Module, keep_results: bool = False) -> None:
        self.events: dict[Key, Tensor] = {}
        self.results: dict[str, list[Any]] = {}
        self.active: list[str] = []
        self._model, self._keep = model, keep_results
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watch(self) -> Iterator[Recorder]:
        """Records for as long as it is open."""
        handles = []
        for name, module in watched(self._model).items():
            before, after = self._before(name), self._after(name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.active.append(name)
            self._note(name, "input", (args, kwargs))

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            self._note(name, "output", result)
            self._calls[name] += 1
            if self._keep:
                kept = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, result)
                self.results.setdefault(name, []).append(kept)
            self.active.pop()

        return hook

    def _note(self, name: str, what: str, value: Any) -> None:
        for number, tensor in enumerate(floats(value)):
            self.events[name, self._calls[name], what, number] = tensor.detach().clone()


class StandIn(nn.Module):
    """In place of a module that can't run: gives what it gave in one process.

    Args:
        results: Its results for the whole graph, one per call.
        rows: Which rows this process holds.
    """

    def __init__(self, results: list[Any], rows: Rows) -> None:
        super().__init__()
        self.results, self.rows, self.calls = results, rows, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.rows.mine(self.results[(self.calls - 1) % len(self.results)])


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule ``name``."""
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, nn.ModuleList | nn.Sequential):
        owner[int(last)] = module
    elif isinstance(owner, nn.ModuleDict):
        owner[last] = module
    else:
        setattr(owner, last, module)


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets the probabilities of dropout that modules hold to 0. Changes ``model``."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            dropout = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if dropout and isinstance(value, float):
                setattr(module, name, 0.0)
            elif dropout and isinstance(value, list):
                setattr(module, name, [0.0 if isinstance(v, float) else v for v in value])
    return model


class NoDropout(TorchFunctionMode):
    """Dropout passes everything: two runs can't draw the same numbers for other rows.

    It is for probabilities that stand in a model's own code; :func:`without_dropout` does the rest,
    also in the messages that a backward pass computes again, where no such mode holds.
    """

    NAMES = frozenset(
        {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
         "feature_alpha_dropout", "dropout_"}
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") in self.NAMES:
            return args[0] if args else given["input"]
        return func(*args, **given)
