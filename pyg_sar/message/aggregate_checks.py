"""Whether a layer's own aggregation treats each target alone, found by giving it them one by one.

PyG's aggregations are known. Of any other, what a target gets must not depend on the messages to
other targets, of which a worker has some only, nor on how many targets there are. All messages to
a target are at hand, so that it can be tried: with each target alone, with numbers drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, aggr

from pyg_sar.message.layer_state import AmbientState
from pyg_sar.message.row_state import Changes, Snapshot

EDGES, TARGETS = 23, 7
_TOLERANCE = {8: 1e-9, 4: 1e-4}


def is_known(layer: MessagePassing) -> bool:
    """Whether a layer aggregates as PyG does."""
    if not str(type(layer).aggregate.__module__).startswith("torch_geometric"):
        return False
    modules = layer.aggr_module.modules() if layer.aggr_module is not None else ()
    own = [m for m in modules if isinstance(m, aggr.Aggregation)]
    return all(type(m).__module__.startswith("torch_geometric") for m in own)


class AggregateCheck:
    """Tries a layer's aggregation. Communicates nothing.

    Args:
        layer: The layer.
        rows: Its messages, without rows ``[0, *]``.
        arguments: What ``aggregate`` takes beside messages, ``index`` and sizes, for the sample.
        levels: Which of these have a row per ``'edge'`` of it, or per ``'node'``.
    """

    def __init__(
        self,
        layer: MessagePassing,
        rows: Tensor,
        arguments: Mapping[str, Any],
        levels: Mapping[str, str],
    ) -> None:
        self.layer, self.arguments, self.levels = layer, arguments, levels
        draw = torch.Generator().manual_seed(0)
        shape = (EDGES, *rows.shape[1:])
        # Of very unlike size, so that a part that is small beside others shows.
        values = torch.randn(shape, generator=draw) * 4.0 ** torch.randint(4, shape, generator=draw)
        self.messages = values.to(rows.dtype).to(rows.device)
        self.index = torch.arange(EDGES, device=rows.device) * TARGETS // EDGES

    def found(self, knows_order: bool) -> tuple[str, tuple[str, ...]]:
        """Why it can't run over workers (or an empty string), and what it changes by itself.

        Args:
            knows_order: The edges' order in the whole graph is known.
        """
        if not self.messages.is_floating_point():
            return "", ()
        every = torch.arange(EDGES, device=self.index.device)
        whole, changed = self._run(every)
        if whole is None or not self._alike(whole, self._run(every)[0]):
            return "", ()  # random also in evaluation: nothing can be told
        changes = Changes()
        for target in range(TARGETS):
            alone, others = self._run(every[self.index == target])
            changes.judge({n: now for n, _, now in others}, iter(changed), lambda t: "")
            if alone is None or not self._alike(alone, whole[target : target + 1]):
                return (
                    "its aggregate() mixes messages to different targets, of which a worker has "
                    "some only, or computes with the number of targets: do that on node features, "
                    "after propagate()"
                ), ()
        if changes.refused:
            return (
                f"its aggregate() changes '{changes.refused}' by the messages that it gets, of "
                "which each worker has its own"
            ), ()
        if not knows_order:
            back = every.flip(0)
            again = self._run(back[self.index[back].argsort(stable=True)])[0]
            if not self._alike(again, whole):
                return (
                    "its aggregate() depends on the order of a node's edges, which is not known "
                    "after reversing or permuting them"
                ), ()
        return "", tuple(sorted(set(changes.updates)))

    def _run(self, edges: Tensor) -> tuple[Tensor | None, list[tuple[str, Any, Any]]]:
        """Aggregates of the edges' targets ``[U, *]``."""
        layer, axis = self.layer, int(self.layer.node_dim)
        targets, index = self.index[edges].unique_consecutive(return_inverse=True)
        count = targets.numel()
        rows = {"edge": edges, "node": targets}
        given = {
            n: v.index_select(0, rows[self.levels[n]]) if n in self.levels else v
            for n, v in self.arguments.items()
        }
        own = {"index": index, "ptr": None, "edge_index_i": index}
        own |= dict.fromkeys(("dim_size", "size_i", "size_j"), count)
        own["size"] = [count, count]
        messages = self.messages.index_select(0, edges)
        messages = messages.movedim(0, axis) if axis % messages.dim() else messages
        state, ambient = Snapshot(layer), AmbientState(index.device, layer)
        modes = [(module, module.training) for module in layer.modules()]
        try:
            with torch.no_grad(), ambient.restored():
                for module, _ in modes:
                    module.training = False
                data = layer.inspector.collect_param_data("aggregate", {**given, **own})
                out = layer.aggregate(messages, **data)
            changes = [*state.changes()]
        finally:
            for module, training in modes:
                module.training = training
            state.restore()
        if not isinstance(out, Tensor) or not -out.dim() <= axis < out.dim():
            return None, changes
        out = out.movedim(axis, 0)
        return (out if out.size(0) == count else None), changes

    def _alike(self, found: Tensor | None, expected: Tensor | None) -> bool:
        if found is None or expected is None or found.shape != expected.shape:
            return False
        tolerance = _TOLERANCE.get(found.element_size(), 6e-2)
        scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
        return torch.allclose(found, expected, tolerance, tolerance * scale, equal_nan=True)
