"""``pyg-sar run``: scripts for one process, on workers; what is printed and written is the same."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import random
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import typing
from torch_geometric.data import Dataset
from torch_geometric.loader import NeighborLoader

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.comm.group import current, finalize
from pyg_sar.tools import cli
from pyg_sar.tools.script import ScriptConfig, in_own_lines, work
from pyg_sar.tools.script_files import PrivateFiles

# A dataset of one graph, which each script begins with.
GRAPH = """
import copy, os, sys
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything, transforms as T
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

torch.set_default_dtype(torch.float64)

class Graphs(InMemoryDataset):
    def __init__(self, root="graphs", transform=None):
        super().__init__(root, transform)
        self.load(self.processed_paths[0])
    processed_file_names = ["data.pt"]
    def process(self):
        g = torch.Generator().manual_seed(1)
        half = torch.randint(40, (2, 90), generator=g)
        data = Data(x=torch.rand(40, 5, generator=g), edge_index=torch.cat([half, half.flip(0)], 1))
        data.y = torch.randint(3, (40,), generator=g)
        data.train_mask = torch.rand(40, generator=g) < 0.6
        self.save([data], self.processed_paths[0])
        print("processed", file=sys.stderr)

class Net(torch.nn.Module):
    def __init__(self, kind, width, classes):
        super().__init__()
        self.conv1, self.conv2 = kind(width, 8), kind(8, classes)
    def forward(self, x, edge_index):
        x = F.dropout(x, 0.5, self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.conv2(x, edge_index)

def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()

seed_everything(5)
"""

SCRIPTS = {
    "train": """
dataset = Graphs(transform=T.NormalizeFeatures())
data = dataset[0]
model = Net(GCNConv, dataset.num_features, dataset.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(3):
    print(f"{epoch} {train(model, data, optimizer):.14f}")
pred = model(data.x, data.edge_index).argmax(-1)
print(int((pred == data.y).sum()), pred[:3].tolist())
model.epochs = epoch
model.conv1.cached = True
with torch.no_grad():
    model(data.x, data.edge_index)
    torch.save(copy.deepcopy(model), "model.pt")
torch.save(model.state_dict(), "state.pt")
again = Net(GCNConv, dataset.num_features, dataset.num_classes)
again.load_state_dict(torch.load("state.pt"))
print(f"{again.eval()(data.x, data.edge_index).sum().item():.12f}")
""",
    "lazy": """
dataset = Graphs()
dataset[0].clone().x[3] = 5.0
data = dataset[0]
model = Net(lambda a, b: SAGEConv((-1, -1), b), -1, 3)
with torch.no_grad():
    model(data.x, data.edge_index)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(2):
    print(f"{train(model, data, optimizer):.14f}", f"{torch.rand(1).item():.12f}")
""",
    "part of a model": """
from torch_geometric.data import HeteroData
from torch_geometric.nn import to_hetero
class Several(Graphs):
    def __init__(self):
        InMemoryDataset.__init__(self, "several")
        self.load(self.processed_paths[0], data_cls=HeteroData)
    def process(self):
        g, data = torch.Generator().manual_seed(1), HeteroData()
        for name, *size in (("user", 30, 4), ("film", 20, 5)):
            data[name].x = torch.rand(size, generator=g)
        ends = [torch.randint(count, (150,), generator=g) for count in (30, 20)]
        data["user", "rates", "film"].edge_index = torch.stack(ends)
        data["user", "rates", "film"].edge_label = torch.rand(150, generator=g)
        self.save([data], self.processed_paths[0])
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 8)
    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)
