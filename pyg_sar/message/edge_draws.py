"""Random numbers that a message draws for its edges, the same for any number of workers.

[Note: draws of a message] A message draws for all edges together, in one process: ``F.dropout`` of
``[E, H]`` weights, say. Here it runs for one tile of edges after the other, and in the backward
pass again. So its k-th draw is made once in a call, when the first tile comes to it, for all of the
worker's edges (:func:`pyg_sar.space.draws.draw`); each tile takes its rows, forward and backward.
With ``'keyed'`` nothing is kept but the key.

A worker without edges runs no tile. After the pass all workers compare how often they drew, and
whether their generators were in the same state at first; who has drawn less learns from the others
what it missed, and draws it.

What isn't one row per edge, or comes of a function that is not known here, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import DistributedIndexError
from pyg_sar.space import draws as fills
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.space.draws import Draws, Fill, draw, generator_mark
from pyg_sar.space.edge_ids import EdgeNumbers, edge_numbers
from pyg_sar.wording import counted

Strength = Literal["same", "keyed"]

_AGREE = ("", "", "agreement")
_NOT_SILENT = (
    "draws random numbers now, and did not when it was first called in this way, though nothing "
    "among its attributes tells"
)
_NOT_KNOWN = (
    "draws random numbers by a function that is not known to draw a row for each edge. Known: "
    "F.dropout, torch.rand_like, torch.randn_like, and bernoulli_(p), uniform_, normal_ and "
    "exponential_ of a tensor with a row per edge"
)


def check_alike(comm: Communicator, mark: int, title: str, strength: str) -> None:
    """Raises where the workers' generators were in other states. All workers call this together.

    Raises:
        DistributedIndexError: In that case, on all workers.
    """
    said = torch.tensor([mark, -mark], device=comm.device)
    most, least = comm.all_reduce(said, "max", label=_AGREE).tolist()
    if most != -least:
        raise unlike(comm, title, strength)


def unlike(comm: Communicator, title: str, strength: str) -> DistributedIndexError:
    """The error where the workers' generators are in other states."""
    return DistributedIndexError(
        f"{title} (rank {comm.rank}): with random='{strength}' all workers' generators must be in "
        "the same state, and they are not. Call torch.manual_seed() with one seed on all workers; "
        "draw what is one worker's own from a torch.Generator() of its own"
    )


def out_of_order(title: str, strength: str) -> DistributedIndexError:
    """The error where an edge update's random numbers would come after others, not before."""
    return DistributedIndexError(
        f"{title}: with random='{strength}' it draws random numbers between edge_updater() and "
        "propagate(); one process's come in another order than here"
    )


@dataclass(slots=True)
class _Drawn:
    """One draw of a call, for all edges of the worker.

    Attributes:
        fill: What is drawn.
        rest: The shape of an edge's row.
        dtype: Of the numbers.
        draws: How; with a key, rows can be drawn again.
        rows: The rows, where there is no key: of dropout, whether they are kept.
    """

    fill: Fill
    rest: list[int]
    dtype: torch.dtype
    draws: Draws
    rows: Tensor | None = None

    def told(self) -> list[Any]:
        """Returns what another worker needs to draw the same."""
        fill = self.fill
        return [fill.name, fill.one, fill.two, self.rest, str(self.dtype).removeprefix("torch.")]


