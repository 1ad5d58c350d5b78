"""Runs one script of PyG for a few epochs on graphs that need no download.

    python benchmarks/script_stand_ins.py --epochs 3 SCRIPT [ARGUMENTS...]
    pyg-sar run --workers 2 benchmarks/script_stand_ins.py --epochs 3 SCRIPT [ARGUMENTS...]

The script's text is changed in its numbers of epochs, and where it rounds what it prints: all
digits are shown. Planetoid's graphs are the real ones, from the folder PLANETOID names; those of
other datasets are random, of the same attributes, types and relations, and small. They are seeded,
and made without a draw of the global generators. See benchmarks/scripts.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch_geometric.datasets
import torch_geometric.logging
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset

# The script's text #########################################################


def rewritten(text: str, epochs: int) -> str:
    """Returns a script with fewer epochs, which prints all digits."""
    fewer = [
        (r"range\((0|1), (\d+)\)", lambda m: f"range({m[1]}, {min(int(m[2]), 1 + epochs)})"),
        (r"(epoch in range\()(\d+)\)", lambda m: f"{m[1]}{min(int(m[2]), epochs)})"),
        (r"(-epochs'.*default=)(\d+)", lambda m: f"{m[1]}{min(int(m[2]), epochs)}"),
        (r'(-epochs".*default=)(\d+)', lambda m: f"{m[1]}{min(int(m[2]), epochs)}"),
        (r"((?:n_steps|num_epochs|epochs) = )(\d+)\b", lambda m: f"{m[1]}{epochs}"),
        (r"(GNNExplainer\(epochs=)(\d+)", lambda m: f"{m[1]}{min(int(m[2]), epochs)}"),
        (r"epoch % \d+ == 0", lambda m: "epoch % 1 == 0"),
    ]
    for pattern, replace in fewer:
        text = re.sub(pattern, replace, text)
    return re.sub(r":\.\d+f\}", ":.15g}", text)


def log(**values: Any) -> None:
    """Takes the place of ``torch_geometric.logging.log``."""
    print(", ".join(f"{name}: {float(value):.15g}" for name, value in values.items()))


# Graphs ####################################################################


class Draws:
    """Random numbers that leave the global generators alone."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def edges(self, sources: int, targets: int, count: int) -> Tensor:
        row = torch.randint(sources, (count,), generator=self.generator)
        col = torch.randint(targets, (count,), generator=self.generator)
        return torch.stack([row, col]).unique(dim=1).contiguous()

    def two_way(self, nodes: int, count: int) -> Tensor:
        edge_index = self.edges(nodes, nodes, count)
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        return torch.cat([edge_index, edge_index.flip(0)], dim=1).unique(dim=1).contiguous()

    def features(self, nodes: int, width: int) -> Tensor:
        """Values of one and zero, like bags of words."""
        drawn = torch.rand(nodes, width, generator=self.generator) < 0.2
        return drawn.to(torch.get_default_dtype())

    def classes(self, nodes: int, number: int) -> Tensor:
        return torch.randint(number, (nodes,), generator=self.generator)

    def split(self, nodes: int, columns: int = 0) -> list[Tensor]:
        """Masks of training, validation and test; ``columns`` of them where there are several."""
        drawn = torch.rand(nodes, columns or 1, generator=self.generator)
        masks = [drawn < 0.4, (drawn >= 0.4) & (drawn < 0.7), drawn >= 0.7]
        return masks if columns else [mask[:, 0] for mask in masks]

    def put_split(self, store: Any, nodes: int, columns: int = 0) -> None:
        for name, mask in zip(("train", "val", "test"), self.split(nodes, columns), strict=True):
            store[f"{name}_mask"] = mask


