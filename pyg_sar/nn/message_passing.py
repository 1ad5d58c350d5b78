"""``DistMessagePassing``: PyG's ``MessagePassing`` over a graph that workers share."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    SumAggregation,
)

from pyg_sar.aggregate import SequentialAggregation, aggregate
from pyg_sar.chunk import Chunks
from pyg_sar.dependence import Dependence, analyse, sample
from pyg_sar.errors import DistributedIndexError, named
from pyg_sar.index_space import DistEdgeIndex, version_of
from pyg_sar.policy import SARPolicy
from pyg_sar.program import DeferredEdge, TileProgram, deferred_edge
from pyg_sar.rounds import ChunkRounds, Rounds, ShardRounds
from pyg_sar.shard import shards_of
from pyg_sar.target_index import NeedsAllEdges

_MERGEABLE = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}

_LEAST_BUDGET, _MOST_BUDGET = 2**20, 2**23  # beyond a few MiB, messages leave the caches


class OneShotWarning(UserWarning):
    """A layer fetches its whole halo at once because its messages can't be computed in parts."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How a call of ``propagate`` runs, agreed on by all workers.

    ``needs`` is ``None`` where the halo is fetched at once. ``max_edges`` bounds tiles and chunks.
    """

    needs: Dependence | None = None
    edge_level: dict[str, bool] = field(default_factory=dict)
    kind: str = ""
    max_edges: int = 0
    out_row: Tensor | None = None


class _Verdicts(dict[Any, _Verdict]):
    """Verdicts per kind of call. A copy of the layer starts without them, on all workers alike."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Verdicts:
        return _Verdicts()

    def __reduce__(self) -> Any:
        return _Verdicts, ()