class EdgeDraws:
    """The random numbers of one call of a layer's message. See [Note: draws of a message].

    All workers make it together, call :meth:`settle` together once the message has run, and have
    their generators in the same state before. In one process's order come first the draws of
    ``edge_update``, then those of ``message``.

    Args:
        edge_index: Distributed edges.
        strength: ``'same'`` or ``'keyed'``.
        title: The layer and its name, for messages.
        silent: The message is known to draw nothing: its edges' numbers are not looked for.

    Attributes:
        drew_nothing: Once settled: there were edges, and no worker drew.
    """

    def __init__(
        self, edge_index: DistEdgeIndex, strength: Strength, title: str, silent: bool = False
    ) -> None:
        self._comm, self._count = edge_index.plan.comm, edge_index.num_edges
        with torch._C.DisableTorchFunctionSubclass():
            self._device = edge_index.device
        self._draws, self._title, self._silent = Draws(strength), title, silent
        self._numbers: EdgeNumbers | None = None
        if not silent:
            self._numbers = edge_numbers(edge_index, places=strength == "same")
        self._start = self._mark = generator_mark(self._device)
        self._drawn: list[_Drawn] = []
        self._settled = False
        self.drew_nothing = False

    def check_start(self, mark: int) -> None:
        """Raises where an edge update that was put off would have drawn before other draws.

        Args:
            mark: The generators' :func:`generator_mark` when the edge update was called.
        """
        if self._drawn and mark != self._start:
            raise out_of_order(self._title, self._draws.strength)

    # Drawing #################################################################

    def rows(
        self, number: int, fill: Fill, rest: Sequence[int], dtype: torch.dtype, columns: Any
    ) -> Tensor:
        """Returns the rows of some edges of the call's draw of this number.

        Args:
            number: Counts the draws of each edge, from 0 on.
            fill: What is drawn.
            rest: The shape of an edge's row.
            dtype: Of the numbers.
            columns: Columns of ``edge_index``: a slice, or their numbers.
        """
        if number == len(self._drawn):
            self._drawn.append(self._first(fill, list(rest), dtype))
        drawn = self._drawn[number]
        if (drawn.fill, drawn.rest, drawn.dtype) != (fill, list(rest), dtype):
            raise self._refusal(
                f"draws {fill.name} numbers of shape [E, {rest}] for some edges, and "
                f"{drawn.fill.name} numbers of shape [E, {drawn.rest}] for others"
            )
        if drawn.rows is not None:
            found = drawn.rows[columns]
            return found.to(dtype).div_(1 - fill.one) if found.dtype == torch.bool else found
        known = self._known()
        given: dict[str, Any] = {"dtype": dtype, "device": self._device, "draws": drawn.draws}
        return draw(fill, rest, known.numbers[columns], known.total, **given)

    def _first(self, fill: Fill, rest: list[int], dtype: torch.dtype) -> _Drawn:
        if self._settled:
            raise self._refusal("draws more random numbers when it runs again than at first")
        known, draws = self._known(), self._draws.fixed()
        drawn = _Drawn(fill, rest, dtype, draws)
        if draws.key is None:
            given: dict[str, Any] = {"dtype": dtype, "device": self._device, "draws": draws}
            drops = fill.name == "dropout" and fill.one < 1
            ids, total, order = known.numbers, known.total, lambda: known.ascending
            drawn.rows = draw(fill, rest, ids, total, order=order, mask=drops, **given)
        self._mark = generator_mark(self._device)
        return drawn

    def _known(self) -> EdgeNumbers:
        if self._numbers is None and self._silent:
            raise self._refusal(_NOT_SILENT)
        if self._numbers is None:
            raise self._refusal(
                "draws random numbers for edges of which it isn't known where they stand in one "
                "process's list of all edges: they were reversed, permuted, joined to edges that "
                "are no self loops, or are self loops of a heterogeneous graph. Make these edges "
                "before write_partitions()"
            )
        return self._numbers

    def _refusal(self, problem: str) -> DistributedIndexError:
        return DistributedIndexError(
            f"{self._title} (rank {self._comm.rank}): with random='{self._draws.strength}' it "
            f"{problem}"
        )

    @contextmanager
    def of_edges(self, columns: Any, count: int, padding: int = 0) -> Iterator[None]:
        """Draws of a message that runs meanwhile are those of some edges.

        Args:
            columns: Their columns of ``edge_index``: a slice, or their numbers.
            count: How many they are.
            padding: Edges before them that stand in for a target without any, and are dropped.

        Raises:
            DistributedIndexError: Naming a draw that is not known, or is not a row per edge.
        """
        before = generator_mark(self._device)
        if before != self._mark and not self._settled:
            raise self._refusal("draws random numbers that are not its edges'")
        # A mode costs each operator of each tile some time.
        with nullcontext() if self._silent else _EdgeDrawing(self, columns, count, padding):
            yield
        after = generator_mark(self._device)
        if after != (before if self._settled else self._mark):
            raise self._refusal(_NOT_SILENT if self._silent else _NOT_KNOWN)

    def kept(self, p: float, heads: int, dtype: torch.dtype) -> Tensor:
        """Draws dropout of a weight of each edge and head; returns which are kept, as bits.

        Args:
            p: Probability to drop one.
            heads: H, at most 32.
            dtype: Of the weights.

        Returns:
            ``[E, 1]``, int32: bit h is set where head h is kept.
        """
        bits = torch.zeros(self._count, 1, dtype=torch.int32, device=self._device)
        step = 2**16
        fill = fills.dropout(p)
        self.rows(0, fill, [heads], dtype, slice(0, 0))
        for first in range(0, self._count, step):
            part = slice(first, min(first + step, self._count))
            kept = self._drawn[0].rows
            kept = self.rows(0, fill, [heads], dtype, part) if kept is None else kept[part]
            for head, column in enumerate(kept.bool().unbind(-1)):
                bits[part, 0] |= column.to(torch.int32) << head
        self._drawn[0].rows = None
        return bits

    # Together ################################################################

    def settle(self) -> None:
        """Lets workers that had no edges draw what others drew. All workers call this together.

        Raises:
            DistributedIndexError: When the workers' generators, or their draws, were not alike.
        """
        self._settled, comm, count = True, self._comm, len(self._drawn)
        facts = [count, -count, self._start, -self._start, self._count]
        said = torch.tensor(facts, device=self._device, dtype=torch.long)
        most, least, mark, other, edges = comm.all_reduce(said, "max", label=_AGREE).tolist()
        self.drew_nothing = most == 0 and edges > 0
        if most == 0:
            return
        if mark != -other:
            raise unlike(comm, self._title, self._draws.strength)
        told = [drawn.told() for drawn in self._drawn]
        if most == -least and comm.world_size > 1:
            # That all workers drew alike shows in their generators, but for what has the same size.
            check_alike(comm, crc32(repr(told).encode()), self._title, self._draws.strength)
            return
        if most == -least:
            return
        everyone = comm.all_gather_object([told, self._count])
        longest = max((found for found, _ in everyone), key=len)
        if any(found != longest and edges > 0 for found, edges in everyone):
            raise self._refusal("draws other random numbers on other workers")
        self._settled = False
        for name, one, two, rest, dtype in longest[count:]:
            self._drawn.append(self._first(Fill(name, one, two), rest, getattr(torch, dtype)))
        self._settled = True


