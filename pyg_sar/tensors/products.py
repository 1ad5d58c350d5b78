"""Rules of matrix products: over the rows they are sums over workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.tensors.boundary import by_rows
from pyg_sar.tensors.node_tensor import (
    NodeTensor,
    by_gathering,
    method,
    name_of,
    node_tensors,
    rule,
    whole,
)
from pyg_sar.tensors.operands import arguments, beside, check_pairs, own, summed, wrap
from pyg_sar.tensors.rows import note_table


def _product(func: Any, left: Tensor, right: Tensor) -> Any:
    """Returns the product of matrices, batches of matrices, or a matrix and a vector."""
    # Axes of the left: [batch,] rows, inner. Of the right: [batch,] inner [, columns].
    names = {
        "mm": ("ri", "ic"), "bmm": ("bri", "bic"), "mv": ("ri", "i"), "dot": ("i", "i"),
        "vdot": ("i", "i"),
    }[func._schema.name.rpartition("::")[2]]  # fmt: skip
    held = [
        (name[t.axis], t)
        for name, t in zip(names, (left, right), strict=True)
        if isinstance(t, NodeTensor)
    ]
    if len({axis for axis, _ in held}) > 1:
        # Rows of the left one by columns of the right one, say.
        check_pairs(func, held[0][1].rows, held[1][1].rows.total, left, right)
        right = whole(right, f"'{func._schema.name}'")
        held = held[:1]
    axis = held[0][0]
    rows = held[0][1].rows
    parts = []
    for name, tensor in zip(names, (left, right), strict=True):
        here = axis in name
        parts.append(own(tensor, rows, name.index(axis)) if here else tensor)
    for tensor, name in zip((left, right), names, strict=True):
        if axis in name and tensor.size(name.index(axis)) != rows.total:
            raise RuntimeError(
                f"{func._schema.name}: shapes {list(left.shape)} and {list(right.shape)} don't fit"
            )
    out = func(*parts)
    if axis == "i":
        return summed(out, rows)
    result = "brc"[-out.dim() :] if out.dim() > 1 else "r"
    return wrap(out, rows, result.index(axis))


@method(F.linear)
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    """Each row by itself: the gradients of the weights are summed with those of their model."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weights = given["input"], [given["weight"], given.get("bias")]
    shared = [t for t in weights if t is not None]
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    by_itself = isinstance(x, NodeTensor) and x.axis < x.dim() - 1 and not transformed
    if node_tensors(shared) or not by_itself:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return by_rows(lambda *own: (func(*own),), [(x, x.axis)], shared, [x.axis])[0]


@rule("mm", "bmm", "mv", "dot", "vdot")
def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    return _product(func, *args)


@rule("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation", "_sparse_addmm")
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """A product and what is added to it."""
    given = arguments(func, args, kwargs)
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
    names["_sparse_addmm"] = names["addmm"]
    name = func._schema.name.rpartition("::")[2]
    if name not in names:
        return by_gathering(func, args, kwargs)
    added = given["self"]
    left, right = (given[part] for part in names[name])
    plain = [t for t in (left, right) if isinstance(t, NodeTensor)]
    if not plain:
        return by_gathering(func, args, kwargs)
    single = {"baddbmm": "bmm", "addmv": "mv"}.get(name, "mm")
    # Rows stay whole: one call, whose rounding is that of one process.
    rows = plain[0].rows
    rowwise = name == "addmm" and isinstance(left, NodeTensor) and left.axis == 0
    if rowwise and not isinstance(right, NodeTensor):
        beside_rows = beside(func, added, rows, -2, [added, left])
        return wrap(
            func(beside_rows, left.local, right, beta=given["beta"], alpha=given["alpha"]),
            rows,
            0,
        )
    packet = getattr(torch.ops.aten, single).default
    product = _product(packet, left, right)
    return product * given["alpha"] + added * given["beta"]


@rule("_euclidean_dist", "_cdist_forward")
def _distances(func: Any, args: Any, kwargs: Any) -> Any:
    """Distances of each row of a matrix to all rows of another (``cdist``)."""
    left, right, *rest = args
    if not isinstance(left, NodeTensor) or left.axis or left.dim() != 2 or right.dim() != 2:
        return by_gathering(func, args, kwargs)
    right = whole(right, f"'{name_of(func)}'")
    return wrap(func(left.local, right, *rest, **kwargs), left.rows, 0)


@method(F.bilinear, torch.bilinear)
def _bilinear(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Each row of two tensors with the matrices of a weight ``[out, in1, in2]``."""
    given = dict(zip(("input1", "input2", "weight", "bias"), args, strict=False)) | kwargs
    tensors = given["input1"], given["weight"], given["input2"]
    out = torch.einsum("...i,oij,...j->...o", *tensors)
    bias = given.get("bias")
    return out if bias is None else out + bias


@method(F.embedding, torch.embedding)
def _embedding_of_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table with a row per node: each worker gets those that it names."""
    names = ("input", "weight") if func is F.embedding else ("weight", "input")
    given = dict(zip(names, args, strict=False)) | kwargs
    table, index = given["weight"], given["input"]
    defaults = {"padding_idx": (None, -1), "max_norm": (None,), "norm_type": (2.0,)}
    plain = all(v in defaults.get(k, (False,)) for k, v in given.items() if k not in names)
    plain = plain and len(args) <= 2 and not index.is_floating_point()
    if plain and isinstance(table, NodeTensor) and table.axis == 0:
        ids = index.local if isinstance(index, NodeTensor) else index
        if ids.numel() and int(ids.min()) < 0:
            raise IndexError("index out of range in self")  # as torch; others' ids may be right
        found = table.index_select(0, index.reshape(-1))
        if index.dim() > 1 and not isinstance(index, NodeTensor) and isinstance(found, NodeTensor):
            found = found.full_tensor()  # By ids that all workers have, several in a row.
        return found.view(*index.shape, *table.shape[1:])
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("embedding")
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table, which all workers hold, by ids that belong to rows."""
    table, index, *rest = args
    if not isinstance(index, NodeTensor):
        return table.index_select(0, index.reshape(-1)).view(*index.shape, *table.shape[1:])
    out = func(whole(table, "embedding()"), index.local, *rest, **kwargs)
    if not isinstance(table, NodeTensor):
        note_table(table, [index.local], index.rows.comm)
    return wrap(out, index.rows, index.axis)


@rule("embedding_dense_backward")
def _embedding_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, index, count, padding, by_frequency = args
    first = next(iter(node_tensors(index, gradient)))
    axis = first.axis
    if by_frequency or axis >= index.dim():
        return by_gathering(func, args, kwargs)
    out = func(own(gradient, first.rows, axis), own(index, first.rows, axis), count, padding, False)
    return summed(out, first.rows)


@rule("_sparse_mm_reduce_impl")
def _reduced_product(func: Any, args: Any, kwargs: Any) -> Any:
    """A plain sparse matrix by rows, with their largest, say: its derivative needs their places."""
    matrix, dense, reduce = args
    own = whole(dense, f"'{name_of(func)}'").requires_grad_()  # Else it finds no places.
    return tuple(out.detach() for out in func(matrix, own, reduce))
