r"""Aggregations as mergeable reductions, with maps of messages before and of results after them.

An aggregation whose partial states merge is a map of each message, one or more reductions over the
in-edges of a target, and a map of each target's results:

.. math::
    \\mathrm{AGG}(\\{m_e\\}) = \\mathrm{finish}\\left(\\bigoplus_1 \\mathrm{map}_1(m_e),
    \\bigoplus_2 \\mathrm{map}_2(m_e), \\ldots \\right)

The reductions run tile by tile (:mod:`pyg_sar.engine.reducers`); ``finish`` runs once, on one row
per target, recorded by autograd like any other code of the layer.

[Note: own aggregations] PyG's aggregations are known. Of any other, what a target gets must not
depend on the messages to other targets, of which a worker has some only, nor on how many targets
there are. All messages to a target are at hand, so that it can be tried: with each target alone,
with numbers drawn at random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.utils import softmax

from pyg_sar.message.layer_facts import is_plain_module
from pyg_sar.message.layer_state import AmbientState, Changes, Snapshot
from pyg_sar.message.row_modules import has_foreign_module

Premap = Callable[[Tensor, Tensor, int], Tensor]
"""``(messages [E, *], index [E], number of targets)`` to mapped messages ``[E, *]``."""

Finish = Callable[[Sequence[Tensor], Tensor, int], Tensor]
"""``(results, in-degrees [num_targets], node axis)`` to the aggregate."""

PLAIN = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.MulAggregation: "mul",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Reductions of messages that are mapped alike.

    Attributes:
        premap: The map, or ``None`` for the messages themselves.
        kinds: The reductions (:func:`pyg_sar.engine.reducers.make_reducer`).
        normalises: The map takes a softmax over each target's in-edges, in whose weights it is
            linear.
    """

    premap: Premap | None
    kinds: tuple[str, ...]
    normalises: bool = False


@dataclass(frozen=True, slots=True)
class Decomposition:
    """An aggregation's groups of reductions, and what becomes of their results, in that order."""

    groups: tuple[Group, ...]
    finish: Finish

    @property
    def linear(self) -> bool:
        """Results are linear in the messages, so that these may hold weights to be merged."""
        return len(self.groups) == 1 and self.groups[0] in (
            Group(None, ("sum",)),
            Group(None, ("mean",)),
        )


def in_place() -> Decomposition:
    """Returns a decomposition in which the layer's own ``aggregate`` reduces chunks."""
    return Decomposition((Group(None, ("place",)),), lambda results, degrees, dim: results[0])


def decompose(module: Any) -> Decomposition | None:
    """Returns an aggregation's decomposition, or ``None`` where partial states don't merge.

    Args:
        module: A :class:`torch_geometric.nn.aggr.Aggregation`; subclasses of those that are known
            may do anything, and are not; nor are those with hooks, or functions of their own.
    """
    parts = _Parts()
    finish = parts.add(module)
    return None if finish is None else Decomposition(parts.groups(), parts.in_order(finish))


