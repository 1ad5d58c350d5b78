"""The Python of README.md and of docs/ runs as it stands there."""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hosted_workers import host
from torch_geometric import transforms
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN, GCNConv, HeteroConv, SAGEConv, global_mean_pool
from torch_geometric.utils import scatter, softmax, to_undirected

import pyg_sar
from pyg_sar.kernels import ops
from pyg_sar.tools import inference
from pyg_sar.train import TrainConfig
from pyg_sar.usage.commands import full_parser

REPOSITORY = Path(__file__).resolve().parent.parent


def snippets(document: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / document).read_text(), flags=re.DOTALL)


def test_the_first_snippet_is_a_whole_script_and_runs_twice(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for epochs, least in ((1, 0.0), (50, 0.8)):
        script = snippets("README.md")[0].replace("range(50)", f"range({epochs})")
        (tmp_path / "first.py").write_text(script)
        runpy.run_path("first.py", run_name="__main__")
        out, errors = capfd.readouterr()
        assert "Warning" not in errors, errors
        found = re.fullmatch(r"test accuracy (\d\.\d+)\n", out)
        assert found is not None and float(found[1]) > least, out  # By chance: 1 of 8.


class MyModel(torch.nn.Module):
    """The reader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 3)

    def forward(self, x, edge_index, edge_attr=None):
        return self.conv(x, edge_index)


def a_graph() -> Data:
    mask = torch.arange(30) % 3
    return Data(
        x=torch.randn(30, 4),
        edge_index=torch.randint(30, (2, 120)),
        edge_attr=torch.randn(120, 2),
        y=torch.randint(3, (30,)),
        train_mask=mask == 0,
        val_mask=mask == 1,
        test_mask=mask == 2,
        batch=torch.arange(30) // 10,
        graph_y=torch.tensor([0, 1, 2]),
    )


def a_hetero_graph() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(20, 4), torch.randn(20, 5)
    for source, target in ("ab", "ba"):
        data[source, "to", target].edge_index = torch.randint(20, (2, 60))
        data[source].y, data[source].val_mask = torch.arange(20) % 3, torch.arange(20) % 2 == 0
    return data


def run(document: str, code: list[str], **names: Any) -> None:
    """Runs pieces of a document one after the other, with what the text around them gives."""
    assert code
    for piece in code:
        exec(compile(piece, document, "exec"), names)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (action for action in full_parser()._actions if action.dest == "verb")
    return found.choices


@pytest.mark.parametrize(
    ("command", "pages"),
    {
        "partition": ["partitioning"],
        "plan": ["planning", "verify", "training"],
        "train": ["training"],
        "run": ["whole-graph"],
        "predict": ["inference", "training"],
        "verify": ["verify", "training"],
    }.items(),
)
def test_every_option_is_explained(command, pages):
    text = "".join((REPOSITORY / f"docs/{page}.md").read_text() for page in pages)
    options = {name for action in commands()[command]._actions for name in action.option_strings}
    options -= {"-h", "--help", "--debug"}
    assert not {name for name in options if not re.search(rf"{name}(?![\w-])", text)}


def test_commands_have_the_options_that_exist(capsys):
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    texts += [parser.epilog.replace("\\\n", " ") for parser in commands().values()]
    lines = [line for text in texts for line in re.findall(r"(?:pyg-sar|-m pyg_sar) (.+)", text)]
    found = 0
    for line in lines:
        words = shlex.split(re.split(r"`|'|  +#", line)[0].replace("...", "").replace(" N", " 2"))
        if len(words) > 2 and words[0] in commands() and words[1] != "--help":
            try:
                full_parser().parse_args(words)
            except SystemExit:
                assert "required" in capsys.readouterr().err, line
            found += 1
    assert found > 30


@pytest.mark.parametrize(("document", "first"), [("README.md", 1), ("docs/verify.md", 0)])
def test_verifying(document, first):
    run(document, snippets(document)[first:], pyg_sar=pyg_sar, model=MyModel(), data=a_graph())


def test_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    code = [text.replace("epochs=500", "epochs=50") for text in snippets("docs/training.md")]
    chosen = code[:2] + code[11:-1]  # The last: test_replicate.py.
    run("docs/training.md", chosen, MyModel=MyModel, torch=torch)
    assert {"report", "run.ckpt"} <= set(os.listdir())


def test_launching(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    code = [
        piece.replace("callbacks=", "config, callbacks=") for piece in snippets("docs/launching.md")
    ]
    code = [piece.replace("parts=2", "parts=1") for piece in code]
    names = {"MyModel": MyModel, "pyg_sar": pyg_sar, "torch": torch, "F": F}
    run("docs/launching.md", code, config=TrainConfig(epochs=2), **names)
    assert {"run.ckpt", "cell.ckpt"} <= set(os.listdir())


def test_planning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    given = {"MyModel": MyModel, "pyg_sar": pyg_sar, "model": MyModel(), "data": a_graph()}
    run("docs/planning.md", snippets("docs/planning.md"), **given)


def test_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    run("docs/recipes.md", snippets("docs/recipes.md"))


class Log:
    """In the place of a run of wandb."""

    def __init__(self, name: str) -> None:
        self.found: list[Any] = [name]

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.found.append((step, numbers))

    def finish(self) -> None:
        self.found.append("end")


def test_callbacks_for_other_programs():
    wandb = SimpleNamespace(init=lambda project: Log(project))
    names = {"pyg_sar": pyg_sar, "wandb": wandb}
    exec(snippets("docs/training.md")[4], names)
    callbacks = [names["WandB"]()]
    config = TrainConfig(epochs=2, eval_every=2)
    result = pyg_sar.Trainer(MyModel(), a_graph(), config, callbacks=callbacks).fit()
    run = callbacks[0].run.found
    assert run[0] == "gnn" and run[-1] == "end"
    assert run[2] == (2, {"loss": result.losses[1], "lr": 0.01, **result.final})


def mean_of(first, second, **options) -> float:
    """In the place of scikit-learn's functions."""
    return float(first.mean() - second.mean())


def test_training_with_a_loss_and_metrics_of_ones_own():
    code, model, data = snippets("docs/training.md"), MyModel(), a_graph()
    data.y = torch.rand(30, 3)
    optimizer = torch.optim.Adam(model.parameters())
    splits = transforms.RandomLinkSplit()(data)
    names = dict(zip(("train_data", "val_data", "test_data"), splits, strict=True))
    names |= {"average_precision_score": mean_of, "roc_auc_score": mean_of, "torch": torch}
    names |= {"pyg_sar": pyg_sar, "TrainConfig": TrainConfig, "optimizer": optimizer}
    fit = ["trainer.fit()"]
    run("docs/training.md", [code[2], *fit, code[3]], model=model, data=data, **names)


def f1_score(target: Any, pred: Any, average: str) -> float:
    """As scikit-learn's, which takes what NumPy makes arrays of."""
    assert average == "macro"
    target, pred = numpy.asarray(target), numpy.asarray(pred)
    both = [(pred == k, target == k) for k in sorted({*target, *pred})]
    return float(numpy.mean([2 * (p & t).sum() / (p.sum() + t.sum()) for p, t in both]))


def test_metrics(tmp_path, monkeypatch, capsys):
    """Three parts give what one process gives, on the mask that the reader chose, too."""
    pytest.importorskip("torchmetrics", reason="the extra 'metrics' is not installed")
    graph = a_graph()
    graph.y = torch.arange(30) // 3 % 3  # All classes in each split.
    pyg_sar.write_partitions(graph, 3, tmp_path / "parts", "random")
    monkeypatch.setitem(sys.modules, "sklearn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sklearn.metrics", SimpleNamespace(f1_score=f1_score))
    training, loop = snippets("docs/training.md")[5:7]
    own = "from torchmetrics.classification import MulticlassAUROC\n" + loop

    def work(plain: bool) -> Any:
        data = graph if plain else pyg_sar.load_partition(tmp_path / "parts")
        torch.manual_seed(0)
        model = MyModel() if plain else pyg_sar.distribute(MyModel())
        names = {"TrainConfig": TrainConfig, "pyg_sar": pyg_sar, "torch": torch}
        names |= {"model": model, "data": data, "f1_score": f1_score}
        run("docs/training.md", [training, own], **names)

    work(True)
    expected = capsys.readouterr().out
    host(work, 3, False)
    found = capsys.readouterr().out.splitlines()
    assert expected.count("\n") == 2 and found.count(expected.splitlines()[1]) == 1
    assert found.count(expected.splitlines()[0]) == 3


def test_lightning(tmp_path, monkeypatch, capfd):
    lightning = pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 2, "parts")
    code = snippets("docs/training.md")[9].replace("max_epochs=50", "max_epochs=3")
    quiet = "enable_progress_bar=False, log_every_n_steps=1, logger"
    from torchmetrics.classification import MulticlassAUROC

    names = {"pyg_sar": pyg_sar, "torch": torch, "F": F, "GCN": GCN, "lightning": lightning}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piece = [code.replace("logger", quiet, 2).replace(quiet, "logger", 1)]
        run("docs/training.md", piece, MulticlassAUROC=MulticlassAUROC, **names)
    assert 0 <= float(capfd.readouterr().out.splitlines()[-1]) <= 1
    assert os.listdir("best") and os.listdir("logs")


