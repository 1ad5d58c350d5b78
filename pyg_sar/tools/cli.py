"""The command line: ``pyg-sar partition``, ``train``, ``run``, ``predict``, ``verify``..."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm.environment import find_launcher
from pyg_sar.comm.messages import RESUME
from pyg_sar.comm.processes import SignalNotice
from pyg_sar.errors import LostWorkerError, PygSarError, StoppedError, WorkerError
from pyg_sar.partition.attributes import MASKS
from pyg_sar.partition.storage import write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.demo import run_demo
from pyg_sar.tools.graphs import load_graph, number_columns, settings_of
from pyg_sar.tools.models import call_with, imported_model, place_and_name
from pyg_sar.tools.planning import plan_command
from pyg_sar.tools.predict import PredictConfig, predict_worker
from pyg_sar.tools.run import (
    ModelConfig,
    RunConfig,
    classes_of,
    over_seeds,
    say_kept,
    train_seeds,
    use_features,
)
from pyg_sar.tools.script import run_command
from pyg_sar.tools.start import (
    on_workers,
    tell_agent,
)
from pyg_sar.tools.tables import TABLES
from pyg_sar.tools.verify import verify
from pyg_sar.train.config import TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling
from pyg_sar.train.report import hosting_lines
from pyg_sar.usage import MODELS, DemoConfig
from pyg_sar.wording import counted

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # "Try again later" of sysexits.h.
EXIT_INTERRUPT = 130

#: Exceptions of a worker that are a user's mistake, and others whose message says it all.
_USAGE_ERRORS = ("UsageError", "PartitionError", "CheckpointError", "ReportError")
_CLEAR_ERRORS = ("DivergedError", "CommTimeoutError", "StoreError")

_COURTESY = 2.0  # seconds


def run_parsed(arguments: argparse.Namespace) -> int:
    """Runs a command and returns the exit code.

    0: done. 1: something failed. 2: a mistake of the user's, one line on stderr. 75: SIGUSR1 came,
    the checkpoint is saved. 130: Ctrl-C.
    """
    try:
        code = _RUNNERS[arguments.verb](arguments)
    except KeyboardInterrupt as interrupt:
        code = EXIT_INTERRUPT
        if _rank() == 0:
            left = str(interrupt) or "nothing is kept; the same command begins anew"
            print(f"Interrupted: {left}", file=sys.stderr)
    except Exception as error:
        # Every failure ends here, as one line; its traceback is a question of --debug.
        code = _explain(error, arguments.debug)
    sys.stdout.flush()
    return code


def _explain(error: Exception, debug: bool) -> int:
    """Writes one line on stderr, by the one worker that should; returns the exit code."""
    text, usage = str(error), isinstance(error, (ValueError, TypeError, OSError, ImportError))
    if isinstance(error, WorkerError):
        text, usage = _root_cause(error)
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.strerror}: {error.filename!r}"
    elif not isinstance(error, PygSarError) and not usage:
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    rank = _rank()
    tell_agent(error)
    # Where rank 0 is the one that is gone, rank 1 speaks.
    speaker = 1 if isinstance(error, WorkerError) and error.rank == 0 != rank else 0
    if debug:
        traceback.print_exception(error)
        if isinstance(error, WorkerError):
            print(error.traceback, file=sys.stderr)
    if rank == speaker:
        print(f"pyg-sar: error: {text}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends all workers as soon as one fails: the one that speaks goes first.
        time.sleep(_COURTESY)
    if isinstance(error, StoppedError):
        return EXIT_STOPPED
    return EXIT_USAGE if usage else EXIT_FAILURE


def _rank() -> int:
    launcher = find_launcher()
    names = () if launcher is None else (launcher.rank, launcher.world)
    rank, world = [os.environ.get(name, "") for name in names] or ("0", "1")
    impossible = rank.isdecimal() and world.isdecimal() and int(rank) >= int(world)
    return int(rank) if rank.isdecimal() and not impossible else 0  # This may be the very error.


def _root_cause(error: WorkerError) -> tuple[str, bool]:
    """Returns the first line of what a worker raised, and whether it was a user's mistake."""
    found = re.match(r"Rank \d+ failed: (\w+): (.*)", str(error))
    if found is None:
        return str(error), False
    if found[1] in _USAGE_ERRORS:
        return found[2], True
    if found[1] in _CLEAR_ERRORS:
        return found[2], False
    return str(error).splitlines()[0] + " (--debug shows where)", False


# Commands ####################################################################


