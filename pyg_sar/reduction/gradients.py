r"""Gradients of parameters: summed over the workers, averaged over replicas once per backward pass.

Sums take one message per dtype. With :math:`L_r` the loss of replica r of R, every parameter's
``.grad`` grows by

.. math:: g = \frac{1}{R} \sum_r \frac{\partial L_r}{\partial \theta},

as ``torch.nn.parallel.DistributedDataParallel`` has it.

[Note: one average per pass] The gradient of a replica is complete where autograd adds it to
``.grad``, however the parameter was used. A hook on the parameter sets aside what ``.grad`` was
before, so that ``.grad`` is this pass's gradient alone; the hooks of the first parameter let the
engine call :meth:`ReplicaGradients.finish` when the pass ends. It averages the gradients of all
parameters in one message per dtype, and adds what was set aside. A parameter to which this replica
contributed nothing counts as 0 where another one did. The message has checksums of the parameters
(:mod:`pyg_sar.reduction.parameters`, [Note: marks]).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Label
from pyg_sar.reduction.parameters import LIMBS, differ, marks, reconcile
from pyg_sar.tensors import NodeTensor

_LABEL: Label = ("", "backward", "gradient sum")


def post_totals(
    named: Sequence[tuple[str, Tensor]],
    own: Sequence[Tensor | None],
    comm: Communicator,
    settings: Sequence[str] = (),
    label: Label = _LABEL,
) -> Callable[[], dict[int, Tensor]]:
    """Begins to sum gradients over the workers, in one message per dtype.

    The message carries checksums of the parameters, too: see [Note: marks].

    Args:
        named: All parameters and their names, alike on every worker.
        own: The gradients that count here, ``None`` in the places of the others.
        comm: The communicator.
        settings: Of the model's layers, to compare.
        label: (layer, phase, kind) for the ledgers.

    Returns:
        Waits for the sums and returns them by ``id(parameter)``, for those parameters to which
        any worker contributed.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]]
    groups, names = defaultdict(list), {id(p): name for name, p in named}
    for (_, parameter), gradient in zip(named, own, strict=True):
        if parameter.requires_grad:
            groups[parameter.dtype, parameter.device].append((parameter, gradient))
    posted = []
    for group in groups.values():
        parts = [torch.zeros_like(p) if g is None else g.resolve_conj() for p, g in group]
        present = parts[0].new_tensor([float(gradient is not None) for _, gradient in group])
        ours = marks([p for p, _ in group], comm, present, settings)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present, ours])
        posted.append((group, flat, comm.all_reduce_async(flat, label=label)))

    def arrive() -> dict[int, Tensor]:
        totals: dict[int, Tensor] = {}
        for group, flat, work in posted:
            work.wait()
            tail = len(group) + LIMBS * comm.world_size
            holders, found = flat[-tail:].split([len(group), tail - len(group)])
            if differ(found.tolist()):
                reconcile([(names[id(p)], p) for p, _ in group], comm, settings)
            sums = flat[:-tail].split([p.numel() for p, _ in group])
            for (p, _), total, count in zip(group, sums, holders.tolist(), strict=True):
                if count:
                    totals[id(p)] = total.view_as(p).clone()
        return totals

    return arrive


# Averages over replicas ########################################################

_AVERAGE = ("", "backward", "gradient average")

Before = dict[int, Tensor | None]
"""The earlier ``.grad``, by the ``id()`` of each parameter that the pass has come to."""


