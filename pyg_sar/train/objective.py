"""The loss of a training over all workers' rows, from the one that a user writes for one process.

[Note: the divisor] A mean loss is a sum over rows, divided by their number (or, of classes with
weights, by the sum of the labels' weights). Workers hold different rows, so that the mean of their
means is another number. What is computed here is the sum of all workers' rows, divided by the sum
of their divisors; so a loss of PyTorch is called without its own reduction.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.metrics import mean
from pyg_sar.reduction.parameters import plain
from pyg_sar.wording import counted

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss(pred, target)``: a value for each row."""

_LABEL = ("", "", "mean")
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_REDUCTIONS = ("mean", "sum", "none")


class Objective:
    r"""A loss over the rows of all workers.

    .. math:: L = \frac{\sum_p \sum_{k \in p} \ell(\hat y_k, y_k)}{\sum_p D_p}

    with :math:`D_p` the number of values on worker p; of cross entropy and ``nll_loss`` the sum of
    the weights of the labels that count (``weight``, ``ignore_index``); 1 in all where the loss is
    a sum.

    Args:
        loss: ``None`` for cross entropy; a loss of ``torch.nn`` or ``torch.nn.functional``, also as
            a ``functools.partial``, with any reduction; or a function that returns a value for each
            row.
        label_smoothing: Of the default.

    Attributes:
        default: Is true for cross entropy that nobody asked for.
        name: Tells the loss from others.
        of_classes: Is true where labels are classes: cross entropy and ``nll_loss``.

    Raises:
        TypeError: When ``loss`` is no function.
        ValueError: For ``label_smoothing`` with another loss than the default, or a reduction
            other than ``'mean'``, ``'sum'`` and ``'none'``.
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
        if not callable(loss):
            raise TypeError(f"Expected 'loss' to be a function (got {type(loss).__name__})")
        function, options = _parts(loss)
        self.name = _name(loss, function, options)
        self.of_classes = function in _OF_CLASSES or isinstance(
            loss, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        self._weight: Tensor | None = options.get("weight")
        self._ignored = options.get("ignore_index", -100)
        self._sums = options.get("reduction") == "sum"
        # Rows with labels below 0 have been left out.
        counts = self._weight is None and self._ignored < 0
        self._weighs = self.of_classes and options.get("reduction") == "mean" and not counts
        self._call: Loss = _without_reduction(loss, options)

    def values(self, pred: Tensor, target: Tensor, rank: int) -> Tensor:
        """Returns the loss of each row, with its gradient.

        Args:
            pred: The model's rows, ``[n, *]``.
            target: Their targets, ``[n, *]``.
            rank: Of this worker, for errors.

        Returns:
            ``[n]``, or ``[n, *]`` where the loss has a value for each entry.

        Raises:
            ValueError: When the loss gives anything else.
        """
        values = self._call(pred, target)
        rows = len(target)
        good = isinstance(values, Tensor) and values.is_floating_point() and values.dim() > 0
        if not good or len(values) != rows:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"Expected 'loss' to give a value for each of {counted(rows, 'rows')} (got {shape} "
                f"on rank {rank}): the mean over one worker's rows is not that over all. Return "
                "the values of the rows, reduction='none'"
            )
        same = self.of_classes or pred.dim() == target.dim()
        if values.dim() > 1 and not (same and values.shape in (pred.shape, target.shape)):
            raise ValueError(  # Rows were broadcast against rows: [n, 1] and [n] to [n, n].
                f"'loss' gives values of shape {list(values.shape)} for predictions of shape "
                f"{list(pred.shape)} and targets of shape {list(target.shape)} (rank {rank}): give "
                "both the same shape, with view(-1, 1) or squeeze(-1)"
            )
        return values

    def divisor(self, values: Tensor, target: Tensor) -> float:
        """Returns this worker's share of the divisor (see [Note: the divisor])."""
        if not self._weighs or target.is_floating_point():
            return float(values.numel())
        counted = target != self._ignored
        if self._weight is None:
            return float(counted.sum())
        return float(self._weight.double()[target[counted]].sum())

    def __call__(self, pred: Tensor, target: Tensor, comm: Communicator) -> Tensor:
        """Returns the loss over all workers' rows, with its gradient. Collective."""
        values = self.values(pred, target, comm.rank)
        if not self._sums and not self._weighs:
            return mean(values)
        own = torch.tensor(
            [values.numel(), self.divisor(values, target)],
            dtype=torch.float64,
            device=comm.device,
        )
        count, divisor = torch.stack(comm.all_gather(own, label=_LABEL)).sum(dim=0).tolist()
        return mean(values) * self._total(count, divisor)

    def _total(self, count: float, divisor: float) -> float:
        if self._sums:
            return count
        return count / divisor if divisor else float("nan")

    def sums(self, pred: Tensor, target: Tensor, rank: int) -> tuple[float, float]:
        """Returns this worker's sum of values, and of the divisor, in float64."""
        pred = pred.detach()
        if self.default:
            values = F.cross_entropy(pred.double(), target, reduction="none")
        else:
            values = self.values(pred, target, rank)
        return float(values.double().sum()), self.divisor(values, target)

    def ratio(self, total: float, divisor: float) -> float | None:
        """Returns the loss, from the sums of all workers; ``None`` without any row."""
        if not divisor:
            return None
        return total if self._sums else total / divisor


def _parts(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns PyTorch's function and the options of a loss that is PyTorch's."""
    if isinstance(loss, nn.modules.loss._Loss):
        names = ("reduction", "weight", "ignore_index")
        return None, {n: getattr(loss, n) for n in names if hasattr(loss, n)}
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


def _without_reduction(loss: Any, options: dict[str, Any]) -> Any:
    reduction = options.get("reduction")
    if reduction is None:
        return loss
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"Expected the reduction of 'loss' to be one of {_REDUCTIONS} (got {reduction!r})"
        )
    if isinstance(loss, nn.Module):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss
    return functools.partial(loss, reduction="none")


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
