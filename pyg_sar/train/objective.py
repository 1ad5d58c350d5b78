"""The loss of a training, as a user writes it for one process, and what is known of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pyg_sar.files import check_type
from pyg_sar.reduction.parameters import plain

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss(pred, target)``: one number, the mean over rows, say."""

_OF_CLASSES = (F.cross_entropy, F.nll_loss)


class Objective:
    """A loss of predictions and targets, which are tensors of the whole graph.

    ``loss`` is ``None`` for cross entropy (with ``label_smoothing``); a loss of ``torch.nn`` or
    ``torch.nn.functional``, also as a ``functools.partial``; or a function that returns one number.

    Attributes:
        default: Is true for cross entropy that nobody asked for.
        name: Tells the loss from others.
        of_classes: Is true where labels are classes: cross entropy and ``nll_loss``.
    """

    def __init__(self, loss: Any = None, label_smoothing: float = 0.0) -> None:
        self.default = loss is None
        if loss is not None and label_smoothing:
            raise ValueError(
                "config.label_smoothing is of the default loss: give it to 'loss', "
                "torch.nn.CrossEntropyLoss(label_smoothing=...)"
            )
        if loss is None:
            loss = functools.partial(F.cross_entropy, label_smoothing=label_smoothing)
        check_type("loss", loss, Callable, "a function")
        function, options = _parts(loss)
        self.name = _name(loss, function, options)
        self.of_classes = function in _OF_CLASSES or isinstance(
            loss, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        known = isinstance(loss, nn.modules.loss._Loss) or function is not None
        self._by_row = known and not self.of_classes
        self._call: Loss = loss

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of the model's rows ``[n, *]``, with its gradient.

        Losses that give no number, and those of PyTorch's that would compare each of the rows with
        every other one, are refused.
        """
        if (
            self._by_row
            and pred.dim() != target.dim()
            and pred.numel() == target.numel() == len(pred)
        ):
            raise ValueError(  # Rows would be broadcast against rows: [n, 1] and [n] to [n, n].
                f"'loss' gets predictions of shape {list(pred.shape)} and targets of shape "
                f"{list(target.shape)}: give both the same shape, with view(-1, 1) or squeeze(-1)"
            )
        value = self._call(pred, target)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"Expected 'loss' to give one number of {len(target)} rows, such as the mean of "
                f"their values (got {shape})"
            )
        return value

    def evaluated(self, pred: Tensor, target: Tensor) -> Tensor:
        """Returns the loss in evaluations: the default in float64, without smoothing."""
        return F.cross_entropy(pred.double(), target) if self.default else self(pred, target)


def _parts(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns PyTorch's function and the options of a loss that is PyTorch's."""
    function: Any = loss
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        if function.args:
            return None, {}
        function, options = function.func, {**function.keywords, **options}
    known = getattr(function, "__module__", "") == "torch.nn.functional"
    if known and "reduction" in inspect.signature(function).parameters:
        return function, {"reduction": "mean", **options}
    return None, {}


def _name(loss: Any, function: Any, options: dict[str, Any]) -> str:
    """Returns a text that is another one for another loss, weights included."""
    if isinstance(loss, nn.Module):
        tensors = {name: tensor.tolist() for name, tensor in loss.state_dict().items()}
        plain_values = {n: v for n, v in vars(loss).items() if not n.startswith("_")}
        kept = {n: text for n, v in plain_values.items() if (text := plain(v)) is not None}
        kept.pop("training", None)
        return f"{type(loss).__qualname__}({kept or ''}{tensors or ''})"
    if function is None:
        return plain(loss) or type(loss).__qualname__
    values = {n: v.tolist() if isinstance(v, Tensor) else plain(v) for n, v in options.items()}
    return f"{function.__name__}({values})"
