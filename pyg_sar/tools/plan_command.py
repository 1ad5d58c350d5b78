"""The arguments of ``pyg-sar plan``."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import current
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.models import MODELS, imported_model
from pyg_sar.tools.planning import plan
from pyg_sar.tools.run import ModelConfig, UsageError, call_of, count_classes
from pyg_sar.tools.verify import call_with
from pyg_sar.train.flow import call_model

PLAN_EPILOG = """\
Each folder is a partition; there is one worker for each part.
  pyg-sar plan --parts parts4 parts8 --model sage --hidden 256 --layers 3 --memory 16GiB
  pyg-sar plan --parts parts --model net.py:make --bandwidth 1Gb
The machine's rates are measured once, and kept in the user's cache. Exit code 1: nothing fits.
"""

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_plan(command: argparse.ArgumentParser) -> Any:
    """Adds the arguments of ``pyg-sar plan``, and returns what adds those of the model."""
    add = command.add_argument
    add("--parts", nargs="+", required=True, metavar="DIR", help="folders of partitions")
    add("--modes", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3], help="to compare")
    add("--memory", metavar="SIZE", help="that a worker may take: 16GiB")
    add("--bandwidth", metavar="RATE", help="bits/s of each link: 1Gb (default: one host)")
    add("--args", metavar="NAMES", help="attributes that the model takes: x,edge_index,edge_attr")
    return command.add_argument_group("model").add_argument


def plan_command(arguments: argparse.Namespace) -> int:
    """Runs ``pyg-sar plan``; returns 0 where a run fits, else 1."""
    call: Any = call_model
    if arguments.args:
        call = call_with([name for name in arguments.args.split(",") if name])
    elif arguments.model in MODELS:
        call = Stock(arguments.model)
    options = {name: getattr(arguments, name) for name in ("hidden", "layers", "heads", "dropout")}
    found = plan(
        Build(arguments.model, options | {"norm": arguments.norm}),
        arguments.parts,
        modes=arguments.modes,
        policy=SARPolicy(),
        memory=arguments.memory,
        bandwidth=None if arguments.bandwidth is None else parse_rate(arguments.bandwidth),
        call=call,
    )
    sys.stdout.write(f"{found}\n")
    return 0 if found.fitting else 1


def parse_rate(text: str) -> float:
    """Returns bytes per second of ``'1Gb'``, ``'100Mb'``: bits per second.

    Raises:
        ValueError: It is no such text.
    """
    # A large B would be bytes.
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)b(?:it)?(?:/s|ps)?", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--bandwidth {text}: expected bits per second, such as 1Gb or 100Mb")
    return float(found[1]) * _BITS[found[2].lower()] / 8


@dataclass(frozen=True, slots=True)
class Build:
    """Builds the model that the command line names, for a part."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: Data) -> nn.Module:
        try:
            if self.name not in MODELS:
                return imported_model(self.name, data)
            config = ModelConfig(name=self.name, **self.options)
            return config.stock(data.num_features, count_classes(data, current())).build()
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Stock:
    """Calls a stock model as ``pyg-sar train`` does."""

    name: str

    def __call__(self, model: nn.Module, data: Data) -> Tensor:
        out: Tensor = call_of(self.name, data)(model, data)
        return out
