"""The arguments of all commands of ``pyg-sar``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pyg_sar.usage import (
    COMMANDS,
    LOSSES,
    METHODS,
    METRICS,
    MODELS,
    NORMS,
    OPTIMIZERS,
    SCHEDULES,
    SCRIPT_WORKERS,
    WIRES,
    DemoConfig,
    Parser,
    command_parser,
    levels_in,
    names_in,
    node_ids_of,
    options_of_file,
    unknown_option,
)

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

_PLAN_EPILOG = """\
Each folder is a partition; there is one worker for each part, if --workers says nothing else.
  pyg-sar plan --parts parts4 parts8 --model sage --hidden 256 --layers 3 --memory 16GiB
  pyg-sar plan graph.pt --model gat --memory 4GiB
  pyg-sar plan graph.pt --parts 2 4 8 --model gat --memory 4GiB
  pyg-sar plan --parts parts --model net.py:make --bandwidth 1Gb --hosts 2
  pyg-sar plan --parts parts16 --model gat --workers 1 2 4 --memory 2GiB --store /scratch
Exit code 1: nothing fits.
"""

_RUN_EPILOG = """\
the script is one for a single process, as it is (docs/whole-graph.md):
  pyg-sar run --workers 4 gcn.py --epochs 100
  torchrun --nproc-per-node 4 -m pyg_sar run gcn.py --epochs 100
All options stand before the script; what follows it is for the script.
Exit code: the script's own. 1: it failed, or a worker did. 130: Ctrl-C.
"""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command.

    Ends the process by help, the version, or an error of :mod:`argparse`; other mistakes are a
    ``ValueError`` or an ``ImportError``.
    """
    parser = full_parser()
    arguments, unknown = parser.parse_known_args(_with_file(parser, list(argv)))
    if unknown:
        raise ValueError(unknown_option(arguments.command, unknown))
    return arguments


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


def full_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = command_parser()
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="verb"
    )
    _add_partition(commands)
    model = _add_plan(_command(commands, "plan", _PLAN_EPILOG))
    _add_model(model, metavar="MODEL", help=f"{', '.join(MODELS)}, or module:callable")
    _add_train(commands)
    _add_run(_command(commands, "run", _RUN_EPILOG))
    _add_predict(commands)
    _add_verify(commands)
    _add_demo(commands)
    return parser


def _command(commands: Any, name: str, epilog: str) -> Any:
    help = COMMANDS[name]
    command = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=epilog,
        formatter_class=_Formatter,
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(command=command)
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
    add = _command(commands, "partition", _PARTITION_EPILOG).add_argument
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
    command: argparse.ArgumentParser = _command(commands, "train", _TRAIN_EPILOG)
    group = _add_workers(command)
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
    command = _command(commands, "predict", _PREDICT_EPILOG)
    add = command.add_argument
    add("--checkpoint", required=True, metavar="FILE", help="the trained model")
    add("--out", required=True, metavar="FILE", help=_OF_ROWS)
    add("--weights", choices=("best", "last"), default="best", help="on validation, or the last")
    add("--model", metavar="MODEL", help="module:callable, where the checkpoint names no model")
    add("--args", type=names_in, metavar="NAMES", help=f"{_OF_ARGS} (default: the training's)")
    _add_workers(command)


def _add_model(group: Any, **model: Any) -> None:
    group("--model", default="gat", **model)
    group("--hidden", type=int, default=64, metavar="N", help="width, of all heads together")
    group("--layers", type=int, default=2, metavar="N", help="convolutions")
    group("--heads", type=int, default=8, metavar="N", help="attention heads (gat, gatv2)")
    group("--dropout", type=float, default=0.5, metavar="P", help="probability")
    group("--norm", choices=NORMS, default="none", help="between layers")