class _Parts:
    """Collects an aggregation's reductions; each is computed once, however often it is used."""

    def __init__(self) -> None:
        self._kinds: list[list[str]] = []
        self._maps: list[tuple[Any, Premap | None, bool]] = []
        self._places: list[tuple[int, int]] = []

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(premap, tuple(kinds), normalises)
            for (_, premap, normalises), kinds in zip(self._maps, self._kinds, strict=True)
        )

    def in_order(self, finish: Finish) -> Finish:
        """Takes results group by group, where ``finish`` takes them as they were reserved."""
        starts = [sum(map(len, self._kinds[:k])) for k in range(len(self._kinds))]
        order = [starts[group] + place for group, place in self._places]
        return lambda results, degrees, dim: finish([results[k] for k in order], degrees, dim)

    def _reserve(
        self, kind: str, owner: Any = None, premap: Premap | None = None, normalises: bool = False
    ) -> int:
        owners = [known for known, _, _ in self._maps]
        group = next((k for k, known in enumerate(owners) if known is owner), len(owners))
        if group == len(owners):
            self._maps.append((owner, premap, normalises))
            self._kinds.append([])
        if kind not in self._kinds[group]:
            self._kinds[group].append(kind)
        self._places.append((group, self._kinds[group].index(kind)))
        return len(self._places) - 1

    def add(self, module: Any) -> Finish | None:
        kind = type(module)
        if not is_plain_module(module, kind):
            return None
        if kind in PLAIN:
            return _taken(self._reserve(PLAIN[kind]))
        make = {
            aggr.VarAggregation: self._variance,
            aggr.StdAggregation: self._deviation,
            aggr.SoftmaxAggregation: self._softmax,
            aggr.PowerMeanAggregation: self._power_mean,
            aggr.AttentionalAggregation: self._attention,
            aggr.DeepSetsAggregation: self._deep_sets,
            aggr.VariancePreservingAggregation: self._variance_preserving,
            aggr.MultiAggregation: self._several,
            aggr.DegreeScalerAggregation: self._scaled,
        }.get(kind)
        if make is None or has_foreign_module(module):
            return None  # It may map a message as others in its tile are.
        return make(module)

    def _variance(self, module: Any) -> Finish:
        return _taken(self._reserve("semi_var" if module.semi_grad else "var"))

    def _deviation(self, module: Any) -> Finish | None:
        variance = self.add(module.var_aggr)
        if variance is None:
            return None

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            out = variance(results, degrees, dim).clamp(min=1e-5).sqrt()
            return out.masked_fill(out <= sqrt(1e-5), 0.0)

        return finish

    def _softmax(self, module: Any) -> Finish:
        def premap(x: Tensor, index: Tensor, targets: int) -> Tensor:
            t = module.t if module.channels == 1 else module.t.view(-1, module.channels)
            alpha = x if isinstance(t, int | float) and t == 1 else x * t
            constant = module.semi_grad and not module.learn
            with torch.set_grad_enabled(torch.is_grad_enabled() and not constant):
                alpha = softmax(alpha, index, None, targets, 0)
            return x * alpha

        return _taken(self._reserve("sum", module, premap, normalises=True))

    def _power_mean(self, module: Any) -> Finish:
        if not isinstance(module.p, Tensor) and module.p == 1:
            return _taken(self._reserve("mean"))

        def power() -> Any:
            return module.p if module.channels == 1 else module.p.view(-1, module.channels)

        # Those of PyG before 2.7, which has no arguments for them.
        low, high = getattr(module, "min_value", 0), getattr(module, "max_value", 100)

        def premap(x: Tensor, index: Tensor, targets: int) -> Tensor:
            return x.clamp(min=low, max=high).pow(power())

        place = self._reserve("mean", module, premap)

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            out = results[place].clamp(min=low, max=high)
            return out.pow(1.0 / power())

        return finish

    def _attention(self, module: Any) -> Finish | None:
        if module.gate_mlp is not None or module.mlp is not None:
            return None  # PyG's MLP may normalise over each target's messages

        def premap(x: Tensor, index: Tensor, targets: int) -> Tensor:
            gate = module.gate_nn(x)
            x = x if module.nn is None else module.nn(x)
            return softmax(gate, index, None, targets, 0) * x

        return _taken(self._reserve("sum", module, premap, normalises=True))

    def _deep_sets(self, module: Any) -> Finish | None:
        if module.local_mlp is not None or module.global_mlp is not None:
            return None

        def premap(x: Tensor, index: Tensor, targets: int) -> Tensor:
            local: Tensor = module.local_nn(x)
            return local

        mapped = premap if module.local_nn is not None else None
        place = self._reserve("sum", module if mapped else None, mapped)

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            out = results[place]
            return out if module.global_nn is None else module.global_nn(out)

        return finish

    def _variance_preserving(self, module: Any) -> Finish:
        place = self._reserve("sum")

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            out = results[place]
            shape = [1] * out.dim()
            shape[dim] = -1
            return out / degrees.to(out.dtype).sqrt().clamp(min=1.0).view(shape)

        return finish

    def _several(self, module: Any) -> Finish | None:
        fused = getattr(module, "fused_aggr", None)  # It takes one 'semi_grad' for all.
        semis = map(_semi, module.aggrs)
        if fused is not None and any(semi not in (None, fused.semi_grad) for semi in semis):
            return None
        parts = [self.add(part) for part in module.aggrs]
        if any(part is None for part in parts):
            return None

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            combined: Tensor = module.combine(
                [part(results, degrees, dim) for part in parts if part is not None]
            )
            return combined

        return finish

    def _scaled(self, module: Any) -> Finish | None:
        inner = self.add(module.aggr)
        if inner is None:
            return None

        def finish(results: Sequence[Tensor], degrees: Tensor, dim: int) -> Tensor:
            given = copy.copy(module)  # PyG's own scaling of a result that is there already
            given._modules = {**module._modules, "aggr": _Given()}
            nodes = torch.arange(degrees.numel(), device=degrees.device)
            index = nodes.repeat_interleave(degrees)
            out: Tensor = given.forward(
                inner(results, degrees, dim), index, dim_size=degrees.numel(), dim=dim
            )
            return out

        return finish


