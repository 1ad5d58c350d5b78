r"""Rows of random tensors that don't depend on how many workers draw them.

A random tensor of all nodes, or of all edges, has a row for each of them; a worker needs the rows
of its own. :func:`draw` gives it these rows, in one of two strengths:

* ``'same'``: the rows of the tensor that one process would draw from PyTorch's generator. Each
  worker draws all :math:`N` rows, in one process's order, and keeps its own. Its generator is left
  as one process's would be. :math:`O(N)` work; memory for a piece of the rows where PyTorch's
  generator gives the same numbers piece by piece, else for all of them. Of ``bernoulli_``
  (dropout), :func:`bernoulli_rows` passes over others' rows, with memory for own ones.
* ``'keyed'``: a row is a function of its number and of a key (Philox4x32-10,
  :func:`philox_rows`). The key is drawn from PyTorch's generator, once for each call.
  :math:`O(n)` work and memory for :math:`n` own rows.

In both, the workers' generators must be in the same state, and stay so: seed them alike
(``torch.manual_seed``), and let all workers draw the same.

[Note: pieces] PyTorch's CPU generator fills large tensors in blocks of 16 values, and treats a last
block that is not full in a way of its own. So a piece has a multiple of 16 values, and the last one
at least 16. Some builds of PyTorch fill a whole tensor from one number of the generator
(``bernoulli_`` by MKL): there pieces would be other numbers. :func:`_comes_in_pieces` tries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import pi, prod
from typing import Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.kernels.ops import use_kernel
from pyg_sar.wording import counted

#: The strengths of :class:`Draws`.
STRENGTHS: tuple[str, ...] = ("same", "keyed")


def generator_mark(device: torch.device) -> int:
    """Returns a number that tells states of PyTorch's default generators apart."""
    mark = crc32(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        mark = crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), mark)
    return mark


