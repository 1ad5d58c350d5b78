"""Training steps on part of the graph: message flow graphs, and sampled neighbours.

Steps on message flow graphs are proved to be those of the whole graph. Sampling is there to compare
with: several steps an epoch, each an estimate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data
from torch_geometric.nn import HeteroBatchNorm

from pyg_sar.files import check_argument, check_whole
from pyg_sar.message.layer_state import modes_kept
from pyg_sar.partition.message_flow import distributed_edges, message_flow_graphs, sample_neighbors
from pyg_sar.space.draws import keyed_numbers
from pyg_sar.tensors import rows_at, wrap
from pyg_sar.tensors.rows import every_rows
from pyg_sar.train.targets import Targets
from pyg_sar.train.wire_error import exact_rows, values_kept

Forward = Callable[[nn.Module, Data], Tensor]
Changed = Callable[[nn.Module], AbstractContextManager[Any]]


def call_model(model: nn.Module, data: Data) -> Tensor:
    """Makes the default forward pass: ``model(data.x, data.edge_index)``.

    PyG's own models trim a message flow graph from layer to layer.
    """
    return model(data.x, data.edge_index, **trimming(model, data))


def trimming(model: nn.Module, data: Data) -> dict[str, Any]:
    """Returns the arguments by which PyG's models trim a message flow graph, where they do."""
    names = "num_sampled_nodes", "num_sampled_edges"
    takes = inspect.signature(model.forward).parameters
    if names[0] not in data or hasattr(model, "jk"):  # JumpingKnowledge needs all layers' rows.
        return {}
    return {f"{n}_per_hop": data[n] for n in names if f"{n}_per_hop" in takes}


def refuse_in_flow(model: nn.Module, *, sampled: bool = False) -> None:
    """Raises ``ValueError`` where a message flow graph is known to change a module's training.

    With ``sampled`` statistics of batches are asked for.
    """
    for name, module in model.named_modules():
        reason = ""
        running = getattr(module, "track_running_stats", False) is True
        if (running or isinstance(module, _BatchNorm | HeteroBatchNorm)) and not sampled:
            reason = "takes statistics over all nodes in training"
        elif getattr(module, "cached", False) is True:
            reason = "has cached=True, and keeps the edges of one graph for the other"
        if reason:
            raise ValueError(
                f"A message flow graph would change the training of {type(module).__name__} "
                f"({name}), which {reason}: train on the whole graph"
            )


@torch.no_grad()
def check_flow(model: nn.Module, data: Data, flow: Data, *, forward: Forward = call_model) -> None:
    """Compares the seeds' outputs on a message flow graph with the whole graph's. Collective.

    It takes two passes over each, in evaluation mode, with rows that travel as they are: narrow
    wires (``SARPolicy(wire=...)``) round those of either otherwise. In the second one no parameter
    is near 0, as a layer of zeros would hide all that is before it. Layers of other models refuse
    ``flow``.

    Args:
        model: The distributed model.
        data: The graph that ``flow`` was made of.
        flow: What :func:`pyg_sar.partition.message_flow_graphs` gave.
        forward: Calls the model on either.

    Raises:
        TypeError: When ``flow`` is no message flow graph of all neighbours.
        ValueError: On every worker, where they differ by more than rounding, or the model holds a
            module whose training would.
    """
    refuse_in_flow(model)
    edges = getattr(flow.get("edge_index"), "edges", None)
    compared = None if edges is None else edges.targets.compared
    if compared is None:
        raise TypeError(
            "Expected 'flow' to be what pyg_sar.partition.message_flow_graphs gave (got "
            f"{type(flow).__name__})"
        )
    earlier = set(compared)
    compared.update(model.modules())
    try:
        _compare(model, data, flow, forward)
    except BaseException:
        compared.difference_update(set(compared) - earlier)
        raise


def _compare(model: nn.Module, data: Data, flow: Data, forward: Forward) -> None:
    """Raises ``ValueError`` where the seeds' outputs differ. See :func:`check_flow`."""
    ways: tuple[Changed, ...] = (nullcontext, _away_from_zero)
    for changed in ways:
        with modes_kept(model), exact_rows(model), changed(model):
            model.eval()
            whole = forward(model, data)[flow.input_id]
            found = forward(model, flow)[: flow.batch_size]
        error, size = (float(t.abs().nan_to_num(math.inf).max()) for t in (found - whole, whole))
        tolerance = torch.finfo(whole.dtype).eps ** 0.5
        too_large = changed is _away_from_zero and math.isinf(size)
        if not too_large and not error <= tolerance * size:
            raise ValueError(
                f"On the message flow graph the seeds' outputs are up to {error:.3g} off those of "
                f"the whole graph (of which the largest is {size:.3g}): the model passes messages "
                "on more often than 'num_layers', or takes all nodes together (norms, readouts, "
                "attention over all nodes). Train on the whole graph, or give more layers"
            )