class Cast:
    """A transform, and then floats of the type that the run asks for: some make their own."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, data: Any) -> Any:
        if self.transform is not None:
            data = self.transform(data)
        kind = torch.get_default_dtype()
        return data.apply(lambda x: x.to(kind) if torch.is_floating_point(x) else x)


class StandIn(InMemoryDataset):
    """A dataset that :meth:`make` draws."""

    def __init__(
        self,
        root: Any = None,
        *args: Any,
        transform: Any = None,
        pre_transform: Any = None,
        **_: Any,
    ) -> None:
        self.arguments = args
        super().__init__(None, Cast(transform))
        made = self.make(Draws(7))
        graphs = made if isinstance(made, list) else [made]
        graphs = [graph if pre_transform is None else pre_transform(graph) for graph in graphs]
        self._data, self.slices = self.collate(graphs)

    def make(self, draws: Draws) -> Any:
        raise NotImplementedError


def node_graph(
    draws: Draws, nodes: int, edges: int, width: int, classes: int, columns: int = 0
) -> Data:
    data = Data(x=draws.features(nodes, width), edge_index=draws.two_way(nodes, edges))
    data.y = draws.classes(nodes, classes)
    draws.put_split(data, nodes, columns)
    return data


class WikipediaNetwork(StandIn):
    def make(self, draws: Draws) -> Data:
        data = node_graph(draws, 600, 3000, 120, 5, columns=10)
        data.edge_index = draws.edges(600, 600, 3000)
        return data


class LINKXDataset(StandIn):
    def make(self, draws: Draws) -> Data:
        return node_graph(draws, 800, 4000, 60, 2, columns=5)


class Entities(StandIn):
    def make(self, draws: Draws) -> Data:
        edge_index = draws.two_way(900, 2500)
        edge_type = draws.classes(edge_index.size(1), 12)
        data = Data(edge_index=edge_index, edge_type=edge_type, num_nodes=900)
        order = torch.randperm(900, generator=draws.generator)
        data.train_idx, data.test_idx = order[:140], order[140:176]
        data.train_y, data.test_y = draws.classes(140, 4), draws.classes(36, 4)
        return data

    @property
    def num_relations(self) -> int:
        return int(self._data.edge_type.max()) + 1

    @property
    def num_classes(self) -> int:
        return int(self._data.train_y.max()) + 1


class RelLinkPredDataset(StandIn):
    def make(self, draws: Draws) -> Data:
        half = draws.edges(400, 400, 3000)
        data = Data(edge_index=torch.cat([half, half.flip(0)], 1), num_nodes=400)
        types = draws.classes(half.size(1), 10)
        data.edge_type = torch.cat([types, types + 10])
        data.train_edge_index, data.train_edge_type = half, types
        for name in ("valid", "test"):
            data[f"{name}_edge_index"] = draws.edges(400, 400, 40)
            count = data[f"{name}_edge_index"].size(1)
            data[f"{name}_edge_type"] = draws.classes(count, 10)
        return data

    @property
    def num_relations(self) -> int:
        return 20


class GraphLandDataset(StandIn):
    GRAPHLAND_DATASETS = types.MappingProxyType({"tolokers-2": None, "city-roads-M": None})
    task = "binary_classification"

    def __init__(self, root: str, split: str, name: str, **kwargs: Any) -> None:
        self.split, self.name = split, name
        super().__init__(root, transform=kwargs.get("transform"))

    def make(self, draws: Draws) -> Data:
        data = node_graph(draws, 700, 3000, 20, 2)
        data.y = data.y.to(data.x.dtype)
        return data


class BitcoinOTC(StandIn):
    def make(self, draws: Draws) -> list[Data]:
        graphs = []
        for _ in range(5):
            edge_index = draws.edges(200, 200, 400)
            signs = draws.classes(edge_index.size(1), 20) - 7
            graphs.append(Data(edge_index=edge_index, edge_attr=signs, num_nodes=200))
        return graphs


class DBLP(StandIn):
    def make(self, draws: Draws) -> HeteroData:
        data = HeteroData()
        sizes = {"author": (400, 33), "paper": (900, 42), "term": (300, 25)}
        for name, (nodes, width) in sizes.items():
            data[name].x = draws.features(nodes, width)
        data["conference"].num_nodes = 20
        data["author"].y = draws.classes(400, 4)
        draws.put_split(data["author"], 400)
        for other, nodes in (("author", 400), ("term", 300), ("conference", 20)):
            edge_index = draws.edges(nodes, 900, 2000)
            data[other, "to", "paper"].edge_index = edge_index
            data["paper", "to", other].edge_index = edge_index.flip(0).contiguous()
        return data


class IMDB(StandIn):
    def make(self, draws: Draws) -> HeteroData:
        data = HeteroData()
        for name, nodes in (("movie", 500), ("director", 250), ("actor", 600)):
            data[name].x = draws.features(nodes, 66)
        data["movie"].y = draws.classes(500, 3)
        draws.put_split(data["movie"], 500)
        for other, nodes, count in (("director", 250, 500), ("actor", 600, 1500)):
            edge_index = draws.edges(500, nodes, count)
            data["movie", "to", other].edge_index = edge_index
            data[other, "to", "movie"].edge_index = edge_index.flip(0).contiguous()
        return data


class MovieLens(StandIn):
    def make(self, draws: Draws) -> HeteroData:
        data = HeteroData()
        data["movie"].x = draws.features(300, 40)
        data["user"].num_nodes = 100
        store = data["user", "rates", "movie"]
        store.edge_index = draws.edges(100, 300, 2500)
        store.edge_label = draws.classes(store.edge_index.size(1), 6)
        store.time = draws.classes(store.edge_index.size(1), 1000)
        return data


class AmazonBook(StandIn):
    def make(self, draws: Draws) -> HeteroData:
        data = HeteroData()
        data["user"].num_nodes, data["book"].num_nodes = 200, 300
        edge_index = draws.edges(200, 300, 2500)
        data["user", "rates", "book"].edge_index = edge_index
        data["book", "rated_by", "user"].edge_index = edge_index.flip(0).contiguous()
        data["user", "rates", "book"].edge_label_index = draws.edges(200, 300, 300)
        return data


class PygNodePropPredDataset(StandIn):
    """The stand-in of OGB's dataset; the signature is theirs."""

    def __init__(self, name: str, root: Any = None, transform: Any = None, **_: Any) -> None:
        self.name = name
        super().__init__(root, transform=transform)

    def make(self, draws: Draws) -> Data:
        nodes = 1500
        data = Data(x=draws.features(nodes, 50) * 2 - 0.5, num_nodes=nodes)
        data.edge_index = draws.edges(nodes, nodes, 6000)
        if "products" in self.name:
            data.edge_index = draws.two_way(nodes, 5000)
        data.y = draws.classes(nodes, 8).view(-1, 1)
        if "arxiv" in self.name:
            data.node_year = draws.classes(nodes, 20).view(-1, 1) + 2000
        self.splits = draws.split(nodes)
        return data

    @property
    def num_classes(self) -> int:
        return 8

    def get_idx_split(self) -> dict[str, Tensor]:
        names = ("train", "valid", "test")
        return {
            name: mask.nonzero().view(-1) for name, mask in zip(names, self.splits, strict=True)
        }