def _add_training(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("training").add_argument
    group("--loss", choices=LOSSES, default="cross_entropy", help="of classes, or numbers")
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
    command = _command(commands, "verify", _VERIFY_EPILOG)
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
    command = _command(commands, "demo", "")
    add = command.add_argument
    default = DemoConfig()
    add("--nodes", type=int, default=default.nodes, metavar="N", help="of the synthetic graph")
    add("--workers", type=int, default=default.workers, metavar="N", help="and parts")
    add("--epochs", type=int, default=default.epochs, metavar="N", help="to train")
    add("--mode", type=int, choices=(1, 2, 3), default=default.mode, help="of the layers")
    add("--prefetch", type=int, default=default.prefetch, choices=(0, 1), help="shards ahead")
    add("--seed", type=int, default=default.seed, help="of graph, partition and parameters")
    add("--out", default=default.out, metavar="DIR", help="for the partition and the picture")


def _add_workers(command: argparse.ArgumentParser) -> Any:
    """Adds the options that :func:`on_workers` reads; returns what adds more to their group."""
    group = command.add_argument_group("workers").add_argument
    group("--parts", required=True, metavar="DIR", help="folder of the partition")
    group(
        "--workers",
        type=int,
        metavar="N",
        help="start N here (default: one per part; pinned: per GPU)",
    )
    _add_hosting(group)
    return group


def _add_hosting(group: Any) -> None:
    """Adds the options that tell how workers compute and send, to a group of options."""
    group("--memory", metavar="SIZE", help="of each worker, for its parts: 2GiB, 500MB")
    group("--store", metavar="DIR", help="folder for what parts that wait hold (a GPU: pinned)")
    group("--backend", choices=("gloo", "nccl", "ccl"), help="default: nccl with GPUs")
    group("--timeout", type=float, default=1800.0, metavar="S", help="seconds per operation")


def _add_plan(command: argparse.ArgumentParser) -> Any:
    """Adds the arguments of ``pyg-sar plan``, and returns what adds those of the model."""
    add = command.add_argument
    of_parts = "folders of partitions; or published:parts=32,nodes=...,edges=...,halo=...,..."
    of_graph = "one that is not partitioned yet, as of pyg-sar partition: --parts are then numbers "
    of_graph += "(default: 2, 4 and 8, estimated)"
    add("source", nargs="?", metavar="GRAPH", help=of_graph)
    add("--parts", nargs="+", metavar="DIR", help=of_parts)
    add("--data-root", default=None, metavar="DIR", help="where datasets are, or are put")
    add("--picture", metavar="FILE", help="write a picture of the table: .svg, .png, .pdf")
    add("--workers", nargs="+", type=int, metavar="W", help="to compare (default: one a part)")
    add("--modes", nargs="+", type=int, choices=(1, 2, 3), help="to compare (default: all)")
    add("--memory", metavar="SIZE", help="that a worker may take: 16GiB")
    of_store = "with --memory: parts that wait go to a file here, as in train; its disk is tried"
    add("--store", metavar="DIR", help=of_store)
    add("--bandwidth", metavar="RATE", help="bits/s of each host's link: 1Gb (default: one host)")
    add("--hosts", type=int, metavar="N", help="that workers are on (default: one each)")
    of_args = "attributes that the model takes: x,edge_index,edge_attr"
    add("--args", type=names_in, metavar="NAMES", help=of_args)
    return command.add_argument_group("model").add_argument


def _add_run(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``pyg-sar run``."""
    group = command.add_argument_group("workers").add_argument
    group(
        "--workers",
        type=int,
        metavar="N",
        help=f"start N here (default: --parts, or {SCRIPT_WORKERS})",
    )
    group("--parts", type=int, metavar="N", help="parts of the graph (default: one per worker)")
    _add_hosting(group)
    group(
        "--float64",
        action="store_true",
        help="default dtype float64, and datasets' float32 as float64: to check what float32 gives",
    )
    group = command.add_argument_group("graphs").add_argument
    group("--cache", metavar="DIR", help="folder of partitions (default: in the user's cache)")
    group(
        "--node-ids",
        type=node_ids_of,
        metavar="NAMES",
        help="attributes that hold node ids, or don't: a,b=no",
    )
    group("--levels", type=levels_in, metavar="NAMES", help="what rows are: a=edge,b=node")
    command.add_argument("script", metavar="SCRIPT", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
