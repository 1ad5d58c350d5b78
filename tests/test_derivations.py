"""What a model derives of ids and masks in each pass: found again, but never what was written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import everything
from oracle import parts, whole
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, MessagePassing
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, softmax

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.tensors import NodeTensor, node_rows, wrap

N = 24
LOOPS = torch.arange(N)


MASKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda ids: ids % 3 != 1,
    lambda ids: (ids > 4) & (ids != ids.flip(0)),
    lambda ids: torch.where(ids < 9, ids, 1) == 1,
    lambda ids: ids.eq(LOOPS if len(ids) == N else 3),
)
IDS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda ids: (ids * 5 + 2) % N,
    lambda ids: ids.clamp(max=7),
    lambda ids: ids[: len(ids) // 2 * 2].view(2, -1)[1],
    lambda ids: torch.cat([ids, LOOPS[:5]]),
    lambda ids: torch.stack([ids, ids.flip(0)])[1],
    lambda ids: ids.roll(1),
    lambda ids: torch.cat([ids, ids[ids > 3]]),
    lambda ids: torch.randint_like(ids, N),
    lambda ids: torch.empty_like(ids).copy_(ids).add_(1).fmod_(N),
    lambda ids: (ids + torch.randint(N, (len(ids),))) % N,
)


def used(ids: Tensor, mask: Tensor, x: Tensor) -> Iterator[Tensor]:
    yield x[ids].square().sum()
    yield torch.zeros_like(x[:, 0]).index_add(0, ids, x[ids, 0] * 2).exp().sum()
    yield x[ids[mask]].sin().sum()
    one, other = torch.stack([mask, ~mask]).unbind(0)
    yield x[ids[one]].sum() * 2 + x[ids[other]].exp().sum()
    if len(mask) == N:
        yield torch.cat([x[mask], x[:2]]).prod(-1).sum()


def write(kind: int, ids: Tensor, mask: Tensor) -> None:
    """Writes into what a program starts from, or what it has derived."""
    if kind == 0:
        ids[3] = 5
    elif kind == 1:
        ids.copy_((ids + 7) % N)
    elif kind == 2:
        ids.data[1:4] = 0
    elif kind == 3:
        mask[2:9] = True
    elif kind == 4:
        mask.logical_not_()
    elif kind == 5:
        ids[mask] = 2


def program(seed: int, x: Tensor, ids: Tensor) -> list[Tensor]:
    """Passes that derive the same each time, of what some of them write."""
    draw, out, start = random.Random(seed), [], ids
    torch.manual_seed(seed)
    steps = [(draw.choice(IDS), draw.choice(MASKS)) for _ in range(3)]
    for _ in range(5):
        ids = start
        for derive, choose in steps:
            ids = derive(ids)
            mask = choose(ids)
            out += [*used(ids, mask, x)]
            if draw.random() < 0.3:
                write(draw.choice([3, 4]), ids, mask)
                out += [*used(ids, mask, x)]
        if draw.random() < 0.6:
            write(draw.randrange(6), start, draw.choice(MASKS)(start))
    return out


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, 3, dtype=torch.float64), torch.randint(N, (N,))


def distributed(seeds: range) -> list[list[Tensor]]:
    comm, (x, ids) = current(), tensors()
    rows = node_rows(comm, torch.arange(comm.rank, N, comm.world_size), N)
    local = x[rows.ids], ids[rows.ids]
    return [
        [t.detach() for t in program(seed, *(wrap(t.clone(), rows, 0) for t in local))]
        for seed in seeds
    ]


def test_programs_that_repeat_and_write() -> None:
    seeds = range(20 if everything() else 8)
    for found in parts(distributed, 3, seeds):
        for seed, values in zip(seeds, found, strict=True):
            torch.testing.assert_close(values, program(seed, *tensors()), rtol=1e-10, atol=1e-10)


def written_in_place(kind: str) -> Any:
    comm = current()
    rows = node_rows(comm, torch.arange(comm.rank, N, comm.world_size), N)
    ids = wrap(rows.ids.clone(), rows, 0)
    found = []
    for _ in range(2):
        mask = ids % 2 == 0
        if len(found) == 0 and kind == "to_local":
            mask.to_local().fill_(True)
        if len(found) == 0 and kind == "another one":
            (ids % 2 == 0).fill_(True)
        found.append((int(mask.sum()), len(ids[mask])))
    return found


@pytest.mark.parametrize(("kind", "right"), [("to_local", N), ("another one", N // 2)])
def test_a_write_stays_where_it_was_made(kind: str, right: int) -> None:
    for found in parts(written_in_place, 3, kind):
        assert found == [(right, right), (N // 2, N // 2)]


# Layers of one's own ##########################################################


class Gcn(MessagePassing):
    """As PyG's tutorial writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        return self.propagate(edge_index, x=self.lin(x), norm=scale[row] * scale[col])

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Gat(MessagePassing):
    """With attention that ``forward`` computes."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.att = nn.Linear(channels, channels), nn.Linear(2 * channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        edge_index, _ = add_self_loops(edge_index[:, edge_index[0] != edge_index[1]])
        row, col = edge_index
        score = self.att(torch.cat([x[row], x[col]], -1)).tanh()
        return self.propagate(edge_index, x=x, alpha=softmax(score, col, num_nodes=x.size(0)))

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * x_j


class OwnGcn(GCNConv):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


class OwnGat(GATConv):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


def passes(kind: Callable[[int], nn.Module], data: Any, prepared: Callable[..., Any]) -> Any:
    """Steps of training, between which an edge is turned round."""
    torch.manual_seed(0)
    model = prepared(kind(data.x.size(1)).double())
    optimizer, out, sent = torch.optim.SGD(model.parameters(), 0.01), [], []
    for step in range(6):
        if step == 4:
            data.edge_index[:, 7] = data.edge_index[:, 7].flip(0)
        with pyg_sar.Ledger(current()) as ledger:
            found = model(data.x, data.edge_index)
            found.sin().sum().backward()
        out.append(whole(found.detach()) if isinstance(found, NodeTensor) else found.detach())
        optimizer.step()
        optimizer.zero_grad()
        sent.append(ledger.sent_messages())
    return out, sent


def on_parts(kind: Callable[[int], nn.Module], root: Path) -> Any:
    out, sent = passes(kind, pyg_sar.load_partition(root), pyg_sar.distribute)
    return out, sent, current().made_edges.made


@pytest.mark.parametrize(("kind", "most"), [(Gcn, 13), (Gat, 40), (OwnGcn, 14), (OwnGat, 46)])
def test_layers_of_ones_own(kind: Any, most: int, root: Path, graph: Data) -> None:
    """A steady pass sends no plan, nor what workers must agree on to make one."""
    right, _ = passes(kind, graph.clone(), lambda layer: layer)
    for out, sent, made in parts(on_parts, 3, kind, root):
        torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
        assert sent[1:4] == [most] * 3, sent
        assert made == 3, (
            "after a write they are distributed anew, as are those that a layer derives"
        )
