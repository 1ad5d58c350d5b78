"""The commands of ``pyg-sar`` by name: nothing here imports PyTorch, so that help comes at once."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NoReturn

COMMANDS = {
    "partition": "cut a graph into parts",
    "plan": "predict memory, bytes and times of a training",
    "train": "train on a partitioned graph",
    "run": "run a PyG script on several workers",
    "predict": "write a model's outputs for all nodes",
    "verify": "compare a model on workers with one process",
    "demo": "compare 4 workers with one plain process, no download",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that takes options by their whole names only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.exit(2, f"pyg-sar: error: {message} ({self.prog} --help)\n")


def command_parser() -> Parser:
    """Returns the parser of ``pyg-sar`` itself, without any command."""
    parser = Parser(
        prog="pyg-sar",
        description="Exact full-batch training of PyTorch Geometric models on several workers.",
    )
    versions = []
    for name in ("pyg_sar", "torch", "torch_geometric"):
        with suppress(PackageNotFoundError):  # A checkout that is not installed.
            versions.append(f"{name} {version(name)}")
    parser.add_argument("--version", action="version", version=", ".join(versions))
    return parser


# Names that options and arguments may have ####################################

METHODS = ("balanced", "metis", "coarsened", "geometric", "random", "contiguous")
LEVELS = ("node", "edge", "graph")
OPTIMIZERS: tuple[str, ...] = ("adam", "adamw", "sgd")
SCHEDULES: tuple[str, ...] = ("none", "cosine", "step", "plateau")
LOSSES: tuple[str, ...] = ("cross_entropy", "bce", "mse", "mae")

#: How halo rows may travel.
WIRES: tuple[str, ...] = ("exact", "bfloat16", "float16", "int8", "int4", "int2")

#: The models of the command line.
MODELS: tuple[str, ...] = ("gat", "gatv2", "sage", "gcn", "gin")

#: Normalisations that :func:`stock_model` takes: none, ``BatchNorm``, ``LayerNorm`` of each row.
NORMS: tuple[str, ...] = ("none", "batch", "layer")

OF_CLASSES = {"accuracy": "accuracy", "auc": "auroc", "ap": "average_precision", "f1": "f1_score"}
OF_NUMBERS = {"mae": "mean_absolute_error", "mse": "mean_squared_error", "r2": "r2_score"}

#: Metrics by name, of which all but the loss and the accuracy of classes are torchmetrics'.
METRICS: tuple[str, ...] = ("loss", *OF_CLASSES, *OF_NUMBERS)

#: Workers of ``pyg-sar run``, where nothing else is said.
SCRIPT_WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The settings of the demo; see ``pyg-sar demo --help``."""

    nodes: int = 20_000
    workers: int = 4
    epochs: int = 20
    mode: int = 1
    prefetch: Literal[0, 1] = 1
    seed: int = 0
    out: str = "runs/demo"


# Values of options as text, and files of options ##############################


def names_in(text: str) -> list[str]:
    """Returns the names of an option such as ``x,edge_index``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def options_of_file(command: argparse.ArgumentParser, path: str) -> list[str]:
    """Returns what a file of options of ``command`` says, as the command line would.

    It is ``.json``, ``.yaml`` or ``.yml``: one mapping from names of options (``weight_decay`` or
    ``weight-decay``) to values; ``true`` gives a switch, ``null`` and ``false`` leave one out.
    """
    names = {
        option.removeprefix("--").replace("-", "_"): action
        for action in command._actions
        for option in action.option_strings
        if option.startswith("--") and option not in ("--help", "--config")
    }
    try:
        found = _read_options(path)
        _check_once(str(key).replace("-", "_") for key in found)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    unknown = [str(key) for key in found if str(key).replace("-", "_") not in names]
    if unknown:
        raise ValueError(f"--config {path}: {unknown_option(command, unknown)}")
    arguments = []
    for key, value in found.items():
        action = names[str(key).replace("-", "_")]
        option = action.option_strings[-1]
        may_stand_alone = action.nargs in (0, "?")
        if value is None or (value is False and may_stand_alone):
            continue
        if isinstance(value, bool) and {"on", "off"} <= set(action.choices or ()):
            value = "on" if value else "off"  # YAML's words for true and false.
        alone = value is True and may_stand_alone
        if not alone and (isinstance(value, bool | dict) or action.nargs == 0):
            raise ValueError(f"--config {path}: {key}: {value!r} is no value of {option}")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        arguments.append(option if alone else f"{option}={text}")
    return arguments


def unknown_option(command: argparse.ArgumentParser, given: Sequence[str]) -> str:
    """Says what a command was given that it does not know, on the command line or in a file."""
    options = [word for word in given if word.startswith("-")] or given
    known = [option.removeprefix("--") for option in command._option_string_actions]
    names = [name for name in known if name not in given]  # Such as ``config`` in a file.
    word = options[0].partition("=")[0].lstrip("-").replace("_", "-")
    near = get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]!r}" if near else f"{command.prog} --help lists them"
    if command.prog.endswith(" run"):
        hint += "; options of the script go after its name"
    return f"{', '.join(options)}: there is no such option; {hint}"


def _read_options(path: str) -> dict[Any, Any]:
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        found = json.loads(text, object_pairs_hook=_dict_of)
    elif Path(path).suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"--config {path}: YAML is read by PyYAML (pip install pyyaml); or write JSON"
            ) from error
        try:
            found, node = yaml.safe_load(text), yaml.compose(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
        if isinstance(node, yaml.MappingNode):
            _check_once(key.value for key, _ in node.value)
    else:
        raise ValueError("expected a file .json, .yaml or .yml")
    if not isinstance(found, dict):
        raise ValueError(f"expected options by name (got {type(found).__name__})")
    return found


def _dict_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_once(key for key, _ in pairs)
    return dict(pairs)


def _check_once(names: Iterable[str]) -> None:
    """Raises where a name comes twice, of which parsers take the last alone."""
    twice = [str(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)}: given twice")


def node_ids_of(text: str) -> dict[str, bool]:
    """Returns what ``'roots,cluster_idx=no'`` says of attributes, as ``write_partitions`` takes
    it.
    """
    found = {}
    for name in names_in(text):
        name, equals, value = name.partition("=")
        if not name or (equals and value != "no"):
            raise argparse.ArgumentTypeError(f"{text!r}: expected NAME or NAME=no, by commas")
        found[name] = not equals
    return found


def levels_in(text: str) -> dict[str, str]:
    """Returns what ``'weight=edge,degree=node'`` says, as ``write_partitions`` takes it."""
    pairs = [name.partition("=") for name in names_in(text)]
    if not all(name and equals and level in LEVELS for name, equals, level in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME=node, NAME=edge or NAME=graph, by commas"
        )
    return {name: level for name, _, level in pairs}