class DistMessagePassing(MessagePassing):
    r"""Base class for message passing layers that also run on a distributed graph.

    Handed an ordinary ``edge_index``, it is :class:`torch_geometric.nn.MessagePassing`. Handed the
    ``edge_index`` of :func:`pyg_sar.load_partition`, :meth:`propagate` computes

    .. math::
        \mathbf{x}_i^{\prime} = \gamma_{\mathbf{\Theta}} \left( \mathbf{x}_i,
        \bigoplus_{q=0}^{W-1} \bigoplus_{j \in \mathcal{N}_q(i)} \,
        \phi_{\mathbf{\Theta}} \left(\mathbf{x}_i, \mathbf{x}_j,\mathbf{e}_{j,i}\right) \right)

    one source worker :math:`q` at a time, and streams the sources again in the backward pass where
    gradients depend on them (SAR). Subclasses are written exactly as PyG's: ``message``,
    ``aggregate``, ``update`` and ``edge_update`` with ``_i`` and ``_j`` arguments. Tensors passed
    to :meth:`propagate` hold this worker's rows.

    Attributes:
        policy: How this layer runs (:class:`SARPolicy`); may be set at any time, on all workers
            alike.

    Args:
        **kwargs: See :class:`torch_geometric.nn.MessagePassing`.
    """

    policy: SARPolicy = SARPolicy()
    ledger_name: str = ""
    _one_shot_call: bool = False

    # [Note: pinned] PyG compiles `propagate` and `edge_updater` from templates when a layer is
    # built, copied or unpickled, and installs them on the class, over an inherited override.
    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        pass

    # Entry points ############################################################

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        edge_index = next(
            (a for a in (*args, *kwargs.values()) if isinstance(a, DistEdgeIndex)), None
        )
        if edge_index is None:
            return super().__call__(*args, **kwargs)
        with self._call_scope(edge_index, args, kwargs):
            return super().__call__(*args, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Propagates messages; see :meth:`torch_geometric.nn.MessagePassing.propagate`.

        Args:
            edge_index: A distributed edge index, or whatever PyG takes.
            size: See PyG.
            **kwargs: Tensors with this worker's rows, and whatever else the layer's methods take.

        Raises:
            ValueError: When a node tensor doesn't have this worker's number of rows.
            DistributedIndexError: When the layer can't run distributed.
        """
        if not isinstance(edge_index, DistEdgeIndex):
            return super().propagate(edge_index, size=size, **kwargs)
        for name, deferred in kwargs.items():
            if not isinstance(deferred, DeferredEdge):
                continue
            if deferred.value is not None:
                kwargs[name] = deferred.value
                continue
            if deferred.used:
                raise DistributedIndexError(
                    f"{self._title()} passes the result of one edge_updater() to propagate() "
                    "twice; set `layer.policy = pyg_sar.SARPolicy(mode=3)` for this layer"
                )
            deferred.used = True
        verdict = self._verdict(edge_index, kwargs)
        if verdict.needs is None:
            return self._propagate_whole(edge_index, size, kwargs)
        return self._propagate_parts(edge_index, size, kwargs, verdict)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """Updates edge features; see :meth:`torch_geometric.nn.MessagePassing.edge_updater`.

        Over a distributed graph the result is a placeholder, computed shard by shard by the
        :meth:`propagate` that gets it.
        """
        if not isinstance(edge_index, DistEdgeIndex):
            return super().edge_updater(edge_index, size=size, **kwargs)
        strategy, _ = self._strategy(edge_index)
        if strategy == "one_shot" or self._edge_update_forward_pre_hooks:
            return super().edge_updater(edge_index, size=size, **kwargs)
        compute = partial(super().edge_updater, edge_index, size=size, **kwargs)
        return deferred_edge(compute, kwargs, edge_index.device)

    # How to run ##############################################################

    def _title(self) -> str:
        name = f" '{self.ledger_name}'" if self.ledger_name else ""
        return f"{type(self).__name__}{name}"

    def _strategy(self, edge_index: DistEdgeIndex) -> tuple[str, str]:
        """``'sequential'``, ``'chunked'`` or ``'one_shot'`` by the layer's definition, and why."""
        if self.policy.mode == 3 or self._one_shot_call:
            return "one_shot", "asked for"
        source = 0 if self.flow == "source_to_target" else 1
        if edge_index.dist_row != source:
            return "one_shot", "it aggregates at the sources of distributed edges"
        if source != 0:
            return "one_shot", "its flow is 'target_to_source'"
        if self.explain:
            return "one_shot", "it is being explained"
        names = self.inspector.get_param_names("update")
        if any(name in self.special_args or name[-2:] in ("_i", "_j") for name in names):
            return "one_shot", "its update() asks for edges"
        merges = type(self).aggregate is MessagePassing.aggregate
        merges &= type(self.aggr_module) in _MERGEABLE
        merges &= not (self._aggregate_forward_pre_hooks or self._aggregate_forward_hooks)
        merges &= self.policy.strategy != "chunked"
        return "sequential" if merges else "chunked", ""

    def _verdict(self, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> _Verdict:
        strategy, reason = self._strategy(edge_index)
        key = (strategy, reason, self.policy, self._kind_of_call(kwargs))
        verdicts: _Verdicts = self.__dict__.setdefault("_verdicts", _Verdicts())
        if key not in verdicts:
            self._agree_on_call(edge_index, str(key))
            verdicts[key] = self._decide(edge_index, kwargs, strategy, reason)
        return verdicts[key]

    def _decide(
        self, edge_index: DistEdgeIndex, kwargs: dict[str, Any], strategy: str, reason: str
    ) -> _Verdict:
        """The leanest strategy that is right, agreed on by all workers."""
        if strategy == "one_shot":
            if reason == "asked for" and self.flow == "source_to_target":
                self._attempt(edge_index, kwargs, "sequential")  # refuses what can't be right
            return self._whole(reason)
        for attempt in ("sequential", "chunked"):
            if attempt == "sequential" and strategy == "chunked":
                continue
            verdict, reason, severity = self._attempt(edge_index, kwargs, attempt)
            if verdict is not None:
                return verdict
            if severity > 1:
                break
        return self._whole(reason)

    def _whole(self, reason: str) -> _Verdict:
        if reason != "asked for" and not self.__dict__.get("_warned", False):
            self._warned = True
            warnings.warn(
                f"{self._title()} fetches its whole halo at once: {reason}. Its memory does not "
                "fall with the number of workers. SARPolicy(mode=3) for this layer silences this",
                OneShotWarning,
                stacklevel=4,
            )
        return _Verdict()

    def _attempt(
        self, edge_index: DistEdgeIndex, kwargs: dict[str, Any], strategy: str
    ) -> tuple[_Verdict | None, str, int]:
        """Looks at the message once and agrees with the other workers on what it needs.

        Returns:
            The verdict, or why there is none and how bad it is (:class:`NeedsAllEdges`).
        """
        plan, complete = edge_index.plan, strategy == "chunked"
        for ledger in plan.comm.ledgers:
            ledger.count("analysis")
        edge_level = self._agree_on_edge_level(edge_index, kwargs, complete)
        compares = type(self.aggr_module) in _NEEDS_VALUES and not complete
        sizes = [edge_index.size(1) if plan.num_local else 0]
        some_edges = _maximum(plan.comm, sizes, edge_index.device)[0] > 0
        reason, severity, budget, numbers, row = "", 0, 0, Dependence.no_opinion(), None
        try:
            program = TileProgram(self, edge_index, kwargs, edge_level, complete)
            tile = sample(edge_index)
            numbers = Dependence.no_opinion()
            if tile.num_edges or not some_edges:
                needs = analyse(program, tile, compares)
                numbers, row = needs.encode(), program.out_row
            budget = self._max_edges(program)
            if Dependence.decode(numbers).pattern and compares:
                raise NeedsAllEdges("it takes the maximum of weights that it normalises")
        except NeedsAllEdges as error:
            reason, severity = str(error), error.severity
        agreed = _maximum(plan.comm, [severity, -budget, *numbers], edge_index.device)
        reason = reason or "another worker found that it needs all edges"
        if agreed[0] == 3 and plan.world_size > 1:
            raise DistributedIndexError(f"{self._title()} can't run distributed: {reason}")
        if agreed[0]:
            return None, reason, agreed[0]
        rows = plan.comm.all_gather_object(None if row is None else [row[0], str(row[1])])
        shape, dtype = next(found for found in rows if found is not None)
        kind = "place" if complete else _MERGEABLE.get(type(self.aggr_module), "")
        needs = Dependence.decode(agreed[2:])
        kept = torch.empty(0, *shape, dtype=getattr(torch, dtype[6:]), device=edge_index.device)
        return _Verdict(needs, edge_level, kind, -agreed[1], kept), "", 0

    def _max_edges(self, program: TileProgram) -> int:
        """Edges whose messages and inputs are materialized at a time."""
        budget = self.policy.message_budget
        if budget is None:
            sources = [program.operands[k].tensor for k in program.numbers("source")]
            own = sum(t.numel() * t.element_size() for t in sources)
            budget = min(max(own // 4, _LEAST_BUDGET), _MOST_BUDGET)
        return max(budget // max(program.row_bytes() + program.message_bytes, 1), 1)

    def _agree_on_call(self, edge_index: DistEdgeIndex, call: str) -> None:
        """Rows of unlike width or dtype can't be exchanged."""
        calls = edge_index.plan.comm.all_gather_object(call)
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise ValueError(
                    f"{self._title()} is called differently on the workers, with {other} at rank "
                    f"{rank} and {calls[0]} at rank 0 (per tensor: dtype, requires_grad, shape of "
                    "a row, axes). Pass the same arguments on every worker"
                )

    def _kind_of_call(self, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What an analysis depends on; the same on all workers."""

        def kind(value: Any) -> Any:
            if isinstance(value, DeferredEdge):
                return "deferred", tuple((k, kind(v)) for k, v in sorted(value.kwargs.items()))
            if isinstance(value, Tensor):
                return value.dtype, value.requires_grad, tuple(value.shape[1:]), value.dim()
            if isinstance(value, tuple | list):
                return tuple(kind(v) for v in value)
            return value if isinstance(value, bool | int | float | str | None) else type(value)

        device = torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled("cuda") else None
        return (
            self.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            device,
            type(self.aggr_module),
            tuple(p.requires_grad for p in self.parameters()),
            tuple(_switches(module) for module in self.modules()),
            tuple((name, kind(value)) for name, value in sorted(kwargs.items())),
        )

    def _agree_on_edge_level(
        self, edge_index: DistEdgeIndex, kwargs: dict[str, Any], complete: bool
    ) -> dict[str, bool]:
        """Which unsuffixed tensors hold one row per edge: those that do so on every worker."""
        found: dict[str, Tensor] = {}
        for value_kwargs, method in self._methods(kwargs, complete):
            for name in self.inspector.get_param_names(method):
                value = value_kwargs.get(name)
                if name[-2:] in ("_i", "_j") or not isinstance(value, Tensor):
                    continue
                if not isinstance(value, DeferredEdge):
                    found[name if method == "message" else f"{method}.{name}"] = value
        if not found:
            return {}
        edges = edge_index.size(1)
        misses = [int(v.dim() == 0 or v.size(0) != edges) for v in found.values()]
        agreed = _maximum(edge_index.plan.comm, misses, edge_index.device)
        return {name: not miss for name, miss in zip(found, agreed, strict=True)}

    def _methods(
        self, kwargs: dict[str, Any], complete: bool
    ) -> Iterator[tuple[dict[str, Any], str]]:
        yield kwargs, "message"
        if complete:
            yield kwargs, "aggregate"
        for value in kwargs.values():
            if isinstance(value, DeferredEdge):
                yield value.kwargs, "edge_update"

    # Running #################################################################

    def _propagate_whole(self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any]) -> Any:
        """PyG's own path: node tensors are read through the distributed index."""
        for name, value in kwargs.items():
            if isinstance(value, DeferredEdge):
                kwargs[name] = value.compute_now()
        return super().propagate(edge_index, size=size, **kwargs)

    def _propagate_parts(
        self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any], verdict: _Verdict
    ) -> Tensor:
        for hook in self._propagate_forward_pre_hooks.values():
            result = hook(self, (edge_index, size, kwargs))
            if result is not None:
                edge_index, size, kwargs = result
        complete, needs = verdict.kind == "place", verdict.needs
        program = TileProgram(self, edge_index, kwargs, verdict.edge_level, complete)
        if needs is None or verdict.out_row is None:
            raise RuntimeError("Expected a verdict for running in parts")
        self._check_edges(program, edge_index)
        run = SequentialAggregation(
            program,
            _rounds(edge_index, complete, verdict.max_edges),
            verdict.kind,
            needs,
            self.policy,
            self.ledger_name,
            verdict.out_row,
        )
        try:
            out = aggregate(run)
        except NeedsAllEdges as error:
            raise DistributedIndexError(
                f"{self._title()} at rank {edge_index.plan.rank}: {error}, which it did not do "
                "when it was analysed. Set `layer.policy = pyg_sar.SARPolicy(mode=3)`"
            ) from error
        data = {n: kwargs.get(n, Parameter.empty) for n in self.inspector.get_param_names("update")}
        out = self.update(out, **self.inspector.collect_param_data("update", data))
        for hook in self._propagate_forward_hooks.values():
            result = hook(self, (edge_index, size, kwargs), out)
            out = out if result is None else result
        return out

    def _check_edges(self, program: TileProgram, edge_index: DistEdgeIndex) -> None:
        for number in program.numbers("edge"):
            rows = program.operands[number].tensor.size(0)
            if rows != edge_index.size(1):
                raise ValueError(
                    f"{self._title()} got an edge-level tensor of {rows} rows for "
                    f"{edge_index.size(1)} edges at rank {edge_index.plan.rank}; pass this "
                    "worker's edge attributes, as pyg_sar.load_partition returns them"
                )

    # One call ################################################################

    @contextmanager
    def _call_scope(
        self, edge_index: DistEdgeIndex, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        plan = edge_index.plan
        outer, plan.scope = plan.scope, self.ledger_name
        whole = self._one_shot_call
        self._one_shot_call = whole or self._wants_attention(args, kwargs)
        try:
            with (
                named(f"{self._title()} at rank {plan.rank}"),
                self._kept_normalisation(edge_index, args, kwargs),
            ):
                hook = self.__dict__.get("gradient_sum")
                if hook is not None:
                    hook.settle()
                yield
        finally:
            plan.scope = outer
            self._one_shot_call = whole

    def _wants_attention(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """``return_attention_weights`` asks for edge values, which only one shot has."""
        return self._bound(args, kwargs).get("return_attention_weights") is not None

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``forward`` by name."""
        try:
            return inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments
        except TypeError:  # forward() itself says better what is wrong.
            return {}

    @contextmanager
    def _kept_normalisation(
        self, edge_index: DistEdgeIndex, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Keeps what ``cached=True`` would keep, for as long as edges and weights are the same.

        PyG normalises edges in every forward pass unless told to cache. The result hangs on the
        edge index here, so that another graph or other weights get their own.
        """
        cacheable = self.__dict__.get("cached") is False and "_cached_edge_index" in self.__dict__
        bound = self._bound(args, kwargs) if cacheable else {}
        x, weight = bound.get("x"), bound.get("edge_weight")
        constant = weight is None or (isinstance(weight, Tensor) and not weight.requires_grad)
        if not isinstance(x, Tensor) or not constant:
            yield
            return
        version = None if weight is None else version_of(weight)
        key = ("normalised", id(self), x.dtype, id(weight), version)
        found = edge_index._memory.get(key)
        self._cached_edge_index = None if found is None else found[0]
        self.cached = True
        try:
            yield
            lasting = not torch.is_inference_mode_enabled()
            if found is None and lasting and self._cached_edge_index is not None:
                made = (self._cached_edge_index, weight)  # keeps the weight, and so its id
                edge_index.remember(key, lambda: made)
        finally:
            self.cached = False
            self._cached_edge_index = None


DistMessagePassing._orig_propagate = DistMessagePassing.propagate
DistMessagePassing._jinja_propagate = DistMessagePassing.propagate

_NEEDS_VALUES = (MaxAggregation, MinAggregation)


def _rounds(edge_index: DistEdgeIndex, complete: bool, max_edges: int) -> Rounds:
    """The way through the edges, kept with them."""
    if not complete:
        return ShardRounds(shards_of(edge_index), max_edges)
    chunks = edge_index.remember(("chunks", max_edges), lambda: Chunks(edge_index, max_edges))
    return ChunkRounds(chunks)


def _switches(module: torch.nn.Module) -> tuple[Any, ...]:
    """Attributes that may decide what a message computes: flags and names, not numbers."""
    found = [
        (name, value)
        for name, value in module.__dict__.items()
        if name[:1] != "_" and isinstance(value, bool | str | None)
    ]
    return type(module).__name__, *found


def _maximum(comm: Any, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The numbers' maxima over all workers."""
    if comm.world_size == 1:
        return list(numbers)
    agreed = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    result: list[int] = comm.all_reduce(agreed, "max", label=("", "", "agreement")).tolist()
    return result