class _Given(torch.nn.Module):
    """Stands for an aggregation whose result is handed over."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def _semi(module: Any) -> bool | None:
    """Returns ``semi_grad`` of a variance or a deviation."""
    found: bool | None = getattr(getattr(module, "var_aggr", module), "semi_grad", None)
    return found if isinstance(module, aggr.VarAggregation | aggr.StdAggregation) else None


def _taken(place: int) -> Finish:
    return lambda results, degrees, dim: results[place]


# A layer's own aggregation ####################################################


EDGES, TARGETS = 23, 7
_COPIES = 131  # of these: what numbers beyond the few decide
NOT_KNOWN = ", of which it is not known which rows they have"
_TOLERANCE = {8: 1e-9, 4: 1e-4}


def is_known(layer: MessagePassing) -> bool:
    """Says if a layer aggregates as PyG does, by modules that treat each row for itself."""
    own = "aggregate" in layer.__dict__
    if own or not str(type(layer).aggregate.__module__).startswith("torch_geometric"):
        return False
    used = layer.aggr_module
    if used is None:
        return True
    known = type(used).__module__.startswith("torch_geometric")
    return known and not has_foreign_module(used)


Watching = Callable[[Tensor, Tensor], AbstractContextManager[Callable[[int], int]]]


def _unwatched(messages: Tensor, index: Tensor) -> AbstractContextManager[Callable[[int], int]]:
    return nullcontext(int)


class AggregateCheck:
    """Tries a layer's aggregation. Communicates nothing.

    Args:
        layer: The layer.
        rows: Its messages, without rows ``[0, *]``.
        arguments: What ``aggregate`` takes beside messages, ``index`` and sizes, for the sample.
        levels: Which of these have a row per ``'edge'`` of it, or per ``'node'``.

    Attributes:
        updates: Attributes and buffers that it changes by itself, where it can run over workers.
    """

    def __init__(
        self,
        layer: MessagePassing,
        rows: Tensor,
        arguments: Mapping[str, Any],
        levels: Mapping[str, str],
    ) -> None:
        self.layer, self.arguments, self.levels = layer, arguments, levels
        draw = torch.Generator().manual_seed(0)
        shape = (EDGES, *rows.shape[1:])
        # Of very unlike size, so that a part that is small beside others shows.
        values = torch.randn(shape, generator=draw) * 4.0 ** torch.randint(4, shape, generator=draw)
        self.messages = values.to(rows.dtype).to(rows.device)
        self.index = torch.arange(EDGES, device=rows.device) * TARGETS // EDGES
        self.gives: type = Tensor
        self.updates = set[str]()

    def found(self, knows_order: bool, watching: Watching) -> str:
        """Returns why it can't run over workers; an empty string where it can.

        Args:
            knows_order: The edges' order in the whole graph is known.
            watching: A context for a run with messages and their targets, which gives what makes
                numbers of nodes that note their use.
        """
        every = torch.arange(EDGES, device=self.index.device)
        whole, changed = self._run(every, watching=watching)
        if not issubclass(self.gives, Tensor):
            return f"its aggregate() gives a {self.gives.__name__}{NOT_KNOWN}"
        if not self.messages.is_floating_point():
            return ""
        if whole is None or self._leaves_out(every):
            return (
                "its aggregate() does not give a row to each target, also to the last ones without "
                "edges: give scatter() the dim_size that aggregate() gets"
            )
        if not alike(whole, self._run(every)[0]):
            return ""  # random also in evaluation: nothing can be told
        changes = Changes()
        for target in range(TARGETS):
            alone, others = self._run(every[self.index == target])
            changes.judge({n: now for n, _, now in others}, iter(changed), lambda t: "")
            if alone is None or not alike(alone, whole[target : target + 1]):
                return (
                    "its aggregate() mixes messages to different targets, of which a worker has "
                    "some only, or computes with the number of targets: do that on node features, "
                    "after propagate()"
                )
        many = self._run(every.repeat(_COPIES))[0]
        middle = slice(_COPIES // 2 * TARGETS, (_COPIES // 2 + 1) * TARGETS)
        if many is None or not alike(many[middle], whole):
            return (
                "its aggregate() does something else with many edges, or targets, than with a few, "
                "of which each worker has its own: let it compute the same for any number"
            )
        if changes.refused:
            return (
                f"its aggregate() changes '{changes.refused}' by the messages that it gets, of "
                "which each worker has its own"
            )
        if not knows_order:
            back = every.flip(0)
            again = self._run(back[self.index[back].argsort(stable=True)])[0]
            if not alike(again, whole):
                return (
                    "its aggregate() depends on the order of a node's edges, which is not known "
                    "after reversing or permuting them"
                )
        self.updates = set(changes.updates)
        return ""

    def _leaves_out(self, every: Tensor) -> bool:
        """Says if a last target without edges gets no row. Errors there are one process's, too."""
        with suppress(Exception):
            return self._run(every[self.index < TARGETS - 1], TARGETS)[0] is None
        return False

    def _run(
        self, edges: Tensor, count: int = 0, watching: Watching = _unwatched
    ) -> tuple[Tensor | None, list[tuple[str, Any, Any]]]:
        """Aggregates of the edges' targets ``[U, *]``, or of the first ``count`` ones."""
        layer, axis = self.layer, int(self.layer.node_dim)
        copies = torch.arange(edges.numel(), device=edges.device) // EDGES * TARGETS
        targets, index = (self.index[edges] + copies).unique_consecutive(return_inverse=True)
        targets = torch.arange(count, device=index.device) if count else targets
        count = targets.numel()
        rows = {"edge": edges, "node": targets % TARGETS}
        given = {
            n: v.index_select(0, rows[self.levels[n]]) if n in self.levels else v
            for n, v in self.arguments.items()
        }
        own = {"index": index, "ptr": None, "edge_index_i": index}
        messages = self.messages.index_select(0, edges)
        messages = messages.movedim(0, axis) if axis % messages.dim() else messages
        state, ambient = Snapshot(layer), AmbientState(index.device, layer)
        try:
            with torch.no_grad(), ambient.restored(), watching(messages, index) as length:
                own |= dict.fromkeys(("dim_size", "size_i", "size_j"), length(count))
                own["size"] = [length(count), length(count)]
                for module in layer.modules():
                    module.training = False
                data = layer.inspector.collect_param_data("aggregate", {**given, **own})
                out = layer.aggregate(messages, **data)
            changes = [*state.changes()]
        finally:
            state.restore()
        self.gives = type(out)
        if not isinstance(out, Tensor) or not -out.dim() <= axis < out.dim():
            return None, changes
        out = out.movedim(axis, 0)
        return (out if out.size(0) == count else None), changes


def alike(found: Tensor | None, expected: Tensor | None) -> bool:
    """Says if numbers are the same but for rounding."""
    if found is None or expected is None or found.shape != expected.shape:
        return False
    found, expected = found.detach(), expected.detach()
    if not (found.is_floating_point() or found.is_complex()):
        return torch.equal(found, expected)
    if found.is_complex():
        found, expected = (torch.view_as_real(x.resolve_conj()) for x in (found, expected))
    tolerance = _TOLERANCE.get(found.element_size(), 6e-2)
    if found.element_size() == 1:  # float8, which PyTorch only converts
        found, expected = found.float(), expected.float()
    scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, tolerance, tolerance * scale, equal_nan=True)
