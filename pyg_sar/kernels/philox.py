r"""Philox4x32-10, a counter-based generator: random bits as a function of numbers alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A
counter of four words of 32 bits goes through ten rounds under a key of two words:

.. math::
    (c_0, c_1, c_2, c_3) \leftarrow (\mathrm{hi}(M_1 c_2) \oplus c_1 \oplus k_0,\;
        \mathrm{lo}(M_1 c_2),\; \mathrm{hi}(M_0 c_0) \oplus c_3 \oplus k_1,\;
        \mathrm{lo}(M_0 c_0))

and the key grows by a constant from round to round. Nothing is kept from call to call, so that
everybody who has the counter and the key has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.kernels.ops import use_kernel

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # by which the key grows
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Returns four words of random bits for each counter.

    Args:
        counter: Four int64 tensors whose shapes broadcast, of values in :math:`[0, 2^{32})`.
        key: Two numbers in :math:`[0, 2^{32})`.

    Returns:
        Four int64 tensors of values in :math:`[0, 2^{32})`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product has 64 bits; int64 keeps all of them, and the mask takes its sign away.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + _STEPS[0]) & _WORD, (k1 + _STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox_rows(ids: Tensor, width: int, key: int, *, native: bool | None = None) -> Tensor:
    r"""Returns a row of random words for each id: a function of the id, the place and the key.

    Words 4 b to 4 b + 3 of a row are those of the counter (low word of the id, high word of the
    id, b, 0).

    Args:
        ids: ``[n]``, int64, not negative.
        width: Words of each row, below :math:`2^{34}`.
        key: Of 64 bits.
        native: Whether to use the C++ kernel; ``None``: where it is there and made for the tensor.

    Returns:
        ``[n, width]``, int64, of values in :math:`[0, 2^{32})`.

    Raises:
        RuntimeError: The kernel was asked for and is missing.
    """
    halves = key & _WORD, (key >> 32) & _WORD
    if use_kernel(native, ids.device.type == "cpu" and ids.dtype == torch.int64):
        found: Tensor = torch.ops.pyg_sar.philox_rows(ids, width, *halves)
        return found
    blocks = torch.arange((width + 3) // 4, device=ids.device)
    low, high = (ids & _WORD).unsqueeze(-1), ((ids >> 32) & _WORD).unsqueeze(-1)
    words = philox((low, high, blocks, blocks.new_zeros(())), halves)
    return torch.stack(words, -1).view(ids.numel(), 4 * blocks.numel())[:, :width]