_PIECE = 2**22  # values of a piece
_BLOCK = 16  # values that PyTorch's CPU generator draws together
_WORDS = 2**18  # of Philox, made at a time
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Fill:
    """The numbers of a random tensor, made by :func:`dropout` and the functions after it.

    Attributes:
        name: The function that made it.
        one: Its first number.
        two: Its second number.
    """

    name: Literal["dropout", "bernoulli", "uniform", "normal", "exponential"]
    one: float = 0.0
    two: float = 0.0

    def whole(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor that PyTorch's own function has filled."""
        if self.name == "dropout" and device.type == "cpu" and 0 < self.one < 1:
            kept = torch.empty(shape, dtype=dtype).bernoulli_(1 - self.one)
            return kept.div_(1 - self.one)  # as F.dropout does, which then multiplies
        if self.name == "dropout":
            # Of ones: the factors themselves, drawn as dropout draws them on this device.
            return F.dropout(torch.ones(shape, dtype=dtype, device=device), self.one)
        out = torch.empty(shape, dtype=dtype, device=device)
        if self.name == "bernoulli":
            return out.bernoulli_(self.one)
        if self.name == "uniform":
            return out.uniform_(self.one, self.two)
        if self.name == "normal":
            return out.normal_(self.one, self.two)
        return out.exponential_(self.one)

    def words(self, dtype: torch.dtype) -> int:
        """Returns how many words of 32 random bits make a value."""
        if self.name in ("dropout", "bernoulli"):
            return 1
        return 2 if self.name == "normal" or dtype == torch.float64 else 1

    def of_words(self, words: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns values ``[*]`` made of random words ``[*, words(dtype)]``."""
        if self.name == "dropout":
            if self.one >= 1:
                return words[..., 0].to(dtype) * 0
            kept = words[..., 0] >= round(self.one * 2**32)
            return kept.to(dtype).div_(1 - self.one)
        if self.name == "bernoulli":
            return (words[..., 0] < round(self.one * 2**32)).to(dtype)
        if self.name == "normal":  # Box and Muller's
            first, second = (words.double() + 0.5).mul_(2.0**-32).unbind(-1)
            values = first.log().mul_(-2).sqrt_() * second.mul_(2 * pi).cos()
            return values.mul_(self.two).add_(self.one).to(dtype)
        values = _uniform(words, _DIGITS[dtype])
        if self.name == "uniform":
            return values.mul_(self.two - self.one).add_(self.one).to(dtype)
        return values.neg_().log1p_().div_(-self.one).to(dtype)


def _uniform(words: Tensor, digits: int) -> Tensor:
    """Numbers in [0, 1) with so many binary digits, float64, of words ``[*, 1]`` or ``[*, 2]``."""
    bits = words[..., 0]
    if digits > 32:
        bits = (bits << 21) | (words[..., 1] >> 11)
        return bits.double().mul_(2.0**-53)
    return (bits >> (32 - digits)).double().mul_(2.0**-digits)


def dropout(p: float) -> Fill:
    """The factors of dropout: 0 with probability ``p``, else ``1 / (1 - p)``."""
    return Fill("dropout", _probability(p))


def bernoulli(p: float) -> Fill:
    """1 with probability ``p``, else 0: ``Tensor.bernoulli_(p)``."""
    return Fill("bernoulli", _probability(p))


def uniform(low: float = 0.0, high: float = 1.0) -> Fill:
    """Numbers in [low, high): ``Tensor.uniform_(low, high)``; ``torch.rand`` by default."""
    return Fill("uniform", low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Fill:
    """Normal numbers: ``Tensor.normal_(mean, std)``; ``torch.randn`` by default."""
    return Fill("normal", mean, std)


def exponential(rate: float = 1.0) -> Fill:
    """Exponential numbers: ``Tensor.exponential_(rate)``."""
    return Fill("exponential", rate)


def _probability(p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"Expected 'p' to be a probability (got {p!r})")
    return float(p)


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows of random tensors are drawn.

    Args:
        strength: ``'same'`` or ``'keyed'``; see :mod:`pyg_sar.space.draws`.
        key: Of ``'keyed'``, 64 bits; ``None``: each call draws one from PyTorch's generator.
        limit: Bytes that ``'same'`` may hold at once where it can't draw piece by piece.

    Raises:
        ValueError: When the strength is none of these.
    """

    strength: Literal["same", "keyed"]
    key: int | None = None
    limit: int = 2**31

    def __post_init__(self) -> None:
        if self.strength not in STRENGTHS:
            raise ValueError(f"Expected 'random' to be 'same' or 'keyed' (got {self.strength!r})")

    def fixed(self) -> Draws:
        """Returns these draws with a key of their own, so that :func:`draw` repeats itself.

        Of ``'same'``: the draws themselves, which don't repeat.
        """
        if self.strength == "same" or self.key is not None:
            return self
        return replace(self, key=int(torch.randint(2**63 - 1, ())))


def draw(
    fill: Fill,
    rest: Sequence[int],
    ids: Tensor,
    total: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    draws: Draws,
    order: Callable[[], Tensor] | None = None,
    mask: bool = False,
) -> Tensor:
    """Returns rows ``ids`` of a random tensor of shape ``[total, *rest]``: ``[n, *rest]``.

    Args:
        fill: What the tensor is filled with.
        rest: The shape of a row.
        ids: Numbers of the wanted rows among all, ``[n]``, int64, in any order.
        total: Rows of the whole tensor.
        dtype: Of the tensor, a floating one.
        device: Where it is drawn: one process's device.
        draws: In which strength.
        order: Returns :func:`ascending` of the ids, where somebody keeps it.
        mask: Return which are not 0 instead, as bool.

    Raises:
        ValueError: When ``'same'`` would hold more bytes at once than ``draws.limit``.
        IndexError: When an id is not in ``[0, total)``.
    """
    with torch._C.DisableTorchFunction():  # Those that watch what is drawn have seen this.
        if ids.numel():
            low, high = (int(n) for n in ids.aminmax())
            if low < 0 or high >= total:
                raise IndexError(f"Expected ids in [0, {total}) (got {low} to {high})")
        device = torch.device(device)
        ids = ids.to(device).long()
        if draws.strength == "keyed":
            found = _keyed(fill, rest, ids, dtype, draws.fixed().key or 0)
            return found != 0 if mask else found
        kept = 1 - fill.one if fill.name == "dropout" else fill.one
        make = partial(fill.whole, dtype=dtype, device=device)
        of_bernoulli = fill.name in ("dropout", "bernoulli") and 0 < kept < 1
        if device.type == "cpu" and of_bernoulli and _is_mersenne_twister(dtype):
            found = bernoulli_rows(kept, rest, ids, total, dtype, order)
            if mask:
                return found
            found = found.to(dtype)
            return found.div_(kept) if fill.name == "dropout" else found
        size = total * prod(rest) * dtype.itemsize
        if size > draws.limit and not _goes_in_pieces(make, rest, total, device):
            raise ValueError(
                f"random='same' draws a tensor of shape {[total, *rest]} as one process would: "
                f"{counted(size, 'bytes')} on each worker at once, more than {draws.limit}. Say "
                "random='keyed', which needs the worker's own rows only"
            )
        found = drawn_rows(make, rest, ids, total, device)
        return found != 0 if mask else found


def keyed_numbers(ids: Tensor, key: int) -> Tensor:
    """Returns a number in [0, 1) for each id, a function of it and the key: float64 ``[n]``."""
    total = int(ids.max()) + 1 if ids.numel() else 0
    draws = Draws("keyed", key=key)
    return draw(uniform(), (), ids, total, dtype=torch.float64, device=ids.device, draws=draws)


def _keyed(fill: Fill, rest: Sequence[int], ids: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    width, words = prod(rest), fill.words(dtype)
    out = torch.empty([ids.numel(), width], dtype=dtype, device=ids.device)
    rows = max(_WORDS // max(width * words, 1), 1)
    for part, some in zip(out.split(rows), ids.split(rows), strict=True):
        found = philox_rows(some, width * words, key).view(some.numel(), width, words)
        part.copy_(fill.of_words(found, dtype))
    return out.view(ids.numel(), *rest)


# As one process ###############################################################


def pieces(total: int, width: int, values: int = 0) -> Iterator[tuple[int, int]]:
    """Returns the first row of each piece, and the row after its last. See [Note: pieces].

    ``values`` are those of a piece; 0: as many as are drawn at once by default.
    """
    rows = max((values or _PIECE) // (max(width, 1) * _BLOCK), 1) * _BLOCK
    first = 0
    while first < total:
        end = first + rows
        if (total - end) * width < _BLOCK:
            end = total
        yield first, end
        first = end


def drawn_rows(
    make: Callable[[Sequence[int]], Tensor],
    rest: Sequence[int],
    ids: Tensor,
    total: int,
    device: torch.device,
) -> Tensor:
    """Returns rows ``ids`` of what ``make([total, *rest])`` draws from PyTorch's generator.

    All rows are drawn, a piece at a time where that gives the same numbers. See [Note: pieces].
    """
    if not _goes_in_pieces(make, rest, total, device):
        return make([total, *rest]).index_select(0, ids)
    ordered, places = (ids, None) if is_ascending(ids) else ids.sort()
    out: Tensor | None = None
    for first, end in pieces(total, prod(rest)):
        piece = make([end - first, *rest])
        if out is None:
            out = piece.new_empty([ids.numel(), *rest])
        low, high = torch.searchsorted(ordered, torch.tensor([first, end])).tolist()
        found = piece[ordered[low:high] - first]
        out[slice(low, high) if places is None else places[low:high]] = found
    return out if out is not None else make([0, *rest])


def is_ascending(ids: Tensor) -> bool:
    """Tells whether no id is below the one before it."""
    return not bool((ids[1:] < ids[:-1]).any())


def ascending(ids: Tensor) -> Tensor:
    """Returns the places of ids in ascending order, ``[n]``, int32, of fewer than 2**31."""
    return ids.argsort().to(torch.int32)


def bernoulli_rows(
    p: float,
    rest: Sequence[int],
    ids: Tensor,
    total: int,
    dtype: torch.dtype,
    order: Callable[[], Tensor] | None = None,
) -> Tensor:
    r"""Returns rows ``ids`` of ``torch.empty([total, *rest], dtype=dtype).bernoulli_(p)``, as bool;
    arguments are those of :func:`draw`.

    A kernel passes over what belongs to other rows, where PyTorch draws as the kernel does: a value
    takes two words :math:`a, b` of 32 bits of a Mersenne twister, and is true where :math:`((2^{32}
    a + b) \bmod 2^{53}) / 2^{53} < p`. Elsewhere :func:`drawn_rows` draws them.
    """
    if not _is_mersenne_twister(dtype) or ids.numel() >= 2**31:
        make = lambda shape: torch.empty(shape, dtype=dtype).bernoulli_(p)  # noqa: E731
        return drawn_rows(make, rest, ids, total, torch.device("cpu")) != 0
    known = None if is_ascending(ids) else ascending(ids) if order is None else order()
    given = ids, known, total, prod(rest), p
    found, state = torch.ops.pyg_sar.bernoulli_rows(torch.get_rng_state(), *given)
    torch.set_rng_state(state)
    return found.view(ids.numel(), *rest)


@cache
def _is_mersenne_twister(dtype: torch.dtype) -> bool:
    """Tells whether the kernel draws what PyTorch draws: not by every library and processor."""
    if not use_kernel(None, True):
        return False
    with torch.random.fork_rng([]):
        state, ids = torch.get_rng_state(), torch.arange(1000)
        drawn = torch.empty(1000, dtype=dtype).bernoulli_(0.3), torch.get_rng_state()
    found, after = torch.ops.pyg_sar.bernoulli_rows(state, ids, None, 1000, 1, 0.3)
    return torch.equal(found.view(-1).to(dtype), drawn[0]) and torch.equal(after, drawn[1])


def _goes_in_pieces(
    make: Callable[[Sequence[int]], Tensor], rest: Sequence[int], total: int, device: torch.device
) -> bool:
    return total * prod(rest) > _PIECE and device.type == "cpu" and _comes_in_pieces(make)


def _comes_in_pieces(make: Callable[[Sequence[int]], Tensor]) -> bool:
    """Tells whether drawing piece by piece gives one process's numbers and state."""
    rows = 5 * _BLOCK + 7
    before = torch.get_rng_state()

    def found(draw: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        torch.set_rng_state(before)
        return draw(), torch.get_rng_state()

    try:
        sizes = [end - first for first, end in pieces(rows, 3, 6 * _BLOCK)]
        whole = found(lambda: make([rows, 3]))
        parts = found(lambda: torch.cat([make([n, 3]) for n in sizes]))
    finally:
        torch.set_rng_state(before)
    return all(map(torch.equal, whole, parts))


# Philox4x32-10 ################################################################
#
# A counter-based generator: random bits as a function of numbers alone (Salmon, Moraes, Dror, Shaw,
# "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A counter of four words of 32 bits goes
# through ten rounds under a key of two words,
#
#     (c_0, c_1, c_2, c_3) <- (hi(M_1 c_2) ^ c_1 ^ k_0, lo(M_1 c_2), hi(M_0 c_0) ^ c_3 ^ k_1,
#                              lo(M_0 c_0)),
#
# and the key grows by a constant from round to round. Nothing is kept from call to call: everybody
# who has the counter and the key has the same bits.


_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # by which the key grows
_ALL_BITS = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Returns four words of random bits, int64 of values in :math:`[0, 2^{32})`, for each counter,
    of four such tensors whose shapes broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product has 64 bits; int64 keeps all of them, and the mask takes its sign away.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _ALL_BITS) ^ c1 ^ k0, ((first >> 32) & _ALL_BITS) ^ c3 ^ k1
        c1, c3 = second & _ALL_BITS, first & _ALL_BITS
        k0, k1 = (k0 + _STEPS[0]) & _ALL_BITS, (k1 + _STEPS[1]) & _ALL_BITS
    return c0, c1, c2, c3


def philox_rows(ids: Tensor, width: int, key: int, *, native: bool | None = None) -> Tensor:
    """Returns a row of random words for each id: a function of the id, the place and the key.

    Words 4 b to 4 b + 3 of a row are those of the counter (low word of the id, high word of the id,
    b, 0).

    Args:
        ids: ``[n]``, int64, not negative.
        width: Words of each row, below :math:`2^{34}`.
        key: Of 64 bits.
        native: Whether to use the C++ kernel; ``None``: where it is there and made for the tensor.

    Returns:
        ``[n, width]``, int64, of values in :math:`[0, 2^{32})`.
    """
    halves = key & _ALL_BITS, (key >> 32) & _ALL_BITS
    if use_kernel(native, ids.device.type == "cpu" and ids.dtype == torch.int64):
        found: Tensor = torch.ops.pyg_sar.philox_rows(ids, width, *halves)
        return found
    blocks = torch.arange((width + 3) // 4, device=ids.device)
    low, high = (ids & _ALL_BITS).unsqueeze(-1), ((ids >> 32) & _ALL_BITS).unsqueeze(-1)
    words = philox((low, high, blocks, blocks.new_zeros(())), halves)
    return torch.stack(words, -1).view(ids.numel(), 4 * blocks.numel())[:, :width]