class Ratings(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = to_hetero(Encoder(), data.metadata())
        self.head = torch.nn.Linear(16, 1)
    def forward(self, data, pairs):
        z = self.encoder(data.x_dict, data.edge_index_dict)
        return self.head(torch.cat([z["user"][pairs[0]], z["film"][pairs[1]]], -1)).view(-1)
data = T.ToUndirected()(Several()[0])
del data["film", "rev_rates", "user"].edge_label
split = T.RandomLinkSplit(0.1, 0.1, neg_sampling_ratio=0.0, edge_types=[("user", "rates", "film")],
                          rev_edge_types=[("film", "rev_rates", "user")])
train_data, val_data, test_data = split(data)
model = Ratings()
with torch.no_grad():
    model.encoder(train_data.x_dict, train_data.edge_index_dict)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for part in (train_data, train_data, val_data):
    optimizer.zero_grad()
    found = model(part, part["user", "film"].edge_label_index)
    loss = F.mse_loss(found, part["user", "film"].edge_label)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.14f}", len(found))
""",
    "made edges": """
from torch_geometric.utils import dropout_edge
data = Graphs()[0]
model = Net(GCNConv, 5, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
whole = data.edge_index
for epoch in range(2):
    data.edge_index = torch.cat([whole[:, :50], whole[:, 60:]], dim=1)
    print(f"{train(model, data, optimizer):.14f}")
""",
    "written edges": """
data = Graphs()[0]
model = Net(GCNConv, 5, 3).eval()
halves = [data.edge_index[:, ::2].clone(), torch.from_numpy(data.edge_index.numpy().copy())]
for edge_index in halves:
    print(f"{model(data.x, edge_index).square().sum().item():.12f}")
    edge_index.data[0, :9] = 7
    print(f"{model(data.x, edge_index).square().sum().item():.12f}")
halves[1].numpy()[1, :9] = 3
print(f"{model(data.x, halves[1]).square().sum().item():.12f}")
""",
    "changed dataset": """
from torch_geometric.utils import to_undirected
dataset = Graphs(transform=T.NormalizeFeatures())
dataset.data.edge_index = to_undirected(dataset.data.edge_index[:, :120])
dataset.data.y = dataset.data.y * 2
print(dataset.data.y.sum().item(), dataset[0].y.sum().item(), dataset.num_classes, dataset.y.max())
model = Net(GCNConv, dataset.num_features, dataset.num_classes).eval()
print(f"{model(dataset[0].x, dataset[0].edge_index).square().sum().item():.12f}")
""",
    "largest component": """
import numpy as np
dataset = Graphs()
row, col = dataset.data.edge_index.numpy()
kept = np.unique(row)[3:].tolist()
place = {node: k for k, node in enumerate(kept)}
pairs = [[place[i], place[j]] for i, j in zip(row, col) if i in place and j in place]
masks = {"train_mask": torch.zeros(len(kept), dtype=torch.bool)}
x, y = dataset.data.x[kept], dataset.data.y[kept]
dataset.data = Data(x=x, edge_index=torch.tensor(pairs).t(), y=y, **masks)
dataset.data.train_mask[torch.randperm(len(kept))[:20]] = True
data = dataset.data
model = Net(GATConv, dataset.num_features, dataset.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(2):
    print(f"{train(model, data, optimizer):.14f}", dataset[0].num_edges, data.train_mask.sum())
""",
    "loader of one graph": """
from torch_geometric.loader import DataLoader
dataset = Graphs()
for loader in (DataLoader([dataset[0]], shuffle=True), DataLoader(dataset, num_workers=2)):
    model = Net(GCNConv, 5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        for data in loader:
            print(f"{train(model, data, optimizer):.14f}", data.num_graphs, data.ptr.tolist())
            print(len(loader), data.batch.sum(), data.edge_index[:, 17].tolist())
print(f"{torch.rand(1).item():.12f}")
""",
    "loader of many graphs": """
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool
g = torch.Generator().manual_seed(4)
def graph(k):
    edges = torch.randint(6 + k, (2, 20 + k), generator=g)
    made = Data(x=torch.rand(6 + k, 5, generator=g), edge_index=edges, y=torch.tensor([k % 3]))
    made.pull = torch.rand(20 + k, 2, generator=g)
    return made
graphs = [graph(k) for k in range(7)]
class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = GATConv(5, 8, edge_dim=2), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 3)
    def forward(self, data):
        x = self.norm(self.conv(data.x, data.edge_index, data.pull)).relu()
        x = F.dropout(x, 0.3, self.training)
        return self.head(global_mean_pool(x, data.batch))
model = Pooled()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for options in ({"batch_size": 3, "shuffle": True}, {"batch_size": 1}, {"batch_size": 7}):
    loader = DataLoader(graphs, num_workers=0, **options)
    for epoch in range(2):
        total = 0.0
        for data in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(data)
        print(f"{total / len(loader.dataset):.12f}", len(loader), data.num_nodes, data.ptr.tolist())
        for same in (data, data.clone(), T.ToUndirected()(data)):
            print(type(same).__name__, same.batch_size, len(same), same.num_graphs, same.num_edges)
model.eval()
right = 0
class Pairs(DataLoader):
    def __init__(self, graphs):
        super().__init__(graphs, batch_size=2)
for data in Pairs(graphs):
    right += int((model(data).argmax(1) == data.y).sum())
print(right, f"{torch.rand(1).item():.12f}")
""",
    "snapshots": """
from pyg_sar.comm.group import current
from torch_geometric.nn import ChebConv
g = torch.Generator().manual_seed(2)
lists = [torch.randint(30, (2, 80), generator=g).numpy() for _ in range(2)]
x, y = torch.rand(5, 30, 4, generator=g), torch.rand(5, 30, generator=g)
of_x, of_h, head = ChebConv(4, 12, 2), ChebConv(6, 12, 2), torch.nn.Linear(6, 1)
model = torch.nn.ModuleList([of_x, of_h, head])
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(2):
    h, loss = torch.zeros(30, 6), 0
    for k in range(5):
        edge_index = torch.tensor(lists[k % 2])
        z, new = (of_x(x[k], edge_index) + of_h(h, edge_index)).chunk(2, -1)
        h = z.sigmoid() * h + (1 - z.sigmoid()) * new.tanh()
        loss = loss + (head(h.relu()).squeeze(-1) - y[k]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.14f}")
made = current().made_edges
print(f"lists: {made and made.made}", file=sys.stderr)
""",
    "compiled": """
data = Graphs()[0]
class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, 8), SAGEConv(8, 3)
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)
for model in (torch.jit.script(Scripted()), torch.compile(Net(GCNConv, 5, 3), backend="eager")):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        print(f"{train(model, data, optimizer):.14f}")
    print(sorted(model.state_dict()))
