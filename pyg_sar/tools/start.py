"""Workers as the command line starts, or finds, them: for ``train`` and ``predict``."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.devices import count_gpus
from pyg_sar.comm.environment import find_launcher, read_environment
from pyg_sar.comm.group import join
from pyg_sar.comm.host import Hosting
from pyg_sar.comm.launch import launch, run
from pyg_sar.errors import PartitionError
from pyg_sar.files import parse_bytes
from pyg_sar.partition.levels import LEVELS
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.store.host_store import PINNED
from pyg_sar.tools.graphs import names_in
from pyg_sar.wording import counted

T = TypeVar("T")


def add_workers(command: argparse.ArgumentParser) -> Any:
    """Adds the options that :func:`on_workers` reads; returns what adds more to their group."""
    group = command.add_argument_group("workers").add_argument
    group("--parts", required=True, metavar="DIR", help="folder of the partition")
    group(
        "--workers",
        type=int,
        metavar="N",
        help="start N here (default: one per part; pinned: per GPU)",
    )
    add_hosting(group)
    return group


def add_hosting(group: Any) -> None:
    """Adds the options that tell how workers compute and send, to a group of options."""
    group("--memory", metavar="SIZE", help="of each worker, for its parts: 2GiB, 500MB")
    group("--store", metavar="DIR", help="folder for what parts that wait hold (a GPU: pinned)")
    group("--backend", choices=("gloo", "nccl", "ccl"), help="default: nccl with GPUs")
    group("--timeout", type=float, default=1800.0, metavar="S", help="seconds per operation")


def on_workers(
    arguments: argparse.Namespace, work: Callable[[Any], T], config: Any
) -> tuple[T, bool]:
    """Runs ``work(config)`` on each worker; returns rank 0's result, and whether it speaks here."""
    options: dict[str, Any] = {"backend": arguments.backend, "timeout": arguments.timeout}
    hosting = hosting_of(arguments)
    if was_launched(arguments.workers):
        device = device_of_parts(hosting.get("memory"), hosting.get("store"))
        place, known, problem = read_environment(), 0, None
        try:
            known = read_metadata(config.parts).num_parts
        except PartitionError as error:  # All workers raise it, once they are joined.
            problem = error
        hosts = bool(hosting) or (place is not None and known > place.world_size)
        with join(arguments.backend, arguments.timeout, device, hosts) as comm:
            with raised_everywhere(comm, PartitionError, "", PartitionError):
                if problem is not None:
                    raise problem
            # Loading tells different partitions apart, on all workers.
            num_parts = max(comm.all_gather_object(known))
            if hosting or comm.world_size < num_parts:
                result = run(work, config, parts=num_parts, **options, **hosting)[0]
            else:
                result = work(config)
            return result, comm.rank == 0
    num_parts = read_metadata(config.parts).num_parts
    workers = default_workers(num_parts, arguments.store)
    workers = workers if arguments.workers is None else arguments.workers
    if not 1 <= workers <= num_parts:
        raise PartitionError(
            f"--workers {workers}: the folder {config.parts!r} has {counted(num_parts, 'parts')}, "
            f"of which each worker takes one or more; start 1 to {counted(num_parts, 'workers')}, "
            f"or partition the graph into {counted(max(workers, 1), 'parts')}"
        )
    if hosting or workers < num_parts:
        hosting["parts"] = num_parts
    return launch(work, workers, config, **options, **hosting)[0], True


def device_of_parts(memory: int | None, store: str | None) -> str | None:
    """Returns where workers compute by where their parts wait, if that decides it."""
    hosting = Hosting.of(1, memory, store)
    return None if hosting is None else hosting.device


def default_workers(parts: int, store: str | None) -> int:
    """Returns how many workers are started for parts: one for each, or for each GPU."""
    gpus = count_gpus() if store == PINNED else 0
    return min(parts, gpus) if gpus else parts


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


def was_launched(workers: int | None) -> bool:
    """Returns whether a launcher (torchrun, ``srun``, ``mpirun``) has started this worker."""
    launcher = find_launcher()
    if launcher is not None and workers is not None:
        raise ValueError(
            f"--workers starts workers, but {launcher.title} ({launcher.rank}, {launcher.world}) "
            "has started them: leave it out"
        )
    return launcher is not None


def tell_agent(error: BaseException) -> None:
    """Leaves an error, and its traceback, where torchrun's agent looks for the cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def hosting_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns where parts that wait are kept, as far as it was said."""
    options: dict[str, Any] = {}
    if arguments.memory is not None:
        options["memory"] = parse_bytes(arguments.memory, "--memory")
    if arguments.store is not None:
        if arguments.store != PINNED and not Path(arguments.store).is_dir():
            raise ValueError(f"--store {arguments.store}: there is no such folder")
        options["store"] = arguments.store
    return options