@contextmanager
def _away_from_zero(model: nn.Module) -> Iterator[None]:
    """Meanwhile parameters near 0 are +-0.1 to 0.2, alike on all workers.

    A layer that starts at 0 (ReZero, LayerScale, a last layer of zeros) would hide what is before.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    with values_kept(parameters):
        for k, parameter in enumerate(parameters):
            draw = torch.Generator().manual_seed(k)
            number = 0.2 * torch.rand(parameter.shape, generator=draw) - 0.1
            number = (number + 0.1 * number.sign()).to(parameter)
            parameter.copy_(torch.where(parameter.abs() < 0.1, number, parameter))
        yield


def training_seeds(flow: Data, targets: Targets, target: str) -> Tensor:
    """Returns which seeds of a message flow graph are training nodes, bool ``[batch_size]``.

    ``targets`` are those of the graph that it was made of. All training nodes must be seeds.
    """
    if target not in flow or "edge" in target or flow[target].size(0) != flow.num_nodes:
        raise ValueError(f"A message flow graph is for targets of nodes (data.{target} is not)")
    seeds = targets.masks["train"][flow.input_id]
    if int(seeds.sum()) < targets.counts["train"]:
        raise ValueError(
            "Expected 'flow' to be made of all training nodes: some are not among its seeds"
        )
    return seeds


def flow_that_pays(data: Data, seeds: Tensor, num_layers: int) -> Data | None:
    """Returns the message flow graph where it has less than 3/4 of the rows and edges. Collective.

    ``seeds`` are the training nodes, a mask or ids.
    """
    flow = message_flow_graphs(data, seeds, num_layers)
    nodes, edges = flow.num_sampled_nodes, flow.num_sampled_edges
    work = sum(sum(nodes[: k + 2]) + sum(edges[: k + 1]) for k in range(num_layers))
    return flow if work < 0.75 * num_layers * (data.num_nodes + data.num_edges) else None


# Sampled neighbours ###########################################################


@dataclass(frozen=True, kw_only=True)
class NeighborSampling:
    """Steps on batches of training nodes with sampled neighbours, as of PyG's ``NeighborLoader``.

    The batches of an epoch, and the neighbours, are functions of the seed and of global ids: the
    same for any number of workers.

    Args:
        num_neighbors: The most in-edges of a node, by hop from the batch's nodes; -1 keeps all.
        batch_size: Training nodes of a step, on all workers together.

    Raises:
        ValueError: For a batch without nodes, or other numbers of neighbours.
    """

    num_neighbors: tuple[int, ...]
    batch_size: int = 1024

    def __post_init__(self) -> None:
        size, numbers = self.batch_size, self.num_neighbors
        check_whole("batch_size", size)
        several = isinstance(numbers, list | tuple) and len(numbers) > 0
        fits = several and all(type(n) is int and (n == -1 or n > 0) for n in numbers)
        wanted = "integers, -1 or at least 1, by hop, such as (10, 5)"
        check_argument(fits, "num_neighbors", numbers, wanted)

    def batches(self, data: Data, mask: Tensor, seed: int, epoch: int) -> Iterator[Data]:
        """Yields the graphs of an epoch, of the training nodes in ``mask``, bool ``[num_nodes]``.
        Collective.

        All draws are functions of the seed and the epoch.
        """
        nodes = distributed_edges(data).targets
        own = rows_at(mask, nodes, 0)
        first = seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9
        numbers = keyed_numbers(nodes.ids[own], first % 2**63)
        everyone = torch.cat(every_rows(numbers, nodes.comm)).sort().values
        batch = torch.full_like(nodes.ids, -1)
        batch[own] = torch.searchsorted(everyone, numbers) // self.batch_size
        for k in range(-(-len(everyone) // self.batch_size)):
            key = (first + (k + 1) * 0x94D049BB133111EB) % 2**63
            yield sample_neighbors(data, wrap(batch == k, nodes, 0), self.num_neighbors, key)