""",
    "transforms": """
data = T.AddSelfLoops()(Graphs()[0])
fill = T.FeaturePropagation(missing_mask=data.x > 0.5)
filled = T.Compose([fill, T.LocalDegreeProfile()])(data.clone())
print([f"{value:.12f}" for value in filled.x[:9].flatten().tolist()], fill.missing_mask.sum())
split = T.RandomLinkSplit(num_val=0.1, num_test=0.2, is_undirected=True)
train_data, val_data, test_data = split(data)
model = Net(SAGEConv, 5, 3).eval()
z = model(train_data.x, train_data.edge_index)
a, b = train_data.edge_label_index
score = (z[a] * z[b]).sum(-1)
loss = F.binary_cross_entropy_with_logits(score, train_data.edge_label)
print(f"{loss.item():.14f}", test_data.edge_label.size(0), f"{torch.rand(1).item():.12f}")
""",
}

OF_ALL_NODES = """
from torch_geometric.loader import NeighborLoader
data = Graphs()[0]
data.edge_attr = torch.arange(180.0)
for hops in (1, 2):
    loader = NeighborLoader(data, num_neighbors=[-1] * hops, batch_size=40)
    model = Net(GATConv, 5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for batch in loader:
        print(f"{train(model, batch, optimizer):.14f}", len(loader), batch.batch_size)
        print(batch.edge_index[:, :50].tolist(), batch.edge_attr[:50].tolist())
        print(batch.n_id.tolist(), batch.e_id[:40].tolist(), batch.input_id.sum().item())
"""
if typing.WITH_TORCH_SPARSE or typing.WITH_PYG_LIB:
    SCRIPTS["loader of all nodes"] = OF_ALL_NODES

EVERYTHING = """
import atexit, os, random, sys
import numpy as np
import torch
print(sys.argv, __name__, os.path.basename(__file__), sys.path[0] == os.getcwd())
print(torch.rand(1).item(), np.random.rand(), random.random(), np.random.default_rng().random())
with open("a.txt", "w") as file:
    file.write("one")
with open("a.txt", "a") as file:
    file.write(" two")
print(open("a.txt").read(), os.path.exists("a.txt"))
os.makedirs("made/here")
np.save("made/here/b.npy", np.ones(2))
os.rename("made/here/b.npy", "c.npy")
print(np.load("c.npy"), os.path.exists("made/here/b.npy"))
open("gone.txt", "w").close()
os.remove("gone.txt")
print(os.path.exists("gone.txt"))
sys.stderr.write("seen once\\n")
atexit.register(lambda: print("the very end", open("end.txt", "a").write("once")))
atexit.register(print, "the end")
sys.exit(7)
"""


def sweep(folder: str, scripts: dict[str, str], names: list[str]) -> dict[str, Any]:
    """Runs scripts one after the other, in a worker: exit codes or errors, and what they print."""
    found: dict[str, Any] = {}
    os.chdir(folder)
    for name in names:
        Path(f"{name}.py").write_text(scripts[name]) if current().rank == 0 else None
        current().barrier()
        config = ScriptConfig(script=f"{name}.py", arguments=("--a", "1"), cache="cache")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = work(config)
            except Exception as error:
                code = in_own_lines(error, config.script)
        torch.set_default_dtype(torch.float32)
        found[name] = code, out.getvalue(), err.getvalue()
    return found


def run(tmp_path: Path, scripts: dict[str, str], workers: int = 2) -> list[dict[str, Any]]:
    return pyg_sar.launch(sweep, workers, str(tmp_path), scripts, list(scripts))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """All scripts of this file, on the workers of one launch."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {name: GRAPH + text for name, text in SCRIPTS.items()}
    return folder, run(folder, {**scripts, "everything": EVERYTHING, **REFUSED})


def alone(text: str, folder: Path, monkeypatch) -> str:
    """What a script prints in one process."""
    monkeypatch.chdir(folder)
    Path("alone.py").write_text(text)
    out = io.StringIO()
    kept = torch.get_default_dtype()
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as of dataset.data
            runpy.run_path("alone.py", run_name="__main__")
    finally:
        torch.set_default_dtype(kept)
    return out.getvalue()


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.?\d*", text)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_printed_is_what_one_process_prints(name, outcomes, tmp_path, monkeypatch):
    _, found = outcomes
    assert [result[name][0] for result in found] == [0, 0], found[0][name]
    first, second = (result[name][1] for result in found)
    assert second == ""
    expected = alone(GRAPH + SCRIPTS[name], tmp_path, monkeypatch)
    assert len(expected.splitlines()) == len(first.splitlines()) > 0
    assert numbers(first) == pytest.approx(numbers(expected), abs=1e-10)


def test_a_saved_model_is_a_plain_one(outcomes, monkeypatch):
    folder, _ = outcomes
    monkeypatch.chdir(folder)
    code = GRAPH.replace("torch.set_default_dtype(torch.float64)", "")
    code += "model = torch.load('model.pt', weights_only=False)\n"
    code += "print({type(m) for m in model.modules()} == {Net, GCNConv, *map(type, "
    code += "Net(GCNConv, 5, 3).modules())}, model.epochs)\n"
    code += "state = torch.load('state.pt', weights_only=True)\n"
    code += "print(all(torch.equal(p, state[n]) for n, p in model.state_dict().items()))\n"
    code += "x, e = torch.rand(4, 5, dtype=torch.float64), torch.tensor([[0, 1], [1, 2]])\n"
    code += "print(model(x, e).shape[0])\n"
    assert alone(code, folder, monkeypatch) == "True 2\nTrue\n4\n"


def test_prints_files_and_exit_codes(outcomes):
    folder, found = outcomes
    (code, out, err), (other, silent, nothing) = (result["everything"] for result in found)
    assert code == other == 7 and silent == nothing == ""
    assert err == "seen once\n"
    lines = out.splitlines()
    assert lines[0] == "['everything.py', '--a', '1'] __main__ everything.py True"
    assert lines[2:5] == ["one two True", "[1. 1.] False", "False"]
    assert lines[5:] == ["the end", "the very end 4"]
    assert (folder / "a.txt").read_text() == "one two"
    assert (folder / "end.txt").read_text() == "once"
    assert np.load(folder / "c.npy").tolist() == [1, 1]
    assert not (folder / "gone.txt").exists() and not list((folder / "made/here").iterdir())


def test_equal_edges_of_snapshots_are_distributed_once(outcomes):
    """Each of the five snapshots of each epoch has its edges as a new tensor."""
    assert outcomes[1][0]["snapshots"][2] == "lists: 2\n"


def test_a_graph_is_processed_once_and_partitioned_once(outcomes):
    folder = outcomes[0]
    processed = [result["train"][2].count("processed\n") for result in outcomes[1]]
    assert processed == [1, 0]
    # With features as they are, also by dataset.data, normalised, and of several types.
    assert len(list((folder / "cache").iterdir())) == 3


# Refused ######################################################################

REFUSED = {
    "loader": GRAPH
    + "from torch_geometric.loader import NeighborLoader\n"
    + "NeighborLoader(Graphs()[0], [2], batch_size=2)\n",
    "lists": GRAPH
    + "from torch_geometric.loader import DataListLoader\n"
    + "DataListLoader([Graphs()[0]] * 2, batch_size=2)\n",
    "group": "import torch\ntorch.distributed.init_process_group('gloo')\n",
    "trace": "import torch\ntorch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))\n",
    "states": GRAPH
    + "data = Graphs()[0]\nmodel = Net(GCNConv, 5, 3)\n"
    + "rank = int(os.environ['RANK'])\ntorch.rand(1 + rank)\nmodel(data.x, data.edge_index)\n",
    "written": GRAPH
    + "dataset = Graphs()\ndata = dataset[0]\ndata.x[3] = 1.5\n"
    + "print(dataset[0].x.sum().item())\n",
    "input": "import sys\nname = input() if sys.stdin.isatty() else sys.stdin.buffer.read()\n",
    "error": "def fail(x):\n    return x.foo\n\nimport os\nfail(os)\n",
    "syntax": "a = = 1\n",
    "caught": GRAPH.replace("g = torch.Generator", "raise OSError('no net'); g = torch.Generator")
    + "try:\n    Graphs('other')\nexcept OSError as error:\n    print('caught', error)\n",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("loader", "'NeighborLoader' under 'pyg-sar run'"),
        ("lists", "'DataListLoader' under 'pyg-sar run': batches of many graphs are divided where"),
        ("group", "starts workers of its own"),
        ("trace", "can't be traced"),
        ("input", "The script reads standard input"),
        ("written", r"Graphs\[0\] after 'x' was written in place"),
        ("states", r"rank\(s\) \[1\] have drawn other random numbers"),
    ],
)
def test_what_has_no_place_is_refused_by_name(name, text, outcomes):
    for result in outcomes[1]:
        code, _, _ = result[name]
        assert isinstance(code, str) and re.search(text, code), code


