"""SIGN, SGC, APPNP, label propagation, Correct and Smooth: two workers have PyG's numbers."""

import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, CorrectAndSmooth, LabelPropagation, SGConv
from torch_geometric.transforms import SIGN

import pyg_sar
from pyg_sar.tools import load_graph

GRAPH = "synthetic:nodes=400,degree=8,features=16,classes=4,signal=0.5"
K, CLASSES, WORKERS, EPOCHS = 2, 4, 2, 30


class OfAll(nn.Linear):
    """SIGN: a linear map of features that were propagated before the training."""

    def forward(self, data: Data) -> torch.Tensor:
        return super().forward(torch.cat([data.x, data.x1, data.x2], dim=1))


class Simple(nn.Module):
    def forward(self, data: Data) -> torch.Tensor:
        return self.conv(data.x, data.edge_index)


class Personalised(nn.Linear):
    """APPNP: predictions of each node, spread with restarts."""

    def forward(self, data: Data) -> torch.Tensor:
        return self.spread(super().forward(data.x), data.edge_index)


def results(data: Data, made) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    size = data.x.size(1)
    models = OfAll((K + 1) * size, CLASSES), Simple(), Personalised(size, CLASSES)
    models[1].conv = SGConv(size, CLASSES, K, cached=True)
    models[2].spread = APPNP(K=5, alpha=0.1)
    outputs, mask = {}, data.train_mask
    for name, plain in zip(("SIGN", "SGC", "APPNP"), models, strict=True):
        model = made(plain.double())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            F.cross_entropy(model(data)[mask], data.y[mask]).backward()
            optimizer.step()
        outputs[name] = model(data).detach()
    labels, soft = F.one_hot(data.y, CLASSES).double(), outputs["SGC"].softmax(dim=1)
    spread, post = made(LabelPropagation(3, 0.9)), made(CorrectAndSmooth(20, 0.8, 20, 0.8))
    outputs["label propagation"] = spread(labels, data.edge_index, mask=mask)
    soft = post.correct(soft, data.y[mask], mask, data.edge_index)
    outputs["SGC, C&S"] = post.smooth(soft, data.y[mask], mask, data.edge_index)
    return outputs


def work(root: str) -> dict[str, torch.Tensor]:
    torch.set_default_dtype(torch.float64)  # LabelPropagation makes tensors of it.
    pyg_sar.tools.propagate_features(root, K, f"{root}-propagated")
    found = results(pyg_sar.load_partition(f"{root}-propagated"), pyg_sar.distribute)
    return {name: out.full_tensor() for name, out in found.items()}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", message="Sparse")  # PyTorch's, in one process.
    graph = load_graph(GRAPH)
    graph.x = graph.x.double()
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(graph, WORKERS, f"{root}/parts")
        found = pyg_sar.launch(work, WORKERS, f"{root}/parts")[0]
    for name, out in results(SIGN(K)(graph), lambda model: model).items():
        right = (out.argmax(1) == graph.y)[graph.test_mask].double().mean()
        apart = float((found[name] - out).abs().max())
        print(f"{name}: test accuracy {right:.3f}, largest difference {apart:.0e}")
