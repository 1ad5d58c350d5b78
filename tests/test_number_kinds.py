"""Layers on complex numbers and on integers: values, dtypes, gradients of single-process PyG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    MODES,
    Job,
    Partitions,
    errors,
    make_graph,
    run_jobs,
    set_policy,
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch_geometric.nn import MessagePassing

import pyg_sar

WAYS = ("weight", "rows", "output", "message", "parts", "pairs")


class Complex(MessagePassing):
    """Conjugates in one of several places; its output is real."""

    def __init__(self, way: str) -> None:
        super().__init__(aggr="sum")
        self.way = way
        self.scale = torch.nn.Parameter(torch.ones(6, dtype=torch.complex128) * (1 + 0.5j))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(1))
        w = torch.complex(edge_weight, edge_weight.square()).view(-1, 1)
        z = z.conj() if self.way == "rows" else z
        out = self.propagate(edge_index, x=z, w=w.conj() if self.way == "weight" else w)
        out = out.conj() if self.way == "output" else out
        return torch.cat([out.real, out.imag], 1) if out.is_complex() else out

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        if self.way == "message":
            return x_j.conj() * w.conj() * self.scale.conj()
        if self.way == "parts":
            return x_j.conj().real * w.conj().imag
        return torch.view_as_real(x_j * w).flatten(1) if self.way == "pairs" else x_j * w


def test_conjugates_in_layers(tmp_path: Path) -> None:
    data = make_graph(20, 60)
    root = Partitions(tmp_path)(data, 2)
    jobs = [Job(Complex(way), root, ("edge_weight",), MODES) for way in WAYS]
    found = workers(run_jobs, 2, jobs)
    for k, job in enumerate(jobs):
        expected = single_process(job.layer, data, job.edge)
        scale = expected.parameter_grads.pop("scale")
        for step, policy in enumerate(MODES):
            results = [worker[k][step] for worker in found]
            for result in results:
                torch.testing.assert_close(result.parameter_grads.pop("scale"), scale)
            assert max(errors(results, expected).values()) < 1e-10, (WAYS[k], policy)


AGGREGATIONS = ("sum", "mean", "max", "min", "mul", "var", "std", "median", "powermean")
KINDS = (torch.int64, torch.uint8, torch.bool)


class Rows(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


def _aggregates(layer: Any, x: Tensor, edge_index: Tensor) -> list[Any]:
    out: list[Any] = []
    for kind in KINDS:
        try:
            out.append(layer(x.to(kind), edge_index))
        except RuntimeError as error:
            out.append(str(error).partition("\n")[0])
    return out


def _of_workers(root: Path) -> list[list[Any]]:
    data = pyg_sar.load_partition(root)
    found = []
    for aggr in AGGREGATIONS:
        layer = pyg_sar.distribute(Rows(aggr=aggr))
        for policy in MODES[:2]:
            set_policy(layer, policy)
            found.append([whole(t) for t in _aggregates(layer, data.x, data.edge_index)])
    return found


@pytest.mark.filterwarnings("ignore")
def test_aggregations_of_integers(tmp_path: Path) -> None:
    data = make_graph(20, 60)
    data.x = torch.randint(0, 6, (20, 4), generator=torch.Generator().manual_seed(0))
    for found in workers(_of_workers, 2, Partitions(tmp_path)(data, 2)):
        for k, here in enumerate(found):
            aggr = AGGREGATIONS[k // 2]
            for one, value in zip(
                here, _aggregates(Rows(aggr=aggr), data.x, data.edge_index), strict=True
            ):
                assert type(one) is type(value), (aggr, one, value)
                if isinstance(value, str):
                    assert one == value, aggr
                else:
                    torch.testing.assert_close(one, value)
