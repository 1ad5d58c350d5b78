"""Training: the loop, its settings, checkpoints, reports."""

from pyg_sar.comm.processes import SignalNotice
from pyg_sar.train.callbacks import CheckpointEvery, LineProgress, TensorBoard, TqdmProgress
from pyg_sar.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from pyg_sar.train.config import EpochRecord, TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling, check_flow
from pyg_sar.train.report import Report, draw_report, read_metrics
from pyg_sar.train.targets import ratio_mask, with_labels
from pyg_sar.train.trainer import Callback, Trainer
from pyg_sar.train.wire_error import gradient_error

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointEvery",
    "EpochRecord",
    "LineProgress",
    "NeighborSampling",
    "Report",
    "SignalNotice",
    "TensorBoard",
    "TqdmProgress",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "check_flow",
    "draw_report",
    "gradient_error",
    "load_checkpoint",
    "ratio_mask",
    "read_metrics",
    "save_checkpoint",
    "with_labels",
]
