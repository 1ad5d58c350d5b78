"""Trained models from checkpoints, and ``pyg-sar predict``: their outputs for all nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import CheckpointError, PygSarError
from pyg_sar.files import TemporaryFolder, replace_file
from pyg_sar.partition.loading import load_partition
from pyg_sar.reduction.rows_file import write_rows
from pyg_sar.tools.inference import call_default, infer
from pyg_sar.tools.models import StockModel, call_with, check_names, imported_model
from pyg_sar.tools.run import ModelConfig, UsageError, as_usage_errors, call_of, use_features
from pyg_sar.tools.tables import TABLES, arrow, names_of
from pyg_sar.train.checkpoint import Checkpoint, inspect_checkpoint, load_checkpoint
from pyg_sar.train.targets import find_targets
from pyg_sar.wording import counted

Weights = Literal["best", "last"]


def load_model(
    checkpoint: str | os.PathLike[str],
    model: Callable[..., nn.Module] | None = None,
    *,
    weights: Weights = "best",
) -> nn.Module:
    """Builds the model of a checkpoint, with its weights, as a plain PyG model. Collective.

    .. code-block:: python

        model = pyg_sar.tools.load_model("run.ckpt")  # of pyg-sar train
        scores = pyg_sar.infer(model, data)

    Checkpoints of ``pyg-sar train`` name one of its models and its arguments; no other class is
    taken from a file. One that was trained with ``--labels`` takes labels as inputs, too::

        data.x = pyg_sar.train.with_labels(data.x, data.y, data.train_mask, num_classes)

    For a model of your own save the arguments, and give the class, which gets them as they stand in
    the file (so it must not run them as code)::

        CheckpointEvery("run.ckpt", every=10, arguments={"hidden": 64})
        model = pyg_sar.tools.load_model("run.ckpt", MyModel)  # MyModel(hidden=64)

    Args:
        checkpoint: The file.
        model: Your model's class, or a function that builds it; called with the ``arguments``
            that the checkpoint holds, or with none.
        weights: ``'best'``: those that were best on the validation nodes, or the last where the
            checkpoint has no others. ``'last'``: as of when it was saved.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        CheckpointError: On every worker, when the file is missing, damaged or of another model, or
            says nothing of how to build the model and ``model`` is not given.
        ValueError: For other ``weights``.
    """
    if weights not in ("best", "last"):
        raise ValueError(
            f"Expected 'weights' to be 'best' or 'last' (got {weights!r} at rank {current().rank})"
        )
    found = inspect_checkpoint(checkpoint)
    return _loaded(checkpoint, found, _build(checkpoint, found, model), weights)


def _build(
    path: str | os.PathLike[str], found: Checkpoint, make: Callable[..., nn.Module] | None
) -> nn.Module:
    extra = _extra(found)
    name = os.fspath(path)
    try:
        if make is not None:
            arguments = extra.get("arguments") or {}
            built = make(**arguments)
        else:
            stock = _stock(extra)
            if stock is None:
                raise CheckpointError(
                    f"{name!r} does not say how its model is built: pass its class, "
                    "load_model(checkpoint, MyModel), or build it and call "
                    "pyg_sar.train.load_checkpoint(checkpoint, model)"
                )
            built = stock.build()
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: no memory for it.
        if isinstance(error, PygSarError):
            raise
        raise CheckpointError(f"Can't build the model of {name!r}: {error}") from error
    if not isinstance(built, nn.Module):
        raise CheckpointError(
            f"Can't build the model of {name!r}: 'model' returned {type(built).__name__}, not a "
            f"torch.nn.Module (rank {current().rank})"
        )
    return built


def _extra(found: Checkpoint) -> dict[str, Any]:
    extra = found.state.get("extra")
    return extra if isinstance(extra, dict) else {}


def _stock(extra: dict[str, Any]) -> StockModel | None:
    """Returns the model of ``pyg-sar train`` that a checkpoint names, if it does.

    PyG's classes run code that arguments hold (``Sequential``), or build classes that arguments
    name (``act``). So only the settings of :class:`ModelConfig`, which are checked, are taken, and
    the numbers of features and classes. What is cached is of the training's graph.
    """
    model, pyg = extra.get("model"), extra.get("pyg")
    sizes = pyg.get("arguments") if isinstance(pyg, dict) else None
    if not isinstance(model, dict) or not isinstance(sizes, dict):
        return None
    names = [field.name for field in fields(ModelConfig)]
    config = ModelConfig(**{name: model[name] for name in names if name in model})
    channels: list[Any] = [sizes.get("in_channels"), sizes.get("out_channels")]
    return config.stock(*channels, cached=False)


def _loaded(
    path: str | os.PathLike[str], found: Checkpoint, model: nn.Module, weights: Weights
) -> nn.Module:
    chosen = weights if found.has_best else "last"
    load_checkpoint(path, model, weights=chosen, restore_rng=False)
    return model.eval()


# pyg-sar predict ##############################################################


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictConfig:
    """The options of ``pyg-sar predict``."""

    checkpoint: str
    parts: str
    out: str
    model: str | None = None
    weights: Weights = "best"
    args: Sequence[str] | None = None


def predict_worker(config: PredictConfig) -> list[int]:
    """Computes all rows and writes them; returns their shape. Collective.

    Raises:
        UsageError: on every worker, where the model does not fit the graph.
    """
    comm = current()
    data = load_partition(config.parts)
    if not isinstance(data, Data):
        raise UsageError(
            f"{config.parts!r} holds a heterogeneous graph: write a script that calls "
            "pyg_sar.infer(model, data, out=..., node_type=...)"
        )
    use_features(data, own=config.model is not None)
    found = inspect_checkpoint(config.checkpoint)
    extra = _extra(found)
    forward: Any = call_default
    with as_usage_errors():
        if config.model is not None:
            model = imported_model(config.model, data)
        elif "pyg" not in extra:
            named = (extra.get("model") or {}).get("name", "FILE.py:callable")
            raise UsageError(
                f"{config.checkpoint!r} does not say how its model is built: add --model {named}"
            )
        else:
            model = _build(config.checkpoint, found, None)
            stock = _stock(extra)
            if stock is not None:
                columns = _show_labels(data, extra, stock, config)
                _check_width(stock, data.x.size(1), columns, config)
                forward = call_of(stock.name.lower(), data, columns)
        args = config.args or (extra.get("model") or {}).get("args")
        if args:
            check_names(args, data)
            forward = call_with(args)
    model = _loaded(config.checkpoint, found, model, config.weights).to(comm.device)
    try:
        if Path(config.out).suffix in TABLES:
            rows: Any = infer(model, data, forward=forward)
            names = data.get("node_name")
            own = rows.to_local(), rows.rows.ids, None if names is None else names.to_local()
            write_table(*own, config.out)
        else:
            rows = infer(model, data, out=config.out, forward=forward)
    except OSError as error:
        raise UsageError(f"{error.strerror}: {error.filename!r}") from error
    return list(rows.shape)


def _show_labels(
    data: Data, extra: dict[str, Any], stock: StockModel, config: PredictConfig
) -> int:
    """Has all training nodes show their labels, as evaluations do; returns the columns."""
    if extra.get("labels") is None:
        return 0
    columns = int(stock.arguments.get("out_channels", 0))
    if "split" not in extra:
        raise CheckpointError(
            f"{config.checkpoint!r} does not say which split its labels belong to: train it again"
        )
    targets = find_targets(data, "y", column=int(extra["split"]))
    shown = targets.masks["train"]
    highest = int(targets.select("train").max()) if targets.counts["train"] else -1
    if highest >= columns:
        raise UsageError(
            f"The model of {config.checkpoint!r} was trained with the labels of "
            f"{counted(columns, 'classes')} as inputs, a training node of {config.parts!r} has "
            f"label {highest}: give the parts of a graph with the same classes"
        )
    data.label_mask = shown
    return columns


def _check_width(stock: StockModel, width: int, columns: int, config: PredictConfig) -> None:
    wanted = stock.arguments.get("in_channels")
    if isinstance(wanted, int) and wanted != width + columns:
        raise UsageError(
            f"The model of {config.checkpoint!r} takes {wanted - columns} features per node, the "
            f"graph {config.parts!r} has {width}: give the parts of a graph with the same features"
        )


# Tables of predictions ########################################################

_ROWS = 2**16  # of a piece of a table


def write_table(
    values: Tensor, places: Tensor, names: Tensor | None, path: str | os.PathLike[str]
) -> None:
    """Writes the rows of all workers to a table, ``.parquet`` or ``.csv``. Collective.

    Its columns are ``id``, what the nodes are called, and ``out_0``, ``out_1``, ... The rows pass
    through ``.npy`` files beside it, so that no worker holds more than its own. Errors are raised
    on every worker.

    ``values`` has a row per node of this worker, ``[num_local, *]``, ``places`` their places in the
    table, int64 ``[num_local]``, and ``names`` their ids (``data.node_name``), by default places.
    """
    comm, path = current(), Path(path).absolute()
    with ExitStack() as stack:
        made = ""
        with _on_all(comm, path):
            if comm.rank == 0:
                arrow(path)
                made = os.fspath(stack.enter_context(TemporaryFolder.beside(path)))
        rows = Path(comm.broadcast_object(made))
        columns = values.flatten(1) if values.dim() > 1 else values.view(-1, 1)
        write_rows(columns, places, rows / "rows.npy")
        if names is not None:
            write_rows(names, places, rows / "names.npy")
        with _on_all(comm, path):
            if comm.rank == 0:
                replace_file(path, lambda file: _convert(rows, file, path.suffix))


@contextmanager
def _on_all(comm: Communicator, path: Path) -> Iterator[None]:
    """Raises an error of rank 0, that a table can't be written, as a ``UsageError`` of all."""
    with raised_everywhere(comm, UsageError, "", ImportError, OSError):
        try:
            yield
        except OSError as error:
            raise OSError(f"{error.strerror or error}: {os.fspath(path)!r}") from error


def _convert(folder: Path, file: Path, suffix: str) -> None:
    pyarrow, csv, parquet = arrow(file)
    with torch.no_grad():
        batches = _batches(folder, pyarrow)
        first = next(batches)
        make = csv.CSVWriter if suffix == ".csv" else parquet.ParquetWriter
        with make(file, first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)


def _batches(folder: Path, pyarrow: Any) -> Iterator[Any]:
    rows = np.load(folder / "rows.npy", mmap_mode="r", allow_pickle=False)
    path = folder / "names.npy"
    names = np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None
    for first in range(0, max(len(rows), 1), _ROWS):
        piece = rows[first : first + _ROWS]
        known = np.arange(first, first + len(piece)) if names is None else None
        ids = names_of(names[first : first + _ROWS]) if names is not None else known
        columns = {f"out_{k}": np.ascontiguousarray(piece[:, k]) for k in range(rows.shape[1])}
        yield pyarrow.RecordBatch.from_pydict({"id": ids, **columns})
