"""Node classifiers built from plain, unmodified PyTorch Geometric layers.

Nothing in this file knows about workers: every model here is what a single-process PyG script would
hold, and :func:`pyg_sar.distribute` turns any of them into a distributed one. They are what
``pyg-sar train --model ...`` trains; a script of your own can use any other model as well.

The command line takes a model by name or as a function of the user's:

=====================  ==========================================================================
model                  what is built
=====================  ==========================================================================
``gat``, ``gcn``, ...  :func:`pyg_sar.tools.models.build_model` with the options of the command line
``module:callable``    what ``callable(data)`` returns, or ``callable()`` where it takes nothing
``FILE.py:callable``   the same, from a file
=====================  ==========================================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv

#: Names that :func:`build_model` takes.
MODELS: tuple[str, ...] = ("gat", "gatv2", "sage", "gcn", "gin")

#: Normalisations that :func:`build_model` takes. All are exact when distributed: ``layer`` works
#: row by row, and ``pyg_sar.distribute`` converts ``batch``.
NORMS: tuple[str, ...] = ("none", "batch", "layer")

ConvFactory = Callable[[int, int, bool], nn.Module]


class NodeClassifier(nn.Module):
    r"""A stack of PyG convolutions: dropout, convolution, normalisation, activation, per layer.

    .. math::
        h^{(l+1)} = \sigma(\mathrm{norm}(\mathrm{conv}_l(\mathrm{dropout}(h^{(l)}), E)))

    The last convolution gives the class scores: no normalisation, activation or dropout after it.

    Args:
        convs: The convolutions, first to last.
        norms: One normalisation after each convolution but the last (``nn.Identity`` for none).
        dropout: Probability of dropping an entry of a layer's input while training.
        activation: Applied after every normalisation.

    Shapes:
        ``x``: ``[num_nodes, in_channels]``, ``edge_index``: ``[2, num_edges]`` (source, target),
        ``edge_weight``: ``[num_edges]`` where the convolutions take one (GCN), otherwise None.
        Output: ``[num_nodes, out_channels]``, unnormalised scores (logits).
    """

    def __init__(
        self,
        convs: list[nn.Module],
        norms: list[nn.Module],
        *,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        if len(norms) != len(convs) - 1:
            raise ValueError(
                f"norms: one for every convolution but the last, so {len(convs) - 1}, "
                f"got {len(norms)}"
            )
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norms)
        self.dropout = dropout
        self.activation = activation

    def reset_parameters(self) -> None:
        """Draws all parameters anew from the current random state."""
        for module in [*self.convs, *self.norms]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = F.dropout(x, self.dropout, self.training)
            x = self._convolve(conv, x, edge_index, edge_weight)
            x = self.activation(norm(x))
        x = F.dropout(x, self.dropout, self.training)
        return self._convolve(self.convs[-1], x, edge_index, edge_weight)

    @staticmethod
    def _convolve(conv: nn.Module, x: Tensor, edge_index: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            out: Tensor = conv(x, edge_index)
        elif isinstance(conv, GCNConv):
            out = conv(x, edge_index, weight)
        else:
            raise ValueError(
                f"edge_weight: {type(conv).__name__} has no edge weights; pass None, or use 'gcn'"
            )
        return out


def build_model(
    name: str,
    in_channels: int,
    hidden: int,
    out_channels: int,
    *,
    layers: int = 2,
    heads: int = 8,
    out_heads: int = 1,
    dropout: float = 0.5,
    norm: str = "none",
    cached: bool = False,
) -> NodeClassifier:
    """Builds one of the stock models.

    ========= ==================================================================================
    ``gat``   Velickovic et al., "Graph Attention Networks" (ICLR 2018): heads concatenated in the
              hidden layers, averaged in the last, ELU, dropout on features and on attention.
    ``gatv2`` Brody et al., "How Attentive are Graph Attention Networks?" (ICLR 2022), same shape.
    ``sage``  Hamilton et al., "Inductive Representation Learning on Large Graphs" (NeurIPS 2017),
              mean aggregation, ReLU.
    ``gcn``   Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks"
              (ICLR 2017), self loops and symmetric normalisation, ReLU.
    ``gin``   Xu et al., "How Powerful are Graph Neural Networks?" (ICLR 2019), a two-layer
              perceptron per layer (with ``norm`` inside) and a trained epsilon, ReLU.
    ========= ==================================================================================

    Args:
        name: One of :data:`MODELS`.
        in_channels: Features per node.
        hidden: Width of a hidden layer; for ``gat`` and ``gatv2`` the width of one head, so that a
            hidden layer holds ``heads * hidden`` values per node.
        out_channels: Number of classes.
        layers: Number of convolutions, at least 1.
        heads: Attention heads of the hidden layers (``gat``, ``gatv2`` only).
        out_heads: Attention heads of the last layer, averaged (``gat``, ``gatv2`` only).
        dropout: Probability in ``[0, 1)``.
        norm: One of :data:`NORMS`, after every convolution but the last. With ``batch`` the
            convolutions before it have no bias (the norm has its own).
        cached: ``gcn`` only: normalise the edges once and keep the result. Right only where the
            model is used with one graph and one set of edge weights for its whole life.

    Raises:
        ValueError: for an unknown name or a number out of range.
    """
    _check_sizes(
        in_channels=in_channels,
        hidden=hidden,
        out_channels=out_channels,
        layers=layers,
        heads=heads,
        out_heads=out_heads,
    )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"Expected 'dropout' to be in [0, 1) (got {dropout})")
    for argument, value, known in (("name", name, MODELS), ("norm", norm, NORMS)):
        if value not in known:
            raise ValueError(f"Expected {argument!r} to be one of {known} (got {value!r})")

    attention = name in ("gat", "gatv2")
    width = hidden * heads if attention else hidden
    make = _conv_factory(name, hidden, heads, out_heads, dropout, norm, cached)
    convs: list[nn.Module] = []
    for layer in range(layers):
        last = layer == layers - 1
        inputs = in_channels if layer == 0 else width
        convs.append(make(inputs, out_channels if last else hidden, last))
    norms = [_make_norm(norm, width) for _ in range(layers - 1)]
    activation = F.elu if attention else F.relu
    return NodeClassifier(convs, norms, dropout=dropout, activation=activation)


def _make_norm(name: str, channels: int) -> nn.Module:
    if name == "batch":
        norm: nn.Module = BatchNorm(channels)
    elif name == "layer":
        norm = nn.LayerNorm(channels)
    else:
        norm = nn.Identity()
    return norm


def _check_sizes(**sizes: int) -> None:
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {argument!r} to be an integer >= 1 (got {value!r})")


def _has_bias(norm: str, last: bool) -> bool:
    # A batch norm takes away what a bias before it adds: such a bias has no gradient but rounding
    # errors, which Adam would turn into full steps.
    return last or norm != "batch"


def _attention(
    kind: type[nn.Module], heads: int, out_heads: int, dropout: float, norm: str
) -> ConvFactory:
    def make(inputs: int, outputs: int, last: bool) -> nn.Module:
        return kind(
            inputs,
            outputs,
            heads=out_heads if last else heads,
            concat=not last,
            dropout=dropout,
            bias=_has_bias(norm, last),
        )

    return make


def _gin(hidden: int, norm: str) -> ConvFactory:
    def make(inputs: int, outputs: int, last: bool) -> nn.Module:
        perceptron = nn.Sequential(
            nn.Linear(inputs, hidden, bias=norm != "batch"),
            _make_norm(norm, hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs, bias=_has_bias(norm, last)),
        )
        conv: nn.Module = GINConv(perceptron, train_eps=True)
        return conv

    return make


def _conv_factory(
    name: str,
    hidden: int,
    heads: int,
    out_heads: int,
    dropout: float,
    norm: str,
    cached: bool,
) -> ConvFactory:
    factories: dict[str, ConvFactory] = {
        "gat": _attention(GATConv, heads, out_heads, dropout, norm),
        "gatv2": _attention(GATv2Conv, heads, out_heads, dropout, norm),
        "gin": _gin(hidden, norm),
        "sage": lambda inputs, outputs, last: SAGEConv(inputs, outputs, bias=_has_bias(norm, last)),
        "gcn": lambda inputs, outputs, last: GCNConv(
            inputs, outputs, cached=cached, bias=_has_bias(norm, last)
        ),
    }
    return factories[name]


# Models by name ###############################################################


def imported_model(source: str, data: Data) -> nn.Module:
    """Builds a model by ``'module:callable'`` or ``'FILE.py:callable'``.

    Args:
        source: Where the function (or class) is.
        data: The graph that the model is for.

    Returns:
        The model.

    Raises:
        ValueError: When there is no such function, or it returns no model.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"Expected a model to be one of {', '.join(MODELS)}, 'module:callable' or "
            f"'FILE.py:callable' (got {source!r})"
        )
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
