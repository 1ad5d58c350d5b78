"""The tensors of the index space: ``DistEdgeIndex`` and its source row ``DistIndex``.

What may be done with them is in ``index_space.py``, which fills the table of handlers.

[Note: made together] Chunks, reversed edges and normalisations are made by all workers together and
kept with the edges. Edges that are found by their content may be those of two relations on one
worker (none of both, say), and two lists on the next. So whatever is made together gets a number
that all workers agree on, and is taken again only where each of them has that very number with its
edges: then it was made of the same edges everywhere. Each proposes its newest; where these differ,
as they do when several were made of the same edges of one worker, a second sum settles it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.edge_ids import Given, Recipe
from pyg_sar.space.pyg_calls import pyg_call
from pyg_sar.wording import counted

_MEMORY = 16  # derivations remembered per tensor

METADATA: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_sparse_csr",
        "is_quantized", "is_meta", "requires_grad", "grad", "grad_fn", "is_leaf", "names",
        "_version", "is_nested", "itemsize", "nbytes", "is_mkldnn", "is_cpu", "is_mps", "is_xpu",
        "is_xla", "_backward_hooks",
    )
    if hasattr(Tensor, name)
) | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
    Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.data_ptr, Tensor.storage_offset, Tensor.is_signed, Tensor.get_device,
    Tensor.untyped_storage, Tensor.is_pinned, Tensor.is_shared, Tensor.is_inference,
    Tensor.__hash__, Tensor.type, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.is_tensor, getattr(Tensor, "requires_grad").__set__,  # noqa: B009
}  # fmt: skip

SAME_CLASS = {
    Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda,
    Tensor.long, Tensor.int, torch.clone, torch.detach, Tensor.pin_memory,
    Tensor.requires_grad_,
}  # fmt: skip

SAME_SHAPE_COMPARE = {
    Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.eq, torch.ne,
}  # fmt: skip

RESHAPE = {
    Tensor.view, Tensor.expand_as, Tensor.expand, Tensor.unsqueeze, Tensor.reshape,
    torch.unsqueeze, torch.reshape,
}  # fmt: skip

LIKE = {
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like,
    torch.randn_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
    Tensor.new_tensor,
}  # fmt: skip

HANDLERS: dict[Any, Callable[..., Any]] = {}


def builtin(function: Any) -> Any:
    """The function that torch itself calls so: PyG puts wrappers in the place of a few."""
    return getattr(torch._C._VariableFunctions, getattr(function, "__name__", ""), function)


def name_of(function: Any) -> str:
    """A function's name for messages, such as ``torch.Tensor.sort``."""
    name = torch.overrides.resolve_name(function) or getattr(function, "__qualname__", None)
    return str(name or function)


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[builtin(function)] = HANDLERS[function] = handler
        return handler

    return register


def storage_of(tensor: Tensor) -> int:
    """Returns the number of a tensor's memory, which no other has while that is alive."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Counts writes into a tensor; inference tensors don't, and are taken for constant."""
    return -1 if tensor.is_inference() else tensor._version


def plain(value: Any) -> Any:
    """The tensor without its meaning: ids of this worker's own numbering.

    It is detached: PyTorch's views keep their base alive, out of sight of Python's collector. What
    an edge index remembers of itself would keep it for ever.
    """
    return value.as_subclass(Tensor).detach() if isinstance(value, InSpace) else value


class Order:
    """Places of edges among all edges of their targets, made when they are first asked for.

    Few aggregations ask, and the places take as much memory as half the edges.

    Args:
        found: The places ``[E]``, or ``None`` where they are not known; or what makes them.
        recipe: What the edges' global numbers come of (``edge_ids.py``), where they are known.
    """

    def __init__(
        self, found: Tensor | Callable[[], Tensor | None] | None, recipe: Recipe | None = None
    ) -> None:
        self._found = found
        self.recipe = recipe

    def find(self) -> Tensor | None:
        """The places, or ``None`` where they are not known."""
        if self._found is not None and not isinstance(self._found, Tensor):
            with torch.inference_mode(False):
                self._found = self._found()
        return self._found


