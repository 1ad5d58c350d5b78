"""Hooks of layers that are called with tensors of the whole graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from pyg_sar.errors import DistributedIndexError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INNER_HOOKS = tuple(
    f"_{name}_forward{when}_hooks"
    for name in ("propagate", "edge_update", "message_and_aggregate")
    for when in ("_pre", "")
)


def refuse_inner_hooks(module: torch.nn.Module, rank: int) -> None:
    """Refuses hooks that are called within a layer, where they see this worker's rows.

    Those of torch and PyG (``weight_norm``, lazy parameters) compute with parameters only.

    Raises:
        DistributedIndexError: Naming the module and the hook.
    """
    for name, inner in module.named_modules():
        for kind in (*(_HOOKS if inner is not module else ()), *_INNER_HOOKS):
            for hook in (inner.__dict__.get(kind) or {}).values():
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if home.partition(".")[0] not in ("torch", "torch_geometric"):
                    raise DistributedIndexError(
                        f"{type(inner).__name__} {name!r} of {type(module).__name__} has a hook in "
                        f"'{kind}', which would see the rows of rank {rank} only: put a forward or "
                        f"backward hook on the {type(module).__name__}, or call it on "
                        "load_partition(view='local')"
                    )


def with_hooks(module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a module's own hooks around ``call``, within which it has none.

    Args:
        module: The module.
        call: Takes the arguments, as the hooks have left them, and gives the module's result.
        args: What the module is called with.
        kwargs: The same by name.
    """
    own = module.__dict__
    hooks = {name: own[name] for name in _HOOKS if own.get(name)}
    if not hooks:
        return call(*args, **kwargs)
    before = {"forward": own["forward"]} if "forward" in own else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        own.update({name: OrderedDict() for name in hooks})
        del own["forward"]
        own.update(before)
        try:
            return call(*args, **kwargs)
        finally:
            own.update(hooks, forward=forward)

    own["forward"] = forward
    try:
        return torch.nn.Module.__call__(module, *args, **kwargs)
    finally:
        del own["forward"]
        own.update(before)
