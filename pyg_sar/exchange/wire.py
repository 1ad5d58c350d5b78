r"""How halo rows travel: as they are, or rounded to 16 bits (``SARPolicy(wire=...)``).

Only rows between workers are rounded, floating-point values of 32 and 64 bits among them; what is
computed with them, sums of gradients included, keeps its own dtype. Rounding is to nearest, hence a
row that is fetched again is the same row. Per value the relative error is at most
:math:`2^{-9}` for ``'bfloat16'`` and :math:`2^{-11}` for ``'float16'``.

[Note: float16 has few exponents] It ends at 65504, and gradients are often below its smallest
number. So each row travels multiplied by a power of two of its own, by which its largest magnitude
is in :math:`[2^{14}, 2^{15})`; the exponent is one more value of the row. What is :math:`2^{29}`
times smaller than the row's largest loses bits, and :math:`2^{39}` times smaller it becomes 0. A
row with an infinity or NaN travels unscaled.

[Note: widened in place] A message arrives in the last bytes of the very buffer that will hold its
rows, and is widened from the first row on, as many rows at a time as don't reach what is still to
be read. So a narrow wire needs no more memory than the exact one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NARROWED = (torch.float32, torch.float64)
_FEW_ROWS = 256  # widened through a copy
_TOP = 15  # rows are scaled below 2^15


class Wire:
    """How rows of one kind of message travel.

    Args:
        name: ``'exact'``, ``'bfloat16'`` or ``'float16'``.

    Attributes:
        is_exact: Nothing is rounded.
    """

    def __init__(self, name: str = "exact") -> None:
        self.name, self.is_exact = name, name == "exact"

    def __repr__(self) -> str:
        return f"Wire({self.name!r})"

    def narrows(self, rows: Tensor) -> bool:
        """True where these rows are rounded."""
        return self.name != "exact" and rows.dtype in _NARROWED and rows.numel() > 0

    def encode(self, rows: Tensor) -> Tensor:
        """The message for ``rows [K, width]``: ``[K, width]``, or ``[K, width + 1]`` in float16."""
        if not self.narrows(rows):
            return rows
        if self.name == "bfloat16":
            return rows.to(torch.bfloat16)
        out = rows.new_empty(rows.size(0), rows.size(1) + 1, dtype=torch.float16)
        most = rows.abs().amax(1)
        scale = _TOP - torch.frexp(most).exponent
        scale = torch.where(torch.isfinite(most) & (most > 0), scale, 0)
        out[:, 0] = scale
        out[:, 1:] = torch.ldexp(rows, scale.view(-1, 1))
        return out

    def landing(self, rows: Tensor) -> Tensor:
        """Where the message for ``rows [K, width]``, a contiguous buffer, has to arrive.

        The last bytes of ``rows``; :meth:`land` then puts the values in their place.
        """
        if not self.narrows(rows):
            return rows
        width = rows.size(1) + (self.name == "float16")
        count = 2 * rows.size(0) * width
        memory = rows.view(-1).view(torch.uint8)
        dtype = torch.bfloat16 if self.name == "bfloat16" else torch.float16
        return memory[memory.numel() - count :].view(dtype).view(rows.size(0), width)

    def land(self, rows: Tensor) -> None:
        """Widens the message that arrived. See [Note: widened in place]."""
        if not self.narrows(rows):
            return
        message = self.landing(rows)
        count, start = rows.size(0), 0
        row, narrow = rows.size(1) * rows.element_size(), 2 * message.size(1)
        while start < count:
            left = count - start
            stop = (count * row - left * narrow) // row  # what lies before the unread message
            if left <= _FEW_ROWS or stop <= start:
                rows[start:] = self._decode(message[start:].clone(), rows.dtype)
                return
            rows[start:stop] = self._decode(message[start:stop], rows.dtype)
            start = stop

    def _decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        if self.name == "bfloat16":
            return message
        return torch.ldexp(message[:, 1:].to(dtype), -message[:, :1].to(torch.int32))
