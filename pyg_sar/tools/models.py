"""The models of ``pyg-sar train --model ...``: PyG's own, and those of the user's.

The stock models are ``GCN``, ``GAT``, ``GraphSAGE`` and ``GIN`` of ``torch_geometric.nn``, so that
the weights of a checkpoint load in plain PyG.

The command line takes a model by name, or as ``module:callable`` or ``FILE.py:callable``: what
``callable(data)`` returns, or ``callable()`` where it takes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Data

from pyg_sar.files import check_argument, check_whole
from pyg_sar.usage import MODELS, NORMS

Call = Callable[[nn.Module, Data], Any]
"""Calls a model with what a graph holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StockModel:
    """A class of ``torch_geometric.nn`` and its keyword arguments, as JSON can hold them."""

    name: str
    arguments: dict[str, Any]

    def build(self) -> nn.Module:
        """Returns the model, its parameters drawn from the current random state.

        Biases right before a batch norm stay 0: the norm takes away what they add, so that their
        gradients are rounding errors only, which Adam would turn into full steps.
        """
        model: Any = getattr(torch_geometric.nn, self.name)(**self.arguments)
        if self.arguments.get("norm") == "BatchNorm":
            last = {"GraphSAGE": "lin_l", "GIN": "nn.lins.1"}.get(self.name, "")
            biases = [conv.get_submodule(last).bias for conv in model.convs[:-1]]
            if self.name == "GIN":  # Before a norm of its own.
                biases += [conv.nn.lins[0].bias for conv in model.convs]
            for bias in biases:
                bias.requires_grad_(False).zero_()
        return model


def stock_model(
    name: str,
    in_channels: int,
    hidden: int,
    out_channels: int,
    *,
    layers: int = 2,
    heads: int = 8,
    dropout: float = 0.5,
    norm: str = "none",
    cached: bool = False,
) -> StockModel:
    """Returns one of PyG's models and the arguments that the options mean.

    ========= ================= ================================================================
    ``gat``   ``GAT``           Velickovic et al., "Graph Attention Networks" (ICLR 2018): heads
                                concatenated in the hidden layers, averaged in the last; dropout
                                on attention, too
    ``gatv2`` ``GAT(v2=True)``  Brody et al., "How Attentive are Graph Attention Networks?"
                                (ICLR 2022), same shape
    ``sage``  ``GraphSAGE``     Hamilton et al., "Inductive Representation Learning on Large
                                Graphs" (NeurIPS 2017), mean aggregation
    ``gcn``   ``GCN``           Kipf and Welling, "Semi-Supervised Classification with Graph
                                Convolutional Networks" (ICLR 2017)
    ``gin``   ``GIN``           Xu et al., "How Powerful are Graph Neural Networks?" (ICLR 2019),
                                a perceptron of two layers in each, with ``norm`` inside
    ========= ================= ================================================================

    Each hidden layer is convolution, norm, ReLU and dropout; the last is a convolution that gives
    the scores.

    Args:
        name: One of :data:`MODELS`.
        hidden: Width of a hidden layer; for ``gat`` and ``gatv2`` that of all heads together.
        layers: Number of convolutions.
        heads: Attention heads of each layer (``gat``, ``gatv2`` only), which divide ``hidden``.
        norm: One of :data:`NORMS`, after every convolution but the last.
        cached: ``gcn`` only: normalise the edges once and keep the result. Right only where the
            model is used with one graph and one set of edge weights for its whole life.
    """
    sizes = {"in_channels": in_channels, "hidden": hidden, "out_channels": out_channels}
    for argument, value in (sizes | {"layers": layers}).items():
        check_whole(argument, value)
    check_argument(0.0 <= dropout < 1.0, "dropout", dropout, "in [0, 1)")
    check_argument(name in MODELS, "name", name, f"one of {MODELS}")
    check_argument(norm in NORMS, "norm", norm, f"one of {NORMS}")
    arguments: dict[str, Any] = {
        "in_channels": in_channels,
        "hidden_channels": hidden,
        "num_layers": layers,
        "out_channels": out_channels,
        "dropout": dropout,
    }
    if norm == "batch":
        arguments["norm"] = "BatchNorm"
    elif norm == "layer":
        arguments |= {"norm": "LayerNorm", "norm_kwargs": {"mode": "node"}}
    if name in ("gat", "gatv2"):
        check_whole("heads", heads)
        if hidden % heads and layers > 1:
            raise ValueError(
                f"Expected 'hidden', the width of all heads together, to be a multiple of "
                f"heads={heads} (got {hidden})"
            )
        arguments |= {"heads": heads, "v2": name == "gatv2"}
    elif name == "gcn":
        arguments["cached"] = cached
    elif name == "gin":
        arguments["train_eps"] = True
    classes = {"sage": "GraphSAGE", "gcn": "GCN", "gin": "GIN"}
    return StockModel(name=classes.get(name, "GAT"), arguments=arguments)


def build_model(
    name: str, in_channels: int, hidden: int, out_channels: int, **options: Any
) -> nn.Module:
    """Builds one of the stock models: :func:`stock_model` with these arguments, built."""
    return stock_model(name, in_channels, hidden, out_channels, **options).build()


# Models by name ###############################################################


def place_and_name(source: str) -> tuple[str, str]:
    """Returns the two sides of ``'module:callable'`` or ``'FILE.py:callable'``."""
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"Expected a model to be one of {', '.join(MODELS)}, 'module:callable' or "
            f"'FILE.py:callable' (got {source!r})"
        )
    return place, name


def imported_model(source: str, data: Data) -> nn.Module:
    """Builds a model for the graph ``data`` by ``'module:callable'`` or ``'FILE.py:callable'``."""
    place, name = place_and_name(source)
    make: Callable[..., Any] | None = getattr(_module(place), name, None)
    if not callable(make):
        raise ValueError(f"{place!r} has no function or class {name!r}")
    model = make(data) if inspect.signature(make).parameters else make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{source} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"There is no module {place!r}") from error
    if not os.path.exists(place):
        raise ValueError(f"There is no file {place!r}")
    name = os.path.splitext(os.path.basename(place))[0]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place!r} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Meanwhile tensors are made in this dtype by default; ``None``: as before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_names(names: Sequence[str], data: Data) -> None:
    """Raises :class:`ValueError` for a name of no attribute of the graph (``'data'`` is itself)."""
    missing = [name for name in names if name not in data and name != "data"]
    if missing:
        raise ValueError(f"'data' has no {missing}; it has {', '.join(map(str, data.keys()))}")


def call_with(names: Sequence[str]) -> Call:
    """Returns a ``call`` that passes the attributes ``names`` of the graph by keyword."""

    def call(model: nn.Module, data: Data) -> Any:
        check_names(names, data)
        return model(**{name: data if name == "data" else data[name] for name in names})

    return call
