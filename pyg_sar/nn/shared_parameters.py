"""The parameters of a model's layers, whose gradients are summed once per backward pass.

[Note: one sum per pass] What operators make of node tensors has complete gradients on every worker
(:mod:`pyg_sar.tensors`). In layers, and in functions that treat each row for itself
(``F.linear``, recurrent cells), a worker's gradient of a parameter is what its rows contribute. So
these compute with other tensors in the place of parameters: all of a model's come from one autograd
node, which the engine runs when all their gradients are there. It sums these over the workers, in
one message per dtype. What follows, ``.grad``, hooks, ``torch.autograd.grad``, is that of one
process. The node serves until a parameter changes: the optimizer's step makes the next call begin
another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch_geometric.nn.models.linkx import SparseLinear

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.gradients import post_totals
from pyg_sar.reduction.parameters import attribute_rows, check_tensors, replicas
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.boundary import summed_gradients
from pyg_sar.tensors.rows import notes


class SharedParameters:
    """The parameters of one model's layers. See [Note: one sum per pass].

    A copy, or what is loaded from a file, begins without layers; these join when they are called.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[str, weakref.ref[torch.nn.Module]]] = {}
        self._others: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self._taken: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._comm: Communicator | None = None
        self._model: weakref.ref[torch.nn.Module] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return SharedParameters, ()

    def join(self, name: str, layer: torch.nn.Module) -> None:
        """Takes in a layer, behind the others: in the same order on all workers.

        A layer that is gone may have had its ``id()``, on some workers alone.
        """
        self._layers.pop(id(layer), None)
        self._layers[id(layer)] = name, weakref.ref(layer)

    def layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The layers that are still there, in the order in which they joined."""
        for name, reference in self._layers.values():
            layer = reference()
            if layer is not None:
                yield name, layer

    def settings(self, comm: Communicator | None = None) -> list[str]:
        """Returns a line for each plain attribute of the layers, alike on all workers.

        Args:
            comm: Of the workers of one graph, which have more alike: attributes of users' layers.
        """
        rows = [
            f"{name}.{row}"
            for name, one in self.layers()
            for row in attribute_rows(one, settings=True, of_users=comm is not None)
        ]
        return rows if comm is None else [*rows, *notes(comm)]

    def of(self, layer: torch.nn.Module, comm: Communicator) -> dict[int, Tensor]:
        """Returns what a layer computes with, by the ``id()`` of what it stands for."""
        wanted = [parameter for _, parameter in shared_in(layer)]
        comm.learns |= bool(wanted)
        if not all(map(self._is_taken, wanted)):
            if id(layer) not in self._layers or self._layers[id(layer)][1]() is not layer:
                self.join(str(getattr(layer, "ledger_name", type(layer).__name__)), layer)
            self._take(comm)
        return {id(p): self._taken[id(p)][2] for p in wanted}

    def compare(self, layer: torch.nn.Module, comm: Communicator) -> None:
        """Compares the workers' models where no backward pass will. Collective.

        Once in a call of the model: when its first layer is called. Parameters outside of layers
        are among them.

        Raises:
            ValueError: on every worker, when some differ.
        """
        if next((one for _, one in self.layers()), None) is layer:
            self.compare_model(comm, self.settings(comm))

    def compare_model(self, comm: Communicator, settings: Sequence[str] = ()) -> None:
        """Compares the workers' models. Collective.

        Args:
            comm: The communicator.
            settings: What else is compared (:meth:`settings`).

        Raises:
            ValueError: on every worker, when some differ.
        """
        model = None if self._model is None else self._model()
        of = [("", model)] if model is not None else self.layers()
        named = [
            (f"{name}.{own}" if name else own, tensor)
            for name, one in of
            for own, tensor in replicas(one)
        ]
        check_tensors(named, settings, comm)

    def known_to(self, comm: Communicator, model: torch.nn.Module) -> None:
        """Lets functions that get one of a model's parameters find these."""
        self._model = weakref.ref(model)
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, NodeTensor):
                comm.shared_parameters[parameter] = weakref.ref(self), name

    def take(self, name: str, parameter: Tensor, comm: Communicator) -> Tensor:
        """Returns what functions compute with in the place of a parameter outside of layers."""
        comm.learns = True
        if not self._is_taken(parameter):
            self._others.setdefault(id(parameter), (name, weakref.ref(parameter)))
            self._take(comm)
        return self._taken[id(parameter)][2]

    def check_part(self, comm: Communicator) -> None:
        """Raises ``ValueError`` on a model that another part of this process runs."""
        before, self._comm = self._comm, comm
        same = before is None or before is comm or before.closed
        if not same and before is not None and before.host is comm.host:
            raise ValueError(
                f"Rank {before.rank} runs this model in the same process, and rank {comm.rank} "
                "can't do so as well: make, or copy, the model within the function that each part "
                "runs"
            )

    def _is_taken(self, parameter: Tensor) -> bool:
        original, version, taken = self._taken.get(id(parameter), (None, 0, parameter))
        same = original is parameter and version == parameter._version
        return same and taken.shape == parameter.shape and taken.data_ptr() == parameter.data_ptr()

    def _take(self, comm: Communicator) -> None:
        named: dict[int, tuple[str, Tensor]] = {}
        for name, one in self.layers():
            for own, parameter in shared_in(one):
                named.setdefault(id(parameter), (f"{name}.{own}", parameter))
        for key, (name, reference) in self._others.items():
            other = reference()
            if other is not None and other.requires_grad:
                named.setdefault(key, (name, other))
        values = [parameter for _, parameter in named.values()]
        # Not by a reference that would keep both: the collector doesn't see autograd's nodes.
        taken = _Shared.apply(comm, weakref.ref(self), list(named.values()), *values)
        self._taken = {id(p): (p, p._version, t) for p, t in zip(values, taken, strict=True)}


def shared_in(layer: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a layer that need gradients, but for those with a row per node."""
    for name, module in layer.named_modules():
        for own, parameter in module._parameters.items():
            rows = isinstance(parameter, NodeTensor)
            rows = rows or (isinstance(module, SparseLinear) and own == "weight")
            if parameter is not None and parameter.requires_grad and not rows:
                yield f"{name}.{own}" if name else own, parameter


def compute_again(layer: torch.nn.Module) -> None:
    """Hooks that computed weights in a call did so of what parameters were then: now of these."""
    for module in layer.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod | WeightNorm):
                hook(module, ())
            elif isinstance(hook, SpectralNorm):
                setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))


class _Shared(torch.autograd.Function):
    """Parameters for computations with each worker's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        owner: weakref.ref[SharedParameters],
        named: Any,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.given = comm, owner, named
        ctx.set_materialize_grads(False)
        return tuple(v.detach() for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        comm, owner, named = ctx.given
        values = [parameter for _, parameter in named]
        if torch.is_grad_enabled():  # Of this sum derivatives are asked for, too.
            return None, None, None, *summed_gradients(values, gradients, comm)
        shared, comm.learns = owner(), False
        settings = [] if shared is None else shared.settings(comm)
        totals = post_totals(named, gradients, comm, settings)()
        return None, None, None, *(totals.get(id(parameter)) for parameter in values)
