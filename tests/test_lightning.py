"""A LightningModule of plain PyG on workers: the numbers, files and decisions of one process."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import make_graph
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Batch
from torch_geometric.nn import BatchNorm, GATConv, GCNConv

import pyg_sar

lightning = pytest.importorskip("lightning", reason="needs the extra 'lightning'")
pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 6


def module(replicas: int) -> Any:
    """Without dropout where replicas, whose random numbers are their own, are compared."""

    from torchmetrics import Metric
    from torchmetrics.classification import MulticlassAUROC

    class Right(Metric):
        """Counts: workers that all add what they have seen would give a multiple."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, pred: Any, target: Any) -> None:
            self.count += (pred.argmax(-1) == target).sum()

        def compute(self) -> Any:
            return self.count.double()

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.right, self.area = Right(), MulticlassAUROC(4)  # Keeps all rows.
            self.first, self.norm = GATConv(6, 8, heads=2), BatchNorm(16)
            self.second, self.scale = GCNConv(16, 4), torch.nn.Parameter(torch.ones(4))

        def forward(self, data: Any) -> Any:
            h = self.norm(self.first(data.x, data.edge_index)).relu()
            h = F.dropout(h, 0.5 if replicas == 1 else 0.0, self.training)
            return self.second(h, data.edge_index) * self.scale

        def training_step(self, data: Any, _: int) -> Any:
            loss = F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])
            self.log("loss", loss, batch_size=1, sync_dist=replicas > 1)
            return loss

        def validation_step(self, data: Any, _: int) -> None:
            out, rest = self(data), ~data.train_mask
            loss, size = F.cross_entropy(out[rest], data.y[rest]), int(rest.sum())
            self.log("val", loss, batch_size=size, sync_dist=replicas > 1)
            right = out[rest].argmax(-1) == data.y[rest]
            self.log("accuracy", right.double().mean(), batch_size=size, sync_dist=True)
            highest = out.detach().max()
            self.log("highest", highest, batch_size=1, reduce_fx="max", sync_dist=True)
            for name, metric in (("right", self.right), ("area", self.area)):
                metric.update(out[rest], data.y[rest])
                self.log(name, metric, batch_size=size)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": decay}

    torch.manual_seed(1)
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(Net().double())


def fit(
    loader: Any, tests: Any, folder: Path, strategy: Any, devices: int, replicas: int
) -> dict[str, Any]:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    folder.mkdir(exist_ok=True)
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="val", save_last=True)
    options = {
        "accelerator": "cpu",
        "devices": devices,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
    }
    trainer = lightning.Trainer(
        strategy=strategy(),
        max_epochs=EPOCHS,
        callbacks=[best, EarlyStopping("val", patience=3)],
        logger=CSVLogger(folder, "log", "0"),
        log_every_n_steps=1,
        **options,
    )
    net = module(replicas)
    trainer.fit(net, loader(), tests)
    (scores,) = trainer.validate(net, tests, ckpt_path="best", verbose=False)
    more = lightning.Trainer(
        strategy=strategy(),
        max_epochs=EPOCHS + 2,
        logger=CSVLogger(folder, "log", "1"),
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )
    again = module(replicas)
    more.fit(again, loader(), ckpt_path=folder / "last.ckpt")
    more.strategy.barrier()  # One worker writes what all read.
    logs = [list(csv.DictReader((folder / "log" / k / "metrics.csv").open())) for k in "01"]
    return {
        "losses": [float(row["loss"]) for row in logs[0] if row["loss"]],
        "went on": [float(row["loss"]) for row in logs[1] if row["loss"]],
        "scores": scores,
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "files": sorted(path.name for path in folder.iterdir()),
        "log": len(logs[0]),
    }


def on_workers(roots: list[Path], folder: Path) -> dict[str, Any]:
    from pyg_sar.lightning import SARStrategy

    comm = pyg_sar.comm.current()
    data = [pyg_sar.load_partition(root) for root in roots]
    loader = partial(DataLoader, data, batch_size=None)
    strategy = partial(SARStrategy, replicas=comm.replicas)
    first, last = strategy(), comm.replicas * comm.world_size - 1
    assert first.broadcast(first.global_rank, last) == last
    ranks = first.all_gather(torch.tensor([first.global_rank]))
    assert ranks.flatten().tolist() == list(range(last + 1))
    return fit(loader, loader(), folder, strategy, 2, comm.replicas)


@pytest.mark.parametrize("shape", [(1, 4), (1, 2), (2, 2), (2, 1)])
def test_a_module_trains_as_in_one_process(shape: tuple[int, int], tmp_path: Path) -> None:
    """In one process the graphs that replicas take in the same step are one."""
    replicas, parts = shape
    data = [make_graph(40 + k, seed=k) for k in range(4)]
    roots = [tmp_path / f"parts{k}" for k in range(4)]
    for one, root in zip(data, roots, strict=True):
        one.train_mask = torch.arange(one.num_nodes) < 20  # As many of each graph.
        pyg_sar.write_partitions(one, parts, root, "random")
    joint: Any = partial(DataLoader, data, replicas, collate_fn=Batch.from_data_list)

    def loader() -> Any:  # Lightning shuffles where there are replicas.
        return joint(sampler=None if replicas == 1 else DistributedSampler(data, 1, 0))

    expected = fit(loader, joint(), tmp_path / "one", lambda: "auto", 1, replicas)
    assert len(expected["losses"]) > 2 and len(expected["went on"]) >= 2
    given = on_workers, replicas * parts, roots, tmp_path / "several"
    for found in pyg_sar.launch(*given, replicas=replicas, timeout=60.0):
        for key in ("losses", "went on"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=0)
        for name, score in expected["scores"].items():  # The area is computed in float32.
            close = 1e-6 if name == "area" else 1e-10
            torch.testing.assert_close(found["scores"][name], score, rtol=close, atol=0)
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-8, atol=1e-10)
        assert (found["files"], found["log"]) == (expected["files"], expected["log"])
