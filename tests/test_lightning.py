"""A LightningModule of plain PyG on workers: the numbers, files and decisions of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import make_graph, workers
from torch.utils.data import DataLoader
from torch_geometric.nn import BatchNorm, GATConv, GCNConv

import pyg_sar

lightning = pytest.importorskip("lightning", reason="needs the extra 'lightning'")
pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 6


def module() -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = GATConv(6, 8, heads=2), BatchNorm(16)
            self.second, self.scale = GCNConv(16, 4), torch.nn.Parameter(torch.ones(4))
            self.losses: list[float] = []

        def forward(self, data: Any) -> Any:
            h = self.norm(self.first(data.x, data.edge_index)).relu()
            h = F.dropout(h, 0.5, self.training)
            return self.second(h, data.edge_index) * self.scale

        def training_step(self, data: Any, _: int) -> Any:
            loss = F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])
            self.log("loss", loss, batch_size=1)
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, data: Any, _: int) -> None:
            out, rest = self(data), ~data.train_mask
            self.log("val", F.cross_entropy(out[rest], data.y[rest]), batch_size=1)
            right = out[rest].argmax(-1) == data.y[rest]
            self.log("accuracy", right.double().mean(), batch_size=1, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": decay}

    torch.manual_seed(1)
    return Net().double()


def fit(data: Any, folder: Path, strategy: Any, devices: int) -> dict[str, Any]:
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
    net, loader = module(), DataLoader([data], batch_size=None)
    trainer.fit(net, loader, loader)
    (scores,) = trainer.validate(net, loader, ckpt_path="best", verbose=False)
    more = lightning.Trainer(
        strategy=strategy(),
        max_epochs=EPOCHS + 2,
        logger=False,
        enable_checkpointing=False,
        **options,
    )
    again = module()
    more.fit(again, loader, ckpt_path=folder / "last.ckpt")
    return {
        "losses": net.losses,
        "went on": again.losses,
        "scores": scores,
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "files": sorted(path.name for path in folder.iterdir()),
        "log": (folder / "log" / "0" / "metrics.csv").read_text().count("\n"),
    }


def on_workers(root: Path, folder: Path) -> dict[str, Any]:
    from pyg_sar.lightning import SARStrategy

    data = pyg_sar.load_partition(root)
    return fit(data, folder, SARStrategy, devices=2)


def test_a_module_trains_as_in_one_process(tmp_path: Path) -> None:
    data = make_graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    expected = fit(data, tmp_path / "one", lambda: "auto", devices=1)
    assert len(expected["losses"]) > 2 and len(expected["went on"]) == 2
    for found in workers(on_workers, 2, tmp_path / "parts", tmp_path / "several"):
        for key in ("losses", "went on"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=0)
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-10, atol=0)
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-8, atol=1e-10)
        assert (found["files"], found["log"]) == (expected["files"], expected["log"])