def _partition(arguments: argparse.Namespace) -> int:
    if arguments.parts < 1:
        raise ValueError(f"--parts {arguments.parts} must be at least 1")
    data = _graph(arguments)
    if isinstance(data, Data) and data.get("x") is None:
        known = ("id", "y", "batch", "node_name", *MASKS)
        left = [name for name in number_columns(data, data.num_nodes) if name not in known]
        if left:
            shown = " ".join(left[:3] + ["..."] * (len(left) > 3))
            told = f"{counted(len(left), 'columns')} stay attributes of their own; make x of them"
            print(f"no features: {told} by --features {shown}", file=sys.stderr)
    statistics = write_partitions(
        data,
        arguments.parts,
        arguments.out,
        arguments.method,
        arguments.seed,
        node_ids=arguments.node_ids,
        levels=arguments.levels,
        overwrite=arguments.overwrite,
        progress=None if arguments.quiet else lambda line: print(line, file=sys.stderr),
        memory=arguments.memory,
        balance_training=arguments.balance_training,
    )
    print(statistics)
    print(f"written to {arguments.out}")
    return 0


def _graph(arguments: argparse.Namespace) -> Data | HeteroData:
    """Returns the graph that a command's SOURCE names."""
    options = {"feature_columns": " ".join(arguments.features)} if arguments.features else {}
    return load_graph(arguments.source, root=arguments.data_root, seed=arguments.seed, **options)


def _train(arguments: argparse.Namespace) -> int:
    config = _run_config(arguments)
    work: Callable[[RunConfig], list[TrainResult]] = train_seeds
    with ExitStack() as stack:
        if config.checkpoint is not None and find_launcher() is not None:
            work = partial(train_seeds, stop=stack.enter_context(SignalNotice()))
        try:
            results, speaks = on_workers(arguments, work, config)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(say_kept(config)) from None
        except LostWorkerError as error:
            if find_launcher() is not None:
                raise
            text = str(error).replace(f". {RESUME}", f"; {say_kept(config)}")
            raise LostWorkerError(text, rank=error.rank, traceback=error.traceback) from None
    if speaks:
        _print_results(results, arguments.seed)
        one_report = config.report if config.seeds == 1 else None
        for line in [] if one_report is None else hosting_lines(one_report):
            print(line)
        for what in ("checkpoint", "report", "tensorboard"):
            path = getattr(config, what)
            if path is not None:
                print(f"{what}: {path}")
    return 0


def _print_results(results: list[TrainResult], first: int) -> None:
    if len(results) == 1:
        print(results[0])
        return
    for seed, result in enumerate(results, first):
        print(f"seed {seed}: {result}")
    found = over_seeds(results, first)
    print(f"at the best epochs of {len(results)} seeds, mean and standard deviation:")
    for name, value in found["mean"].items():
        print(f"  {name:<16} {value:.4f} +- {found['spread'][name]:.4f}")


def _check_file(option: str, path: str | None) -> None:
    """Raises where an option names no file in a folder that is there."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder")
    if path is not None and Path(path).is_dir():
        raise ValueError(f"{option} {path!r} is a folder: give the name of a file")


def _predict(arguments: argparse.Namespace) -> int:
    _check_file("--out", arguments.out)
    if Path(arguments.out).suffix not in (".npy", *TABLES):
        raise ValueError(f"--out {arguments.out}: expected a name in .npy, {' or '.join(TABLES)}")
    if arguments.model in MODELS:
        raise ValueError(
            f"--model {arguments.model}: the checkpoint names such a model itself: leave this out, "
            "or give what builds a model of your own, module:callable or FILE.py:callable"
        )
    config = settings_of(PredictConfig, arguments)
    shape, speaks = on_workers(arguments, predict_worker, config)
    if speaks:
        print(f"{counted(shape[0], 'rows')} of {shape[1:]} written to {arguments.out}")
    return 0


def _run_config(arguments: argparse.Namespace) -> RunConfig:
    resume = arguments.resume
    if resume == "":
        if arguments.checkpoint is None:
            raise ValueError("--resume without a file means the file of --checkpoint: give one")
        resume = arguments.checkpoint
    for option, needed in _NEEDS.items():
        value = getattr(arguments, option)
        if value is not None and getattr(arguments, needed.split()[0]) in (None, "none"):
            name = f"--{option.replace('_', '-')} {value}"
            raise ValueError(f"{name} means nothing without --{needed}: give it, or leave it out")
    if arguments.auto_resume and arguments.checkpoint is None:
        raise ValueError("--auto-resume goes on from the file of --checkpoint: give one")
    progress = "none" if arguments.quiet else "bar" if sys.stderr.isatty() else "lines"
    _check_file("--checkpoint", arguments.checkpoint)
    _check_file("--resume", resume)
    for option in ("report", "tensorboard"):
        if getattr(arguments, option) == "":
            raise ValueError(f"--{option} '' names no folder")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds {arguments.seeds} must be at least 1")
    if arguments.seeds > 1 and (arguments.checkpoint is not None or resume is not None):
        raise ValueError(
            f"--seeds {arguments.seeds} goes without --checkpoint and --resume, which are of one "
            "run: run the seed that you want alone (--seed K --checkpoint FILE)"
        )
    if arguments.labels is not None and arguments.loss != "cross_entropy":
        raise ValueError(
            f"--labels {arguments.labels} shows classes to the model, which --loss "
            f"{arguments.loss} has none of: leave it out"
        )
    model = settings_of(ModelConfig, arguments, name=arguments.model)
    if model.own:
        _refuse_for_own(model, arguments)
    return settings_of(
        RunConfig,
        arguments,
        model=model,
        train=settings_of(TrainConfig, arguments),
        policy=settings_of(SARPolicy, arguments, random="keyed"),
        sampler=_sampler(arguments),
        checkpoint_every=_given(arguments.checkpoint_every, 10),
        resume=resume,
        progress=progress,
    )


def _refuse_for_own(model: ModelConfig, arguments: argparse.Namespace) -> None:
    """Raises for an option of the built-in models, which a model of one's own would not see."""
    place_and_name(model.name)  # A mistyped name is no model of one's own.
    default = ModelConfig()
    names = ["hidden", "heads", "dropout", "norm"]
    if arguments.mfg == "off" and arguments.sampler == "none":
        names.append("layers")
    for name in names:
        if getattr(model, name) != getattr(default, name):
            raise ValueError(
                f"--{name} {getattr(model, name)} is of the models {', '.join(MODELS)}: write it "
                f"into your model, or leave it out of a run with --model {model.name}"
            )
    if arguments.labels is not None:
        raise ValueError(
            f"--labels {arguments.labels} is of the models {', '.join(MODELS)}: for a model of "
            "your own write a script with Trainer(labels=...)"
        )


