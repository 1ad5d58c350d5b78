"""The types of the arguments of a ``Trainer``, and whose parameters its optimizer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch_geometric.data.data import BaseData

from pyg_sar.files import check_type
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.flow import NeighborSampling
from pyg_sar.train.targets import SPLITS

_NEEDED: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "data": (BaseData, "a Data, as load_partition gives it"),
    "forward": (Callable, "a function of model and data"),
    "callbacks": (Sequence, "a list of callbacks"),
}
_CALLBACK = ("on_start", "on_epoch", "on_end", "close")
_OPTIONAL: dict[str, tuple[Any, str]] = {
    "config": (TrainConfig, "a TrainConfig or None"),
    "metrics": (Mapping, "a dict of functions by name, or None"),
    "splits": (Mapping, "a dict of attributes by split, or None"),
    "flow": (BaseData, "what message_flow_graphs gives, or None"),
    "sampler": (NeighborSampling, "a NeighborSampling or None"),
    "evaluate_on": (Mapping, "a dict of graphs by split, or None"),
    "optimizer": (torch.optim.Optimizer, "an optimizer that was made, or None"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises where an argument of a ``Trainer`` can't be meant.

    Args:
        given: The arguments by name.

    Raises:
        TypeError: For another type: names the argument.
        ValueError: For splits of other names; an optimizer that has none of the model's parameters;
            a ``flow`` that is no message flow graph.
    """
    for name, (kind, wanted) in _NEEDED.items():
        check_type(name, given[name], kind, wanted)
    for name, (kind, wanted) in _OPTIONAL.items():
        if given[name] is not None:
            check_type(name, given[name], kind, wanted)
    for k, one in enumerate(given["callbacks"]):
        missing = [name for name in _CALLBACK if not callable(getattr(one, name, None))]
        if missing:
            raise TypeError(
                f"callbacks[{k}]={one!r} has no {missing[0]}(): derive its class from "
                "pyg_sar.train.Callback"
            )
    unknown = sorted(set(given["splits"] or ()) - set(SPLITS))
    if unknown:
        raise ValueError(f"Expected 'splits' to name {', '.join(SPLITS)} (got {unknown})")
    if given["flow"] is not None and "input_id" not in given["flow"]:
        raise ValueError("'flow' has no 'input_id': make it by pyg_sar.message_flow_graphs")
    if given["optimizer"] is not None:
        _check_optimizer(given["optimizer"], given["model"])


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if own and not own & held:
        raise ValueError(
            "'optimizer' holds no parameter of 'model', which would not be trained: make it for "
            "model.parameters()"
        )