class Energy(MyModel):
    def forward(self, z, pos, edge_index):
        return self.conv(torch.cat([pos, z.view(-1, 1)], dim=1).sin(), edge_index)


def test_forces(tmp_path):
    data = Data(z=torch.rand(30), pos=torch.randn(30, 3), edge_index=a_graph().edge_index)
    data.force = torch.randn(30, 3)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")

    def work() -> None:
        mine = pyg_sar.load_partition(tmp_path / "parts")
        pos = mine.pos.requires_grad_()
        code = snippets("docs/training.md")[10:11]
        names = {"torch": torch, "pyg_sar": pyg_sar, "model": Energy(), "data": mine, "pos": pos}
        run("docs/training.md", code, **names)

    host(work, 3)


def test_link_prediction_and_all_nodes_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    once, each, evaluate = snippets("docs/link_prediction.md")
    (gather,) = snippets("docs/training.md")[8:9]
    graph = a_graph()
    graph.edge_index = to_undirected(graph.edge_index)
    graph.edge_attr = None
    run("docs/link_prediction.md", [once], pyg_sar=pyg_sar, data=graph)
    found: list[Any] = []

    def roc_auc_score(labels: Any, scores: Any) -> int:
        """As scikit-learn's."""
        found.append(labels.shape == scores.shape)
        return 0

    class Evaluator:
        """As OGB's."""

        def __init__(self, name: str) -> None:
            self.name = name

        def eval(self, values: Any) -> str:
            found.append([len(rows) for rows in values.values()])
            return self.name

    def work() -> None:
        model = pyg_sar.distribute(MyModel())
        names = {"pyg_sar": pyg_sar, "F": F, "torch": torch, "model": model}
        names |= {"Evaluator": Evaluator, "roc_auc_score": roc_auc_score}
        run("docs/link_prediction.md", [each, evaluate, "out, data = z, test", gather], **names)

    host(work, 4)
    assert found.count(True) == 4 and found.count([30, 30]) == 1


