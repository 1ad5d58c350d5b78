"""The command line: ``pyg-sar partition``, ``train``, ``run``, ``predict``, ``verify``..."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm.environment import find_launcher
from pyg_sar.comm.messages import RESUME
from pyg_sar.comm.processes import SignalNotice
from pyg_sar.errors import LostWorkerError, PygSarError, StoppedError, WorkerError
from pyg_sar.partition.assignment import METHODS
from pyg_sar.partition.attributes import MASKS
from pyg_sar.partition.storage import write_partitions
from pyg_sar.policy import WIRES, SARPolicy
from pyg_sar.tools.demo import DemoConfig, run_demo
from pyg_sar.tools.graphs import load_graph, names_in, number_columns, settings_of
from pyg_sar.tools.models import MODELS, NORMS, call_with, imported_model, place_and_name
from pyg_sar.tools.planning import PLAN_EPILOG, add_plan, plan_command
from pyg_sar.tools.predict import PredictConfig, predict_worker
from pyg_sar.tools.run import (
    LOSSES,
    METRICS,
    ModelConfig,
    RunConfig,
    classes_of,
    over_seeds,
    say_kept,
    train_seeds,
    use_features,
)
from pyg_sar.tools.script import RUN_EPILOG, add_run, run_command
from pyg_sar.tools.start import (
    add_workers,
    levels_in,
    node_ids_of,
    on_workers,
    options_of_file,
    tell_agent,
    unknown_option,
)
from pyg_sar.tools.tables import TABLES
from pyg_sar.tools.verify import verify
from pyg_sar.train.config import OPTIMIZERS, SCHEDULES, TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling
from pyg_sar.train.report import hosting_lines
from pyg_sar.usage import COMMANDS, Parser, command_parser
from pyg_sar.wording import counted

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # "Try again later" of sysexits.h.
EXIT_INTERRUPT = 130

#: Exceptions of a worker that are a user's mistake, and others whose message says it all.
_USAGE_ERRORS = ("UsageError", "PartitionError", "CheckpointError", "ReportError")
_CLEAR_ERRORS = ("DivergedError", "CommTimeoutError", "StoreError")

_COURTESY = 2.0  # seconds
_OF_FEATURES = "columns of a table that become x, in this order: age income 'f*'"
_OF_ROWS = "a row per node: .npy, or .parquet, .csv with the ids of nodes"
_OF_ARGS = "attributes that the model takes: x,edge_index,edge_attr"
_OF_IDS = "attributes that hold node ids, or don't: roots,cluster_idx=no (see write_partitions)"
_OF_LEVELS = "what rows of attributes are: weight=edge,degree=node (see write_partitions)"

_PARTITION_EPILOG = """\
sources:
  synthetic                 built in: power-law degrees, planted classes (the default)
  cora, photo, wikics, ...  a dataset of torch_geometric.datasets, or Class/Name
  ogbn-arxiv, ...           OGB's raw files in --data-root; ogb ('pyg_sar[ogb]') downloads them
  FILE.npz, FILE.pt         arrays (edge_index, num_nodes, x, y, train_mask, ...), a saved Data
  FILE.parquet, FILE.csv    edges: columns source and target; :nodes=FILE has a row per node
  FOLDER                    edge_index.npy, x.npy, ..., or edges.parquet, nodes.csv: memory mapped,
                            so that with --memory it may be larger than the memory
Options follow a colon:
  pyg-sar partition synthetic:nodes=200000,degree=50 --parts 4 --out parts
  pyg-sar partition photo:undirected=true,split=random --parts 4 --out parts
"""

_TRAIN_EPILOG = """\
one machine:
  pyg-sar train --parts parts --workers 4
  torchrun --nproc-per-node 4 -m pyg_sar train --parts parts
fewer workers than parts: each computes several parts in turn
  pyg-sar train --parts parts --workers 2

several hosts, here two with two workers each; the same line on both, but for --node-rank 0 and 1
(the partition's folder under the same path on each; rank 0's host writes checkpoint and report):
  torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 \\
      --master-addr host0 --master-port 29500 -m pyg_sar train --parts parts
