"""ViSNet's layer, whose messages and aggregates are tuples of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import make_graph, parts, whole
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models.visnet import ViS_MP

import pyg_sar


def layer() -> ViS_MP:
    torch.manual_seed(0)
    return ViS_MP(2, 8, 5.0, None, trainable_vecnorm=False, last_layer=False).double()


def outputs(model: ViS_MP, data: Data) -> list[Tensor]:
    """What the layer gives, and the gradient of node features."""
    x = torch.cat([data.x, data.x[:, :2]], 1).requires_grad_()
    vectors = torch.ones(len(x), 3, 8).double() * x.unsqueeze(1)
    edge_attr = torch.cat([data.edge_attr, data.edge_attr], 1)
    out, moved, edges = model(
        x, vectors, data.edge_index, data.edge_weight, edge_attr, data.edge_attr[:, :3]
    )
    found = (out, moved, edges)
    (gradient,) = torch.autograd.grad(sum(t.square().sum() for t in found), x)
    return [whole(t).detach() for t in (*found, gradient)]


def on_part(root: Path) -> list[Tensor]:
    return outputs(pyg_sar.distribute(layer()), pyg_sar.load_partition(root))


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_a_tuple_of_messages_is_aggregated_on_the_whole_graph(tmp_path: Path) -> None:
    data = make_graph()
    pyg_sar.write_partitions(data, 3, tmp_path, "random")
    for found in parts(on_part, 3, tmp_path):
        for t, expected in zip(found, outputs(layer(), data), strict=True):
            torch.testing.assert_close(t, expected, rtol=0, atol=1e-10)