def test_files_of_other_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = PrivateFiles()
    Path("there").write_text("real")
    with contextlib.closing(files):
        for mode, text in (("w", "mine"), ("a", " more")):
            with files.open(open, "there", mode) as file:
                file.write(text)
        with files.open(open, "there") as file:
            assert file.read() == "mine more"
        assert files.stat(os.stat, "there").st_size == 9 and Path("there").read_text() == "real"
        with files.open(open, "log", "a") as file:
            file.write("end")
        with pytest.raises(OSError, match="was appended to by this run"):
            files.open(open, "log")
        files.remove(os.remove, "there")
        with pytest.raises(FileNotFoundError):
            files.open(open, "there")
        with pytest.raises(FileNotFoundError):
            files.open(open, "none/there", "w")
        files.mkdir(os.mkdir, "none")
        files.open(open, "none/there", "w").close()
        assert os.listdir() == ["there"] and Path("there").read_text() == "real"
    assert not Path(files.folder).exists()


def test_tracebacks_have_the_lines_of_the_script(outcomes):
    for result in outcomes[1]:
        code, _, _ = result["error"]
        lines = [line.strip() for line in code.splitlines()]
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1] == 'File "error.py", line 5, in <module>'
        assert 'File "error.py", line 2, in fail' in lines
        assert not re.search(r"script\w*\.py\", line|runpy|launch", code)
        syntax, _, _ = result["syntax"]
        assert syntax.startswith('  File "syntax.py", line 1') and "SyntaxError" in syntax


