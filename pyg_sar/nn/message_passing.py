"""``DistMessagePassing``: PyG's ``MessagePassing`` over a graph that workers share."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from pyg_sar.dependence import Dependence, analyse
from pyg_sar.errors import DistributedIndexError, named
from pyg_sar.index_space import DistEdgeIndex, version_of
from pyg_sar.policy import SARPolicy
from pyg_sar.program import DeferredEdge, TileProgram, deferred_edge
from pyg_sar.shard import shards_of
from pyg_sar.target_index import NeedsAllEdges

_MERGEABLE = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}


class OneShotWarning(UserWarning):
    """A layer fetches its whole halo at once because its messages can't be computed in parts."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How a call of ``propagate`` runs, agreed on by all workers."""

    edge_level: dict[str, bool]
    needs: Dependence | None
    reason: str


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
        return self._propagate_shards(edge_index, size, kwargs, verdict)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """Updates edge features; see :meth:`torch_geometric.nn.MessagePassing.edge_updater`.

        Over a distributed graph the result is a placeholder, computed shard by shard by the
        :meth:`propagate` that gets it.
        """
        if not isinstance(edge_index, DistEdgeIndex):
            return super().edge_updater(edge_index, size=size, **kwargs)
        if self._refusal(edge_index) or self._edge_update_forward_pre_hooks:
            return super().edge_updater(edge_index, size=size, **kwargs)
        compute = partial(super().edge_updater, edge_index, size=size, **kwargs)
        return deferred_edge(compute, kwargs, edge_index.device)

    # How to run ##############################################################

    def _title(self) -> str:
        name = f" '{self.ledger_name}'" if self.ledger_name else ""
        return f"{type(self).__name__}{name}"

    def _refusal(self, edge_index: DistEdgeIndex) -> str:
        """Why the layer can't run shard by shard, as far as its definition tells; '' if it can."""
        if self.policy.mode == 3 or self._one_shot_call:
            return "asked for"
        source = 0 if self.flow == "source_to_target" else 1
        if edge_index.dist_row != source:
            return "it aggregates at the sources of distributed edges"
        if source != 0:
            return "its flow is 'target_to_source'"
        if self.explain:
            return "it is being explained"
        if type(self).aggregate is not MessagePassing.aggregate:
            return "it has an aggregate() of its own"
        if type(self.aggr_module) not in _MERGEABLE:
            return f"partial states of {type(self.aggr_module).__name__} can't be merged"
        if self._aggregate_forward_pre_hooks or self._aggregate_forward_hooks:
            return "it has hooks on aggregate()"
        names = self.inspector.get_param_names("update")
        if any(name in self.special_args or name[-2:] in ("_i", "_j") for name in names):
            return "its update() asks for edges"
        return ""

    def _verdict(self, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> _Verdict:
        reason = self._refusal(edge_index)
        key = (reason, self._kind_of_call(kwargs))
        verdicts: _Verdicts = self.__dict__.setdefault("_verdicts", _Verdicts())
        if key not in verdicts:
            self._agree_on_call(edge_index, str(key))
            whole = self._whole(reason) if reason else None
            verdicts[key] = whole or self._analyse(edge_index, kwargs)
        return verdicts[key]

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

    def _whole(self, reason: str) -> _Verdict:
        if reason != "asked for" and not self.__dict__.get("_warned", False):
            self._warned = True
            warnings.warn(
                f"{self._title()} fetches its whole halo at once: {reason}. Its memory does not "
                "fall with the number of workers. SARPolicy(mode=3) for this layer silences this",
                OneShotWarning,
                stacklevel=4,
            )
        return _Verdict({}, None, reason)

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
            tuple((name, kind(value)) for name, value in sorted(kwargs.items())),
        )

    def _analyse(self, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> _Verdict:
        """Looks at the message once and agrees with the other workers on what it needs."""
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("analysis")
        edge_level = self._agree_on_edge_level(edge_index, kwargs)
        shards = shards_of(edge_index)
        reason, numbers = "", [0] * 7
        try:
            program = TileProgram(self, edge_index, kwargs, edge_level)
            needs = analyse(program, shards, type(self.aggr_module) in _NEEDS_VALUES)
            numbers = needs.encode()
            if needs.pattern and type(self.aggr_module) in _NEEDS_VALUES:
                raise NeedsAllEdges("it takes the maximum of weights that it normalises")
        except NeedsAllEdges as error:
            reason = str(error)
        agreed = _maximum(plan.comm, [int(bool(reason)), *numbers], edge_index.device)
        if agreed[0]:
            return self._whole(reason or "another worker found that it needs all edges")
        return _Verdict(edge_level, Dependence.decode(agreed[1:]), "")

    def _agree_on_edge_level(
        self, edge_index: DistEdgeIndex, kwargs: dict[str, Any]
    ) -> dict[str, bool]:
        """Which unsuffixed tensors hold one row per edge: those that do so on every worker."""
        found: dict[str, Tensor] = {}
        for value_kwargs, method in self._methods(kwargs):
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

    def _methods(self, kwargs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        yield kwargs, "message"
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

    def _propagate_shards(
        self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any], verdict: _Verdict
    ) -> Tensor:
        for hook in self._propagate_forward_pre_hooks.values():
            result = hook(self, (edge_index, size, kwargs))
            if result is not None:
                edge_index, size, kwargs = result
        program = TileProgram(self, edge_index, kwargs, verdict.edge_level)
        needs = verdict.needs
        if needs is None:
            raise RuntimeError("Expected a verdict for running shard by shard")
        self._check_edges(program, edge_index)
        run = SequentialAggregation(
            program,
            shards_of(edge_index),
            _MERGEABLE[type(self.aggr_module)],
            needs,
            self.policy,
            self.ledger_name,
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


def _maximum(comm: Any, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The numbers' maxima over all workers."""
    if comm.world_size == 1:
        return list(numbers)
    agreed = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    result: list[int] = comm.all_reduce(agreed, "max", label=("", "", "agreement")).tolist()
    return result
