"""Random numbers that don't depend on the number of workers: outside of messages, and in them.

[Note: rows of nodes] With ``SARPolicy(random=...)``, :class:`ModelDraws` watches a layer's
forward pass. A random tensor with as many rows as this worker has nodes, on every worker, is this
worker's rows of one for all nodes; with as many as an ``edge_index`` has edges, of one for all
edges. One of another shape that is the same on all workers is drawn alike by all. The workers ask
each other, once per draw, what a shape can be on all of them, and whether their generators are in
the same state; anything else is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from pyg_sar.comm.group import Communicator
from pyg_sar.engine.analysis import title_of
from pyg_sar.engine.kernels.relational import RelationalTerms
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.message.edge_draws import (
    DRAWS,
    Drawing,
    EdgeDraws,
    Strength,
    in_other_order,
    out_of_order,
    told_order,
    unlike,
)
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.message.program import DeferredEdge
from pyg_sar.space import draws as fills
from pyg_sar.space.distributed_index import DistEdgeIndex, name_of
from pyg_sar.space.draws import Draws, Fill, draw, generator_mark
from pyg_sar.space.edge_ids import edge_numbers

_AGREE = ("", "", "agreement")

_REFUSED = {
    F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, torch.bernoulli, torch.multinomial, torch.poisson, torch.normal,
    torch.randint_like, torch.randperm, Tensor.bernoulli, Tensor.multinomial, Tensor.random_,
    Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_,
}  # fmt: skip


_UNKNOWN = (
    "is not known. Known: F.dropout, torch.rand, torch.randn, torch.randint, torch.rand_like, "
    "torch.randn_like, bernoulli_(p), uniform_, normal_, exponential_"
)


class ModelDraws(Drawing):
    """Draws the random numbers of one call of a layer. See [Note: rows of nodes].

    Args:
        comm: The workers.
        strength: ``'same'`` or ``'keyed'``.
        title: The layer, for messages.
        given: The arguments of ``forward``, among which are its edges.
        layer: The layer, which may keep its edges with self loops (``cached=True``).
    """

    def __init__(
        self, comm: Communicator, strength: Strength, title: str, given: Any, layer: Any
    ) -> None:
        super().__init__()
        self._comm, self._draws, self._title, self._layer = comm, Draws(strength), title, layer
        self._edges = [leaf for leaf in tree_leaves(given) if isinstance(leaf, DistEdgeIndex)]
        self._total: int | None = None
        self._away = 0
        self._mark = generator_mark(comm.device)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Lets what is drawn meanwhile alone: layers see to their own draws."""
        with self._known_draws(), _pop_mode_temporarily() if self._on_top() else nullcontext():
            self._away += 1
            try:
                yield
            finally:
                self._away -= 1

    def _on_top(self) -> bool:
        return _get_current_function_mode() is self

    @contextmanager
    def _known_draws(self) -> Iterator[None]:
        """Draws meanwhile are known ones."""
        self.check_no_other()
        try:
            yield
        finally:
            self._mark = generator_mark(self._comm.device)

    def check_no_other(self) -> None:
        """Raises where a function that is not known has drawn: within another one, or in C++."""
        several = self._comm.world_size > 1 and not self._away
        if several and generator_mark(self._comm.device) != self._mark:
            raise self._refusal(f"draws random numbers by a function that {_UNKNOWN}")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._away:
            return func(*args, **kwargs)
        if func in _REFUSED and _draws(func, args, kwargs):
            raise self._refusal(f"'{name_of(func)}' {_UNKNOWN}")
        make = _OF_SHAPE.get(func)
        if make is not None:
            with self._known_draws():
                return self._of_shape(func, make, args, kwargs)
        with self._known_draws() if func in DRAWS else nullcontext():
            return super().__torch_function__(func, types, args, kwargs)

    def like(self, x: Tensor, fill: Fill, dtype: torch.dtype | None = None) -> Tensor | None:
        if type(x) not in (Tensor, Parameter) and not isinstance(x, DeferredEdge):
            return None  # It knows itself what its rows are.
        found = self._numbers(fill, list(x.shape), dtype or x.dtype, x.device)
        if found is not None and in_other_order(x):
            raise self._refusal(told_order(fill, x))
        if found is None:
            self._check_whole(f"{fill.name} numbers of shape {list(x.shape)}", x)
        return found

    def _of_shape(
        self, func: Any, make: Callable[..., tuple[Fill, Any]], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Calls ``torch.rand`` and the like."""
        others = {"device", "dtype", "requires_grad", "layout", "pin_memory"}
        given = {name: value for name, value in kwargs.items() if name not in others}
        if "generator" in given or "out" in given:
            return func(*args, **kwargs)
        fill, shape = make(*args, **given)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        whole = torch.long if fill.name == "integers" else torch.get_default_dtype()
        found = self._numbers(fill, list(shape), kwargs.get("dtype") or whole, device)
        if found is None:
            return func(*args, **kwargs)
        return found.requires_grad_(bool(kwargs.get("requires_grad")))

    def _numbers(
        self, fill: Fill, shape: list[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Random numbers of a shape; ``None``: all workers draw alike, each the whole."""
        rows = self._rows(f"{fill.name} numbers of shape {shape}", shape, device)
        if rows is None:
            return None
        ids, total = rows
        given: dict[str, Any] = {"dtype": dtype, "device": device, "draws": self._draws}
        return draw(fill, shape[1:], ids, total, **given)

    def _rows(self, what: str, shape: list[int], device: torch.device) -> tuple[Tensor, int] | None:
        """The global numbers of a tensor's rows and their total; ``None``: all draw the whole."""
        count = shape[0] if shape else -1
        locals_ = {edges.plan.num_local for edges in self._edges}
        deeper = bool(locals_.intersection(shape[1:]))
        kept = tree_leaves(getattr(self._layer, "_cached_edge_index", None))
        normalised = [leaf for leaf in kept if isinstance(leaf, DistEdgeIndex)]
        candidates = [*self._edges, *(e for e in normalised if e is not self._edges[0])]
        known = [count in locals_, deeper, *(edges.size(1) == count for edges in candidates)]
        facts = [generator_mark(device), crc32(repr(shape).encode())]
        mine = [*facts, *(-fact for fact in facts), *(int(not fact) for fact in known)]
        said = torch.tensor(mine, device=self._comm.device)
        found = self._comm.all_reduce(said, "max", label=_AGREE).tolist()
        if found[0] != -found[2]:
            raise unlike(self._comm, self._title, self._draws.strength)
        alike, (nodes, deeper, *edges) = found[1] == -found[3], [not no for no in found[4:]]
        of_edges = [e for e, fits in zip(candidates, edges, strict=True) if fits]
        if nodes and not of_edges:
            return self._nodes(what)
        if of_edges and not nodes:
            return self._of_edges(what, of_edges)
        if alike and not nodes and not deeper:
            return None
        raise self._refusal(
            f"draws {what}, which may be rows of nodes or of edges"
            if of_edges
            else f"draws {what}, which is neither a row for each of the {sorted(locals_)} nodes "
            "of this worker, nor for each of its edges, nor the same on all workers"
        )

    def _check_whole(self, what: str, x: Tensor) -> None:
        """Raises unless a tensor is the same on all workers: a row per node would not be."""
        content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        mark = crc32(content)
        said = torch.tensor([mark, -mark], device=self._comm.device)
        most, least = self._comm.all_reduce(said, "max", label=_AGREE).tolist()
        if most != -least:
            raise self._refusal(
                f"draws {what} for a tensor that is another one on each worker, and has not a row "
                "for each of the worker's nodes or edges"
            )

    def _nodes(self, what: str) -> tuple[Tensor, int]:
        plan = self._edges[0].plan
        if any(edges.plan.n_id is not plan.n_id for edges in self._edges) or plan.n_id is None:
            raise self._refusal(
                f"draws {what}, and the nodes' global ids are known of homogeneous graphs only"
            )
        if self._total is None:
            count = torch.tensor(plan.num_local, device=self._comm.device)
            self._total = int(self._comm.all_reduce(count, label=_AGREE))
        return plan.n_id, self._total

    def _of_edges(self, what: str, found: list[DistEdgeIndex]) -> tuple[Tensor, int]:
        if any(edges is not found[0] for edges in found):
            raise self._refusal(f"draws {what}: several 'edge_index' have as many edges")
        known = edge_numbers(found[0], places=self._draws.strength == "same")
        if known is None:
            raise self._refusal(
                f"draws {what} for edges of which it isn't known where they stand in one process's "
                "list of all edges"
            )
        return known.numbers, known.total

    def _refusal(self, problem: str) -> DistributedIndexError:
        return DistributedIndexError(
            f"{self._title} (rank {self._comm.rank}): with random='{self._draws.strength}' "
            f"{problem}. Draw it before write_partitions(), or say random=None"
        )


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns False where a function that may draw is told not to, or has a generator."""
    if kwargs.get("generator") is not None:
        return False
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):  # Built-in functions don't tell.
        return True
    bound.apply_defaults()
    return bool(bound.arguments.get("training", True))


def _shape(*size: Any, **named: Any) -> Any:
    given = named.get("size", size)
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _rand(*size: Any, **named: Any) -> tuple[Fill, Any]:
    return fills.uniform(), _shape(*size, **named)


def _randn(*size: Any, **named: Any) -> tuple[Fill, Any]:
    return fills.normal(), _shape(*size, **named)


def _randint(*given: Any, **named: Any) -> tuple[Fill, Any]:
    *bounds, size = (*given, named["size"]) if "size" in named else given
    low = named.get("low", bounds[0] if len(bounds) > 1 else 0)
    return fills.integers(low, named["high"] if "high" in named else bounds[-1]), size


_OF_SHAPE: dict[Any, Callable[..., tuple[Fill, Any]]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.randint: _randint,
}


# Around a layer's call ########################################################


class DrawsOfLayers:
    """Opens :class:`ModelDraws` around a layer's call, and closes it.

    Args:
        comm: The workers.
        strength: ``'same'`` or ``'keyed'``.
    """

    def __init__(self, comm: Communicator, strength: Strength) -> None:
        self.comm, self.strength = comm, strength
        self.open: list[ModelDraws] = []

    @contextmanager
    def around(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Draws meanwhile what the layer draws outside of its messages.

        Args:
            layer: The layer.
            args: What it is called with on this worker.
            kwargs: The same by name.
        """
        draws = ModelDraws(self.comm, self.strength, type(layer).__name__, (args, kwargs), layer)
        self.open.append(draws)
        try:
            with draws:
                yield
            draws.check_no_other()
        finally:
            self.open.pop()

    def __deepcopy__(self, memo: dict[int, Any]) -> DrawsOfLayers:
        return DrawsOfLayers(self.comm, self.strength)


@contextmanager
def away(draws: DrawsOfLayers | None) -> Iterator[None]:
    """Lets layers see to their own draws meanwhile."""
    if draws is None or not draws.open:
        yield
        return
    with draws.open[-1].away():
        yield


# In calls of ``propagate`` ########################################################


_MOST_HEADS = 32  # bits of a word


@contextmanager
def drawing(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any]
) -> Iterator[EdgeDraws | None]:
    """Lets the layer's message draw meanwhile as ``SARPolicy(random=...)`` says.

    All workers come here together. Gives what draws; ``None``: each worker for itself.

    Args:
        layer: The layer (a ``DistMessagePassing``).
        edge_index: Distributed edges.
        kwargs: Keyword arguments of ``propagate``.
    """
    strength = layer.policy.random
    if strength is None:
        yield None
        return
    silent, key = facts_of(layer).silent, layer.call_key(kwargs)
    draws = EdgeDraws(edge_index, strength, title_of(layer), silent=key in silent)
    yield draws
    draws.settle()
    if draws.drew_nothing:
        silent.add(key)
    for value in kwargs.values():
        if isinstance(value, DeferredEdge) and value.mark is not None:
            draws.check_start(value.mark)