def test_an_error_of_rank_0_alone_is_one_of_all(outcomes):
    assert [result["caught"][0] for result in outcomes[1]] == [0, 0]
    assert outcomes[1][0]["caught"][1] == "caught no net\n"


def test_parts_in_one_process(tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = GRAPH + SCRIPTS["train"] + "print(torch.load('model.pt', weights_only=False).conv1)\n"
    expected = alone(text, tmp_path, monkeypatch)
    kept = torch.get_default_dtype()
    try:
        assert work(ScriptConfig(script="alone.py", parts=3, cache="cache")) == 0
    finally:
        finalize()
        torch.set_default_dtype(kept)
    found = capsys.readouterr().out
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-10)


def test_a_module_that_parts_wait_in_is_named(tmp_path, monkeypatch):
    """It holds Python's lock of its import, which the other parts wait for."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("seeds_at_once.py").write_text("import torch\ntorch.manual_seed(3)\n")
    Path("script.py").write_text("import seeds_at_once\n")
    try:
        with pytest.raises(RuntimeError, match="the module 'seeds_at_once' loads a graph, sets a"):
            work(ScriptConfig(script="script.py", parts=2, cache="cache"))
    finally:
        finalize()


FIXED = """
import torch
from torch_geometric.data import Data, Dataset

