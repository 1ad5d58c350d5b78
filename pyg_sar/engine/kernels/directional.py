r"""Second derivatives (``create_graph=True``) in modes 1 and 2: source rows come once more.

Let a kernel compute :math:`f(x)` of node, edge and parameter tensors :math:`x`; :math:`g` is the
gradient of its output. Its backward pass gives the gradients of :math:`\langle g, f \rangle`.
Let :math:`v_k` be the gradients of these. Autograd asks for the derivatives, by :math:`x` and
:math:`g`, of

.. math::
    S(x, g) = \sum_k \langle v_k, \partial \langle g, f(x) \rangle / \partial x_k \rangle

A target's part of :math:`S` depends on its in-edges alone. So :math:`S` is the aggregate of a
message as any other that needs all in-edges of a target at once: it goes by chunks. Only its
gradient is wanted; its value is never computed. For each chunk :math:`x_j` and :math:`v_j` of the
sources come, and the gradients of :math:`x_j` go back: what mode 1 promises (SAR, section 3.2).

The gradient of :math:`S` is a kernel's backward pass again, so higher derivatives follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from pyg_sar.engine.chunks import Chunks
from pyg_sar.engine.kernels.attention import SoftmaxAttention
from pyg_sar.engine.kernels.message import Messages, MessagesForward
from pyg_sar.engine.kernels.sums import Sums
from pyg_sar.engine.run import Kernel, Pass, run
from pyg_sar.engine.schedule import Schedule, by_chunks
from pyg_sar.errors import refuse_second_derivative
from pyg_sar.kernels import fallback
from pyg_sar.kernels.scores import NUMBERS
from pyg_sar.message.decompose import in_place
from pyg_sar.message.dependence import Dependence
from pyg_sar.message.layer_facts import draws_nothing
from pyg_sar.message.program import EdgeProgram, Mapped, Operand, Role
from pyg_sar.message.target_index import Reductions
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

_BUDGET = 2**23  # bytes of a chunk's inputs, as of messages
_GRAPHS = 4  # a chunk's graph of a graph takes a few times what its messages take

Outputs = Callable[[Tile, Sequence[Any]], list[Tensor]]
"""A kernel's outputs of a chunk's targets, ``[U, *]``, from its inputs' rows, by PyTorch."""


