"""The autograd function of an aggregation: the gap that SAR leaves in the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.aggregate import SequentialAggregation
from pyg_sar.errors import named, refuse_second_derivative


class _Sequential(torch.autograd.Function):
    """The gap that SAR leaves in the autograd trace, from operands and parameters to results."""

    @staticmethod
    def forward(
        ctx: Any, run: SequentialAggregation, parameters: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(run.requires_grad)
        out, states = run.forward([t.detach() for t in tensors[:count]], record=True)
        # Zero-size stand-ins keep the places of what needn't be saved.
        empty = out[0].new_empty(0)
        operands = [t if run.saves(k) else empty for k, t in enumerate(tensors[:count])]
        # Parameters are saved for the sake of their versions: a change in place is noticed.
        kept = [tensor for state in states for tensor in state]
        ctx.save_for_backward(*operands, *tensors[count:], *kept)
        ctx.run, ctx.parameters, ctx.count = run, parameters, count
        ctx.lengths = [len(state) for state in states]
        run.program.release()
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        run: SequentialAggregation = ctx.run
        refuse_second_derivative(run.title(), "need SARPolicy(mode=3)")
        saved = ctx.saved_tensors
        kept = iter(saved[ctx.count + len(ctx.parameters) :])
        states = [[next(kept) for _ in range(length)] for length in ctx.lengths]
        operands = [t.detach() if run.saves(k) else None for k, t in enumerate(saved[: ctx.count])]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        del saved, kept
        with named(f"the backward pass of {run.title()}"):
            rows = [gradient.contiguous() for gradient in gradients]
            totals, sums = run.backward(rows, operands, states, last=not keep)
        found = [sums.get(key) for key in ctx.parameters]
        return (None, None, *totals, *found)


def aggregate(run: SequentialAggregation) -> Tensor:
    """Runs the aggregation, recorded for autograd where a gradient is wanted."""
    tensors = [operand.tensor for operand in run.program.operands]
    if torch.is_grad_enabled() and run.needs.needs_gradient:
        parameters = [p for p in run.program.layer.parameters() if p.requires_grad]
        keys = tuple(id(p) for p in parameters)
        results = _Sequential.apply(run, keys, *tensors, *parameters)
    else:
        results = run.forward([t.detach() for t in tensors], record=False)[0]
    axis = run.program.layer.node_dim
    results = [out.movedim(0, axis) if axis % out.dim() else out for out in results]
    return run.decomposition.finish(results, run.rounds.in_degree, axis)
