"""Functions that autograd doesn't see, or that leave torch, and a few more."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors.node_tensor import (
    NodeTensor,
    method,
    name_of,
    node_tensors,
    refusal,
    rule,
    whole,
)
from pyg_sar.tensors.operands import own


@method(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """``x.data = values``: autograd sees no operator."""
    target, values = args
    if not isinstance(target, NodeTensor) or not _alike(target, values):
        raise DistributedIndexError(
            f"'x.data = values' takes values of the same rows and shape ({list(target.shape)}), "
            f"got {type(values).__name__} of {list(values.shape)}: write x.data.copy_(values)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(target, values)  # Its dtype, and device: model.double() sets these so.
    _share(target, values)


@rule("_has_compatible_shallow_copy_type")
def _may_be_data(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether ``x.data = values`` is possible: torch asks where ``x`` is plain as well.

    Raises:
        DistributedIndexError: When ``x`` alone is plain: it would be left without memory.
    """
    target, values = args
    if isinstance(values, NodeTensor) and not isinstance(target, NodeTensor):
        raise DistributedIndexError(
            f"'x.data = values' of a plain tensor got a tensor of the graph (shape "
            f"{list(values.shape)}; rank {values.rows.comm.rank}): make x of such a tensor, by "
            "torch.empty_like(data.x), say, or write x.data.copy_(values)"
        )
    return bool(target.device.type == values.device.type)


@cache
def _let_torch_ask() -> torch.library.Library:
    """Lets torch ask that rule: what operators are composed of would be called above it."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, key)
    return library  # Which is there as long as it is kept.


_let_torch_ask()


def _alike(target: NodeTensor, values: Any) -> bool:
    """Returns whether a tensor has the same rows and shape."""
    same = isinstance(values, NodeTensor) and values.shape == target.shape
    return same and target.axis == values.axis and target.rows.same(values.rows)


def _share(target: NodeTensor, values: NodeTensor) -> None:
    target._local, target.make, target.origin = values.local, None, values.origin
    target.writes, target._edges = values.writes, values._edges
    target._column = values._column


@method(Tensor.apply_, Tensor.map_, Tensor.map2_, Tensor.__dlpack__)
@method(Tensor.share_memory_, Tensor.storage, Tensor._typed_storage)
def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuses calls that go through memory without operators."""
    why = "reads memory, where a worker holds its rows: x.to_local(). untyped_storage() frees it"
    raise refusal(func, why, *args)


@method(Tensor.untyped_storage)
def _storage(func: Any, args: Any, kwargs: Any) -> Any:
    """The memory of this worker's rows: reversible layers free it and fill it again."""
    return args[0].local.untyped_storage()


@method(Tensor.data_ptr)
def _address(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns this worker's address: PyG's ``EdgeIndex`` tells by it what was written in place."""
    local = args[0].local
    return local.data_ptr() or local.untyped_storage()._cdata  # Without rows there is no address.


@rule("set_")
def _set(func: Any, args: Any, kwargs: Any) -> Tensor:
    """``x.set_(values)``, which shares the memory of values of the same rows."""
    target, *values = args
    same = len(values) == 1 and isinstance(target, NodeTensor) and _alike(target, values[0])
    if not same or values[0].dtype != target.dtype:
        raise refusal(func, "takes another tensor of the same rows, shape and dtype", *args)
    _share(target, values[0])
    return cast(Tensor, target)


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Gradients times a factor, of ``GradScaler``: ``found`` is 1 where one is not finite."""
    gradients, found, factor = args
    for gradient in gradients:
        found.masked_fill_(~gradient.isfinite().all(), 1.0)
        gradient.mul_(factor)


@rule("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def _fused_optimizer(func: Any, args: Any, kwargs: Any) -> Any:
    """A step of parameters, each number for itself: gradients and states have their rows."""
    lists = [list(given) for given in args if isinstance(given, list | tuple)]
    for k, parameter in enumerate(args[0]):
        for place, tensors in enumerate(lists):
            if k >= len(tensors) or not node_tensors(parameter, tensors[k]):
                continue
            kept = isinstance(parameter, NodeTensor)
            if place == 1 and not kept:
                tensors[k] = whole(tensors[k], name_of(func))
            elif kept and (place == 1 or _alike(parameter, tensors[k])):
                tensors[k] = own(tensors[k], parameter.rows, parameter.axis)
            elif tensors[k].dim():  # The number of steps has no rows.
                why = "takes states with the parameter's rows: set fused=False"
                raise refusal(func, why, parameter, tensors[k])
    return func(*lists, *args[len(lists) :], **kwargs)


# Functions that leave torch ###################################################


@method(Tensor.numpy, Tensor.tolist, Tensor.__array__)
def _leaves(func: Any, args: Any, kwargs: Any) -> Any:
    name = f"Tensor.{func.__name__}()"
    if args[0].requires_grad and func is not Tensor.tolist:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    out = func(whole(args[0], name), *args[1:], **kwargs)
    if func is not Tensor.tolist:
        out.flags.writeable = False  # In one process it would be written into the tensor, too.
    return out


@method(F.one_hot)
def _one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    """Each row's, with as many classes as the whole tensor has."""
    named = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
    values, given = named["input"], named.get("num_classes", -1)
    if values.dtype != torch.long or not values.numel():
        return func(whole(values, "one_hot()"), given)
    low, high = int(values.min()), int(values.max())
    if low < 0:
        raise RuntimeError("Class values must be non-negative.")
    if given != -1 and high >= given:
        raise RuntimeError("Class values must be smaller than num_classes.")
    classes = torch.arange(high + 1 if given == -1 else given, device=values.device)
    return (values.unsqueeze(-1) == classes).long().contiguous()