class _EdgeDrawing(TorchFunctionMode):
    """Hands what a message draws meanwhile, by functions that are known, to :class:`EdgeDraws`."""

    def __init__(self, draws: EdgeDraws, columns: Any, count: int, padding: int) -> None:
        super().__init__()
        self._draws, self._columns, self._number = draws, columns, 0
        self._count, self._padding = count, padding

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OTHERS and kwargs.get("generator") is None:
            raise self._draws._refusal(_NOT_KNOWN)
        handler = DRAWS.get(func)
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)

    def like(self, x: Tensor, fill: Fill, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the numbers for a tensor.

        Args:
            x: For its shape, dtype and device.
            fill: What is drawn.
            dtype: Of the numbers; ``None``: that of ``x``.
        """
        draws = self._draws
        if x.dim() == 0 or x.size(0) != self._count + self._padding:
            raise draws._refusal(
                f"draws {fill.name} numbers for a tensor of shape {list(x.shape)}, which isn't a "
                f"row for each of the {counted(self._count, 'edges')} that it gets at a time"
            )
        # PyTorch draws in the order of memory, which F.dropout and the like take from x.
        if not torch.empty_like(x).is_contiguous():
            raise draws._refusal(
                f"draws {fill.name} numbers for a tensor of shape {list(x.shape)} that lies in "
                f"memory in another order, by strides {list(x.stride())}: call contiguous() first"
            )
        number, self._number = self._number, self._number + 1
        found = draws.rows(number, fill, x.shape[1:], dtype or x.dtype, self._columns)
        if self._padding == 0:
            return found
        return torch.cat([found.new_ones(self._padding, *found.shape[1:]), found])


# Functions ####################################################################


def _of_dropout(mode: _EdgeDrawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not 0 < p <= 1 or not training:
            return F.dropout(input, p, training, inplace)
        factors = mode.like(input, fills.dropout(p))
        return input.mul_(factors) if inplace else input * factors

    return dropout(*args, **kwargs)


def _of_plain_dropout(mode: _EdgeDrawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def dropout(input: Tensor, p: float, train: bool) -> Any:
        inplace = func is torch.dropout_
        return _of_dropout(mode, F.dropout, (input, p, train, inplace), {})

    return dropout(*args, **kwargs)


def _of_like(mode: _EdgeDrawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    fill = fills.uniform() if func is torch.rand_like else fills.normal()
    if set(kwargs) - {"input", "dtype", "device"}:
        return func(*args, **kwargs)
    return mode.like(args[0] if args else kwargs["input"], fill, kwargs.get("dtype"))


_IN_PLACE: dict[Any, tuple[Callable[..., Fill], tuple[tuple[str, float], ...]]] = {
    Tensor.bernoulli_: (fills.bernoulli, (("p", 0.5),)),
    Tensor.uniform_: (fills.uniform, (("from", 0.0), ("to", 1.0))),
    Tensor.normal_: (fills.normal, (("mean", 0.0), ("std", 1.0))),
    Tensor.exponential_: (fills.exponential, (("lambd", 1.0),)),
}


def _of_filling(mode: _EdgeDrawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    make, parameters = _IN_PLACE[func]
    x, *rest = args
    known = dict(parameters)
    values = {**known, **dict(zip(known, rest, strict=False)), **kwargs}
    numbers = all(isinstance(value, int | float) for value in values.values())
    if len(rest) > len(known) or set(values) != set(known) or not numbers:
        return func(*args, **kwargs)
    return x.copy_(mode.like(x, make(*values.values())))


DRAWS: dict[Any, Any] = {
    F.dropout: _of_dropout,
    torch.dropout: _of_plain_dropout,
    torch.dropout_: _of_plain_dropout,
    torch.rand_like: _of_like,
    torch.randn_like: _of_like,
    **dict.fromkeys(_IN_PLACE, _of_filling),
}
"""Functions that are known to draw a row for each row of a tensor, and what stands for them."""
_OTHERS = frozenset({
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.randint_like, torch.bernoulli,
    torch.multinomial, torch.normal, torch.poisson, Tensor.bernoulli, Tensor.multinomial,
    Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_,
})  # fmt: skip
"""Others, which may be called where the generator's state is put back afterwards."""
