"""What must be alike on all workers, and isn't: an error, where numbers would be wrong."""

from __future__ import annotations

import pytest
import torch
from oracle import Partitions, make_graph, threads
from torch_geometric.nn import GAT, GraphNorm

import pyg_sar
from pyg_sar.errors import WorkerError


def change(root, where, name, value, learns):
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(GAT(data.x.size(1), 4, 2, norm=GraphNorm(4)).double())
    with torch.set_grad_enabled(learns):
        model(data.x, data.edge_index).sum()
        if pyg_sar.comm.current().rank == 1:
            setattr(model.get_submodule(where), name, value)
        out = model(data.x, data.edge_index)
        if learns:
            out.square().sum().backward()


@pytest.mark.parametrize("learns", [True, False])
def test_an_attribute_changed_on_one_worker(learns, tmp_path):
    root = Partitions(tmp_path)(make_graph(), 2)
    for where, name, value in (("convs.1", "negative_slope", 0.5), ("norms.0", "eps", 0.1)):
        message = f"'{where}.{name}: {value}' at rank 1, '{where}.{name}: "
        with pytest.raises(WorkerError, match=message):
            threads(change, 2, root, where, name, value, learns)


def means(swapped):
    values = torch.arange(3.0), torch.arange(3.0) + pyg_sar.comm.current().rank
    if swapped and pyg_sar.comm.current().rank == 1:
        b = pyg_sar.mean(values[1])
        a = pyg_sar.mean(values[0])
    else:
        a = pyg_sar.mean(values[0])
        b = pyg_sar.mean(values[1])
    return float(a), float(b)


def test_means_in_another_order():
    assert threads(means, 2, False) == [(1.0, 1.5)] * 2
    with pytest.raises(WorkerError, match=r"mean at .*alike.py:\d+.*mean at .*alike.py:\d+"):
        threads(means, 2, True)