class Fixed(Dataset):
    def len(self):
        return 1

    def get(self, idx):
        return Data(x=torch.arange(40.0).view(20, 2), edge_index=torch.arange(20).repeat(2, 1))

data = Fixed()[0]
print(float((data.x ** 2).sum()))
"""

DAMAGES: dict[str, Callable[[Path], object]] = {
    "altered: its SHA-256": lambda root: flip(next(root.glob("part-00001*"))),
    "is missing": lambda root: next(root.glob("part-00000*")).unlink(),
    "'metadata.json' is missing": lambda root: (root / "metadata.json").unlink(),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_part_in_the_cache_is_made_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(FIXED)
    config = ScriptConfig(script="s.py", parts=2, cache="cache")
    expected = f"{float((torch.arange(40.0) ** 2).sum())}\n"
    try:
        assert work(config) == 0 and capsys.readouterr().out == expected
        (root,) = Path("cache").iterdir()
        for message, damage in DAMAGES.items():
            damage(root)
            assert work(config) == 0
            said = capsys.readouterr()
            assert said.out == expected and list(Path("cache").iterdir()) == [root]
            lines = said.err.splitlines()
            assert len(lines) == 1 and "is partitioned again: " in lines[0] and message in lines[0]
        assert work(config) == 0 and capsys.readouterr().err == ""
        DAMAGES["is missing"](root)
        (root / "mine").touch()
        with pytest.raises(FileExistsError, match="'mine' is of no partition; move it elsewhere"):
            work(config)
        assert (root / "mine").exists()
    finally:
        finalize()


IN_FLOAT32 = GRAPH.replace("torch.set_default_dtype(torch.float64)", "")
IN_FLOAT32 += """
dataset = Graphs()
x = dataset[0].x
print(x.dtype, dataset.data.x.dtype, torch.rand(1).dtype, dataset.num_features, file=sys.stderr)
stored = torch.load(dataset.processed_paths[0], weights_only=False)[0]
print(stored["x"].dtype, file=sys.stderr)
data = dataset[0]
model = Net(GCNConv, 5, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(2):
    print(f"{train(model, data, optimizer):.14f}")
"""


def test_float64_for_a_script_in_float32(tmp_path, monkeypatch, capsys):
    """One worker and several print the same; files of the dataset stay in float32."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(IN_FLOAT32)
    printed = []
    for parts in (None, 2):
        try:
            config = ScriptConfig(script="s.py", parts=parts, cache="cache", float64=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as of dataset.data
                assert work(config) == 0
        finally:
            finalize()
        captured = capsys.readouterr()
        printed.append(numbers(captured.out))
        kinds = [line for line in captured.err.splitlines() if line.startswith("torch.")]
        assert kinds == ["torch.float64 torch.float64 torch.float64 5", "torch.float32"]
        assert torch.get_default_dtype() == torch.float32
    assert len(printed[0]) == 2 and printed[1] == pytest.approx(printed[0], abs=1e-10)


def test_all_is_put_back(tmp_path, monkeypatch):
    def replaced() -> list[Any]:
        return [
            *(builtins.open, os.stat, os.remove, io.open, torch.save, torch.load, torch.compile),
            *(torch.nn.Module.__call__, torch.optim.Optimizer.__init__, Dataset.__getitem__),
            *(NeighborLoader.__init__, np.random.default_rng, random.seed, torch.manual_seed),
            *(
                sys.stdout,
                sys.stdin,
                atexit.register,
                sys.argv,
                sys.modules["__main__"],
                list(sys.path),
            ),
        ]

    monkeypatch.chdir(tmp_path)
    before = replaced()
    Path("s.py").write_text("import sys\nassert len(sys.argv) == 1\nprint('done')\n")
    assert work(ScriptConfig(script="s.py")) == 0
    assert replaced() == before


# The command ##################################################################


def test_the_command_shows_one_traceback_and_its_mistakes(tmp_path, capfd, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    # The worker that fails first ends the other one, which has printed by then.
    meet = "print(sys.argv[1:], flush=True); pyg_sar.comm.current().barrier()"
    Path("s.py").write_text(f"import sys, pyg_sar\n{meet}\nraise KeyError('here')\n")
    assert main(["run", "--workers", "2", "s.py", "--workers", "9"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "['--workers', '9']\n"
    assert captured.err.count("Traceback") == captured.err.count("KeyError: 'here'") == 1
    assert captured.err.count("File ") == 1 and 'File "s.py", line 3' in captured.err
    for arguments, text in (
        (["none.py"], "No such file: 'none.py'"),
        (["--workers", "3", "--parts", "2", "s.py"], "--workers 3 must be from 1"),
        (["--memory", "much", "s.py"], "--memory='much' must be a number of bytes"),
    ):
        assert main(["run", *arguments]) == cli.EXIT_USAGE
        assert text in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(FIXED)
    Path("file").write_text("no folder")
    try:
        assert work(ScriptConfig(script="s.py", parts=2, cache="file/cache")) == 0
    finally:
        finalize()
    said = capsys.readouterr()
    assert "the cache 'file/cache' can't be written" in said.err and "--cache DIR" in said.err
    assert said.err.count("\n") == 1 and said.out
