r"""How halo rows travel: as they are, or rounded to 16, 8, 4 or 2 bits (``SARPolicy(wire=...)``).

Only rows between workers are rounded, floating-point values of 32 and 64 bits among them; what is
computed with them, sums of gradients included, keeps its own dtype. A row that is fetched again is
the same row. To 16 bits rounding is to nearest: per value the relative error is at most
:math:`2^{-9}` for ``'bfloat16'`` and :math:`2^{-11}` for ``'float16'``.

[Note: float16 has few exponents] It ends at 65504, and gradients are often below its smallest
number. So each row travels multiplied by a power of two of its own, by which its largest magnitude
is in :math:`[2^{14}, 2^{15})`; the exponent is one more value of the row. What is :math:`2^{29}`
times smaller than the row's largest loses bits, and :math:`2^{39}` times smaller it becomes 0. A
row with an infinity or NaN travels unscaled.

[Note: integers with a scale] To :math:`b = 8, 4, 2` bits a row x becomes :math:`q = \lfloor (x - z)
/ s + u \rfloor` with :math:`z = \min x` and :math:`s = (\max x - \min x) / (2^b - 1)`, and arrives
as :math:`z + s q`: each value is off by less than s. Rounding is stochastic, u in [0, 1), so that
errors have mean 0 over many rows (Wan et al., "Adaptive message quantization and parallelization
for distributed full-graph GNN training", MLSys 2023). Here u is a hash of what the row holds: a row
that is fetched again, or sent to two workers, must be the same row. So rows that stay as they are,
as features do, are rounded the same in each epoch. Sums in another order, as of parts that are
hosted otherwise, differ in their last bits; so the hash reads a value's place between the row's
least and largest only as far as these bits don't reach, and of the other values less. Where such a
place is at a boundary all the same, u is another. z and s travel with the row, before
its bits; rows that this would not make smaller travel as they are. A row with an infinity or NaN
arrives as NaN.

[Note: widened in place] A message arrives in the last bytes of the very buffer that will hold its
rows, and is widened from the first row on, as many rows at a time as don't reach what is still to
be read. So a narrow wire needs no more memory than the exact one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_NARROWED = (torch.float32, torch.float64)
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_FEW_ROWS = 256  # widened through a copy
_PIECE = 4096  # rows that are brought to integers, and back, at a time
_TOP = 15  # rows are scaled below 2^15
_ODD = -1640531527, 73244475  # factors that spread bits: 2^32 over the golden ratio; of a mixer


class Wire:
    """How rows of one kind of message travel.

    Args:
        name: ``'exact'``, ``'bfloat16'``, ``'float16'``, ``'int8'``, ``'int4'`` or ``'int2'``.
        kept: What plain gathers keep from step to step, a
            :class:`~pyg_sar.exchange.gather.KeptRows` or ``None``.

    Attributes:
        is_exact: Nothing is rounded.
    """

    def __init__(self, name: str = "exact", kept: Any = None) -> None:
        self.kept = kept
        self.name, self.is_exact = name, name == "exact"
        self._bits = _BITS.get(name, 0)

    def __repr__(self) -> str:
        return f"Wire({self.name!r})"

    def narrows(self, rows: Tensor) -> bool:
        """True where rows of this dtype and width are rounded, however many there are."""
        if self.is_exact or rows.dtype not in _NARROWED or not rows.size(1):
            return False
        return not self._bits or self._columns(rows) < rows.size(1) * rows.element_size()

    def _columns(self, rows: Tensor) -> int:
        """Returns the values of a row's message."""
        if self._bits:
            return 2 * rows.element_size() + -(-rows.size(1) * self._bits // 8)
        return rows.size(1) + (self.name == "float16")

    def _dtype(self) -> torch.dtype:
        if self._bits:
            return torch.uint8
        return torch.bfloat16 if self.name == "bfloat16" else torch.float16

    def encode(self, rows: Tensor) -> Tensor:
        """The message for ``rows [K, width]``: ``[K, *]`` of a narrower dtype, or the rows."""
        if not self.narrows(rows):
            return rows
        if self.name == "bfloat16":
            return rows.to(torch.bfloat16)
        out = rows.new_empty(rows.size(0), self._columns(rows), dtype=self._dtype())
        if self._bits:
            for piece, part in zip(rows.split(_PIECE), out.split(_PIECE), strict=True):
                self._quantise(piece, part)
            return out
        most = rows.abs().amax(1)
        scale = _TOP - torch.frexp(most).exponent
        scale = torch.where(torch.isfinite(most) & (most > 0), scale, 0)
        out[:, 0] = scale
        out[:, 1:] = torch.ldexp(rows, scale.view(-1, 1))
        return out

    def _quantise(self, rows: Tensor, out: Tensor) -> None:
        """Writes rows as integers. See [Note: integers with a scale]."""
        levels, each = 2**self._bits - 1, 8 // self._bits
        low, high = rows.aminmax(dim=1)
        scale = torch.stack([low, high / levels - low / levels], dim=1)
        numbers = ((rows - scale[:, :1]) / scale[:, 1:]).nan_to_num_(0.0).clamp_(0, levels)
        numbers = numbers.add_(_noise(numbers / levels)).floor_().clamp_(0, levels)
        missing = -rows.size(1) % each
        whole = torch.nn.functional.pad(numbers.to(torch.uint8), (0, missing))
        shifts = torch.arange(each, dtype=torch.uint8, device=rows.device) * self._bits
        header = scale.view(torch.uint8)
        out[:, : header.size(1)] = header
        packed = whole.unflatten(1, (-1, each)) << shifts
        out[:, header.size(1) :] = packed.sum(2, dtype=torch.uint8)

    def landing(self, rows: Tensor) -> Tensor:
        """Where the message for ``rows [K, width]``, a contiguous buffer, has to arrive.

        The last bytes of ``rows``; :meth:`land` then puts the values in their place.
        """
        if not self.narrows(rows):
            return rows
        width, dtype = self._columns(rows), self._dtype()
        memory = rows.view(-1).view(torch.uint8)
        count = rows.size(0) * width * dtype.itemsize
        return memory[memory.numel() - count :].view(dtype).view(rows.size(0), width)

    def land(self, rows: Tensor) -> None:
        """Widens the message that arrived. See [Note: widened in place]."""
        if not self.narrows(rows):
            return
        message = self.landing(rows)
        count, start = rows.size(0), 0
        row = rows.size(1) * rows.element_size()
        narrow = message.size(1) * message.element_size()
        while start < count:
            left = count - start
            stop = (count * row - left * narrow) // row  # what lies before the unread message
            if left <= _FEW_ROWS or stop <= start:
                rows[start:] = self._decode(message[start:].clone(), rows)
                return
            if self._bits:
                stop = min(stop, start + _PIECE)
            rows[start:stop] = self._decode(message[start:stop], rows)
            start = stop

    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        if self.name == "bfloat16":
            return message
        if not self._bits:
            return torch.ldexp(message[:, 1:].to(like.dtype), -message[:, :1].to(torch.int32))
        head, each = 2 * like.element_size(), 8 // self._bits
        head_bytes = message[:, :head].clone(memory_format=torch.contiguous_format)
        scale = head_bytes.view(like.dtype)
        shifts = torch.arange(each, dtype=torch.uint8, device=message.device) * self._bits
        numbers = (message[:, head:, None] >> shifts) & (2**self._bits - 1)
        numbers = numbers.view(len(message), -1)[:, : like.size(1)]
        return torch.addcmul(scale[:, :1], scale[:, 1:], numbers.to(like.dtype))


@cache
def wire_of(name: str) -> Wire:
    """Returns the wire of this name that keeps nothing."""
    return Wire(name)


def _noise(places: Tensor) -> Tensor:
    """Returns numbers in [0, 1) by the values' places in their rows, ``[K, width]`` in [0, 1]."""
    bits = 24 if places.dtype == torch.float64 else 14
    fine = (places * 2**bits).round_().to(torch.int32)
    column = torch.arange(places.size(1), dtype=torch.int32, device=places.device) * _ODD[0]
    row = _mix((fine >> (bits - 5)) + column).sum(1, keepdim=True, dtype=torch.int32)
    mixed = _mix(_mix(fine + column) + row)
    return (mixed & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _mix(x: Tensor) -> Tensor:
    for _ in range(2):
        x = (x ^ (x >> 16)) * _ODD[1]
    return x ^ (x >> 16)
