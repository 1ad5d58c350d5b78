"""``distribute(model)``: the one verb that makes a PyG model run on a distributed graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
import torch_geometric.nn as gnn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import EGConv, EquilibriumAggregation, MessagePassing

from pyg_sar.comm.group import Communicator, current
from pyg_sar.files import check_type
from pyg_sar.message.row_modules import has_foreign_module, is_compiled, overridden_entry
from pyg_sar.nn.attention import GlobalMultiheadAttention
from pyg_sar.nn.embedding import own_rows
from pyg_sar.nn.global_calls import GlobalCalls, global_class, named_as, names_of
from pyg_sar.nn.global_inputs import warn_of_memory
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import NORMS
from pyg_sar.nn.one_process import OwnGraphs
from pyg_sar.nn.reducing_layers import check_layer, mixin_of
from pyg_sar.nn.shared_parameters import SharedParameters
from pyg_sar.nn.uncompiled import between_graphs, keep_out_of_graphs
from pyg_sar.policy import SARPolicy
from pyg_sar.reduction.gradients import ReplicaGradients
from pyg_sar.reduction.moments import OVER_ROWS
from pyg_sar.reduction.parameters import (
    attribute_rows,
    copy_from_first,
    dense_parts,
    first_difference,
    refuse_wrapped,
)

_Model = TypeVar("_Model", bound=torch.nn.Module)


@cache
def _dist_class(kind: type[MessagePassing], alone: bool) -> type[DistMessagePassing]:
    """The layer's class with :class:`DistMessagePassing` before it.

    Args:
        kind: The layer's class.
        alone: One process, whose layers can be compiled; else each call is made between two graphs.
    """
    before = mixin_of(kind)
    methods = dict(names_of(kind))
    if not alone:
        methods["__call__"] = between_graphs(DistMessagePassing.__call__)
    return type(kind.__name__, (*before, DistMessagePassing, kind), methods)


def distribute(
    model: _Model,
    policy: SARPolicy | None = None,
    *,
    layer_policies: Mapping[str, SARPolicy] | None = None,
) -> _Model:
    """Converts a PyG model in place to run on the ``edge_index`` of :func:`load_partition`.

    Every :class:`~torch_geometric.nn.MessagePassing` layer becomes a
    :class:`~pyg_sar.nn.DistMessagePassing` by a swap of its class, and so do norms over nodes, and
    ``torch.nn.MultiheadAttention``: they take and give tensors of the whole graph. All other
    modules, readouts included, stay as they are, and so do parameters, buffers, ``state_dict`` keys
    and the model's own code. Rank 0's parameters and buffers are copied to
    all workers. Embeddings with a row per node of the graph that was loaded, and the adjacency's
    weight of ``LINKX``, become tensors of the whole graph of which each worker owns its rows
    (:class:`~pyg_sar.nn.NodeEmbedding`). In one process, on a plain ``Data``, layers that have a
    kernel use it, and store no message per edge.

    .. code-block:: python

        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(GAT(data.num_features, 64, 3, num_classes))
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()   # every p.grad is that of one process, on every worker

    So are the gradients that hooks on parameters see, and that ``torch.autograd.grad`` returns.

    Args:
        model: The model, built alike on every worker.
        policy: How its layers run; ``None``: ``SARPolicy()``, with which they draw the random
            numbers of one process.
        layer_policies: Policies of single layers, by their name in ``model.named_modules()``.

    Returns:
        ``model``.

    Raises:
        TypeError: When ``model`` is no module, or a policy no :class:`~pyg_sar.SARPolicy`.
        ValueError: When a layer's parameters don't exist yet, a layer is not known, the model is on
            another device than the workers' data, it holds ``DistributedDataParallel`` or FSDP, or
            workers' models differ: in modules, shapes or plain attributes.

    Warns:
        OneShotWarning: A layer that can't be computed shard by shard runs as PyG does, on tensors
            of the whole graph: its class has a ``propagate`` of its own, say.
    """
    comm = current()
    policies = _policies(model, policy, layer_policies)
    _check(model, policies, comm)
    _put_on_device(model, comm)
    policy = policy or SARPolicy()
    for group in (comm, comm.across):
        if group is not None:
            _check_alike(model, policy, policies, group)
    if comm.world_size > 1:
        copy_from_first((*model.parameters(), *model.buffers()), comm)
        own_rows(model, comm)
    if comm.across is not None:
        copy_from_first((*model.parameters(), *model.buffers()), comm.across)
    graphs, shared = OwnGraphs(), SharedParameters()
    keep_out_of_graphs()
    for name, module in model.named_modules():
        kind: Any = type(module)
        as_in_pyg = _why_as_in_pyg(module) if isinstance(module, MessagePassing) else ""
        if as_in_pyg:
            if comm.world_size > 1:
                warn_of_memory(f"{kind.__name__} {name!r} {as_in_pyg}")
        elif isinstance(module, MessagePassing):
            if not isinstance(module, DistMessagePassing):
                for entry in {"propagate", "edge_updater"} & vars(module).keys():
                    if is_compiled(vars(module)[entry], kind, entry):
                        del vars(module)[entry]
                module.__class__ = _dist_class(kind, comm.world_size == 1)
            module.ledger_name = name or type(module).__name__
            module.policy = policies.get(name, policy)
            if comm.world_size == 1:
                module.own_graphs = graphs
            if not isinstance(module, GlobalCalls):
                _take_whole(module, name, shared)
        elif kind in NORMS:
            # One process has all rows; ``SyncBatchNorm`` alone is for GPUs.
            if comm.world_size > 1 or isinstance(module, torch.nn.SyncBatchNorm):
                module.__class__ = named_as(NORMS[kind], kind)
            if not isinstance(module, torch.nn.InstanceNorm1d):
                _take_whole(module, name, shared)
        elif kind is torch.nn.MultiheadAttention:
            whole_kind: Any = GlobalMultiheadAttention
            module.__class__ = named_as(whole_kind, kind)
    if comm.world_size > 1:
        shared.known_to(comm, model)
    if comm.across is not None:
        averaging = ReplicaGradients(comm.across, shared.settings)
        averaging(model)
        model.register_forward_pre_hook(averaging)
    return model


def _policies(model: Any, policy: Any, layer_policies: Any) -> dict[str, SARPolicy]:
    """Returns the policies of single layers; raises ``TypeError`` where something is no policy."""
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    names = "a dict of layers' names and policies"
    check_type("layer_policies", layer_policies or {}, Mapping, names)
    policies = dict(layer_policies or {})
    given = {"policy": policy} | {f"layer_policies[{name!r}]": p for name, p in policies.items()}
    for name, value in given.items():
        if not isinstance(value, SARPolicy) and (name != "policy" or value is not None):
            raise TypeError(
                f"Expected {name} to be a pyg_sar.SARPolicy (got {value!r}): write "
                "SARPolicy(mode=3), say"
            )
    return policies


def _put_on_device(model: torch.nn.Module, comm: Communicator) -> None:
    """Moves a model from the CPU to this worker's device, where ``load_partition`` puts the data.

    Its parameters stay the objects that they are, which an optimizer may know already. A single
    process on the CPU chooses its devices by itself.

    Raises:
        ValueError: The model, or some of it, is on another device.
    """
    if comm.world_size == 1 and comm.device.type == "cpu":
        return
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    elsewhere = {name: t.device for name, t in tensors.items() if t.device != comm.device}
    if not elsewhere:
        return
    name, device = next(iter(elsewhere.items()))
    if len(elsewhere) == len(tensors) and {d.type for d in elsewhere.values()} == {"cpu"}:
        before = list(model.parameters())
        model.to(comm.device)
        if all(a is b for a, b in zip(before, model.parameters(), strict=True)):
            return
    raise ValueError(
        f"distribute() got a model with '{name}' on {device} at rank {comm.rank}, whose device, "
        f"and that of its data, is {comm.device}: call model.to(comm.device) first, with comm = "
        "pyg_sar.comm.current()"
    )


def _take_whole(module: Any, name: str, shared: SharedParameters) -> None:
    """Lets a module take and give tensors of the whole graph."""
    kind: Any = type(module)
    layer = isinstance(module, MessagePassing)
    on_all = layer and (has_foreign_module(module) or _counts_nodes(module))
    module.__class__ = global_class(kind, on_all)
    module.shared_parameters = shared
    shared.join(name or kind.__name__, module)


def _counts_nodes(layer: Any) -> bool:
    """Returns whether a layer gives loops to the nodes up to the last one that has an edge."""
    loops = isinstance(layer, EGConv) and layer.add_self_loops
    return loops and "symnorm" not in layer.aggregators


def _check(model: torch.nn.Module, policies: Mapping[str, SARPolicy], comm: Communicator) -> None:
    modules = dict(model.named_modules())
    converted = {n: m for n, m in modules.items() if isinstance(m, MessagePassing)}
    converted = {n: m for n, m in converted.items() if not _why_as_in_pyg(m)}
    unknown = [name for name in policies if name not in converted]
    if unknown:
        layers = list(converted)
        raise ValueError(
            f"'layer_policies' names {unknown}, which are no message passing layers of the model; "
            f"it has {layers}"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"Parameter '{name}' is not initialized at rank {comm.rank}: call "
                "pyg_sar.nn.initialize(model, data.x, data.edge_index) with the model's arguments "
                "(of a HeteroData data.x_dict, data.edge_index_dict) before distribute(), or give "
                "its layer's in_channels instead of -1"
            )
    if comm.across is not None or comm.world_size > 1:
        refuse_wrapped(model)
        for name, module in modules.items():
            _check_process_group(name, module)
    if comm.world_size == 1:
        return
    for name, module in modules.items():
        check_layer(name, module, comm.rank)


def _check_process_group(name: str, module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.SyncBatchNorm):
        return
    known = type(module) in NORMS or isinstance(module, tuple(NORMS.values()))
    if not known:
        raise ValueError(
            f"'{name}' ({type(module).__name__}) is derived from SyncBatchNorm, and would ask the "
            "other workers itself: derive it from BatchNorm1d"
        )
    if module.process_group is not None:
        raise ValueError(
            f"'{name}' (SyncBatchNorm) has a 'process_group' of its own; statistics are over all "
            "workers: leave it at None"
        )


def _why_as_in_pyg(layer: MessagePassing) -> str:
    """Returns why PyG's own layer runs, on tensors of the whole graph; ``''``: it need not."""
    if own := overridden_entry(type(layer)):
        return f"has a method {own}() of its own"
    for name, module in layer.named_modules():
        kind: Any = type(module)
        if isinstance(module, EquilibriumAggregation):
            return f"minimises one energy over all targets together ('{name}', {kind.__name__})"
        per_node = isinstance(module, gnn.LayerNorm) and module.mode != "graph"
        # What holds a batch norm: it asks that one, but for a single row, of all workers.
        holds = kind in (gnn.BatchNorm, gnn.DiffGroupNorm)
        holds = holds and not getattr(module, "allow_single_element", False)
        known = kind in NORMS or holds or per_node or isinstance(module, tuple(NORMS.values()))
        if isinstance(module, OVER_ROWS) and not known:
            supported = ", ".join(sorted({norm.__name__ for norm in NORMS}))
            return (
                f"normalises over rows by '{name}' ({kind.__name__}), which is none of {supported}"
                ", nor derived from the class in pyg_sar.nn.NORMS"
            )
    return ""


def _check_alike(
    model: torch.nn.Module,
    policy: SARPolicy,
    policies: Mapping[str, SARPolicy],
    comm: Communicator,
) -> None:
    """Workers with different models or policies would wait for each other forever."""
    rows = [f"{name}: {type(module).__name__}" for name, module in model.named_modules()]
    rows += [f"{name}: {list(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    rows += [f"{name}: requires_grad={p.requires_grad}" for name, p in model.named_parameters()]
    buffers = [(name, part) for name, b in model.named_buffers() for part in dense_parts(b)]
    rows += [f"{name}: {list(b.shape)} {b.dtype}" for name, b in buffers]
    rows += [f"policy: {policy}", f"layer policies: {sorted(map(str, policies.items()))}"]
    found = first_difference([*rows, *attribute_rows(model)], comm)
    if found is not None:
        rank, here, first = found
        raise ValueError(
            f"distribute() got different models or policies: '{here}' at {comm.member} {rank}, "
            f"'{first}' at {comm.member} 0. Build the model alike on every worker; an attribute "
            "that may differ needs a name that begins with an underscore"
        )