def of_all_edges(
    draws: EdgeDraws | None, edge_index: DistEdgeIndex, columns: Tensor | None, padding: int
) -> AbstractContextManager[None]:
    """Takes what is drawn meanwhile for numbers of all edges, in the order of ``columns`` if given.

    Args:
        draws: What draws; ``None``: each worker for itself.
        edge_index: Distributed edges, for which they draw: before they were put in that order.
        columns: Their order, ``[E]``.
        padding: How many edges stand in for those of a worker without.
    """
    if draws is None:
        return nullcontext()
    places = slice(None) if columns is None else columns
    return draws.of_edges(places, edge_index.size(1), padding)


def mark_deferred(layer: Any, deferred: DeferredEdge, device: torch.device) -> DeferredEdge:
    """Notes where one process would have drawn the random numbers of an edge update."""
    if layer.policy.random == "same":
        deferred.mark = generator_mark(device)
    return deferred


def computed(layer: Any, deferred: DeferredEdge, device: torch.device) -> Tensor:
    """Computes an edge update of all edges that was put off.

    Raises:
        DistributedIndexError: When one process would have drawn its random numbers before others.
    """
    mark, now = deferred.mark, generator_mark(device)
    found = deferred.compute_now()
    if mark not in (None, now) and generator_mark(device) != now:
        raise out_of_order(title_of(layer), layer.policy.random)
    return found


def with_kept_weights(
    attention: Attention | RelationalTerms, draws: EdgeDraws | None
) -> Attention | RelationalTerms | None:
    """An attention whose dropped weights are drawn; ``None`` where it has too many heads."""
    if draws is None or attention.p == 0:
        return attention
    if isinstance(attention, RelationalTerms):
        rows, heads = attention.x, attention.query.size(2)
    else:
        rows, heads = attention.value, attention.value.size(1)
    if heads > _MOST_HEADS:
        return None
    return replace(attention, drop_key=draws.kept(attention.p, heads, rows.dtype))
