"""Random messages from a small grammar: the source text of ``message`` and what it does.

A program is a few statements over ``[E, 4]`` values. Most are made of operators that treat every
edge alike and alone; some hold one act whose result depends on which edges are at hand, on how many
they are, on a worker's own numbering, or on how often the message runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, scatter, softmax

WIDTH = 4
LEAVES = (
    "x_j",
    "x_j",
    "x_i - x_j",
    "edge_attr + x_j",
    "edge_weight.view(-1, 1) * x_j",
    "self.lin(x_j)",
)
ROW_WISE = (
    "torch.tanh({0})", "{0}.relu()", "-2.5 * {0} / 3", "{0} * self.scale", "self.lin({0})",
    "{0}.softmax(-1)", "{0}.view(-1, 2, 2).transpose(1, 2).flatten(1)", "{0}.abs() + 0.5",
    "{0} / ({0}.norm(dim=1, keepdim=True) + 1)", "{0} - {0}.mean(-1, keepdim=True)",
    "torch.nn.functional.layer_norm({0}, (4,))", "{0}.sort(dim=1)[0]", "{0}.cumsum(1)",
    "{0}.clone().mul_({0}.detach())", "torch.einsum('ec,cd->ed', {0}, self.square)",
    "{0}.gather(1, {0}.argmax(1, keepdim=True)).expand(-1, 4)", "{0} @ self.square",
    "{0} + self.table[(edge_attr[:, 0] > 0).long()]", "{0}.flip(1)", "{0}.roll(1, -1)",
    "{0}.masked_fill({0} < 0, 0.5)", "{0} * ({0} > 0)", "{0}.clamp(-1, 1).exp()",
    "torch.bmm({0}.view(-1, 1, 4), {0}.view(-1, 4, 1)).view(-1, 1) * x_j",
    "{0} + {0}.new_ones({0}.size(0), 1)", "torch.zeros_like({0}).add_({0})",
    "{0}.reshape({0}.size(0), -1)", "torch.stack([{0}, x_j]).sum(0)",
    "self.lin({0}.view(-1, 1, 4)).squeeze(1)", "{0}.var(1, keepdim=True) + {0}",
    "{0}.index_select(1, self.order)", "{0} * {0}.amax(1, keepdim=True)",
    "torch.logsumexp({0}, 1, keepdim=True) * x_j",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} * {1}", "torch.where({0} > 0, {0}, {1})", "torch.maximum({0}, {1})",
    "torch.cat([{0}[:, :2], {1}[:, 2:]], 1)", "({0} - {1}).square()", "torch.lerp({0}, {1}, 0.3)",
    "({0} * {1}).sum(-1, keepdim=True) * x_j",
)  # fmt: skip
MASKED = (
    "m{k} = {0}[:, 0] > 0",
    "b{k} = torch.zeros_like({0})",
    "b{k}[m{k}] = self.lin({0}[m{k}])",
)
AT_TARGETS = (
    "softmax({0}, index, num_nodes=size_i) * {0}", "softmax({0}, index) + x_j",
    "{0} - scatter({0}, index, 0, size_i, 'mean')[index]",
    "{0} / degree(index, size_i).clamp(min=1)[index].view(-1, 1)",
    "{0} * (edge_index_i == edge_index_j).view(-1, 1)",
    "{0} + scatter({0}, index, 0, dim_size, 'sum').tanh().index_select(0, index)",
)  # fmt: skip
MIXING = (
    "{0} / {0}.abs().max()", "{0} - {0}.mean(0)", "{0} - {0}.mean()", "{0}.softmax(0)",
    "{0}.cumsum(0)", "{0}.flip(0)", "{0}[torch.arange({0}.size(0) - 1, -1, -1)]",
    "{0} @ ({0}.t() @ {0}).tanh()", "{0} / len({0})", "{0} * {0}.size(0)", "{0} / {0}.shape[0]",
    "{0} / {0}.numel()", "{0} + {0}.argmax(0)", "{0} * {0}.argmax()", "{0} * ({0} > 1.5).any()",
    "{0} * 2 if {0}.sum().item() > 0 else {0}", "{0} * 2 if ({0} > 2).any() else {0}",
    "{0} / {0}.norm()", "{0} / {0}.norm(dim=0)", "{0}.sort(dim=0)[0]", "{0}.roll(1, 0)",
    "torch.nn.functional.batch_norm({0}, None, None, training=True)", "{0} - {0}[:1]",
    "{0} * torch.arange({0}.size(0)).view(-1, 1)", "{0} + self.places[: {0}.size(0)]",
    "({0} - {0}.min()) / ({0}.max() - {0}.min() + 1)", "{0} * {0}.std()", "{0} - {0}.median()",
    "{0} * torch.linspace(0, 1, {0}.size(0)).view(-1, 1)", "{0} + {0}.t().mean(1)",
    "{0} * torch.ones({0}.size(0)).sum()", "{0} / {0}.abs().max().clamp(min=5.0)",
    "{0} @ torch.corrcoef({0}.t()).nan_to_num()", "{0}.clamp(max={0}.quantile(0.9).item())",
    "{0} * torch.from_numpy({0}.detach().numpy()).abs().max()", "{0} * max({0}.tolist())[0]",
    "{0} - {0}.view(-1).topk(3)[0].mean()", "torch.cat([{0}[1:], {0}[:1]])",
)  # fmt: skip
NUMBERING = (
    "{0} * (index + 1).view(-1, 1)", "{0} * index.view(-1, 1).to({0}.dtype)",
    "{0} * (edge_index_j % 2).view(-1, 1)", "{0} + self.nodes[index]",
    "{0} + self.nodes[edge_index_i]", "{0} * (edge_index_i > 3).view(-1, 1)",
    "{0} * (edge_index_i < edge_index_j).view(-1, 1)", "{0} + self.nodes[edge_index_j]",
    "{0} * (index == 0).view(-1, 1)", "{0} * index.max()", "{0} + index.unique().numel()",
    "{0} * torch.cat([index[:1] * 0, index.diff()]).view(-1, 1)", "{0} * edge_index_j.max()",
)  # fmt: skip
PLACES = (
    "torch.cat([{0}[:5] * 2, {0}[5:]])", "{0}.index_fill(0, torch.tensor([0, 3]), 0.0)",
    "{0} * torch.tensor([k % 2 for k in range({0}.size(0))]).view(-1, 1)", "{0}.tril(-2)",
    "torch.cat([torch.dropout({0}, 0.5, True)[:5], {0}[5:]])", "{0}[-1:].zero_() + {0}",
)  # fmt: skip
SIZES = (
    "{0} / size_j", "{0} * size_i", "{0} / dim_size", "{0} * (size[0] - 1)",
    "{0} + 1 / size_j", "{0} * float(size_i)", "{0} * torch.tensor(1.0 * dim_size)",
    "softmax({0}, index, num_nodes=size_i) * size_i", "{0} if size_j > 12 else {0} * 2",
)  # fmt: skip
STATE = (
    "self.calls += 1", "self.count += 1", "self.count = self.count + 1", "self.log.append(1)",
    "self.momentum.mul_(0.9).add_(0.1)", "self.counts['calls'] = self.counts['calls'] + 1",
)  # fmt: skip
LOCAL_STATE = (
    "self.total += x_j.detach().sum()", "self.calls += x_j.size(0)", "self.count += len(x_j)",
    "self.running.mul_(0.9).add_(0.1 * x_j.detach().mean(0))", "self.log.append(x_j.size(0))",
    "self.running = self.running + x_j.detach().amax(0)",
)  # fmt: skip
AGGREGATIONS = ("sum", "sum", "mean", "max", "std", "median", "softmax", ["sum", "max"])
OWN = {  # aggregate() of the layer's own: by targets, and over all of them
    "apart": "scatter({0}, index, 0, dim_size, 'sum').tanh()",
    "numbers": "scatter({0}, index, 0, dim_size, 'sum') / dim_size",
    "joint": "scatter({0} / {0}.abs().max(), index, 0, dim_size, 'sum')",
}
ARGUMENTS = (
    "x_i", "x_j", "edge_attr", "edge_weight", "index", "edge_index_i", "edge_index_j", "size",
    "size_i", "size_j", "dim_size",
)  # fmt: skip
KINDS = {
    "plain": 10, "targets": 4, "mixing": 7, "numbering": 3, "sizes": 3, "state": 2,
    "local state": 2, "own": 2,
}  # fmt: skip
MIXES = ("mixing", "numbering", "local state")  # no worker can know what one process says


@dataclass(frozen=True)
class Program:
    """A random message.

    Attributes:
        kind: What it does beside row-wise operators.
        lines: The statements of ``message``; the last one returns.
        own: The expression of its own ``aggregate``, or an empty string.
        aggr: The aggregation.
    """

    kind: str
    lines: tuple[str, ...]
    own: str
    aggr: Any

    @property
    def mixes(self) -> bool:
        """Whether an error is all that is right over workers."""
        return self.kind in MIXES or "abs().max()" in self.own


def random_program(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    lines: list[str] = []

    def name(expression: str) -> str:
        lines.append(f"a{len(lines)} = {expression}")
        return f"a{len(lines) - 1}"

    def value(depth: int) -> str:
        if depth == 0:
            return name(draw.choice(LEAVES))
        if draw.random() < 0.25:
            return name(draw.choice(BINARY).format(value(depth - 1), value(depth - 1)))
        if draw.random() < 0.07:
            given, number = value(depth - 1), len(lines)
            lines.extend(line.format(given, k=number) for line in MASKED)
            return f"b{number}"
        return name(draw.choice(ROW_WISE).format(value(depth - 1)))

    acts = {"targets": AT_TARGETS, "mixing": MIXING, "numbering": NUMBERING, "sizes": SIZES}
    result = value(draw.randint(0, 2))
    if kind in acts:
        result = name(draw.choice(acts[kind]).format(result))
    if kind in ("state", "local state"):
        lines.append(draw.choice(STATE if kind == "state" else LOCAL_STATE))
    if draw.random() < 0.5:
        result = name(draw.choice(ROW_WISE).format(result))
    own = draw.choice(list(OWN.values())) if kind == "own" else ""
    return Program(kind, (*lines, f"return {result}"), own, draw.choice(AGGREGATIONS))


class Layer(MessagePassing):
    """What the programs' messages are methods of."""

    def __init__(self, aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr)
        draw = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        self.lin = Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.lin.weight.data = numbers(WIDTH, WIDTH)
        self.lin.bias.data = numbers(WIDTH)
        self.scale = Parameter(numbers(WIDTH))
        for key, rows in {"square": WIDTH, "table": 2, "places": 1000, "nodes": 1000}.items():
            self.register_buffer(key, numbers(rows, WIDTH))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("momentum", torch.ones(()))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("running", torch.zeros(WIDTH, dtype=torch.float64))
        self.calls, self.log, self.counts = 0, [], {"calls": 0}

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight, edge_attr=edge_attr)

    def state(self) -> list[Any]:
        """What the message may have changed."""
        buffers = (self.count, self.momentum, self.total, self.running)
        return [*(b.tolist() for b in buffers), self.calls, list(self.log), dict(self.counts)]


def _method(name: str, first: str, given: Sequence[str], lines: Sequence[str]) -> Any:
    text = "\n    ".join(lines)
    used = [word for word in given if any(_uses(line, word) for line in lines)]
    scope = {"torch": torch, "softmax": softmax, "scatter": scatter, "degree": degree}
    exec(f"def {name}({', '.join(['self', *first.split(), *used])}):\n    {text}", scope)
    return scope[name]


def _uses(line: str, word: str) -> bool:
    cleaned = "".join(c if c.isalnum() or c == "_" else " " for c in line.replace(".", " ."))
    return word in cleaned.split() and f"self.{word}" not in line


def build(program: Program) -> Layer:
    """A plain PyG layer with the program's message."""
    methods = {"message": _method("message", "", ARGUMENTS, program.lines)}
    if program.own:
        body = [f"return {program.own.format('inputs')}"]
        methods["aggregate"] = _method("aggregate", "inputs", ("index", "dim_size"), body)
    if program.kind.startswith("update "):
        body = [f"return {program.kind.removeprefix('update ')}"]
        methods["update"] = _method("update", "inputs", ARGUMENTS, body)
    layer: Layer = type("Random", (Layer,), methods)(program.aggr)
    return layer