class Evaluator:
    """The stand-in of OGB's accuracy, which counts as theirs does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self, given: dict[str, Any]) -> dict[str, float]:
        y_true, y_pred = (
            value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            for value in (given["y_true"], given["y_pred"])
        )
        return {"acc": float((y_true == y_pred).mean())}


def put_stand_ins() -> None:
    """Puts stand-ins in the place of datasets."""
    for kind in StandIn.__subclasses__():
        setattr(torch_geometric.datasets, kind.__name__, kind)
    real: Any = torch_geometric.datasets.Planetoid

    class Planetoid(real):
        def __init__(self, root: str, name: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(os.environ["PLANETOID"], name, *args, **kwargs)
            self._data.x = self._data.x.to(torch.get_default_dtype())

    torch_geometric.datasets.Planetoid = Planetoid
    ogb, inner = types.ModuleType("ogb"), types.ModuleType("ogb.nodeproppred")
    vars(inner).update(PygNodePropPredDataset=PygNodePropPredDataset, Evaluator=Evaluator)
    vars(ogb)["nodeproppred"] = inner
    sys.modules.update({"ogb": ogb, "ogb.nodeproppred": inner})
    torch_geometric.logging.log = log


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs one script of PyG on stand-ins.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "Agg")
    torch.set_default_dtype(getattr(torch, given.dtype))
    put_stand_ins()
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(given.script))
    torch_geometric.seed_everything(0)
    code = compile(rewritten(Path(given.script).read_text(), given.epochs), given.script, "exec")
    space = vars(sys.modules["__main__"])
    space["__file__"] = os.path.abspath(given.script)
    exec(code, space)


if __name__ == "__main__":
    main()
