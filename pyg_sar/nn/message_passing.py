"""``DistMessagePassing``: PyG's ``MessagePassing`` over a graph that workers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, RGCNConv

from pyg_sar.engine.analysis import (
    Choice,
    Chooser,
    Key,
    decomposition_of,
    most_edges,
    needs_sorted_edges,
    title_of,
    titled,
)
from pyg_sar.engine.choose import (
    attention_kernel,
    message_kernel,
    only_sums,
    own_attention,
    sums_call,
)
from pyg_sar.engine.run import run
from pyg_sar.errors import DistributedIndexError, note_place, refuse_transforms
from pyg_sar.exchange.gather import KeptRows
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.ops import warn_if_missing
from pyg_sar.message.decompose import PLAIN, decompose
from pyg_sar.message.edge_draws import EdgeDraws
from pyg_sar.message.layer_facts import (
    Itself,
    draws_nothing,
    facts_of,
    home_of,
    pristine,
)
from pyg_sar.message.layer_state import (
    attributes_of,
    forget_tile_values,
    padded_to,
    put_tile_values,
)
from pyg_sar.message.outside import outside_of
from pyg_sar.message.program import DeferredEdge, TileProgram, deferred_edge
from pyg_sar.message.row_modules import changes_of, update_asks_for_edges
from pyg_sar.message.target_index import NeedsAllEdges
from pyg_sar.nn.fused_layers import (
    adding_bias,
    adds_bias,
    as_aggregated,
    as_read,
    attention_of,
    known_attention,
    seed_for,
)
from pyg_sar.nn.global_inputs import WITHIN, is_explained
from pyg_sar.nn.message_draws import (
    computed,
    drawing,
    mark_deferred,
    of_all_edges,
    with_kept_weights,
)
from pyg_sar.nn.one_process import NothingFused, OwnGraphs, must_be_fused, unless_fused
from pyg_sar.nn.propagation import (
    JoinsOfNothing,
    as_kept,
    charged,
    check_pairs,
    first_target_filled,
    in_first_order,
    keeping_rows,
    kept_normalisation,
    kind_of_argument,
    known_size,
    note_tensors,
    on_stand_ins,
    refuse_local_ids,
    reversed_call,
    sorted_edges,
    stand_ins,
    travelling,
    whole_scope,
    with_room,
)
from pyg_sar.nn.transform_first import known_base, transforming_first
from pyg_sar.nn.uncompiled import between_graphs
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.partial_edges import inner

_METHODS = ("message", "aggregate", "update", "edge_update")
_FLAGS = (bool, str, type(None))
_SWITCHES = (*_FLAGS, int, float)
_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}  # of parameters, hooks and the like
_MANY_CHOICES = 32  # numbers among a layer's attributes are steps, say, and tell nothing


class DistMessagePassing(MessagePassing):
    r"""Base class for message passing layers that also run on a distributed graph.

    Layers derived from PyG's ``MessagePassing`` need not be rewritten:
    :func:`pyg_sar.distribute` converts them to this class.

    .. code-block:: python

        class Conv(pyg_sar.DistMessagePassing):
            def forward(self, x, edge_index):  # x [num_nodes, F]
                return self.propagate(edge_index, x=x)

            def message(self, x_i, x_j):  # [edges at hand, F]
                return x_j - x_i

    With an ordinary ``edge_index`` it is :class:`torch_geometric.nn.MessagePassing`. With the
    ``edge_index`` of :func:`pyg_sar.load_partition`, :meth:`propagate` computes

    .. math::
        \mathbf{x}_i^{\prime} = \gamma_{\mathbf{\Theta}} \left( \mathbf{x}_i,
        \bigoplus_{q=0}^{W-1} \bigoplus_{j \in \mathcal{N}_q(i)} \,
        \phi_{\mathbf{\Theta}} \left(\mathbf{x}_i, \mathbf{x}_j,\mathbf{e}_{j,i}\right) \right)

    where :math:`\mathcal{N}_q(i)` are the neighbours of node :math:`i` that worker :math:`q` owns.
    It goes through the workers one at a time, and fetches their rows again in the backward pass
    where gradients depend on them (SAR). Subclasses are written exactly as PyG's: ``message``,
    ``aggregate``, ``update`` and ``edge_update`` with ``_i`` and ``_j`` arguments. ``forward`` and
    ``update`` compute with tensors of the whole graph (docs/whole-graph.md), messages with the
    rows of some edges. A message that mixes edges is refused with a
    :class:`~pyg_sar.errors.DistributedIndexError` (:class:`SARPolicy`).

    Attributes:
        policy: How this layer runs (:class:`SARPolicy`); may be set at any time, on all workers
            alike.

    The arguments are those of :class:`torch_geometric.nn.MessagePassing`.
    """

    policy: SARPolicy = SARPolicy()
    ledger_name: str = ""
    kept_rows: KeptRows | None = None  # Of its last exchange, with SARPolicy(refresh_every=...).
    _one_shot_call: bool = False
    own_graphs: OwnGraphs | None = None  # Of one process, set by `distribute`.

    # [Note: pinned] PyG compiles `propagate` and `edge_updater` from templates when a layer is
    # built, copied or unpickled, and installs them on the class, over an inherited override.
    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        pass

    def __prepare_scriptable__(self) -> Any:
        """Is called by ``torch.jit.script``, which knows PyG's own layers alone.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"torch.jit.script() got a model with {title_of(self)}, which is distributed: script "
            "PyG's own model with its weights, plain.load_state_dict(model.state_dict())"
        )

    # Entry points ############################################################

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if any(isinstance(a, dict) for a in given):
            given += tuple(r for a in given if isinstance(a, dict) for r in a.values())
        edges = [a for a in given if isinstance(a, DistEdgeIndex)]
        if torch.compiler.is_compiling():
            if edges:
                return self._uncompiled(*args, **kwargs)
            return super().__call__(*args, **kwargs)
        if not edges:
            fused = self._own_graph(args, kwargs)
            if fused is not None:
                with suppress(NothingFused), unless_fused(self):
                    return self._call_on_own_graph(fused, args, kwargs)
            return super().__call__(*args, **kwargs)
        return self._call_on(edges, args, kwargs)

    @between_graphs
    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """A call on distributed edges, whose worker is the only one."""
        return self(*args, **kwargs)

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
            if self.explain or self.decomposed_layers > 1:  # not in PyG's compiled template
                return MessagePassing.propagate(self, edge_index, size=size, **kwargs)
            return super().propagate(edge_index, size=size, **kwargs)
        if edge_index.partial is not None:
            edge_index = inner(edge_index, self._source_row())
        if not edge_index.kept and "_cached_edge_index" in self.__dict__:
            edge_index = as_kept(self, edge_index)
        return self._propagate(edge_index, size, kwargs)

    def _propagate(self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any]) -> Tensor:
        """Propagates messages over a distributed graph."""
        for name, deferred in kwargs.items():
            if not isinstance(deferred, DeferredEdge):
                continue
            if deferred.value is not None:
                kwargs[name] = deferred.value
                continue
            if deferred.used:
                raise DistributedIndexError(
                    f"{title_of(self)} passes the result of one edge_updater() to propagate() "
                    "twice; set `layer.policy = pyg_sar.SARPolicy(mode=3)` for this layer"
                )
            deferred.used = True
        facts, key = facts_of(self), self.call_key(kwargs)
        steady = self._steady_key(edge_index, size, kwargs, key)
        choice = None if steady is None else facts.steady.get(steady)
        if choice is not None:
            check_pairs(edge_index, kwargs, self)
            call = choice.sums_call
            found = None if call is None else call.run(self, edge_index, kwargs)
            if found is not None:
                return found[0][0]
            return self._propagate_parts(edge_index, kwargs, choice, key)
        if is_explained(self):
            raise DistributedIndexError(
                f"{title_of(self)} at rank {edge_index.plan.rank} is explained, or has hooks of "
                "edges, which would see some of them only: call it with tensors of the whole graph"
            )
        edge_index = with_room(self, edge_index, kwargs)
        if edge_index.dist_row != self._source_row() and not self._one_shot_call:
            edge_index, kwargs = reversed_call(self, edge_index, size, kwargs)
            key = self.call_key(kwargs)
        size = known_size(edge_index, size, self)
        check_pairs(edge_index, kwargs, self)
        inner_call = edge_index.plan.context.layer
        with nullcontext() if inner_call else charged(edge_index, self.ledger_name):
            strategy, reason = self._strategy()
            choice = Chooser(self, edge_index, kwargs, key).choice(strategy, reason)
            keeps = () if choice.rows is None else choice.rows.agreed.keeps
            if choice.needs is None:
                must_be_fused(self)
                before, facts.edge_sets = attributes_of(self, keeps) | facts.edge_sets, {}
                self._check_choice(choice)
                out = self._propagate_whole(edge_index, size, kwargs, choice, key)
                if edge_index.plan.world_size > 1 and not self._one_shot_call:
                    put_tile_values(self, before, title_of(self))
                return out
            self._check_choice(choice)
            if steady is not None and not choice.sizes:
                call = None if choice.sets else only_sums(self, edge_index, kwargs, choice)
                facts.steady[steady] = replace(choice, sums_call=call)
            return self._propagate_parts(edge_index, kwargs, choice, key)

    def _check_choice(self, choice: Choice) -> None:
        """Raises where tensors of the whole graph are asked for what a choice can't give."""

    def _steady_key(
        self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any], key: Key
    ) -> tuple[Any, ...] | None:
        """Returns all that decides how a plain call runs; ``None`` where it is not plain."""
        plan = edge_index.plan
        leaving = edge_index.dist_row != (0 if self.flow == "source_to_target" else 1)
        if plan.open_ended or leaving or size is not None:
            return None
        if self._one_shot_call or self.explain or any(map(self.__dict__.get, WITHIN)):
            return None
        tensors = [v[0] if isinstance(v, tuple | list) and v else v for v in kwargs.values()]
        tensors = [v for v in tensors if isinstance(v, Tensor) and not isinstance(v, DeferredEdge)]
        own, devices = type(self), sorted({v.device.type for v in tensors})
        local = self.node_dim, plan.rank, own.message, own.aggregate, own.update, *devices
        return self.policy, local, *key

    def call_key(self, kwargs: dict[str, Any]) -> Key:
        """Returns a call's kind, alike on all workers, and what may change its message besides.

        That is the flags, names and numbers among the attributes of the layer and its modules, and
        methods that were put on the layer itself.

        Args:
            kwargs: Keyword arguments of :meth:`propagate`.
        """
        axis, devices = int(self.node_dim), filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        casts = tuple([(device, torch.get_autocast_dtype(device)) for device in devices])
        kinds = [(name, kind_of_argument(kwargs[name], axis)) for name in sorted(kwargs)]
        aggregation, grad = type(self.aggr_module), torch.is_grad_enabled()
        modules = [*self.modules()]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        learns = tuple([p.requires_grad for p in parameters])
        kind = self.training, grad, casts, aggregation, learns, tuple(kinds)
        # A method of the layer's own, not of its class: others may stand there tomorrow.
        switches: list[Any] = [self.__dict__.get(name) for name in _METHODS]
        switches.append(torch.get_default_dtype())
        facts = self.__dict__.get("_facts") or facts_of(self)
        outside = facts.outside
        if outside is None or outside.modules != modules:
            outside = outside_of(self)
        if facts.asks or outside.unknown:  # Then no key tells what the message does.
            switches.append(Itself(object()))
        elif outside.places:
            switches.append(outside.state())
        many = len(facts.steady) + len(facts.choices) >= _MANY_CHOICES
        wanted = _FLAGS if many else _SWITCHES
        for module in modules:
            switches.append(type(module))
            for name, value in module.__dict__.items():
                if name in _TABLES:
                    continue
                if isinstance(value, wanted) and name[0] != "_":
                    switches.append((name, value))
                elif isinstance(value, list | tuple) and name[0] != "_":
                    switches.append((name, *[v for v in value if isinstance(v, wanted)]))
                elif callable(value) and home_of(value) != "pyg_sar":
                    switches.append((name, Itself(value)))
        return kind, tuple(switches)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """Updates edge features; see :meth:`torch_geometric.nn.MessagePassing.edge_updater`.

        Over a distributed graph the result is a placeholder, computed shard by shard by the
        :meth:`propagate` that gets it.
        """
        if not isinstance(edge_index, DistEdgeIndex):
            return super().edge_updater(edge_index, size=size, **kwargs)
        if edge_index.partial is not None:
            edge_index = inner(edge_index, self._source_row())
        if edge_index.plan.open_ended:
            edge_index = with_room(self, edge_index, kwargs)
        if edge_index.targets is not None:
            size = known_size(edge_index, size, self)
        kwargs = as_read(self, edge_index, kwargs)
        # Edges that go to the other ends' owners first: a worker without edges here has some there.
        leaving = edge_index.dist_row != self._source_row() and not self._one_shot_call
        compute = partial(self._edge_updates, edge_index, size=size, **kwargs)
        if not leaving and self._why_whole():
            with travelling(self, edge_index.plan):
                return compute()
        deferred = deferred_edge(compute, kwargs, edge_index.device)
        if not self.may_draw():
            return deferred
        return mark_deferred(self, deferred, edge_index.device)

    def _edge_updates(self, edge_index: DistEdgeIndex, size: Any, **kwargs: Any) -> Any:
        """Returns the edge features of all edges at once."""
        key = self.call_key(kwargs)
        keeps = Chooser(self, edge_index, kwargs, key).check_edge_update()
        facts_of(self).edge_sets = attributes_of(self, keeps)
        padding = stand_ins(edge_index)
        with (
            drawing(self, edge_index, kwargs, key) if self.may_draw() else nullcontext() as draws,
            on_stand_ins(self, "edge_update", keeps) if padding else nullcontext(),
            of_all_edges(draws, edge_index, None, padding),
        ):
            return super().edge_updater(edge_index, size=size, **kwargs)

    # How to run ##############################################################

    def may_draw(self) -> bool:
        """Returns whether a message may draw random numbers as the policy's ``random`` says."""
        return self.policy.random is not None and not draws_nothing(self)

    def _source_row(self) -> int:
        """Returns the row of ``edge_index`` that messages come from."""
        return 0 if self.flow == "source_to_target" else 1

    def _why_whole(self) -> str:
        """Returns why the layer's definition needs all edges at once; empty where it does not."""
        if self._one_shot_call or self.policy.mode == 3:
            return "asked for"
        return "its update() asks for edges" if update_asks_for_edges(self) else ""

    def _strategy(self) -> tuple[str, str]:
        """Returns the strategy that the layer's definition allows, and the reason."""
        whole = self._why_whole()
        if whole:
            return "one_shot", whole
        merges = pristine(self, "aggregate", of=MessagePassing)
        merges &= decompose(self.aggr_module) is not None
        merges &= self.policy.strategy != "chunked"
        return "sequential" if merges else "chunked", ""

    # Running #################################################################

    def _propagate_whole(
        self, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any], choice: Choice, key: Key
    ) -> Any:
        """PyG's own path: node tensors are read through the distributed index."""
        for name, value in kwargs.items():
            if isinstance(value, DeferredEdge):
                kwargs[name] = computed(self, value, edge_index.device)
        plan, edges, columns, padded = edge_index.plan, edge_index, None, 0
        levels = {} if choice.rows is None else choice.rows.edges
        if edge_index.dist_row == self._source_row():
            padded = most_edges(self, edge_index)
            found = sorted_edges(edge_index) if needs_sorted_edges(self) else None
            if found is not None:
                edges, columns = found
                names = {name.rpartition(".")[2] for name, level in levels.items() if level}
                for name in names & kwargs.keys():
                    kwargs[name] = kwargs[name].index_select(0, columns)
        with (  # Draws come before methods are others' for a while.
            drawing(self, edge_index, kwargs, key) if self.may_draw() else nullcontext() as draws,
            whole_scope(self, edge_index, choice) as padding,
            first_target_filled(self),
            padded_to(self, padded),
            in_first_order(self, columns),
            travelling(self, plan),
            of_all_edges(draws, edge_index, columns, padding),
        ):
            if self.decomposed_layers > 1:  # not in PyG's compiled template
                return MessagePassing.propagate(self, edges, size=size, **kwargs)
            return super().propagate(edges, size=size, **kwargs)

    def _propagate_parts(
        self, edge_index: DistEdgeIndex, kwargs: dict[str, Any], choice: Choice, key: Key
    ) -> Tensor:
        out: Any = None
        own: Attention | None = None
        if choice.needs is not None and choice.needs.attention is not None:
            own = own_attention(self, edge_index, kwargs, choice)
        draws = drawing(self, edge_index, kwargs, key) if self.may_draw() else nullcontext()
        with draws as drawn:
            call = None if choice.sums is None else sums_call(self, edge_index, kwargs, choice)
            found = None if call is None else call.run(self, edge_index, kwargs)
            own_kind: Any = type(self)
            if found is None and (own is not None or known_attention(own_kind) is not None):
                out = self._attended(edge_index, kwargs, choice, drawn, own)
            if found is None and out is None:
                found = self._aggregated(edge_index, kwargs, choice, drawn)
        if found is not None:
            out = found[0][0]
            if type(self.aggr_module) not in PLAIN:  # Else nothing becomes of the sum any more.
                finish = decomposition_of(self, choice.strategy == "chunked").finish
                out = finish(*found, self.node_dim)
        if choice.sets:
            put_tile_values(self, attributes_of(self, choice.sets), title_of(self))
        if pristine(self, "update", of=MessagePassing):
            return out
        data = {n: kwargs.get(n, Parameter.empty) for n in self.inspector.get_param_names("update")}
        return self.update(out, **self.inspector.collect_param_data("update", data))

    def _attended(
        self,
        edge_index: DistEdgeIndex,
        kwargs: dict[str, Any],
        choice: Choice,
        draws: EdgeDraws | None,
        own: Attention | None,
    ) -> Tensor | None:
        """Returns softmax attention by kernel; ``None`` where the kernels don't know the layer."""
        if own is not None:
            attention: Any = replace(own, seed=seed_for(self, own.p))
        elif self.policy.kernels == "off" or choice.strategy != "sequential":
            return None
        else:
            attention = attention_of(self, edge_index, kwargs)
        if attention is not None and draws is not None:
            attention = with_kept_weights(attention, draws)
        if attention is None:
            return None
        if edge_index.plan.rank == 0:
            warn_if_missing()
        title = titled(type(self).__name__, self.ledger_name, edge_index.plan.rank)
        given = attention, edge_index, self.policy, self.ledger_name, title
        kernel, tensors = attention_kernel(*given)
        if isinstance(attention, Attention) and attention.bias is not None:
            facts = facts_of(self)
            facts.bias = None  # The kernel adds it.
            kernel.was_changed = partial(setattr, facts, "bias_apart", True)
        record = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        out = run(kernel, tensors, record)[0]
        if own is not None:
            return out.view(len(out), *choice.out_rows[0].shape[1:])
        return as_aggregated(self, out)

    def _aggregated(
        self,
        edge_index: DistEdgeIndex,
        kwargs: dict[str, Any],
        choice: Choice,
        draws: EdgeDraws | None,
    ) -> tuple[list[Tensor], Tensor]:
        """Returns reductions of messages, computed tile by tile, and in-degrees."""
        must_be_fused(self)
        complete = choice.strategy == "chunked"
        reductions = decomposition_of(self, complete)
        most = most_edges(self, edge_index) if complete else 0
        given = self, edge_index, kwargs, choice.edge_level, reductions.groups, complete, most
        program = TileProgram(*given, choice.sizes)
        rest = edge_index, choice, reductions, self.policy, self.ledger_name
        kernel = message_kernel(program, *rest, draws)
        try:
            record = torch.is_grad_enabled() and kernel.needs_gradient
            results = run(kernel, kernel.tensors(), record)
        except NeedsAllEdges as error:
            raise DistributedIndexError(
                f"{title_of(self)} at rank {edge_index.plan.rank}: {error}, which it did not do "
                "when it was analysed. Set `layer.policy = pyg_sar.SARPolicy(mode=3)`"
            ) from error
        axis = self.node_dim
        results = [out.movedim(0, axis) if axis % out.dim() else out for out in results]
        return results, kernel.schedule.in_degree

    # One process #############################################################

    def _own_graph(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Tensor, DistEdgeIndex] | None:
        """Returns the call's plain edges and what stands for them, where the kernels are faster."""
        graphs = self.own_graphs
        eligible = self.policy.kernels != "off" and self.policy.mode != 3
        eligible = eligible and not is_explained(self)
        if graphs is None or not eligible or self._strategy()[0] != "sequential":
            return None
        if self.training in facts_of(self).not_fused or changes_of(self):
            return None
        return graphs.stand_in(self, self._bound(args, kwargs))

    def _call_on_own_graph(
        self, fused: tuple[Tensor, DistEdgeIndex], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Runs on the graph that stands for plain edges."""
        edges, graph = fused
        args = tuple(graph if a is edges else a for a in args)
        kwargs = {name: graph if a is edges else a for name, a in kwargs.items()}
        return self._call_on([graph], args, kwargs)

    # One call ################################################################

    def _call_on(
        self, edges: Sequence[DistEdgeIndex], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Runs on distributed edges: ledgers charge this layer for what they gather meanwhile."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_transforms(title_of(self))
        plan, whole = edges[0].plan, self._one_shot_call
        own: Any = type(self)
        if isinstance(self, RGCNConv):
            refuse_local_ids(self, plan, self._bound(args, kwargs).get("x"))
        if _gives_attention(own):  # Edge values, which only one shot has.
            asked = self._bound(args, kwargs).get("return_attention_weights")
            self._one_shot_call = whole or asked is not None
        outer = [(e.plan.context, e.plan.context.layer) for e in edges]
        for context, _ in outer:
            context.layer = self.ledger_name
        keeps = self.policy.refresh_every > 1
        # What it kept before its user set cached=False it goes on using, as PyG's code does.
        caches = self.__dict__.get("cached") is False
        caches = caches and self.__dict__.get("_cached_edge_index", self) is None
        maps = known_base(own) is not None
        bound = partial(self._bound, args, kwargs)
        try:
            facts = self.__dict__.get("_facts")
            if facts is not None and facts.before_tiles:
                forget_tile_values(self)
            with (
                keeping_rows(self, edges) if keeps else nullcontext(),
                kept_normalisation(self, edges[0], bound) if caches else nullcontext(),
                transforming_first(self) if maps else nullcontext(),
                adding_bias(self) if adds_bias(own) else nullcontext(),
                nullcontext() if edges[0].num_edges else JoinsOfNothing(),
            ):
                return super().__call__(*args, **kwargs)
        except Exception as error:
            note_place(error, f"{title_of(self)} at rank {plan.rank}")
            note_tensors(error, self._bound(args, kwargs), edges[0].device)
            raise
        finally:
            self._one_shot_call = whole
            for context, before in reversed(outer):
                context.layer = before
                context.gathered.clear()

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``forward`` by name."""
        forward: Any = self.forward
        own = [self] if inspect.ismethod(forward) else []
        try:
            signature = _signature(forward.__func__ if own else forward)
            bound = signature.bind_partial(*own, *args, **kwargs).arguments
        except TypeError:  # forward() itself says better what is wrong.
            return {}
        return dict([*bound.items()][len(own) :])


@lru_cache(256)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


@cache
def _gives_attention(own: Any) -> bool:
    return "return_attention_weights" in inspect.signature(own.forward).parameters


DistMessagePassing._orig_propagate = DistMessagePassing.propagate
DistMessagePassing._jinja_propagate = DistMessagePassing.propagate
