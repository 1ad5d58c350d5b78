"""A run's backward pass that is itself recorded (``create_graph=True``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_sar.errors import note_place, refuse_second_derivative


class Derivatives(Protocol):
    """The derivatives of a kernel's gradients (:mod:`pyg_sar.engine.kernels.directional`)."""

    def check(self, kernel: Any) -> None:
        """Raises ``NotImplementedError`` where the kernel has none."""

    def find(
        self,
        kernel: Any,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        directions: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """By the outputs' gradients, then by the inputs. All workers call it together.

        ``directions`` are the gradients of the inputs' gradients; the inputs that are ``wanted``
        have these.
        """


def recorded(backward: Callable[..., Any], run: Any, gradients: Sequence[Tensor]) -> Any:
    """The results of the ``backward`` pass of a run, which autograd records.

    Raises:
        NotImplementedError: The kernel's gradients have no derivatives.
    """
    kernel = run.kernel
    if kernel.derivatives is None:
        refuse_second_derivative(kernel.title, kernel.second_derivative)
    kernel.derivatives.check(kernel)
    saved = run.saved_tensors  # Once: what torch.utils.checkpoint packs is unpacked once.
    inputs, wanted = kernel.inputs(saved), run.needs_input_grad
    once = SimpleNamespace(**vars(run), saved_tensors=saved, needs_input_grad=wanted)
    return (None, *_Gradients.apply(backward, once, len(gradients), *gradients, *inputs))


class _Gradients(torch.autograd.Function):
    """From the outputs' gradients and the inputs to the inputs' gradients."""

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], run: Any, count: int, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.kernel, ctx.count, ctx.wanted = run.kernel, count, run.needs_input_grad[1:]
        return tuple(backward(run, *tensors[:count])[1:])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        kernel, count, tensors = ctx.kernel, ctx.count, ctx.saved_tensors
        try:
            with torch._C._EnableTorchFunction():
                rest = tensors[count:], tensors[:count], directions, ctx.wanted
                return (None, None, None, *kernel.derivatives.find(kernel, *rest))
        except Exception as error:
            note_place(error, f"the second derivative of {kernel.title}")
            raise