def test_reductions_over_all_nodes(tmp_path):
    pyg_sar.write_partitions(a_graph(), 3, tmp_path / "parts", "random")
    names = {"softmax": softmax, "scatter": scatter, "global_mean_pool": global_mean_pool}

    def work() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        reductions = snippets("docs/what-runs.md")[:1]
        run("docs/what-runs.md", reductions, x=data.x, gate=data.x, data=data, **names)

    host(work, 3)


def test_heterogeneous_graphs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (_, code) = snippets("docs/what-runs.md")
    once, each = code.split("\n\n")
    (scores,) = snippets("docs/training.md")[7:8]
    run("docs/what-runs.md", [once], pyg_sar=pyg_sar, data=a_hetero_graph())

    def work() -> None:
        model = HeteroConv({(s, "to", t): SAGEConv((-1, -1), 3) for s, t in ("ab", "ba")})
        run("docs/what-runs.md", [each, scores], pyg_sar=pyg_sar, model=model)

    host(work, 4)


@pytest.mark.skipif(not ops.built, reason="no C++ kernels")
def test_larger_than_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 16, "parts", "random")

    def train(root: str) -> int:
        return pyg_sar.load_partition(root).num_nodes

    code, again = snippets("docs/larger-than-memory.md")
    names = {"pyg_sar": pyg_sar, "train": train}
    assert "/scratch" in code
    run("docs/larger-than-memory.md", [code.replace("/scratch", str(tmp_path))], **names)
    data = a_graph()
    conv, norm = SAGEConv(data.num_features, 4), torch.nn.BatchNorm1d(4)
    given = {"conv": conv, "norm": norm, "x": data.x, "edge_index": data.edge_index, "F": F}
    run("docs/larger-than-memory.md", [again], **given)


