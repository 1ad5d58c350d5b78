r"""Keeps what the backward passes of ReLU and dropout need as one bit for each number.

PyTorch's ReLU, :math:`y = \max(x, 0)`, saves :math:`y`; dropout, :math:`y_i = x_i m_i`, saves
:math:`m`, whose values are 0 and :math:`1 / (1 - p)`. Both backward passes ask one question of each
number that was saved: :math:`\partial x_i = \partial y_i` or 0 by :math:`y_i > 0`, and
:math:`\partial x_i = \partial y_i m_i`. A bit answers it. So parts that wait in a store keep bits,
a 32nd of the memory in float32, and nothing is computed again.

Gradients are the same to the bit. What isn't seen to have two values only is saved as it is.

[Note: whose memory it is] Where the next layer saves ReLU's result as its own input, bits beside it
save nothing. Dropout's result is another tensor: ReLU's result is then needed for its own backward
pass alone, and becomes bits when dropout has been computed.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

LEAST = 1 << 14
"""Numbers from which bits are kept: a tensor of fewer stays in memory anyway."""
CHUNK = 1 << 19
"""Numbers that are turned into bits, or back, at a time: what NumPy needs beside."""

RELU = {torch.relu, torch.relu_, F.relu, Tensor.relu, Tensor.relu_}
DROPOUT = {torch.dropout, torch.dropout_, F.dropout}


class SavedBits(TorchFunctionMode):
    """Has ReLU and dropout of plain CPU tensors save bits, on the thread that enters it.

    Not in :func:`torch.utils.checkpoint.checkpoint` and other blocks that say themselves what is
    saved, and not while PyTorch compiles.

    Attributes:
        kept: Bytes of what was turned into bits since the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0
        self._last: weakref.ref[_Saved] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        of_relu = func in RELU
        if not (of_relu or func in DROPOUT) or not _can_save(args[0] if args else None):
            return func(*args, **named)
        saved: list[_Saved] = []

        def pack(tensor: Tensor) -> _Saved:
            found = _Saved(tensor, of_relu)
            saved.append(found)
            return found

        with saved_tensors_hooks(pack, _Saved.whole):
            out = func(*args, **named)
        if of_relu:
            self._last = weakref.ref(saved[0]) if len(saved) == 1 else None
        elif saved:
            before = self._last() if self._last is not None else None
            if before is not None and before.is_memory_of(args[0]):
                saved.append(before)
            self._last = None
            self.kept += sum(each.become_bits() for each in saved)
        return out


def _can_save(x: Any) -> bool:
    return (
        type(x) is Tensor
        and x.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.is_floating_point()
        and x.numel() >= LEAST
        and not torch.compiler.is_compiling()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


class _Saved:
    """Holds the tensor that one call has saved, or its bits.

    Args:
        tensor: What PyTorch would save.
        sign: Only whether a number is above 0 matters; else the tensor has 0 and one other value.
    """

    __slots__ = (
        "__weakref__",
        "_bits",
        "_dtype",
        "_shape",
        "_sign",
        "_tensor",
        "_value",
        "_version",
    )

    def __init__(self, tensor: Tensor, sign: bool) -> None:
        self._tensor: Tensor | None = tensor
        self._bits: Tensor | None = None
        self._version, self._sign = tensor._version, sign
        self._shape, self._dtype, self._value = tensor.shape, tensor.dtype, 1.0

    def is_memory_of(self, x: Tensor) -> bool:
        """Returns whether this is a tensor that is there as a whole, and ``x`` is the same."""
        mine = self._tensor
        same = mine is not None and mine.data_ptr() == x.data_ptr()
        return same and mine is not None and mine.shape == x.shape

    def become_bits(self) -> int:
        """Gives the tensor up for its bits, and returns its bytes; 0: it stays."""
        tensor = self._tensor
        if tensor is None or not tensor.is_contiguous() or tensor.numel() < LEAST:
            return 0
        if tensor._version != self._version:
            return 0  # Its backward pass says so.
        flat = tensor.detach().view(-1)
        value = 1.0 if self._sign else float(flat[:CHUNK].max())
        bits = torch.empty(-(-len(flat) // 8), dtype=torch.uint8)
        for start in range(0, len(flat), CHUNK):
            chunk = flat[start : start + CHUNK]
            # ReLU hands on the gradient of NaN.
            mask = (chunk <= 0).logical_not_() if self._sign else chunk == value
            if not self._sign and not torch.equal(mask, chunk != 0):
                return 0
            packed = torch.from_numpy(np.packbits(mask.numpy()))
            bits[start // 8 : start // 8 + len(packed)] = packed
        self._tensor, self._bits, self._value = None, bits, value
        return tensor.nbytes

    def whole(self) -> Tensor:
        """The tensor, or one with the same answers.

        Raises:
            RuntimeError: It was changed in place since it was saved.
        """
        if self._bits is None:
            tensor = self._tensor
            assert tensor is not None
            if tensor._version != self._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{tuple(self._shape)}], the output of relu or dropout, is "
                    f"at version {tensor._version}; expected version {self._version} instead"
                )
            return tensor
        out = torch.empty(self._shape, dtype=self._dtype)
        flat = out.view(-1)
        for start in range(0, len(flat), CHUNK):
            chunk = flat[start : start + CHUNK]
            bits = self._bits[start // 8 : -(-(start + len(chunk)) // 8)].numpy()
            chunk.copy_(torch.from_numpy(np.unpackbits(bits, count=len(chunk))))
        return out if self._value == 1 else out.mul_(self._value)
