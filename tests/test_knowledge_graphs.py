"""Messages that depend on a query and on the edge's relation: those of NBFNet (Zhu et al., 2021).

States ``[B, N, F]`` are those of a batch of queries on one graph, of which no node is sampled.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import in_turn
from oracle import TOLERANCE, error, gradient_scale, parts, whole, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, scatter

import pyg_sar
from pyg_sar import SARPolicy

NODES, EDGES, RELATIONS, WIDTH = 48, 240, 5, 4
MESSAGES, REDUCTIONS = ("distmult", "transe", "rotate"), ("sum", "max", "pna")
HEADS, ASKED = torch.tensor([3, 10, 40]), torch.tensor([0, 2, 4])


class BellmanFord(MessagePassing):
    """A generalized Bellman-Ford iteration.

    Args:
        from_query: Relations are computed from the query, not parameters of the layer.
        kind: The message: what a relation does to a source's state.
        aggr: How messages and the boundary condition are reduced.
    """

    def __init__(self, from_query: bool, kind: str, aggr: str) -> None:
        several = ["mean", "max", "min", "std"] if aggr == "pna" else aggr
        super().__init__(aggr=several, node_dim=-2)
        self.kind = kind
        count = 5 if aggr == "pna" else 2
        self.relation = torch.nn.Embedding(RELATIONS, WIDTH)
        self.of_query = torch.nn.Linear(WIDTH, RELATIONS * WIDTH) if from_query else None
        self.out, self.norm = torch.nn.Linear(count * WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)

    def relations(self, query: Tensor) -> Tensor:
        if self.of_query is None:
            return self.relation.weight.expand(len(query), -1, -1)
        return self.of_query(query).view(len(query), RELATIONS, WIDTH)

    def forward(self, state: Tensor, query: Tensor, boundary: Tensor, data: Data) -> Tensor:
        given = {"relation": self.relations(query), "edge_type": data.edge_type}
        out = self.propagate(data.edge_index, state=state, edge_weight=data.weight, **given)
        return self.combined(state, self.with_boundary(out, boundary))

    def message(
        self, state_j: Tensor, relation: Tensor, edge_type: Tensor, edge_weight: Tensor
    ) -> Tensor:
        rows = relation.index_select(-2, edge_type)
        return self.acted_on(state_j, rows) * edge_weight.view(-1, 1)

    def acted_on(self, state: Tensor, relation: Tensor) -> Tensor:
        if self.kind == "distmult":
            return state * relation
        if self.kind == "transe":
            return state + relation
        (a, b), (c, d) = state.chunk(2, -1), relation.chunk(2, -1)
        return torch.cat([a * c - b * d, a * d + b * c], -1)

    def with_boundary(self, out: Tensor, boundary: Tensor) -> Tensor:
        several = not isinstance(self.aggr, str)
        if self.aggr == "max":
            return torch.maximum(out, boundary)
        return out + (torch.cat([boundary] * 4, -1) if several else boundary)

    def combined(self, state: Tensor, out: Tensor) -> Tensor:
        return self.norm(self.out(torch.cat([state, out], -1))).relu()


class Original(BellmanFord):
    """As NBFNet's code has it: ``message`` appends the boundary, ``aggregate`` knows of it.

    Of PNA, the degrees are scaled by a mean over all nodes.
    """

    def forward(self, state: Tensor, query: Tensor, boundary: Tensor, data: Data) -> Tensor:
        given = {"relation": self.relations(query), "edge_type": data.edge_type}
        given |= {"boundary": boundary, "edge_weight": data.weight}
        return self.propagate(data.edge_index, state=state, size=(NODES, NODES), **given)

    def message(
        self, state_j: Tensor, relation: Tensor, boundary: Tensor, edge_type: Tensor
    ) -> Tensor:
        rows = relation.index_select(self.node_dim, edge_type)
        message = F.dropout(self.acted_on(state_j, rows), 0.2)
        return torch.cat([message, boundary], dim=self.node_dim)

    def aggregate(self, input: Tensor, edge_weight: Tensor, index: Tensor, dim_size: int) -> Tensor:
        index = torch.cat([index, torch.arange(dim_size, device=input.device)])
        edge_weight = torch.cat([edge_weight, torch.ones(dim_size, device=input.device)])
        shape = [1] * input.dim()
        shape[self.node_dim] = -1
        values = input * edge_weight.view(shape)
        if isinstance(self.aggr, str):
            return scatter(values, index, self.node_dim, dim_size, self.aggr)
        squares = input.square() * edge_weight.view(shape)
        mean, square = (scatter(v, index, -2, dim_size, "mean") for v in (values, squares))
        high, low = (scatter(values, index, -2, dim_size, kind) for kind in ("max", "min"))
        std = (square - mean**2).clamp(min=1e-6).sqrt()
        features = torch.cat([mean, high, low, std], -1)
        scale = degree(index, dim_size).to(values.dtype).log().unsqueeze(-1)
        return features * (scale / scale.mean())

    def update(self, inputs: Tensor, state: Tensor) -> Tensor:
        return self.combined(state, inputs)


class Network(torch.nn.Module):
    """Two iterations from the boundary condition, and a score of each node.

    Args:
        layer: Makes a layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.query = torch.nn.Embedding(RELATIONS, WIDTH)
        self.layers = torch.nn.ModuleList([layer(), layer()])
        self.score = torch.nn.Linear(2 * WIDTH, 1)

    def forward(self, data: Data) -> Tensor:
        query = self.query(ASKED)
        starts = (data.node.view(1, -1) == HEADS.view(-1, 1)).to(query.dtype)
        state = boundary = starts.unsqueeze(-1) * query.unsqueeze(1)
        for layer in self.layers:
            state = layer(state, query, boundary, data) + state
        pair = torch.cat([state, query.unsqueeze(1).expand(-1, state.size(1), -1)], -1)
        return self.score(pair).squeeze(-1)


def graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data(
        edge_index=torch.randint(NODES, (2, EDGES), generator=draw),
        edge_type=torch.randint(RELATIONS, (EDGES,), generator=draw),
        weight=torch.rand(EDGES, generator=draw, dtype=torch.float64) + 0.5,
        node=torch.arange(NODES),
        y=torch.rand(NODES, generator=draw, dtype=torch.float64),
        num_nodes=NODES,
    )


CASES = list(product((True, False), MESSAGES, REDUCTIONS))


def network(case: Any, kind: type[BellmanFord] = BellmanFord) -> Network:
    torch.manual_seed(1)
    return Network(lambda: kind(*case)).double()


def step(model: Any, data: Data) -> tuple[Tensor, dict[str, Tensor | None]]:
    scores = model(data)
    (scores - data.y).square().mean().backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters()}


def on_workers(root: Path, kind: type[BellmanFord], chosen: list[Any]) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for case in chosen:
        k = CASES.index(case)
        policy = SARPolicy(mode=(k + k // len(REDUCTIONS)) % 3 + 1)
        model = pyg_sar.distribute(network(case, kind), policy)
        torch.manual_seed(7)
        scores, gradients = step(model, data)
        found.append((whole(scores.transpose(0, 1)), gradients))
    return found


@pytest.mark.filterwarnings("ignore:Original .* mixes:pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("kind", [BellmanFord, Original])
@pytest.mark.parametrize(("start", "world"), [(workers, 2), (parts, 3)])
def test_nbfnet(start, world, kind, tmp_path):
    data, expected = graph(), []
    pyg_sar.write_partitions(data, world, tmp_path / "parts", "random")
    chosen = in_turn([CASES] * 5)[2 * (kind is Original) + (start is parts)]
    for case in chosen:
        model = network(case, kind)
        torch.manual_seed(7)
        expected.append(step(model, data))
    for found in start(on_workers, world, tmp_path / "parts", kind, chosen):
        for case, (scores, gradients), (right, others) in zip(chosen, found, expected, strict=True):
            assert error(scores, right.transpose(0, 1)) <= TOLERANCE, case
            scale = gradient_scale(others)
            wrong = {n: error(gradients[n], g, scale) for n, g in others.items() if g is not None}
            assert max(wrong.values()) <= TOLERANCE, (case, wrong)
