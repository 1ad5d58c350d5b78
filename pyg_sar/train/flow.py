"""Training steps on message flow graphs, and the proof that they are those of the whole graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data
from torch_geometric.nn import HeteroBatchNorm

from pyg_sar.comm.group import current
from pyg_sar.message.layer_state import modes_kept
from pyg_sar.partition.message_flow import message_flow_graphs

Forward = Callable[[nn.Module, Data], Tensor]


def call_model(model: nn.Module, data: Data) -> Tensor:
    """Makes the default forward pass: ``model(data.x, data.edge_index)``.

    PyG's own models trim a message flow graph from layer to layer.
    """
    out: Tensor = model(data.x, data.edge_index, **trimming(model, data))
    return out


def trimming(model: nn.Module, data: Data) -> dict[str, Any]:
    """Returns the arguments by which PyG's models trim a message flow graph, where they do."""
    names = "num_sampled_nodes", "num_sampled_edges"
    takes = inspect.signature(model.forward).parameters
    if names[0] not in data or hasattr(model, "jk"):  # JumpingKnowledge needs all layers' rows.
        return {}
    return {f"{n}_per_hop": data[n] for n in names if f"{n}_per_hop" in takes}


def refuse_in_flow(model: nn.Module, *, sampled: bool = False) -> None:
    """Raises where a message flow graph is known to change a model's training.

    Args:
        model: The model.
        sampled: Statistics of batches are asked for.

    Raises:
        ValueError: Naming the module.
    """
    for name, module in model.named_modules():
        policy = getattr(module, "policy", None)
        reason = ""
        running = getattr(module, "track_running_stats", False) is True
        if (running or isinstance(module, _BatchNorm | HeteroBatchNorm)) and not sampled:
            reason = "takes statistics over all nodes in training"
        elif getattr(module, "cached", False) is True:
            reason = "has cached=True, and keeps the edges of one graph for the other"
        elif policy is not None and getattr(policy, "random", None) is not None:
            reason = "draws the random numbers of the whole graph (SARPolicy(random=...))"
        if reason:
            raise ValueError(
                f"A message flow graph would change the training of {type(module).__name__} "
                f"({name}), which {reason}: train on the whole graph"
            )


@torch.no_grad()
def check_flow(model: nn.Module, data: Data, flow: Data, *, forward: Forward = call_model) -> None:
    """Compares the seeds' outputs on a message flow graph with the whole graph's. Collective.

    It takes one pass over each, in evaluation mode. Layers of other models refuse ``flow``.

    Args:
        model: The distributed model.
        data: The part that ``flow`` was made of.
        flow: What :func:`pyg_sar.message_flow_graphs` gave.
        forward: Calls the model on either.

    Raises:
        TypeError: When ``flow`` is no message flow graph of all neighbours.
        ValueError: On every worker, where they differ by more than rounding, or the model holds a
            module whose training would.
    """
    refuse_in_flow(model)
    edges = flow.get("edge_index")
    checked = getattr(getattr(edges, "partial", None), "checked", None)
    if checked is None:
        raise TypeError(
            "Expected 'flow' to be what pyg_sar.message_flow_graphs gave (got "
            f"{type(flow).__name__} with edge_index of {type(edges).__name__})"
        )
    earlier = set(checked)
    checked.update(model.modules())
    try:
        _compare(model, data, flow, forward)
    except BaseException:
        checked.difference_update(set(checked) - earlier)
        raise


def _compare(model: nn.Module, data: Data, flow: Data, forward: Forward) -> None:
    """Raises ``ValueError`` where the seeds' outputs differ. See :func:`check_flow`."""
    with modes_kept(model):
        model.eval()
        whole = forward(model, data)[flow.input_id]
        found = forward(model, flow)[: flow.batch_size]
    error = (found - whole).abs().max() if whole.numel() else whole.new_zeros(())
    size = whole.abs().max() if whole.numel() else whole.new_zeros(())
    both = torch.stack([error.double().nan_to_num(float("inf")), size.double()])
    error, size = current().all_reduce(both, "max", label=("", "", "agreement"))
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    if not float(error) <= tolerance * float(size):
        raise ValueError(
            f"On the message flow graph the seeds' outputs are up to {float(error):.3g} off those "
            f"of the whole graph (of which the largest is {float(size):.3g}): the model passes "
            "messages on more often than 'num_layers', or takes all nodes together (norms, "
            "readouts, attention over all nodes). Train on the whole graph, or give more layers"
        )


def flow_rows(flow: Data, index: Tensor, target: str) -> Tensor:
    """Returns where the rows of a split are in a message flow graph.

    Args:
        flow: The message flow graph.
        index: Local ids of nodes.
        target: The attribute that holds the targets.

    Raises:
        ValueError: When some are no seeds.
    """
    seeds = flow.input_id
    if target not in flow or "edge" in target or flow[target].size(0) != flow.num_nodes:
        raise ValueError(f"A message flow graph is for targets of nodes (data.{target} is not)")
    if not len(seeds) and not len(index):
        return index
    rows = torch.searchsorted(seeds, index).clamp(max=max(len(seeds) - 1, 0))
    if not len(seeds) or not torch.equal(seeds[rows], index):
        raise ValueError(
            "Expected 'flow' to be made of all training nodes: some are not among its seeds"
        )
    return rows


def flow_that_pays(data: Data, seeds: Tensor, num_layers: int) -> Data | None:
    """Returns the message flow graph where it has less than 3/4 of the rows and edges. Collective.

    Args:
        data: This worker's part.
        seeds: Its training nodes.
        num_layers: The model's layers.
    """
    flow = message_flow_graphs(data, seeds, num_layers)
    nodes, edges = flow.num_sampled_nodes, flow.num_sampled_edges
    work = sum(sum(nodes[: k + 2]) + sum(edges[: k + 1]) for k in range(num_layers))
    whole = num_layers * (data.num_nodes + data.edge_index.size(1))
    both = torch.tensor([work, whole], device=seeds.device)
    work, whole = current().all_reduce(both, "sum", label=("", "", "agreement")).tolist()
    return flow if work < 0.75 * whole else None