Workers talk over the interface that host0's name leads to; GLOO_SOCKET_IFNAME=eth0 chooses another.

after a lost worker the same line with --resume continues the same loss curve; torchrun does it by
itself with
  torchrun --max-restarts 3 ... -m pyg_sar train ... --checkpoint FILE --auto-resume
and with --nnodes 1:2 it goes on with the hosts that are left, which take over the parts
srun, mpirun and others start it as well (docs/launching.md); after SIGUSR1 to any worker all save
to --checkpoint and end with code 75
"""

_PREDICT_EPILOG = """\
The graph may be another one than that of the training. Under torchrun, and with fewer workers than
parts, as pyg-sar train. The file gets its name once all rows are written.
Tables (.parquet, .csv) have the columns id (what the graph's own tables call the node, else its
number) and out_0, out_1, ...
  pyg-sar predict --checkpoint run.ckpt --parts parts --out predictions.npy
  pyg-sar predict --checkpoint run.ckpt --parts parts --out predictions.parquet
  pyg-sar predict --checkpoint run.ckpt --parts parts --out z.npy --model net.py:make
"""

_VERIFY_EPILOG = """\
sources: as of pyg-sar partition
models:
  gat, gcn, sage, ...       with the options below
  mycode:make, net.py:Net   what make(data), or make(), returns
Exit code 0: the same as in one process. 1: not supported, or not the same.
  pyg-sar verify cora --model gcn --norm batch
  pyg-sar verify graph.pt --model net.py:make --args x,edge_index,edge_attr
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: done. 1: something failed. 2: a mistake of the user's, one line on stderr. 75: SIGUSR1 came,
    the checkpoint is saved. 130: Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        arguments, unknown = parser.parse_known_args(_with_file(parser, argv))
        if unknown:
            raise ValueError(unknown_option(arguments.command, unknown))
    except (ImportError, OSError, ValueError) as error:
        return _explain(error, "--debug" in argv)
    try:
        code = arguments.run(arguments)
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


