"""``pyg_sar.verify``: what it finds, what it names, and that it can fail."""

from __future__ import annotations

import copy
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import CHANNELS, EDGE_DIM, OUT, make_graph
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.tensors import NodeTensor
from pyg_sar.tools.verify import call_with, sample_nodes


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(90, 500, dtype=torch.float32)


class Net(torch.nn.Module):
    """Two layers, with whatever a test puts between them."""

    def __init__(self, between: Any = None, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([gnn.GCNConv(CHANNELS, 8), gnn.GATConv(8, OUT)])
        self.inner = inner or torch.nn.Identity()
        self.between = between or (lambda x: x)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.inner(self.convs[0](x, edge_index).relu())
        return self.convs[1](self.between(x), edge_index)


class Cleaned(Net):
    """Takes features that are missing."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(), edge_index)


def verify(model: Any, data: Data, **options: Any) -> Any:
    """With two workers in place of three: what most tests find doesn't depend on it."""
    return pyg_sar.verify(model, data, num_workers=2, **options)


def rows_here(x: Tensor) -> Tensor:
    """All rows in one process; on a worker its own."""
    return x.to_local() if isinstance(x, NodeTensor) else x


# Models that are right #######################################################


def test_reductions_over_nodes_are_those_of_one_process(graph: Data):
    def between(x: Tensor) -> Tensor:
        top = x[torch.topk(x[:, 0], 3).indices].sum()
        return (x - x.mean(0)) / x.std() + x.max(0).values * top

    model, before = Net(between), torch.get_rng_state()
    assert verify(model, graph).ok
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_runs(graph: Data):
    model = gnn.GAT(CHANNELS, 8, 2, OUT, heads=2, norm="batch_norm", dropout=0.5)
    before = copy.deepcopy(model.state_dict())
    report = pyg_sar.verify(model, graph)
    assert report.ok, report
    assert [layer.name for layer in report.layers] == ["convs.0", "convs.1"]
    for layer in report.layers:
        assert (layer.kind, layer.strategy, layer.case) == ("GATConv", "sequential", 2)
        assert 0 < layer.resident_rows <= layer.halo_rows and layer.received_bytes > 0
    assert report.gradient_errors.keys() == {
        "data.x", *(name for name, _ in model.named_parameters())
    }  # fmt: skip
    assert "ok: the same as one process" in str(report)
    assert torch.get_default_dtype() == torch.float32 and graph.x.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and model.training


def test_a_module_that_layers_share_with_their_model(graph: Data):
    """PyG's models hand their activation to their layers: it is not watched there."""
    report = pyg_sar.verify(gnn.GIN(CHANNELS, 8, 2, OUT, norm="batch_norm"), graph)
    assert report.ok, report
    assert not report.warnings, report.warnings


class Draws(torch.nn.Module):
    """Draws in messages, between layers, by Python, and after a layer that can't run."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = gnn.GATConv(CHANNELS, 4, heads=2, dropout=0.4)
        self.mixes, self.last = Mixes(8), gnn.GCNConv(8, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.attention(F.dropout(x, 0.3), edge_index) + torch.randn(x.size(0), 1)
        x = x * random.random() + F.dropout(self.mixes(x, edge_index), 0.5)
        return self.last(F.dropout(x, 0.5), edge_index)


def test_random_numbers_are_compared(graph: Data):
    model, state = Draws(), (random.getstate(), torch.get_rng_state())
    report = pyg_sar.verify(model, graph)
    assert set(report.refused) == {"mixes (Mixes)"} and not report.first_difference, report
    assert report.output_error < 1e-12 and "dropout" not in str(report)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


def test_rows_held_are_counted(graph: Data):
    model = gnn.GraphSAGE(CHANNELS, 8, 1, OUT)
    one = pyg_sar.verify(model, graph, policy=pyg_sar.SARPolicy(prefetch=0)).layers[0]
    three = pyg_sar.verify(model, graph, policy=pyg_sar.SARPolicy(mode=3)).layers[0]
    assert 0 < one.resident_rows <= one.halo_rows <= three.resident_rows
    assert (one.case, three.case, three.strategy) == (1, 0, "one_shot")


def test_hosted_parts_and_what_they_keep(graph: Data, tmp_path: Path):
    model = gnn.Sequential(
        "x, edge_index",
        [
            (gnn.SAGEConv(CHANNELS, 8), "x, edge_index -> x"),
            (gnn.GATConv(8, OUT), "x, edge_index -> x"),
        ],
    )
    report = pyg_sar.verify(model, graph, 4, memory="1GiB", store=tmp_path)
    assert report.ok and report.hosting["parts"] == [4]
    assert [layer["case"] for layer in report.hosting["layers"].values()] == [1, 2]
    halos = [layer["backward"]["halo"] for layer in report.hosting["layers"].values()]
    assert all(halos)  # of case 1 these are targets' gradients, read where they lie
    text = str(report)
    assert f"4 parts on 1 worker (4), memory=1,073,741,824 bytes each, store={tmp_path}" in text
    assert "rows and messages again" in text
    mixes = gnn.Sequential("x, edge_index", [(Mixes(CHANNELS), "x, edge_index -> x")])
    refused = pyg_sar.verify(mixes, graph, 2, memory="1GiB")
    assert refused.refused.keys() == {"module_0 (Mixes)"}


@pytest.mark.parametrize("workers", [1, 4])
def test_numbers_of_workers(workers: int, graph: Data):
    assert pyg_sar.verify(Net(), graph, workers).ok


def test_edge_attributes_by_name_or_by_call(graph: Data):
    model = gnn.GAT(CHANNELS, 8, 2, OUT, edge_dim=EDGE_DIM)
    names = pyg_sar.tools.call_with(["x", "edge_index", "edge_attr"])
    report = verify(model, graph, call=names)
    assert report.ok and "data.edge_attr" in report.gradient_errors
    assert verify(model, graph, call=lambda m, d: m(d.x, d.edge_index, edge_attr=d.edge_attr)).ok


def test_models_that_take_the_graph_or_several_calls(graph: Data):
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = gnn.SAGEConv(CHANNELS, CHANNELS)

        def forward(self, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
            x = self.conv(data.x, data.edge_index)
            return x, {"again": F.dropout(self.conv(x, data.edge_index), 0.5, self.training)}

    assert verify(Twice(), graph).ok


def test_uninitialized_parameters(graph: Data):
    model = gnn.GCN(-1, 8, 2, OUT)
    assert verify(model, graph).ok
    assert any(torch.nn.parameter.is_lazy(p) for p in model.parameters())


# Models that are not #########################################################


def test_a_local_mean_is_found(graph: Data):
    report = verify(Net(lambda x: x - rows_here(x).mean(0)), graph)
    assert not report.ok and not report.refused
    assert report.output_error > 1e-4
    assert re.match(r"the input of 'convs.1' \(GATConv\) differs .* Net.forward", str(
        report.first_difference))  # fmt: skip
    assert report.layers[0].output_error < 1e-12


def test_the_first_module_that_differs_is_found(graph: Data):
    class Centred(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) - rows_here(x).max(dim=0).values

    report = verify(Net(inner=Centred()), graph)
    assert "the output of 'inner' (Centred)" in report.first_difference
    assert "Centred.forward()" in report.first_difference


def test_the_model_s_own_end_is_found(graph: Data):
    class End(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = gnn.SAGEConv(CHANNELS, OUT)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index) / rows_here(x).norm()

    report = verify(End(), graph)
    assert "the output of End differs" in report.first_difference
    assert report.layers[0].output_error < 1e-12


def test_gradients_that_are_zero_differ_by_rounding():
    """The softmax of one edge is 1, whatever its attributes. There are as many edges as nodes."""
    rows = torch.arange(30)
    edge_index = torch.stack([rows, rows // 3 * 3 + (rows + 1) % 3])
    ring = Data(x=torch.rand(30, 4), edge_index=edge_index, edge_attr=torch.rand(30, 2))

    def call(model: torch.nn.Module, data: Data) -> Tensor:
        return model(data.x, data.edge_index, data.edge_attr)

    layer = gnn.GATConv(4, 3, edge_dim=2, add_self_loops=False)
    assert verify(layer, ring, call=call).ok


def test_a_wrong_gradient_is_found(graph: Data):
    """Values are right, gradients are not: the mean is cut out of the graph in one process only."""

    def halved(x: Tensor) -> Tensor:
        rows = rows_here(x).size(0) / 90
        return x * rows + (x * (1 - rows)).detach()

    report = verify(Net(halved), graph)
    assert report.output_error < 1e-12
    assert report.first_difference.startswith("outputs agree, but the gradient of")


def test_a_wrong_buffer_is_found(graph: Data):
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += rows_here(x).size(0)
            return x

    report = verify(Net(inner=Counts()), graph)
    assert "the buffer 'inner.seen' differs" in report.first_difference


class Mixes(gnn.MessagePassing):
    """Its message depends on all edges, and reads runs of memory, which workers don't have."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(channels, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x))

    def message(self, x_j: Tensor) -> Tensor:
        return (x_j - x_j.mean(dim=0)).as_strided(x_j.shape, (1, 1))


def test_everything_that_is_refused_is_named(graph: Data):
    class Refused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Mixes(CHANNELS)
            self.norm = torch.nn.BatchNorm2d(8)
            self.second = Mixes(8)
            self.last = gnn.GATConv(8, OUT)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.norm(self.first(x, edge_index)[..., None, None])[..., 0, 0]
            return self.last(self.second(x, edge_index), edge_index)

    report = verify(Refused(), graph)
    assert report.refused.keys() == {"first (Mixes)", "second (Mixes)"}
    assert not report.ok and report.failure == "" and report.first_difference == ""
    assert [(layer.name, layer.output_error < 1e-12) for layer in report.layers] == [("last", True)]
    for name in report.refused:
        assert f"not supported: {name}: " in str(report)


def test_the_model_s_own_code_is_refused(graph: Data):
    class Strides(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = gnn.SAGEConv(CHANNELS, OUT)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index).as_strided((90, 1), (1, 1))

    report = verify(Strides(), graph)
    assert not report.ok and "as_strided" in report.failure
    assert "failed: DistributedIndexError" in str(report)


@pytest.mark.parametrize("flaw", ["names", "workers", "plain error"])
def test_mistakes(flaw: str, graph: Data):
    if flaw == "names":
        with pytest.raises(ValueError, match=r"'batch'.*call="):
            pyg_sar.verify(gnn.SGFormer(CHANNELS, 8, OUT), graph)
    elif flaw == "workers":
        for name, wrong in (
            ("num_workers", 0),
            ("num_workers", "3"),
            ("max_nodes", 1.5),
            ("tolerance", -1),
            ("tolerance", "x"),
        ):
            with pytest.raises(ValueError, match=rf"'{name}' to be .* \(got {wrong!r}\)"):
                pyg_sar.verify(Net(), graph, **{name: wrong})
        with pytest.raises(ValueError, match=f"'num_workers' is {graph.num_nodes + 1}, .* fewer"):
            pyg_sar.verify(Net(), graph, graph.num_nodes + 1)
        for name, wrong in (("model", 3), ("data", HeteroData()), ("policy", "x"), ("call", 3)):
            given = {"model": Net(), "data": graph, name: wrong}
            with pytest.raises(TypeError, match=f"'{name}' to be .* {type(wrong).__name__}"):
                pyg_sar.verify(**given)
        with pytest.raises(ValueError, match=r"the plain model: call it before distribute\(\)"):
            pyg_sar.verify(pyg_sar.distribute(Net()), graph)
        with pytest.raises(ValueError, match=r"no \['nope'\]; it has .*edge_index"):
            pyg_sar.verify(Net(), graph, call=call_with(["nope"]))
    else:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            pyg_sar.verify(gnn.GCN(CHANNELS + 1, 8, 2, OUT), graph)
        assert "plain PyG in one process" in caught.value.__notes__[0]
        assert torch.get_default_dtype() == torch.float32
        broken = graph.clone()
        broken.x[3, 0] = math.nan
        with pytest.raises(ValueError, match=r"outputs are not finite.*: data\.x holds NaN"):
            pyg_sar.verify(Net(), broken)
        assert verify(Cleaned(), broken).ok


# The sample ##################################################################


def test_samples_grow_along_edges():
    graph = make_graph(400, 1600)
    sample = sample_nodes(graph, 100, seed=3)
    assert sample.num_nodes == 100 and sample.x.size(0) == 100
    assert sample.num_edges == sample.edge_attr.size(0)
    # An induced subgraph of random nodes would keep a sixteenth of the edges.
    assert sample.num_edges > graph.num_edges / 12
    assert torch.equal(sample.x, sample_nodes(graph, 100, seed=3).x)
    assert not torch.equal(sample.x, sample_nodes(graph, 100, seed=4).x)
    assert sample_nodes(graph, 400) is graph
    none = Data(x=torch.zeros(30, 1), edge_index=torch.empty(2, 0, dtype=torch.long))
    assert sample_nodes(none, 7).num_nodes == 7


def test_a_sample_is_verified(graph: Data):
    report = pyg_sar.verify(Net(), graph, max_nodes=40)
    assert report.ok and (report.num_nodes, report.of_nodes) == (40, 90)
    assert "on 40 of 90 nodes" in str(report)


# The command #################################################################


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], graph: Data):
    torch.save(graph, tmp_path / "graph.pt")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch_geometric.nn import GATConv\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, data):\n"
        "        super().__init__()\n"
        f"        self.conv = GATConv(data.num_features, 4, edge_dim={EDGE_DIM})\n"
        "    def forward(self, x, edge_index, edge_attr=None):\n"
        "        rows = getattr(x, 'to_local', lambda: x)()\n"
        "        return self.conv(x - rows.mean(0) * (edge_attr is None), edge_index, edge_attr)\n"
    )
    source, model = str(tmp_path / "graph.pt"), f"{tmp_path}/net.py:Net"
    assert main(["verify", source, "--model", model, "--args", "x,edge_index,edge_attr"]) == 0
    assert "ok: the same" in capsys.readouterr().out
    assert main(["verify", source, "--model", model]) == 1
    assert "DIFFERS: the output of Net" not in (found := capsys.readouterr().out)
    assert "DIFFERS: the input of 'conv' (GATConv)" in found
    assert main(["verify", source, "--model", "sage", "--norm", "batch", "--workers", "2"]) == 0
    assert "2 workers against one process" in capsys.readouterr().out
    for wrong, match in (("sag", "'module:callable'"), ("nowhere:x", "no module"),
                         (f"{tmp_path}/net.py:Nat", "no function or class")):  # fmt: skip
        assert main(["verify", source, "--model", wrong]) == 2
        assert match in capsys.readouterr().err
