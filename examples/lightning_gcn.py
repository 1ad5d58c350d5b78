"""A LightningModule on two workers: the module is plain PyG and Lightning.

python examples/lightning_gcn.py            # starts two workers
torchrun --nproc_per_node=4 examples/lightning_gcn.py --partition parts
"""

import argparse
import os
import tempfile

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torch_geometric.nn import GCNConv

import pyg_sar
from pyg_sar.lightning import SARStrategy
from pyg_sar.tools import load_graph


class GCN(lightning.LightningModule):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(features, 16), GCNConv(16, classes)

    def forward(self, data):
        h = F.dropout(self.first(data.x, data.edge_index).relu(), 0.5, self.training)
        return self.second(h, data.edge_index)

    def training_step(self, data, batch_index):
        loss = F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])
        self.log("loss", loss, batch_size=1, sync_dist=True)
        return loss

    def validation_step(self, data, batch_index):
        right = self(data)[data.val_mask].argmax(-1) == data.y[data.val_mask]
        self.log("accuracy", right.float().mean(), batch_size=1, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(partition: str, folder: str, epochs: int = 30) -> float:
    strategy = SARStrategy()
    data = pyg_sar.load_partition(partition)  # tensors of the whole graph
    lightning.seed_everything(0, verbose=False)
    model = GCN(data.num_features, int(data.y.max()) + 1)
    loader = DataLoader([data], batch_size=None)
    trainer = lightning.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[
            ModelCheckpoint(folder, monitor="accuracy", mode="max"),
            EarlyStopping("accuracy", mode="max", patience=10),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, loader)
    (found,) = trainer.validate(model, loader, ckpt_path="best", verbose=False)
    return found["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partition", help="a folder of pyg_sar.write_partitions")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            accuracy = train(asked.partition, folder)
        else:
            graph = load_graph("synthetic:nodes=2000,classes=4,features=16")
            pyg_sar.write_partitions(graph, 2, f"{folder}/parts")
            accuracy = pyg_sar.launch(train, 2, f"{folder}/parts", folder)[0]
        if os.environ.get("RANK", "0") == "0":
            print(f"validation accuracy {accuracy:.3f}")
