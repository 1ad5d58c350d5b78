"""The one place that decides which kernel computes a call, and by which schedule.

What an analysis of the call has found (:mod:`pyg_sar.engine.analysis`) is the same on all workers,
and so are the layer's policy, dtypes, and which workers share memory. So all decide alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, SumAggregation

from pyg_sar.engine.analysis import Choice, decomposition_of, title_of
from pyg_sar.engine.chunks import Chunks
from pyg_sar.engine.cuts import rows_travel, split_edges
from pyg_sar.engine.kernels.attention import SoftmaxAttention, covers_of
from pyg_sar.engine.kernels.directional import Streamed
from pyg_sar.engine.kernels.message import Messages, changed_message, keeps_graphs
from pyg_sar.engine.kernels.relational import RelationalAttention, RelationalTerms
from pyg_sar.engine.kernels.sums import Sums, SumsCall, Way
from pyg_sar.engine.run import Kernel
from pyg_sar.engine.schedule import by_chunks, by_shards
from pyg_sar.exchange.cover import ALL_PUSHED, SUMS
from pyg_sar.exchange.wire import wire_of
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.ops import made_for, warn_if_missing_on, why_missing_on
from pyg_sar.ledger import Label
from pyg_sar.message.decompose import PLAIN, Decomposition
from pyg_sar.message.dependence import Dependence
from pyg_sar.message.edge_draws import EdgeDraws
from pyg_sar.message.formulas import formula_of
from pyg_sar.message.layer_facts import hooks_of, is_plain_module, pristine
from pyg_sar.message.layer_state import preserved_attributes
from pyg_sar.message.program import TileProgram, check_nodes
from pyg_sar.message.recording import Recording
from pyg_sar.message.target_index import Reductions
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile, shards_of
from pyg_sar.wording import counted

_PLAN: Label = ("", "", "plan")


def attention_kernel(
    attention: Attention | RelationalTerms,
    edge_index: DistEdgeIndex,
    policy: SARPolicy,
    name: str,
    title: str,
) -> tuple[Kernel, list[Tensor]]:
    """The kernel of a call that is an attention, and its inputs. Made by all workers together.

    Raises:
        ValueError: A tensor doesn't have a row for each of this worker's nodes, or edges.
        IndexError: An edge is of no relation.
    """
    tensors = attention.tensors()
    plan, edge_attr = edge_index.plan, tensors.get("edge_attr")
    if edge_attr is not None and edge_attr.size(0) != edge_index.num_edges:
        raise _other_edges(edge_attr, edge_index, title)
    relational = isinstance(attention, RelationalTerms)  # queries by relation, then by node
    for role in ("value", "x", "key") if relational else ("value", "x", "key", "query"):
        count = edge_index.num_targets if role == "query" else plan.num_local
        if (tensor := tensors.get(role)) is not None and tensor.size(0) != count:
            check_nodes(tensor, 0, count, role, plan.rank)
    if isinstance(attention, RelationalTerms):
        kernel: Kernel = RelationalAttention(attention, edge_index, policy, name, title)
        return kernel, list(tensors.values())
    kept = attention.drop_key
    shapes = tuple([(role, t.dtype, t.shape[1:]) for role, t in tensors.items()])
    key = policy, attention.kind, attention.p > 0, torch.is_grad_enabled(), shapes
    # Edge features stay with the targets' workers, maxima and normalisers would not stand a narrow
    # wire, and tanh has no states to merge: then all rows are pulled.
    pushes = policy.push != "off" and policy.wire == "exact" and plan.world_size > 1
    pushes &= edge_attr is None and attention.score.softmax
    if plan.comm.host is not None:  # One block of several parts' edges has no seed of its own.
        pushes &= attention.score.by_source and (attention.p == 0 or kept is not None)
    remember = edge_index.remember_together if pushes else edge_index.remember
    made = remember(("attention", pushes), dict)
    if key not in made:
        splits: tuple[Any, Any] = None, None
        if pushes and attention.value.shape[1:].numel():
            splits = covers_of(edge_index, attention, policy, torch.is_grad_enabled())
        made[key] = by_shards(shards_of(edge_index), *splits), splits
    schedule, splits = made[key]
    sent: list[list[Tensor]] = [[], []]
    if kept is not None:  # The owners of the sources hear which weights of pushed edges are kept.
        bits = [() if one is None else one.sent(edge_index, kept.view(-1)) for one in splits]
        sent = [[part.unsqueeze(-1) for part in parts] for parts in bits]
    kernel = SoftmaxAttention(attention, schedule, policy, name, title, sent)
    if attention.score.softmax:
        kernel.derivatives = Streamed(edge_index, policy)
    return kernel, list(tensors.values())


def message_kernel(
    program: TileProgram,
    edge_index: DistEdgeIndex,
    choice: Choice,
    decomposition: Decomposition,
    policy: SARPolicy,
    name: str,
    draws: EdgeDraws | None = None,
) -> Messages:
    """The kernel of any call. Made by all workers together.

    ``draws`` are the random numbers of the edges; ``None``: those of each worker.

    Raises:
        ValueError: An edge-level tensor doesn't have a row for each of this worker's edges.
    """
    needs, most = choice.needs, choice.max_edges
    if needs is None:
        raise RuntimeError("Expected a choice for running in parts")
    for number in program.numbers("edge"):
        tensor = program.operands[number].tensor
        if tensor.size(0) != edge_index.num_edges:
            raise _other_edges(tensor, edge_index, title_of(program.layer))
    if choice.strategy == "chunked":
        key = ("chunks", most)
        chunks = edge_index.remember_together(key, lambda: Chunks(edge_index, most))
        schedule = by_chunks(chunks)
    else:
        schedule = edge_index.remember("by shards", lambda: by_shards(shards_of(edge_index)))
    rest = schedule, policy, name, most, choice.out_rows, draws
    kernel = Messages(program, decomposition, needs, *rest)
    kernel.derivatives = Streamed(edge_index, policy)
    return kernel


def sums_call(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], choice: Choice
) -> SumsCall | None:
    """Decides how a kind of call runs that is sums; ``None`` where there is no kernel for it.

    Decided by what is alike in all calls of the kind (``DistMessagePassing.call_key``).
    """
    found, needs, policy = choice.sums, choice.needs, layer.policy
    if found is None or needs is None or policy.kernels == "off":
        return None
    if hooks_of(layer, "message"):
        return None
    rows, weight = kwargs[found.source], None if found.weight is None else kwargs[found.weight]
    rows = rows[0] if isinstance(rows, tuple | list) else rows
    keeps = keeps_graphs(needs, policy)
    extrema = "max" in found.kinds or "min" in found.kinds
    # Extrema need the rows again, which a message's graph would have kept.
    plain = weight is None and not keeps and rows.dtype in (torch.float32, torch.float64)
    learnt = weight is not None and weight.requires_grad
    if not made_for(rows) or (extrema and not plain) or (learnt and keeps):
        return None
    title = f"{title_of(layer)} at rank {edge_index.plan.rank}"
    own = not (getattr(layer.message, "__module__", None) or "").startswith("torch_geometric.")
    recorded = torch.is_grad_enabled() and rows.requires_grad
    there = policy.push != "off" and found.alone and not (learnt or extrema)
    exact, numbered = policy.wire == "exact", weight is not None
    rest = policy.prefetch, wire_of(policy.wire), found.kinds, extrema or learnt
    given = exact, recorded, numbered, there, extrema
    return SumsCall(
        source=found.source,
        weight=found.weight,
        axis=layer.node_dim,
        kernel=partial(Sums, layer.ledger_name, title, *rest),
        record=torch.is_grad_enabled() and needs.needs_gradient,
        key=("sums", *given) if why_missing_on(rows.device) is None else None,
        way=partial(_sums_way, given=given),
        check=partial(_check_sums, choice=choice, title=title, own=own),
        checks_always=own,
        derivatives=partial(Streamed, policy=policy),
    )


def only_sums(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], choice: Choice
) -> SumsCall | None:
    """Returns the sums that a kind of call is; ``None`` where it does anything besides."""
    updates = hooks_of(layer, "propagate") or not pristine(layer, "update", of=MessagePassing)
    if updates or layer.may_draw() or choice.sets or type(layer.aggr_module) not in PLAIN:
        return None
    call = sums_call(layer, edge_index, kwargs, choice)
    return None if call is None or call.key is None else call


def _check_sums(
    layer: Any,
    edge_index: DistEdgeIndex,
    kwargs: dict[str, Any],
    rows: Tensor,
    weight: Tensor | None,
    *,
    choice: Choice,
    title: str,
    own: bool,
) -> None:
    """Raises where sums' arguments don't fit the edges; where the message is a layer's own, tries
    it."""
    plan, source = edge_index.plan, "" if choice.sums is None else choice.sums.source
    check_nodes(rows, layer.node_dim, plan.num_local, source, plan.rank)
    if weight is not None and weight.size(0) != edge_index.num_edges:
        raise _other_edges(weight, edge_index, title)
    if own and choice.needs is not None:
        groups = decomposition_of(layer, False).groups
        given = layer, edge_index, kwargs, choice.edge_level, groups
        _check_formula(TileProgram(*given, sizes=choice.sizes), edge_index, choice.needs, title)


def _other_edges(tensor: Tensor, edge_index: DistEdgeIndex, title: str) -> ValueError:
    return ValueError(
        f"{title} got an edge-level tensor of {counted(tensor.size(0), 'rows')} for "
        f"{counted(edge_index.num_edges, 'edges')} at rank {edge_index.plan.rank}: pass "
        "a tensor of the graph's edges, with a row for each of them"
    )


def own_attention(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], choice: Choice
) -> Attention | None:
    """Returns the attention that a message of one's own is; ``None`` where it is none.

    See [Note: formulas by operators]. Before its random numbers are drawn.

    Raises:
        DistributedIndexError: When the message is another one than it was.
    """
    needs = choice.needs
    found = None if needs is None else needs.attention
    if (
        needs is None
        or found is None
        or layer.policy.kernels == "off"
        or layer.policy.strategy == "chunked"
    ):
        return None
    plain = is_plain_module(layer.aggr_module, SumAggregation) and not hooks_of(layer, "message")
    plain &= pristine(layer, "aggregate", of=MessagePassing)
    if not plain or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return None
    groups = decomposition_of(layer, False).groups
    program = TileProgram(layer, edge_index, kwargs, choice.edge_level, groups, sizes=choice.sizes)
    title = f"{title_of(layer)} at rank {edge_index.plan.rank}"
    _check_formula(program, edge_index, needs, title)
    parameter = None
    if found.att:
        path, _, name = found.att.rpartition(".")
        parameter = layer.get_submodule(path)._parameters[name]
        parameter = parameter.view(parameter.shape[-2:])
    rows = [operand.tensor for operand in program.operands]
    value, key, query, att = found.terms(rows, parameter)
    attention = Attention(
        kind="additive" if found.kind.startswith("joined") else found.kind,
        value=value.unsqueeze(1) if value.dim() == 2 else value,
        key=key,
        query=query,
        att=att,
        slope=found.slope,
        scale=found.scale,
        p=found.p,
    )
    first, *others = attention.tensors().values()
    alike = all(t.dtype == first.dtype and t.device == first.device for t in others)
    return attention if alike and made_for(first) else None


def _check_formula(
    program: TileProgram, edge_index: DistEdgeIndex, needs: Dependence, title: str
) -> None:
    """Raises where a message, tried on an edge, is not the formula that it was."""
    edge = _an_edge(program, edge_index)
    if edge is None:
        return
    tile, values = edge
    given = {**program.own(tile, Reductions(watched=True)), **program.sizes}
    devices = [edge_index.device] if edge_index.is_cuda else []
    for operand, row in zip(program.operands, values, strict=True):
        if row is not None:
            row.requires_grad_(operand.tensor.requires_grad)
    kept = preserved_attributes(program.layer, buffers=True)
    recording = Recording()
    with kept, torch.random.fork_rng(devices), torch.enable_grad(), recording.saving(), recording:
        message, *_ = program.call(values, given)
    now = formula_of(recording, program, values, tile.index, message)
    before = needs.source, needs.product, needs.attention
    if (now.source, now.product, now.attention) != before:
        raise changed_message(title)


def _sums_way(edge_index: DistEdgeIndex, given: tuple[bool, ...]) -> Way | None:
    """The way of sums of rows, times constant weights or not; ``None``: not by kernel.

    By a cover, where rows travel; where all are read in place, owners add up the gradients of their
    rows. All workers call this together; it is made once per structure and kept with it.

    ``given`` tells whether rows travel exactly, a backward pass may follow, edges have numbers,
    edges may be gone through at their sources, and extrema are among the sums.
    """
    exact, record, numbered, there, extrema = given
    comm = edge_index.plan.comm

    def make() -> Way | None:
        shards = shards_of(edge_index)
        if extrema and any(b.segments.source.dtype != torch.int32 for b in shards.blocks):
            return None
        # What a narrow wire rounds must not depend on where workers run.
        if not (there and exact) or comm.world_size == 1:
            return by_shards(shards), None, False
        missing = why_missing_on(edge_index.device)
        ready = torch.tensor(int(missing is None), device=edge_index.device)
        can = bool(int(comm.all_reduce(ready, "min", label=_PLAN)))
        cover = can and comm.host is None and rows_travel(comm)
        split = None
        if cover:
            split = split_edges(edge_index, SUMS, SUMS, numbered=numbered)
        elif can and record:  # The same as those of additive attention.
            costs = ALL_PUSHED, ALL_PUSHED
            split = split_edges(edge_index, *costs, numbered=numbered, by_source=True)
        return by_shards(shards, split if cover else None, split), split, cover

    remember = edge_index.remember_together if there else edge_index.remember
    way: Way | None = remember(("sums", *given), make)
    # All workers get here together; whether each has the kernels, they find out together.
    if why_missing_on(edge_index.device) is not None:
        if edge_index.plan.rank == 0:
            warn_if_missing_on(edge_index.device)
        return None
    return way


def _an_edge(
    program: TileProgram, edge_index: DistEdgeIndex
) -> tuple[Tile, list[Tensor | None]] | None:
    """Returns an edge, from an own row, and its operands' rows; ``None`` where there is none."""
    if edge_index.size(1) == 0 or edge_index.plan.num_local == 0:
        return None
    one = slice(0, 1)
    source, target = (row[one] for row in edge_index.ends())
    place = source % edge_index.plan.num_local
    tile = Tile(0, one, target, torch.zeros_like(target), place, one)
    tensors = [operand.tensor.detach() for operand in program.operands]
    return tile, program.gather(tile, tensors, [tensors[k] for k in program.numbers("source")])