class ReplicaGradients:
    """Averages the gradients of a model's parameters. See [Note: one average per pass].

    It is called before the model's forward pass, to find parameters that the model got since.
    ``settings`` returns a line for each setting of the model's layers, to compare.
    """

    def __init__(self, across: Communicator, settings: Callable[[], list[str]]) -> None:
        self.across, self.settings = across, settings
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._named: list[tuple[str, weakref.ref[Tensor]]] = []
        self._passes: dict[int, tuple[Before, set[int]]] = {}

    def __deepcopy__(self, memo: Any) -> ReplicaGradients:
        return ReplicaGradients(self.across, self.settings)

    def __call__(self, model: torch.nn.Module, _: Any = None) -> None:
        """Takes in the parameters of a model that need gradients.

        Raises:
            ValueError: One of them has a row per node.
        """
        self._model, self._named = weakref.ref(model), []
        parameter: Any
        for name, parameter in model.named_parameters():
            if isinstance(parameter, NodeTensor):
                raise ValueError(
                    f"'{name}' has a row per node at {self._here()}; replicas have graphs of their "
                    "own, so such rows can't be averaged over them. Train it with one replica, or "
                    "compute what it holds from the nodes' features"
                )
            if not (parameter.requires_grad and parameter.is_leaf):
                continue
            reference = weakref.ref(parameter)
            if parameter not in self.across.shared_parameters:
                self.across.shared_parameters[parameter] = self
                parameter.register_hook(partial(self._begin, reference, name))
                parameter.register_post_accumulate_grad_hook(partial(self._added, name))
            if self.across.shared_parameters[parameter] is self:  # Not another model's, too.
                self._named.append((name, reference))

    def _here(self) -> str:
        return f"replica {self.across.rank}"

    def _begin(self, reference: weakref.ref[Tensor], name: str, gradient: Tensor | None) -> None:
        """Sets aside what ``.grad`` was, just before the gradient is added to it."""
        parameter, task = reference(), torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = {}, set()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self.finish, task))
        before, added = self._passes[task]
        if parameter is None:
            return
        if gradient is None:  # Nothing will be added.
            added.add(id(parameter))
            return
        sparse = gradient.layout != torch.strided
        if sparse or gradient.requires_grad:
            what = "is sparse" if sparse else "has a graph"
            raise ValueError(
                f"The gradient of '{name}' {what} at {self._here()}: gradients that are averaged "
                "over replicas are dense (sparse=False) and have no derivatives (backward() "
                "without create_graph=True)"
            )
        before[id(parameter)] = parameter.grad
        parameter.grad = None

    def _added(self, name: str, parameter: Tensor) -> None:
        """Notes that ``.grad`` has the gradient."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        _, added = self._passes.get(torch._C._current_graph_task_id(), ({}, set()))
        if len(hooks) > 1:
            raise ValueError(
                f"'{name}' has a hook by register_post_accumulate_grad_hook() at {self._here()}, "
                "which would see its gradient before it is averaged over the replicas: read "
                "'.grad', or let the optimizer step, after backward()"
            )
        added.add(id(parameter))

    @torch.no_grad()
    def finish(self, task: int) -> None:
        """Averages what a backward pass (autograd's ``task``) has added, and adds it to what was
        there before.

        Raises:
            ValueError: Gradients were asked for by ``torch.autograd.grad``, not added to ``.grad``,
                or of tensors in the place of the parameters; parameters differ between replicas.
        """
        before, added = self._passes.pop(task)
        model = None if self._model is None else self._model()
        if model is not None:
            self(model)
        named = [(name, p) for name, one in self._named if (p := one()) is not None]
        for name, parameter in named:
            if id(parameter) in before and id(parameter) not in added:
                parameter.grad = before[id(parameter)]
                raise ValueError(
                    f"torch.autograd.grad() was asked for the gradient of '{name}' at "
                    f"{self._here()}; it would be that of this replica alone. Gradients are "
                    "averaged over replicas in '.grad': call backward()"
                )
        if not before.keys() <= {id(parameter) for _, parameter in named}:
            raise ValueError(
                f"A backward pass at {self._here()} reached parameters that the model doesn't "
                "train (torch.func.functional_call; or they were replaced, or frozen, after the "
                "forward pass): their gradients can't be averaged over replicas. Train the model's"
            )
        own = [p.grad if id(p) in before else None for _, p in named]
        means = post_totals(named, own, self.across, self.settings(), _AVERAGE)()
        if means:
            torch._foreach_div_(list(means.values()), self.across.world_size)
        for _, parameter in named:
            kept, mean = before.get(id(parameter), parameter.grad), means.get(id(parameter))
            if mean is not None:
                kept = mean if kept is None else kept.add_(mean)
            parameter.grad = kept