class Streamed(NamedTuple):
    """Derivatives of the gradients of a kernel that goes over edges, with its layer's policy."""

    edges: DistEdgeIndex
    policy: SARPolicy

    def check(self, kernel: Kernel) -> None:
        """See :class:`~pyg_sar.engine.run.Derivatives`."""
        if not kernel.wire.is_exact:
            refuse_second_derivative(kernel.title, "need SARPolicy(wire='exact')")
        if not isinstance(kernel, Messages):
            return
        if any("semi_var" in group.kinds for group in kernel.decomposition.groups):
            # Its gradient depends on the messages' mean, which needs no messages.
            refuse_second_derivative(kernel.title, f"with 'semi_grad' {kernel.second_derivative}")
        if kernel.draws is None:
            layer = kernel.program.layer
            if isinstance(layer, MessagePassing) and not draws_nothing(layer):
                remedy = "of a message that draws random numbers need SARPolicy(random='same')"
                refuse_second_derivative(kernel.title, remedy)

    def find(
        self,
        kernel: Kernel,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        directions: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """See :class:`~pyg_sar.engine.run.Derivatives`. All workers call it together."""
        again = torch.is_grad_enabled()  # These derivatives are recorded, too.
        layer, roles, outputs = outputs_of(kernel)
        roles = roles[: len(inputs)]
        inputs, gradients = [_leaves(tensors, again) for tensors in (inputs, gradients)]
        rows = [self._rows(kernel, k, tensor) for k, tensor in enumerate(inputs)]
        operands = [Operand(role, tensor) for role, tensor in zip(roles, rows, strict=False)]
        operands += [Operand("aggregate", gradient) for gradient in gradients]
        numbers: list[int] = []
        for k, direction in enumerate(directions):
            role: Role = roles[k] if k < len(roles) else "whole"
            if direction is None and wanted[k] and role == "source":
                direction = torch.zeros_like(rows[k])  # Rows come on all workers or on none.
            if direction is not None:
                numbers.append(k)
                operands.append(Operand(role, _leaves([direction], again)[0]))
        for k in kernel.unread:
            if roles[k] != "whole":
                operands[k] = Operand("whole", rows[k].new_zeros(()).expand(1, *rows[k].shape[1:]))
        program = _Program(layer, outputs, operands, numbers, roles, kernel.unread)
        wants = [t for t in (*gradients, *inputs) if t.requires_grad]
        if not wants:
            return [None] * (len(gradients) + len(inputs))
        schedule = by_chunks(self._chunks(program))
        schedule = replace(schedule, forward=())
        tensors = [operand.tensor for operand in operands] + inputs[len(roles) :]
        with torch.enable_grad():
            (out,) = run(Directional(program, kernel, self, schedule), tensors, True)
            every = [torch.ones_like(out)]
            found = torch.autograd.grad(out, wants, every, create_graph=again, allow_unused=True)
        results = iter(found)
        return [next(results) if t.requires_grad else None for t in (*gradients, *inputs)]

    def _rows(self, kernel: Kernel, number: int, tensor: Tensor) -> Tensor:
        """An input, or zeros of its shape where it is not there."""
        if number not in kernel.unread:
            return tensor
        if isinstance(kernel, Messages):
            return kernel.program.operands[number].tensor
        return tensor.new_zeros(()).expand(self.edges.plan.num_local, *tensor.shape[1:])

    def _chunks(self, program: EdgeProgram) -> Chunks:
        """Chunks whose rows, and the graphs of these, take what messages take at a time."""
        edges, per_edge = self.edges, max(_GRAPHS * program.row_bytes(), 1)
        budget = self.policy.message_budget or _BUDGET
        most = max(budget // per_edge, 1)
        return edges.remember_together(("chunks", most), lambda: Chunks(edges, most))


def _leaves(tensors: Iterable[Tensor], recorded: bool) -> list[Tensor]:
    """Tensors of which autograd tells apart the same one twice."""
    if recorded:
        return [tensor.view_as(tensor) for tensor in tensors]
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


class Directional(Messages):
    """The gradient of S, by chunks, of one kernel's call. See the top of the module.

    Its inputs are ``program``'s operands, then the layer's parameters.
    """

    def __init__(
        self, program: _Program, kernel: Kernel, derivatives: Streamed, schedule: Schedule
    ) -> None:
        needs = Dependence(True, True, -1, (), float("inf"), 0)
        policy = replace(derivatives.policy, mode=1)
        rest = schedule, policy, kernel.name, 0, ()
        super().__init__(program, in_place(), needs, *rest, getattr(kernel, "draws", None))
        self.title, self.derivatives = kernel.title, derivatives
        self._place, self._no_edges = len(program.roles), derivatives.edges.size(1) == 0
        if isinstance(kernel, Messages):
            self.ambient = kernel.ambient

    def forward(self, tensors: Sequence[Tensor], record: bool) -> Any:
        tensors = tensors[: len(self.requires_grad)]
        if self._no_edges:  # Parameters have gradients here, too.
            self.read = MessagesForward(self, tensors, record).of_no_edges()
        return _Nothing(tensors[self._place].new_zeros(self.schedule.in_degree.numel()))


class _Nothing(Pass):
    """The forward pass of what is never read."""

    states: ClassVar[list[list[Tensor]]] = [[]]

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def finish(self) -> list[Tensor]:
        return [self._out]


class _Program(EdgeProgram):
    """S of a chunk's targets, ``[U]``: their sum, in the first place.

    Args:
        layer, outputs: The kernel's outputs, and the layer whose parameters these depend on.
        operands: The kernel's inputs, the gradients of its outputs, then the directions.
        numbers: Which of the inputs, and behind them of the layer's parameters, have a direction.
        roles: Of the kernel's inputs.
        unread: Those that are zeros, of one row.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        outputs: Outputs,
        operands: list[Operand],
        numbers: Sequence[int],
        roles: Sequence[Role],
        unread: Iterable[int],
    ) -> None:
        self.layer, self.operands, self._outputs = layer, operands, outputs
        self._numbers, self.roles, self._unread = numbers, roles, unread

    def run(self, tile: Tile, values: Sequence[Any], log: Reductions) -> list[Mapped]:
        """See :meth:`~pyg_sar.message.program.TileProgram.run`."""
        out = values[len(self.roles)].new_zeros(max(tile.targets.numel(), 1))
        if tile.num_edges or not tile.targets.numel():
            total = self._derivative(tile, values)
            out = torch.cat([total.view(1), out[1:]])
        return [Mapped(out, log)]

    def _derivative(self, tile: Tile, values: Sequence[Any]) -> Tensor:
        count = len(self.roles)
        rows, rest = list(values[:count]), values[count:]
        gradients = rest[: len(rest) - len(self._numbers)]
        for k in self._unread:
            if self.roles[k] != "whole":
                length = tile.targets.numel() if self.roles[k] == "aggregate" else tile.num_edges
                rows[k] = rows[k].expand(length, *rows[k].shape[1:])
        total = gradients[0].new_zeros(())
        with torch.enable_grad():
            for k in self._numbers:
                if k < count and not rows[k].requires_grad:
                    rows[k] = rows[k].detach().requires_grad_()
            found = zip(self._outputs(tile, rows), gradients, strict=True)
            pairs = [(out, gradient) for out, gradient in found if out.requires_grad]
            every = [*rows, *(p for p in self.layer.parameters() if p.requires_grad)]
            wanted = [every[k] for k in self._numbers]
            if not pairs or not wanted:
                return total
            reached, given = zip(*pairs, strict=True)
            ends = reached, wanted, given
            first = torch.autograd.grad(*ends, create_graph=True, allow_unused=True)
            for derivative, direction in zip(first, rest[len(gradients) :], strict=True):
                if derivative is not None:
                    total = total + (derivative * direction).sum()
        return total


# The outputs of a chunk #######################################################


def outputs_of(kernel: Kernel) -> tuple[torch.nn.Module, list[Role], Outputs]:
    """The layer, the roles of a kernel's inputs, and its outputs as PyTorch computes them."""
    if isinstance(kernel, Messages):
        roles: list[Role] = [operand.role for operand in kernel.program.operands]
        return kernel.program.layer, roles, _of_messages(kernel)
    if isinstance(kernel, SoftmaxAttention):
        known: dict[str, Role] = {"value": "source", "key": "source", "edge_attr": "edge"}
        known["query"] = "aggregate"
        roles = [known.get(name, "whole") for name in kernel.names]
        return torch.nn.Module(), roles, _of_attention(kernel)
    if isinstance(kernel, Sums):
        return torch.nn.Module(), ["source", "edge"], _of_sums(kernel)
    raise TypeError(f"Expected a kernel that goes over edges (got {type(kernel).__name__})")


def _of_messages(kernel: Messages) -> Outputs:
    program: Any = kernel.program
    if program.complete or isinstance(program, _Program):
        return lambda tile, rows: [m.messages for m in program.run(tile, rows, Reductions())]
    program = copy.copy(program)
    program.complete = True

    def outputs(tile: Tile, rows: Sequence[Any]) -> list[Tensor]:
        log = Reductions()
        own = program.own(tile, log)
        out, values, given = program.call(rows, {**own, **program.sizes})
        mapped = program.finished(tile, out, values, {**given, **own}, log)
        groups = kernel.decomposition.groups
        pairs = [(m, kind) for m, g in zip(mapped, groups, strict=True) for kind in g.kinds]
        return [_reduced(m.messages, tile, kind) for m, kind in pairs]

    return outputs


def _reduced(messages: Tensor, tile: Tile, kind: str) -> Tensor:
    """As PyG's aggregations reduce them: ``[E, *]`` to ``[U, *]``."""
    at = tile.index, 0, tile.targets.numel()
    if kind not in ("var", "semi_var"):
        return scatter(messages, *at, reduce=kind)
    squares = messages.detach().square() if kind == "semi_var" else messages.square()
    return scatter(squares, *at, reduce="mean") - scatter(messages, *at, reduce="mean").square()


def _of_sums(kernel: Sums) -> Outputs:
    def outputs(tile: Tile, rows: Sequence[Any]) -> list[Tensor]:
        messages, *weight = rows
        if weight:
            messages = messages * weight[0].view(-1, 1)
        return [_reduced(messages, tile, kind) for kind in kernel.kinds]

    return outputs


def _of_attention(kernel: SoftmaxAttention) -> Outputs:
    def outputs(tile: Tile, rows: Sequence[Any]) -> list[Tensor]:
        a = kernel.given(rows)
        numbers = torch.arange(tile.num_edges, device=tile.index.device)
        counts = torch.bincount(tile.index, minlength=tile.targets.numel())
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        key = kernel.drop_keys(tile.columns, a.value.device) if a.p > 0 else None
        terms = a.value, a.key, a.query, a.att, a.edge_attr, a.edge_weight
        rest = offsets, None, key, *fallback.split_seed(a.seed), a.p
        number = NUMBERS[a.kind]
        out = fallback.attention(number, *terms, a.slope, a.scale, numbers, *rest)
        return [out if a.bias is None else out + a.bias]

    return outputs