@pytest.mark.skipif(not ops.built, reason="no C++ kernels")
def test_after_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        inference, "launch", lambda fn, *args, parts, **how: host(fn, parts, *args[1:])
    )

    class Own(MyModel):
        def __init__(self, hidden: int) -> None:
            super().__init__()

    data, sizes = a_graph(), {"in_channels": 4, "out_channels": 4}
    extra = {"model": {"name": "gcn", "hidden": 4, "layers": 1}, "pyg": {"arguments": sizes}}
    pyg_sar.train.save_checkpoint("run.ckpt", GCN(4, 4, 1, 4), state={"extra": extra})
    names = {"MyModel": Own, "CheckpointEvery": pyg_sar.train.CheckpointEvery, "numpy": numpy}
    run("docs/inference.md", snippets("docs/inference.md"), pyg_sar=pyg_sar, data=data, **names)
    assert numpy.load("scores.npy").shape == (30, 3)


def test_the_faq():
    names = {"GCN": GCN, "model": pyg_sar.distribute(GCN(4, 4, 1))}
    run("docs/faq.md", snippets("docs/faq.md"), torch=torch, **names)


def test_the_global_view(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    names = {"pyg_sar": pyg_sar, "torch": torch, "F": F, "GCN": GCN, "num_classes": 3}
    for code in snippets("docs/whole-graph.md"):
        exec(code, names)
        assert 0 <= names["accuracy"] <= 1


_RESOLVED_ALONE = """
import itertools, os, pkgutil, sys, torch_geometric, pyg_sar
for first, names in itertools.groupby(sys.argv[1:], key=lambda name: name.split(".")[1]):
    child = os.fork()
    if not child:
        getattr(pyg_sar, first)
        for name in names:
            pkgutil.resolve_name(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(first)
"""


def test_names_in_documents_are_there_whatever_was_imported():
    """Those of each subpackage in a process where nothing has used another one."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    found = {n for p in pages for n in re.findall(r"\bpyg_sar(?:\.[A-Za-z_]\w*)+", p.read_text())}
    assert {"pyg_sar.tensors.NodeTensor", "pyg_sar.scatter"} <= found
    found.remove("pyg_sar.lightning")  # Imported by its own name: what it needs is an extra.
    command = [sys.executable, "-c", _RESOLVED_ALONE, *sorted(found)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert not ended.returncode, ended.stderr


def anchors(text: str) -> set[str]:
    """The names by which a document's headings are linked."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_references_in_docstrings_lead_somewhere():
    """Those to names of the package; ``make docs`` follows them all."""
    wrong = []
    for path in sorted((REPOSITORY / "pyg_sar").rglob("*.py")):
        for name in re.findall(r":[a-z]+:`~?(pyg_sar\.[\w.]+)`", path.read_text()):
            try:
                pkgutil.resolve_name(name)
            except (AttributeError, ImportError):
                wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_links_between_documents_lead_somewhere():
    documents = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*/**/*.md")]
    documents = [path for path in documents if ".venv" not in path.parts]
    assert len(documents) > 20
    wrong = []
    for path in documents:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if link.startswith(("http://", "https://")):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            good = target.exists()
            if good and anchor and target.suffix == ".md":
                good = anchor in anchors(target.read_text())
            if not good:
                wrong.append(f"{path.relative_to(REPOSITORY)}: {link}")
    assert not wrong


def test_no_document_with_python_is_left_out():
    documents = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("**/*.md")]
    names = {str(path.relative_to(REPOSITORY)) for path in documents}
    tried = ("faq", "what-runs", "inference", "larger-than-memory", "link_prediction")
    tried = (*tried, "whole-graph", "launching", "planning", "recipes")
    found = {name for name in names if snippets(name)}
    assert found == {"README.md", *(f"docs/{name}.md" for name in (*tried, "training", "verify"))}