# Options that another one brings into play.
_NEEDS = {
    "num_neighbors": "sampler neighbor",
    "batch_size": "sampler neighbor",
    "checkpoint_every": "checkpoint FILE",
    "measure_every": "report DIR",
}


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _sampler(arguments: argparse.Namespace) -> NeighborSampling | None:
    if arguments.sampler == "none":
        return None
    if arguments.mfg != "off" or arguments.labels is not None:
        raise ValueError("--sampler neighbor goes without --mfg and --labels: leave them out")
    text = "10" if arguments.num_neighbors is None else arguments.num_neighbors
    given = text.split(",")
    if not all(re.fullmatch(r"-1|[1-9]\d*", n) for n in given):
        raise ValueError(f"--num-neighbors {text}: expected numbers, such as 10,5")
    if len(given) not in (1, arguments.layers):
        raise ValueError(
            f"--num-neighbors {text}: expected one number, or one for each of {arguments.layers} "
            "layers"
        )
    numbers = tuple(map(int, given if len(given) > 1 else given * arguments.layers))
    return NeighborSampling(num_neighbors=numbers, batch_size=_given(arguments.batch_size, 1024))


def _verify(arguments: argparse.Namespace) -> int:
    data = _graph(arguments)
    if not isinstance(data, Data):
        raise ValueError(f"{arguments.source!r} is a heterogeneous graph, which can't be verified")
    torch.manual_seed(arguments.seed)
    if arguments.model in MODELS:
        use_features(data, own=False)
        labels = data.get("y")
        known = isinstance(labels, torch.Tensor) and labels.numel()
        classes = data.num_features
        if known:
            classes = max(classes_of(int(labels.max()), data.num_nodes), 1)
        config = settings_of(ModelConfig, arguments, name=arguments.model)
        model = config.stock(data.num_features, classes).build()
    else:
        model = imported_model(arguments.model, data)
    nodes = min(data.num_nodes, arguments.max_nodes)
    print(
        f"comparing {counted(arguments.workers, 'workers')} with one process on "
        f"{counted(nodes, 'nodes')} ...",
        file=sys.stderr,
    )
    report = verify(
        model,
        data,
        arguments.workers,
        policy=SARPolicy(mode=arguments.mode, prefetch=arguments.prefetch),
        call=call_with(arguments.args) if arguments.args else None,
        max_nodes=arguments.max_nodes,
        method=arguments.method,
        node_ids=arguments.node_ids,
        levels=arguments.levels,
        seed=arguments.seed,
        memory=arguments.memory,
        store=arguments.store,
    )
    print(report)
    return 0 if report.ok else EXIT_FAILURE


_RUNNERS = {
    "partition": _partition,
    "plan": plan_command,
    "train": _train,
    "run": run_command,
    "predict": _predict,
    "verify": _verify,
    "demo": lambda arguments: run_demo(settings_of(DemoConfig, arguments)),
}