@dataclass(frozen=True, slots=True)
class Partial:
    """The mark of edges of a message flow graph (``partial_edges.py``).

    Attributes:
        missing: How many in-edges each own node has beside those that are here, int64
            ``[num_local]``; ``None`` where it is not known.
    """

    missing: Tensor | None


class InSpace(Tensor):
    """The base of :class:`DistIndex` and :class:`DistEdgeIndex`. Not a public class."""

    plan: HaloPlan
    by_content: bool = False  # found again by what it holds, or derived from what is
    kept: bool = False  # by one layer, which alone finds it
    targets: int | None
    places: Order | None = None
    partial: Partial | None = None
    memory: OrderedDict[Any, Any]

    @property
    def order(self) -> Tensor | None:
        """``[E]``: puts edges in the order of the whole graph's edge list; ``None``: not known."""
        return None if self.places is None else self.places.find()

    def ordered(self, order: Order | Tensor | None) -> Self:
        """This tensor, whose edges have these places among all edges of their targets.

        A tensor: their global numbers.
        """
        self.places = Order(order, Given(order)) if isinstance(order, Tensor) else order
        return self

    @property
    def bipartite(self) -> bool:
        """True where sources and targets are nodes of two types, each numbered on its own."""
        return self.targets is not None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise refusal(func)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({plain(self)!r}, plan={self.plan!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistributedIndexError(
            "A distributed edge index belongs to this worker's running exchange and can't be "
            "pickled; save the partition folder and call pyg_sar.load_partition(root) instead"
        )

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value made earlier for ``key``, or a new one."""
        if key not in self.memory:
            with torch.inference_mode(False):  # Training may come after inference.
                self.memory[key] = make()
            while len(self.memory) > _MEMORY:
                self.memory.popitem(last=False)
        self.memory.move_to_end(key)
        return self.memory[key]

    def remember_together(self, key: Any, make: Callable[[], Any]) -> Any:
        """As :meth:`remember`, of what all workers make together. See [Note: made together]."""
        found = self.recall_together(key)
        if found is None:
            with torch.inference_mode(False):
                found = make()
            self.keep_together(key, found)
        return found

    def recall_together(self, key: Any) -> Any:
        """The value that all workers made together for ``key``, or ``None`` on all."""
        if not self.by_content or self.plan.world_size == 1:
            if key in self.memory:
                self.memory.move_to_end(key)
            return self.memory.get(key)
        made: OrderedDict[int, Any] = self.remember(("together", key), OrderedDict)
        plan, device = self.plan, self.device
        label = ("", "", "agreement")
        newest, only = max(made, default=0), next(iter(made)) if len(made) == 1 else 0
        said = torch.tensor([newest, -newest, only, plan.tokens], device=device)
        plan.comm.all_reduce(said, "max", label=label)
        most, least, proposed, plan.tokens = said.tolist()
        if newest and most == -least:  # The same on all workers, as in most passes.
            return made[newest]
        proposed = proposed or newest
        said = torch.tensor([int(proposed not in made), proposed, -proposed], device=device)
        plan.comm.all_reduce(said, "max", label=label)
        missing, most, least = said.tolist()
        return None if missing or most != -least else made[proposed]

    def keep_together(self, key: Any, value: Any) -> Any:
        """Keeps what all workers made after :meth:`recall_together` had given ``None``."""
        if not self.by_content or self.plan.world_size == 1:
            return self.remember(key, lambda: value)
        made: OrderedDict[int, Any] = self.remember(("together", key), OrderedDict)
        self.plan.tokens += 1
        made[self.plan.tokens] = value
        while len(made) > _MEMORY * 4:
            made.popitem(last=False)
        return value


class DistIndex(InSpace):
    """A row of source ids: own nodes below ``plan.num_local``, halo nodes from there on.

    ``flat`` is the one-dimensional index that a view or an expansion of it came from.
    """

    flat: Tensor


class DistEdgeIndex(InSpace):
    r"""Edges ``[2, E]`` whose targets are this worker's nodes, in the index space.

    ``edge_index[0]`` is a :class:`DistIndex`, ``edge_index[1]`` a plain tensor of local ids
    (the other way round after ``edge_index.flip(0)``: ``dist_row`` is 1 then).

    Args of :func:`dist_edge_index`:
        edge_index: Integer tensor ``[2, E]``.
        plan: The halo plan of the source nodes.
        targets: Between nodes of two types: this worker's nodes of the targets' type.

    Attributes:
        num_edges: E.
        num_targets: This worker's nodes of the targets' type; ``plan.num_local`` counts the
            sources'.
        origin: What it is a copy of.
    """

    dist_row: int
    num_edges: int
    num_targets: int
    origin: DistEdgeIndex | None = None

    def ends(self) -> tuple[Tensor, Tensor]:
        """The distributed row and the local one, both as plain tensors ``[E]``."""
        rows = plain(self)
        return rows[self.dist_row], rows[1 - self.dist_row]


def dist_index(
    index: Tensor, plan: HaloPlan, flat: Tensor | None = None, targets: int | None = None
) -> DistIndex:
    """Wraps source ids ``[E]`` (int64, below ``plan.num_ids``)."""
    index = plain(index)
    out = index.as_subclass(DistIndex)
    if out is index:
        out = index.view_as(index).as_subclass(DistIndex)
    out.plan, out.targets, out.memory = plan, targets, OrderedDict()
    out.flat = index if flat is None else flat
    return out


def dist_edge_index(
    edge_index: Tensor,
    plan: HaloPlan,
    dist_row: int = 0,
    targets: int | None = None,
    by_content: bool = False,
) -> DistEdgeIndex:
    """Wraps edges ``[2, E]`` in the index space of ``plan``.

    Args:
        edge_index: Source ids below ``plan.num_ids`` and the targets' local ids.
        plan: The halo plan of the source nodes.
        dist_row: The row of the sources.
        targets: This worker's nodes of the targets' type where that is not the sources' type
            (a bipartite relation). ``None``: sources and targets are the same nodes.
        by_content: They are found again by what they hold, or derived from such.

    Raises:
        ValueError: When the shape is not ``[2, E]``.
    """
    edge_index = plain(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got {list(edge_index.shape)}) at "
            f"rank {plan.rank}"
        )
    out = edge_index.as_subclass(DistEdgeIndex)
    out.plan, out.targets, out.dist_row = plan, targets, dist_row
    out.num_edges = edge_index.size(1)
    out.num_targets = plan.num_local if targets is None else targets
    out.memory, out.by_content = OrderedDict(), by_content
    return out


def refusal(func: Any) -> DistributedIndexError:
    call, name = pyg_call(), name_of(func)
    named = f"'{call}' ({name})" if call else f"'{name}'"
    return DistributedIndexError(
        f"{named} on a distributed edge index would compute with this worker's own "
        "numbering and give local numbers. Supported: reading node tensors with it (x[row], "
        "index_select), scattering into node tensors (scatter, degree, softmax), selecting edges "
        "by a mask, joining them, comparing its two rows. Do other preprocessing on "
        "data.edge_index, outside the layer, or on the whole graph before write_partitions()"
    )


def require_rows(x: Tensor, dim: int, plan: HaloPlan, what: str) -> None:
    if x.dim() == 0 or x.size(dim) != plan.num_local:
        call = pyg_call()
        raise DistributedIndexError(
            f"{f'{call!r}: ' if call else ''}{what} a tensor of shape {list(x.shape)} with a "
            f"distributed index at rank {plan.rank}: axis {dim} must hold the worker's "
            f"{counted(plan.num_local, 'nodes')}"
        )


# Handlers that only know the tensor itself ####################################


@handles(*SAME_CLASS)
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        out = func(plain(source), *args[1:], **kwargs)
    if out.is_floating_point():
        raise refusal(func)
    unchanged = func not in (Tensor.clone, torch.clone) and out.data_ptr() == source.data_ptr()
    if unchanged and out.dtype == source.dtype:
        return source
    plan = source.plan.to(out.device)
    places, device = source.places, out.device
    order = None
    if places is not None:
        order = Order(lambda: _moved(places.find(), device), places.recipe)
    if isinstance(source, DistEdgeIndex):
        place = source.dist_row, source.targets, source.by_content
        copy = dist_edge_index(out, plan, *place).ordered(order)
        copy.origin = source if plan is source.plan else None
        copy.partial = source.partial
        return copy
    row = dist_index(out, plan, targets=source.targets).ordered(order)
    row.partial = source.partial
    return row


def _moved(order: Tensor | None, device: torch.device) -> Tensor | None:
    return None if order is None else order.to(device)


@handles(Tensor.min, torch.min)
def _min(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        raise refusal(func)
    return plain(args[0]).min()


@handles(*LIKE)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    return func(plain(args[0]), *args[1:], **kwargs)


@handles(Tensor.view_as)
def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    source, other = args
    if not isinstance(source, InSpace) or source.shape != other.shape:
        raise refusal(func)
    return source  # The same object: what is remembered on it stays.


@handles(*RESHAPE)
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if not isinstance(source, DistIndex):
        raise refusal(func)
    out = func(plain(source), *[plain(a) for a in args[1:]], **kwargs)
    row = dist_index(out, source.plan, source.flat, source.targets).ordered(source.places)
    row.partial = source.partial
    return row


# Selected edges ##############################################################


class Selections:
    """Edges selected from a tensor earlier, found again by the same or by equal columns.

    Relational layers select the edges of each relation by a mask that they make anew in each pass.
    As many edges are remembered as there are in a few copies of the whole.
    """

    def __init__(self, num_edges: int) -> None:
        self._room = 4 * num_edges + 64
        self._narrow = num_edges < 2**31
        self._held = 0
        self._by_identity: OrderedDict[Any, tuple[Tensor, DistEdgeIndex]] = OrderedDict()
        self._by_content: OrderedDict[Any, tuple[Tensor, DistEdgeIndex]] = OrderedDict()

    def find(self, columns: Tensor, make: Callable[[Tensor], DistEdgeIndex]) -> DistEdgeIndex:
        """The edges in these columns (a mask, or their numbers), made of the columns' numbers."""
        key = (id(columns), version_of(columns))
        if key not in self._by_identity:
            # The entry keeps `columns` alive, so that its id stays its own.
            self._by_identity[key] = columns, self._equal(columns, make)
            if len(self._by_identity) > 16:
                self._by_identity.popitem(last=False)
        self._by_identity.move_to_end(key)
        return self._by_identity[key][1]

    def _equal(self, columns: Tensor, make: Callable[[Tensor], DistEdgeIndex]) -> DistEdgeIndex:
        with torch.inference_mode(False):
            mask = columns.dtype in (torch.bool, torch.uint8)
            numbers = columns.nonzero().view(-1) if mask else columns.clone()
            numbers = numbers.int() if self._narrow else numbers
        places = torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
        key = numbers.numel(), int(numbers.sum()), int((numbers * places).sum())
        found = self._by_content.pop(key, None)
        if found is not None and not torch.equal(found[0], numbers):
            self._held -= numbers.numel()
            found = None
        if found is None:
            found = numbers, make(numbers)
            found[1].by_content = True
            self._held += numbers.numel()
        self._by_content[key] = found
        while self._held > self._room and len(self._by_content) > 1:
            _, (dropped, _) = self._by_content.popitem(last=False)
            self._held -= dropped.numel()
        return found[1]
