"""Users' hooks on parameters, which run on the sum of all workers' gradients.

[Note: hooks on sums] Autograd calls a parameter's hooks when this worker's part of its gradient is
there, in the middle of a backward pass. The sum over the workers is known at the end of the pass.
So a parameter whose gradients are summed keeps its users' hooks in a :class:`Deferred` table, in
which autograd finds only what sums; the others run at the end, on the sum, in the model's order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import PygSarError

_WRAPPERS = frozenset(
    {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
)


class Deferred(OrderedDict[int, Any]):
    """A tensor's table of hooks: autograd calls ``own``; ``users`` holds what users register.

    Args:
        own: Called by autograd, if given.
        users: The table so far, whose handles stay valid.
    """

    def __init__(self, own: Callable[[Tensor], Any] | None, users: Any) -> None:
        super().__init__()
        if own is not None:
            super().__setitem__(-1, own)  # Autograd reads what lies here.
        self.users: dict[int, Callable[[Tensor], Any]] = OrderedDict() if users is None else users

    def __setitem__(self, key: int, hook: Any) -> None:
        self.users[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.users[key]

    def __contains__(self, key: object) -> bool:
        return key in self.users


def defer_hooks(parameter: Tensor, own: Callable[[Tensor], Tensor | None]) -> None:
    """Has autograd call ``own`` with this worker's gradient, and none of the users' hooks."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = Deferred(own, before)
    parameter._post_accumulate_grad_hooks = Deferred(None, after)


def hooked(parameter: Tensor, total: Tensor) -> Tensor:
    """The gradient that the users' hooks make of the sum, as autograd would."""
    hooks: Any = parameter._backward_hooks
    for hook in list(hooks.users.values()):
        found = hook(total)
        total = total if found is None else found
    return total


def call_after(parameter: Tensor) -> None:
    """Calls the hooks of ``register_post_accumulate_grad_hook``."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.users.values()):
        hook(parameter)


def refuse_node_hooks(node: Any, name: str) -> None:
    """Refuses hooks on the node that accumulates a gradient: nothing can run them on the sum.

    Raises:
        PygSarError: When there is one.
    """
    for register in (node.register_hook, node.register_prehook):
        probe = register(_nothing)
        table = probe.hooks_dict_ref()
        others = len(table) - 1
        probe.remove()
        if others:
            raise PygSarError(
                f"Parameter {name!r} has a hook on its AccumulateGrad node, which would see this "
                "worker's part of the gradient only; use parameter.register_hook() or "
                "register_post_accumulate_grad_hook(), which see the sum over all workers"
            )


def wrapper_of(model: torch.nn.Module) -> str | None:
    """The wrapper of torch in which a model is, or runs, if it sums gradients its own way."""
    kinds = {type(module) for module in model.modules()}
    names = {base.__name__ for kind in kinds for base in kind.__mro__}
    found = sorted(names & _WRAPPERS)
    if found:
        return found[0]
    if getattr(model, "_is_fsdp_managed_module", False):
        return "FullyShardedDataParallel"
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return None if active is None else "DistributedDataParallel"


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Refuses a second summation of gradients around, or in, a distributed model.

    Raises:
        ValueError: When there is one.
    """
    name = wrapper_of(model)
    if name is not None:
        raise ValueError(
            f"The model is distributed by pyg_sar.distribute() and by {name}, which would take "
            "each worker's gradients for those of a batch of its own, and average them. Use the "
            f"model that distribute() returns, without {name}"
        )


def _nothing(*_: Any) -> None:
    """Does nothing."""