def _with_file(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Returns the arguments, before them the options of the file that ``--config`` names."""
    if argv[:1] != ["train"]:
        return argv
    first = Parser(prog="pyg-sar train", add_help=False)
    first.add_argument("--config", action="append", default=[])
    paths = first.parse_known_args(argv)[0].config
    if not paths:
        return argv
    if len(paths) > 1:
        raise ValueError(
            f"--config is given {len(paths)} times ({', '.join(paths)}): give one file"
        )
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return ["train", *options_of_file(commands.choices["train"], paths[0]), *argv[1:]]


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


# Arguments ###################################################################


def _parser() -> argparse.ArgumentParser:
    parser = command_parser()
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_partition(commands)
    model = add_plan(_command(commands, "plan", plan_command, PLAN_EPILOG))
    _add_model(model, metavar="MODEL", help=f"{', '.join(MODELS)}, or module:callable")
    _add_train(commands)
    add_run(_command(commands, "run", run_command, RUN_EPILOG))
    _add_predict(commands)
    _add_verify(commands)
    _add_demo(commands)
    return parser


def _command(commands: Any, name: str, run: Any, epilog: str) -> Any:
    help = COMMANDS[name]
    command = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=epilog,
        formatter_class=_Formatter,
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=run, command=command)
    return command


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are any, and the epilog as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default is not None and not isinstance(action.default, bool)
        if not shown or action.default == argparse.SUPPRESS:
            return text
        return text + " (default: %(default)s)"


def _add_partition(commands: Any) -> None:
    add = _command(commands, "partition", _partition, _PARTITION_EPILOG).add_argument
    add("source", nargs="?", default="synthetic", metavar="SOURCE", help="the graph, see below")
    add("--parts", type=int, required=True, metavar="N", help="parts: one or more per worker")
    add("--out", required=True, metavar="DIR", help="folder to write")
    of_method = "balanced: even nodes and edges; metis: even nodes; coarsened: in less memory; "
    of_method += "geometric: by pos"
    add("--method", choices=METHODS, default="balanced", help=of_method)
    add("--seed", type=int, default=0, help="of the partitioner and of what is drawn")
    add("--node-ids", type=node_ids_of, metavar="NAMES", help=_OF_IDS)
    add("--levels", type=levels_in, metavar="NAMES", help=_OF_LEVELS)
    add("--data-root", default=None, metavar="DIR", help="where datasets are, or are put")
    add("--features", nargs="+", metavar="NAME", help=_OF_FEATURES)
    of_memory = "memory to take beside the graph, such as 2GiB; a folder's graph may be larger"
    add("--memory", metavar="SIZE", help=of_memory)
    of_training = "even training nodes too, by balanced or coarsened"
    add("--balance-training", action="store_true", help=of_training)
    add("--overwrite", action="store_true", help="replace a partition in DIR")
    add("--quiet", action="store_true", help="print the statistics only")


def _add_train(commands: Any) -> None:
    command: argparse.ArgumentParser = _command(commands, "train", _train, _TRAIN_EPILOG)
    group = add_workers(command)
    group("--mode", type=int, choices=(1, 2, 3), default=1, help="1: SAR, 2: keep, 3: one shot")
    group("--prefetch", type=int, default=1, choices=(0, 1), help="shards fetched ahead")
    group("--wire", choices=WIRES, default="exact", help="how halo rows are sent")
    group(
        "--refresh-every",
        type=int,
        default=1,
        metavar="K",
        help="steps: exchange rows in each K-th",
    )
    group("--measure-every", type=int, metavar="N", help="epochs: report errors of gradients")

    of_config = "YAML or JSON of options by name; those of the command line win"
    command.add_argument("--config", metavar="FILE", help=of_config)
    model = command.add_argument_group("model").add_argument
    _add_model(model, metavar="MODEL", help=f"{', '.join(MODELS)}, module:callable or FILE.py:...")
    model("--args", type=names_in, metavar="NAMES", help=_OF_ARGS)
    _add_training(command)
    _add_files(command)


def _add_predict(commands: Any) -> None:
    command = _command(commands, "predict", _predict, _PREDICT_EPILOG)
    add = command.add_argument
    add("--checkpoint", required=True, metavar="FILE", help="the trained model")
    add("--out", required=True, metavar="FILE", help=_OF_ROWS)
    add("--weights", choices=("best", "last"), default="best", help="on validation, or the last")
    add("--model", metavar="MODEL", help="module:callable, where the checkpoint names no model")
    add("--args", type=names_in, metavar="NAMES", help=f"{_OF_ARGS} (default: the training's)")
    add_workers(command)


def _add_model(group: Any, **model: Any) -> None:
    group("--model", default="gat", **model)
    group("--hidden", type=int, default=64, metavar="N", help="width, of all heads together")
    group("--layers", type=int, default=2, metavar="N", help="convolutions")
    group("--heads", type=int, default=8, metavar="N", help="attention heads (gat, gatv2)")
    group("--dropout", type=float, default=0.5, metavar="P", help="probability")
    group("--norm", choices=NORMS, default="none", help="between layers")


def _add_training(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("training").add_argument
    group("--loss", choices=tuple(LOSSES), default="cross_entropy", help="of classes, or numbers")
    group("--epochs", type=int, default=200, metavar="N", help="in all, resumed ones included")
    group("--lr", type=float, default=0.01, help="learning rate")
    group("--optimizer", choices=OPTIMIZERS, default="adam", help="the optimizer")
    group("--weight-decay", type=float, default=5e-4, metavar="X", help="of all parameters")
    group("--schedule", choices=SCHEDULES, default="none", help="of the learning rate")
    group("--warmup", type=int, default=0, metavar="N", help="epochs of a linear ramp")
    group("--step-size", type=int, default=50, metavar="N", help="of step and plateau")
    group("--gamma", type=float, default=0.5, metavar="X", help="of step and plateau")
    group("--label-smoothing", type=float, default=0.0, metavar="X", help="in [0, 1)")
    group("--clip-norm", type=float, metavar="X", help="largest norm of all gradients")
    group("--seed", type=int, default=0, help="of parameters and dropout")
    group("--seeds", type=int, default=1, metavar="N", help="runs, with seeds from --seed on")
    of_mfg = "compute what training nodes need, not all; auto: where that is less"
    group("--mfg", choices=("auto", "on", "off"), default="off", help=of_mfg)
    group("--labels", type=float, metavar="X", help="share of training labels that are inputs")
    group("--sampler", choices=("none", "neighbor"), default="none", help="to compare with")
    of_neighbors = "sampled ones, by hop; -1: all (default: 10)"
    group("--num-neighbors", metavar="N,N", help=of_neighbors)
    of_batch = "training nodes of a sample (default: 1024)"
    group("--batch-size", type=int, metavar="N", help=of_batch)

    group = command.add_argument_group("evaluation").add_argument
    group("--eval-every", type=int, default=1, metavar="N", help="epochs")
    of_metric = "says which epoch is best, on validation (default: accuracy of classes, else loss)"
    group("--metric", choices=METRICS, help=of_metric)
    group("--patience", type=int, metavar="N", help="evaluations to wait, then stop early")
    group("--split", type=int, default=0, metavar="K", help="column of two-dimensional masks")


def _add_files(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("files").add_argument
    group("--checkpoint", metavar="FILE", help="save here")
    group("--checkpoint-every", type=int, metavar="N", help="epochs (default: 10)")
    group(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="go on from here; without FILE: from --checkpoint",
    )
    group("--auto-resume", action="store_true", help="go on from --checkpoint if it exists")
    group("--allow-changes", action="store_true", help="resume with other settings")
    group("--report", metavar="DIR", help="write settings, metrics and a picture here")
    group("--tensorboard", metavar="DIR", help="write losses and scores for TensorBoard here")
    group("--overwrite", action="store_true", help="replace another run's report and checkpoint")
    group("--quiet", action="store_true", help="no progress")


def _add_verify(commands: Any) -> None:
    command = _command(commands, "verify", _verify, _VERIFY_EPILOG)
    add = command.add_argument
    add("source", nargs="?", default="synthetic", metavar="SOURCE", help="the graph, see below")
    add("--workers", type=int, default=3, metavar="N", help="parts that this process hosts")
    add("--max-nodes", type=int, default=2000, metavar="N", help="look at a sample of N nodes")
    add("--method", choices=METHODS, default="random", help="who gets which node")
    add("--mode", type=int, choices=(1, 2, 3), default=1, help="1: SAR, 2: keep, 3: one shot")
    add("--prefetch", type=int, default=1, choices=(0, 1), help="shards fetched ahead")
    add("--node-ids", type=node_ids_of, metavar="NAMES", help=_OF_IDS)
    add("--levels", type=levels_in, metavar="NAMES", help=_OF_LEVELS)
    add("--memory", metavar="SIZE", help="limit: workers are then parts in turn, as in train")
    add("--store", metavar="DIR", help="folder for what parts that wait hold")
    add("--args", type=names_in, metavar="NAMES", help=_OF_ARGS)
    add("--seed", type=int, default=0, help="of the sample and the parameters")
    add("--data-root", default=None, metavar="DIR", help="where datasets are, or are put")
    add("--features", nargs="+", metavar="NAME", help=_OF_FEATURES)
    group = command.add_argument_group("model").add_argument
    _add_model(group, metavar="MODEL", help=f"{', '.join(MODELS)}, or module:callable")


def _add_demo(commands: Any) -> None:
    command = _command(commands, "demo", lambda given: run_demo(settings_of(DemoConfig, given)), "")
    add = command.add_argument
    default = DemoConfig()
    add("--nodes", type=int, default=default.nodes, metavar="N", help="of the synthetic graph")
    add("--workers", type=int, default=default.workers, metavar="N", help="and parts")
    add("--epochs", type=int, default=default.epochs, metavar="N", help="to train")
    add("--mode", type=int, choices=(1, 2, 3), default=default.mode, help="of the layers")
    add("--prefetch", type=int, default=default.prefetch, choices=(0, 1), help="shards ahead")
    add("--seed", type=int, default=default.seed, help="of graph, partition and parameters")
    add("--out", default=default.out, metavar="DIR", help="for the partition and the picture")
