"""Models of a script that several workers run: distributed when they are first used.

[Note: lazy layers] A layer whose widths are not known draws its parameters in its first call, among
the other random numbers of that call. A run on one node finds the widths, and which parameters are
drawn in whose call. They are drawn again before the first real call, where one process draws them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor

from pyg_sar.convert import distribute
from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.layer_state import modes_kept
from pyg_sar.nn.global_calls import GlobalCalls
from pyg_sar.tensors import NodeMatrix, mapped, node_tensors
from pyg_sar.tools.script_files import called_by_package
from pyg_sar.tools.script_together import Together

REMEDIES = (
    "where each worker has a GPU, 'pyg-sar run' loads graphs there. Move graph and model by "
    '.to("cuda"), as for one GPU, or say `pyg-sar run --backend gloo`, to compute on the CPU',
    "workers compute on the CPU where there are fewer GPUs than workers, or with --backend gloo. "
    "Start as many workers as there are GPUs (--workers), or hide these from the script "
    "(CUDA_VISIBLE_DEVICES='')",
)
"""Where workers compute on a GPU, and where on the CPU."""


class Models:
    """The models of a script at one rank."""

    def __init__(self, together: Together) -> None:
        self.together = together
        self._made: list[weakref.ref[Module]] = []
        self._ready: dict[int, weakref.ref[Module]] = {}
        self._calls: list[Module] = []
        self._to_draw: list[tuple[Module, Module]] = []
        """Modules in whose call parameters are to be drawn, and those that draw them."""

    def note(self, module: Module) -> None:
        """Notes a module that was made, or copied."""
        self._made.append(weakref.ref(module))

    def is_ready(self, module: Module) -> bool:
        """Returns whether a module is distributed."""
        found = self._ready.get(id(module))
        return found is not None and found() is module

    # When they are used ------------------------------------------------------

    def call(self, real: Callable[..., Any], module: Module, args: Any, kwargs: Any) -> Any:
        """Calls a module, which is distributed before if it is the first time."""
        if self._to_draw:
            self.draw_for([module])
        if self._calls or called_by_package():  # as in the backward pass of a layer
            return self._called(real, module, args, kwargs)
        given = [*args, *kwargs.values()]
        graphs = [value.to_dict() for value in given if isinstance(value, Data | HeteroData)]
        whole_graph = node_tensors(given, graphs)
        self._check_device(whole_graph, f"{type(module).__name__} got a tensor of the graph")
        if whole_graph and not self.is_ready(module):
            for root in self._roots([module]):
                self.prepare(root, (module, args, kwargs))
            # By the method of the class that it has now.
            return module(*args, **kwargs)
        if not isinstance(module, GlobalCalls):
            self.together.count_call()
        return self._called(real, module, args, kwargs)

    def _called(self, real: Callable[..., Any], module: Module, args: Any, kwargs: Any) -> Any:
        self._calls.append(module)
        try:
            return real(module, *args, **kwargs)
        finally:
            self._calls.pop()

    def before_layer(self, layer: Module) -> None:
        """Does what goes before the call of a layer, which has random numbers of its own."""
        if not self._calls:
            self.together.count_call()
        self.draw_for(layer.modules())

    def draw_for(self, callers: Iterable[Module]) -> None:
        """Has parameters drawn that one process draws in the calls of these modules."""
        inside = {id(module) for module in callers}
        now = [drawn for caller, drawn in self._to_draw if id(caller) in inside]
        self._to_draw = [pair for pair in self._to_draw if id(pair[0]) not in inside]
        for module in now:
            module.reset_parameters()  # type: ignore[operator]

    def optimize(self, params: Any) -> list[Any]:
        """Distributes the models whose parameters an optimizer gets; returns the parameters, or
        groups of them, as they are now.
        """
        groups: list[dict[str, Any]] = list(params)
        if groups and not isinstance(groups[0], dict):  # As Optimizer takes them.
            groups = [{"params": groups}]
        for k, group in enumerate(groups):
            given = group["params"]
            groups[k] = {**group, "params": [given] if isinstance(given, Tensor) else list(given)}
        wanted = {id(p) for group in groups for p in group["params"]}
        homes = [m for m in self._alive() if any(id(p) in wanted for p in _own(m))]
        replaced: dict[int, Tensor] = {}
        for root in self._roots(homes):
            before = dict(root.named_parameters(remove_duplicate=False))
            if not any(map(is_lazy, before.values())):
                self.prepare(root, None)
            after = dict(root.named_parameters(remove_duplicate=False))
            replaced |= {id(before[name]): after[name] for name in before}
        return [
            {**group, "params": [replaced.get(id(p), p) for p in group["params"]]}
            for group in groups
        ]

    def _alive(self) -> Iterator[Module]:
        self._made = [ref for ref in self._made if ref() is not None]
        for ref in self._made:
            module = ref()
            if module is not None:
                yield module

    def _roots(self, modules: list[Module]) -> list[Module]:
        """Returns the outermost modules that hold these, in the order in which they were made."""
        alive, wanted = list(self._alive()), set(map(id, modules))
        noted = set(map(id, alive))
        everyone = [module for module in modules if id(module) not in noted] + alive
        inside = {
            id(inner) for outer in everyone for inner in outer.modules() if inner is not outer
        }
        outermost = [module for module in everyone if id(module) not in inside]
        return [m for m in outermost if not wanted.isdisjoint(map(id, m.modules()))]

    def prepare(self, root: Module, call: tuple[Module, Any, Any] | None) -> None:
        """Distributes a model, unless it is already.

        ``call`` is the model, or a part of it, and the arguments that it is called with, by which
        lazy layers get their widths.
        """
        if all(map(self.is_ready, root.modules())):
            return
        if self.together.comm.device.type == "cpu":  # From there a model is moved to a GPU.
            self._check_device(root.parameters(), f"{type(root).__name__} has parameters")
        with torch.random.fork_rng(devices=[]):
            lazy = [m for m in root.modules() if any(map(is_lazy, _own(m)))]
            if lazy:
                if call is None or not {*lazy} <= {*call[0].modules()}:
                    raise DistributedIndexError(
                        f"'{type(root).__name__}' has layers whose widths are not known yet "
                        f"({', '.join(sorted({type(m).__name__ for m in lazy}))}), and a part of "
                        "it is called alone: call the whole model first"
                    )
                self._find_widths(*call)
            distribute(root)
        for module in root.modules():
            self._ready[id(module)] = weakref.ref(module)

    def _check_device(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raises ``DistributedIndexError`` on tensors that are elsewhere than workers compute."""
        comm = self.together.comm
        for tensor in tensors:
            if tensor.device == comm.device:
                continue
            gpu = comm.device.type == "cuda"
            raise DistributedIndexError(
                f"{what} on {tensor.device} (rank {comm.rank}), and this worker computes on "
                f"{comm.device}: {REMEDIES[0] if gpu else REMEDIES[1]}"
            )

    @torch.no_grad()
    def _find_widths(self, model: Module, args: Any, kwargs: Any) -> None:
        """Runs a model on a graph of one node of each type and one edge of each relation."""

        def cut(value: Any) -> Any:
            if isinstance(value, SparseTensor):
                return SparseTensor.eye(1, has_value=value.has_value(), dtype=value.dtype())
            if isinstance(value, NodeMatrix) and value.made:
                one = torch.ones(1, dtype=value.dtype, device=value.device)
                return torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), one, (1, 1))
            pairs = value.dim() == 2 and value.size(0) == 2 and value.dtype == torch.long
            if pairs or isinstance(value, NodeMatrix):
                return torch.zeros(2, 1, dtype=torch.long, device=value.device)
            if value.dim() == 0:
                return value
            return torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device)

        def small(value: Any) -> Any:
            if isinstance(value, Data | HeteroData):
                return copy.copy(value).apply(cut)
            if isinstance(value, SparseTensor):
                return cut(value)
            return mapped(cut, value)

        def noted(module: Any) -> Callable[[], None]:
            def reset() -> None:
                if not drawing:
                    self._to_draw.append((self._calls[-1], module))
                drawing.append(module)
                type(module).reset_parameters(module)
                drawing.pop()

            return reset

        drawing: list[Module] = []
        drawn = [module for module in model.modules() if hasattr(module, "reset_parameters")]
        for module in drawn:
            module.__dict__["reset_parameters"] = noted(module)
        self._calls.append(model)
        try:
            with modes_kept(model):
                model.eval()
                model(*map(small, args), **{name: small(value) for name, value in kwargs.items()})
        finally:
            self._calls.pop()
            for module in drawn:
                del module.__dict__["reset_parameters"]


def _own(module: Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]
