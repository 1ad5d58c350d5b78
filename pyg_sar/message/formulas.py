"""Messages that are a formula which kernels know, as their operators tell.

[Note: formulas by operators] ``edge_weight.view(-1, 1) * x_j`` is the message of GCNConv, GraphConv
and many others, and copies of GATConv, GATv2Conv and TransformerConv are in many projects:
``softmax(score, index)``, dropped or not, times the source rows. That a message is one is read off
what runs: each result is described by the operator that made it and by what that got, from the
operands on, and the messages' description is compared with those of what the kernels compute.
Another operator on what is described, or a write into an operand, ends it: the message runs as any
other. What autograd does is not among these operators (``detach()``, hooks, functions with a
backward pass of their own): values and gradients must be those of the same formula by PyG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.utils import softmax

from pyg_sar.message.decompose import alike
from pyg_sar.message.program import TileProgram
from pyg_sar.message.recording import Recording, dense_in
from pyg_sar.message.target_index import trailing
from pyg_sar.space.distributed_index import storage_of

_EPSILON = 1e-16  # that PyG's softmax adds to the sum

Description = tuple[Any, ...]


class AttentionOf(NamedTuple):
    """An attention, by the numbers of a message's operands.

    Attributes:
        kind: ``'additive'``, ``'gatv2'`` or ``'dot'`` (:mod:`pyg_sar.kernels.scores`);
            ``'joined'``: additive, of keys and queries that are joined and multiplied by ``att``;
            ``'joined queries'``: the queries come first.
        value: The source rows.
        key: The keys, source rows as well; -1: the values are the keys.
        query: The targets' rows; -1: there are none.
        att: The parameter that the scores are products with, or an empty string.
        slope: Of the leaky ReLU; 1: none.
        scale: What inner products are multiplied by.
        p: Probability of the dropout.
        heads: Into which rows ``[N, H * C]`` are cut; 0: they have them already, or none.
    """

    kind: str
    value: int
    key: int
    query: int
    att: str
    slope: float
    scale: float
    p: float
    heads: int

    def is_like(self, other: AttentionOf | None) -> bool:
        """Says if another attention differs in numbers alone."""
        return other is not None and other == self._replace(
            slope=other.slope, scale=other.scale, p=other.p
        )

    def cut(self, rows: Tensor) -> Tensor:
        """Returns rows with an axis of heads."""
        return rows.unflatten(1, (self.heads, -1)) if self.heads and rows.dim() == 2 else rows

    def terms(self, rows: Sequence[Any], att: Any) -> tuple[Tensor, Tensor | None, Tensor, Any]:
        """Returns values, keys, queries and ``att`` of the score that the kernels know."""
        value, query = self.cut(rows[self.value]), rows[self.query]
        key = None if self.key < 0 else rows[self.key]
        if self.kind in ("gatv2", "dot"):
            key, query = None if key is None else self.cut(key), self.cut(query)
        elif self.kind != "additive" and key is not None:
            first, second = att.chunk(2, -1)
            of_key, of_query = (first, second) if self.kind == "joined" else (second, first)
            key, query = ((self.cut(t) * a).sum(-1) for t, a in ((key, of_key), (query, of_query)))
            att = None
        return value, key, query, att


class Formula(NamedTuple):
    """The formula that a message is, by the numbers of its operands; at most one of these.

    Attributes:
        source: The operand whose source rows are the message, unchanged; -1 if there is none.
        product: The operands whose product it is: source rows, and numbers of edges.
        attention: The softmax attention that it is.
        factors: Those of the attention's dropout, in the run at hand.
    """

    source: int = -1
    product: tuple[int, int] | None = None
    attention: AttentionOf | None = None
    factors: Tensor | None = None


def formula_of(
    recording: Recording,
    program: TileProgram,
    values: Sequence[Any],
    index: Tensor,
    message: Tensor,
) -> Formula:
    """Returns the formula that a run of a message was; one without anything where it was none.

    Args:
        recording: The run.
        program: The message.
        values: The operands' rows that it ran on.
        index: The edges' targets.
        message: What it gave.
    """
    roles = [(operand.role, operand.axis) for operand in program.operands]
    trace = _Trace(values, roles, index, program.layer.named_parameters())
    try:
        for func, args, kwargs, out in recording.calls:
            trace.add(func, args, kwargs, out)
        found = trace.of(message)
        if found[0] == "product":
            return Formula(product=(found[1][1], found[2][1]))
        if found[0] == "operand":
            same = message is values[found[1]] and roles[found[1]] == ("source", 0)
            return Formula(source=found[1] if same else -1)
        if not trace.skipped:
            return Formula(attention=_found(found, roles), factors=trace.factors)
    except _Unknown:
        pass
    return Formula()


def is_by_pyg(
    formula: Formula,
    values: Sequence[Any],
    att: Tensor | None,
    index: Tensor,
    message: Tensor,
) -> bool:
    """Says if a message, and its gradients, are those of a formula computed by PyG.

    Args:
        formula: The formula.
        values: The operands' rows that the message ran on, with gradients.
        att: The parameter that the scores of an attention are products with.
        index: The edges' targets.
        message: What it gave.
    """
    given = [v for v in (*values, att) if isinstance(v, Tensor) and v.requires_grad]
    own = {id(v): v.detach().requires_grad_() for v in given}
    with torch.enable_grad(), Recording().saving():  # Checkpoints count what others save.
        rows = [own.get(id(v), v) for v in values]
        right = _by_pyg(formula, rows, own.get(id(att), att), index)
    pairs = [(message, right)]
    if given and message.requires_grad:
        places = torch.arange(message.numel(), dtype=torch.float64, device=message.device).cos()
        share = places.to(message).view(message.shape)
        rest = {"allow_unused": True, "materialize_grads": True}
        pairs += zip(
            torch.autograd.grad(message, given, share, retain_graph=True, **rest),
            torch.autograd.grad(right, list(own.values()), share, **rest),
            strict=True,
        )
    return message.requires_grad == right.requires_grad and all(alike(*pair) for pair in pairs)


def _by_pyg(formula: Formula, rows: Sequence[Any], att: Any, index: Tensor) -> Tensor:
    found, factors = formula.attention, formula.factors
    if found is None:
        source, number = formula.product or (formula.source, None)
        of_edges = 1 if number is None else trailing(rows[number].view(-1), rows[source])
        return rows[source] * of_edges
    value, key, query, att = found.terms(rows, att)
    if key is None:
        score = (leaky_relu(value + query, found.slope) * att).sum(-1)
    elif found.kind == "dot":
        score = (query * key).sum(-1) * found.scale
    else:
        score = leaky_relu(key + query, found.slope)
    weights = softmax(score, index)
    weights = weights if factors is None else weights * factors
    return value * (weights if value.dim() == 2 else weights.unsqueeze(-1))


class _Unknown(Exception):
    """Something that no formula does."""


class _Trace:
    """Descriptions of tensors, by their places in memory.

    Attributes:
        roles: The operands' roles and axes.
        factors: Those of the dropout.
        skipped: Operators were called that are not known, on what is not described.
    """

    def __init__(
        self,
        values: Sequence[Any],
        roles: Sequence[tuple[str, int]],
        index: Tensor,
        tables: Iterable[tuple[str, Tensor]],
    ) -> None:
        self.roles, self.skipped = roles, False
        self.factors: Tensor | None = None
        known: list[tuple[Tensor, Description]] = [(t, ("table", name)) for name, t in tables]
        rows = [(k, v) for k, v in enumerate(values) if isinstance(v, Tensor)]
        known += [(row, ("operand", k, row.dim())) for k, row in rows]
        self._learnt = {found[:2] for t, found in known if t.requires_grad}
        self._known = {_place(index): ("index",), **{_place(t): found for t, found in known}}

    def of(self, tensor: Any, constant: bool = False) -> Description:
        """Returns the description of a tensor; ``constant``: it may be one to autograd."""
        if not isinstance(tensor, Tensor) or _place(tensor) not in self._known:
            raise _Unknown
        found = self._known[_place(tensor)]
        if tensor._backward_hooks or (tensor.requires_grad != self._learns(found) and not constant):
            raise _Unknown
        return found

    def _learns(self, found: Description) -> bool:
        """Says if what is described has a gradient."""
        if found[0] in ("operand", "table"):
            return found[:2] in self._learnt
        parts = (part for part in found[1:] if isinstance(part, tuple))
        return found[0] != "maximum" and any(map(self._learns, parts))

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Describes the result of an operator."""
        name = func._schema.name.rpartition("::")[2]
        try:
            rule = _RULES[name]
            if name.endswith("_"):  # It writes into what it returns.
                self._check_written(storage_of(out))
            found = rule(self, out, *args, **kwargs)
        except (_Unknown, KeyError, TypeError, ZeroDivisionError):  # Or another overload.
            memory = {at[0] for at in self._known}
            if any(storage_of(t) in memory for t in dense_in(args, kwargs)):
                raise _Unknown from None
            self.skipped = True
            return
        if name.endswith("_"):
            self._known = {at: d for at, d in self._known.items() if at[0] != storage_of(out)}
        if isinstance(out, Tensor):
            self._known[_place(out)] = found

    def _check_written(self, storage: int) -> None:
        stored = [found for at, found in self._known.items() if at[0] == storage]
        if any(found[0] in ("operand", "table", "index") for found in stored):
            raise _Unknown


def _place(tensor: Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    # The stride of an axis of one number may be any.
    steps = tuple(s for s, n in zip(tensor.stride(), shape, strict=True) if n != 1)
    return storage_of(tensor), tensor.storage_offset(), shape, steps, tensor.dtype


# What operators make ##########################################################


def _view(trace: _Trace, out: Tensor, source: Tensor, *_: Any, **__: Any) -> Description:
    of = trace.of(source, constant=True)
    if out.dtype != source.dtype:
        raise _Unknown
    if of == ("index",):
        if out.stride(0) != 1 or any(n != 1 and s for n, s in _others(out)):
            raise _Unknown
        return of
    if out.shape == source.shape and out.stride() == source.stride():
        return of
    numbers = of[0] == "operand" and source.numel() == len(source)
    if out.shape == (*source.shape, 1) or (numbers and _is_column(out, len(source), out.dim())):
        return "column", of
    if of[0] == "operand" and source.dim() == 2 and out.dim() == 3 and len(out) == len(source):
        return "operand", of[1], 3, out.size(1)
    raise _Unknown


def _is_column(tensor: Tensor, rows: int, dims: int) -> bool:
    """Says if a tensor has a number for each row of one of so many axes: ``[E, 1, ...]``."""
    return dims > 1 and tensor.shape == (rows, *[1] * (dims - 1))


def _others(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


def _add(trace: _Trace, out: Tensor, one: Tensor, other: Any, alpha: float = 1) -> Description:
    if alpha != 1:
        raise _Unknown
    if not isinstance(other, Tensor):
        if other != _EPSILON or trace.of(one)[0] != "total":
            raise _Unknown
        return trace.of(one)
    if one.shape != other.shape:
        raise _Unknown
    return "add", trace.of(one), trace.of(other)


def _mul(trace: _Trace, out: Tensor, one: Tensor, other: Any) -> Description:
    if not isinstance(other, Tensor):
        return "scaled", trace.of(one), float(other)
    if one.dtype != other.dtype:
        raise _Unknown
    pairs = (one, trace.of(one)), (other, trace.of(other))
    for (a, of_a), (b, of_b) in (pairs, pairs[::-1]):
        numbers = of_b[1] if of_b[0] == "column" else of_b
        if of_a[0] == numbers[0] == "operand" and len(of_a) == 3 and len(numbers) == 3:
            roles = trace.roles[of_a[1]], trace.roles[numbers[1]]
            if roles == (("source", 0), ("edge", 0)) and _is_column(b, len(a), a.dim()):
                return "product", of_a, numbers
        if of_b[0] == "factors" and a.shape == b.shape:
            return "dropped", of_a, of_b[1]
        if of_b[0] == "table":
            fits = a.dim() == 3 and b.shape[-2:] == a.shape[1:] and b.numel() == a[0].numel()
            return "mul", of_a, of_b if fits else _refuse()
        if of_b[0] in ("column", "softmax", "dropped") and of_a[0] == "operand":
            weights = of_b[1] if of_b[0] == "column" else of_b
            fits = b.shape == (*a.shape[:-1], 1) and (a.dim() == 3) == (of_b[0] == "column")
            return "weighted", of_a, weights if fits else _refuse()
    if one.shape != other.shape:
        raise _Unknown
    return "mul", pairs[0][1], pairs[1][1]


def _refuse() -> Any:
    raise _Unknown


def _div(trace: _Trace, out: Tensor, one: Tensor, other: Any) -> Description:
    if not isinstance(other, Tensor):
        if trace.of(one)[0] == "kept":
            return _mask(trace, out, one, other)
        return "scaled", trace.of(one), 1 / float(other)
    weight, total = trace.of(one), trace.of(other)
    if weight[0] != "exp" or total != ("at", ("total", weight)):
        raise _Unknown
    return "softmax", weight[1]


def _mask(trace: _Trace, out: Tensor, kept: Tensor, share: float) -> Description:
    if trace.of(kept) != ("kept", share) or trace.factors is not None:
        raise _Unknown
    trace.factors = out
    return "factors", 1 - share


def _keep(trace: _Trace, out: Tensor, empty: Tensor, share: float = 0.5) -> Description:
    if trace.of(empty) != ("empty",):
        raise _Unknown
    return "kept", share


def _sum(
    trace: _Trace, out: Tensor, x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any
) -> Description:
    if keepdim or x.dim() != 3 or list(dims or ()) not in ([-1], [2]) or out.dtype != x.dtype:
        raise _Unknown
    return "sum", trace.of(x)


def _cat(trace: _Trace, out: Tensor, rows: Sequence[Tensor], dim: int = 0) -> Description:
    if len(rows) != 2 or out.dim() != 3 or dim not in (-1, 2):
        raise _Unknown
    return "cat", *map(trace.of, rows)


def _leaky_relu(trace: _Trace, out: Tensor, x: Tensor, slope: float = 0.01) -> Description:
    return "leaky_relu", trace.of(x), float(slope)


def _maximum(
    trace: _Trace, out: Tensor, into: Tensor, dim: int, index: Tensor, x: Tensor, reduce: str,
    include_self: bool = True,
) -> Description:  # fmt: skip
    right = trace.of(into) == ("zeros",) and dim == 0 and trace.of(index) == ("index",)
    if not right or reduce != "amax" or include_self:
        raise _Unknown
    return "maximum", trace.of(x, constant=True)


def _total(
    trace: _Trace, out: Tensor, into: Tensor, dim: int, index: Tensor, x: Tensor
) -> Description:
    zeros = trace.of(into, constant=True) == ("zeros",)  # It has a gradient by now.
    if not zeros or dim != 0 or trace.of(index) != ("index",):
        raise _Unknown
    return "total", trace.of(x)


def _at(trace: _Trace, out: Tensor, source: Tensor, dim: int, index: Tensor) -> Description:
    if dim != 0 or trace.of(index) != ("index",) or index.dim() != 1:
        raise _Unknown
    return "at", trace.of(source)


def _sub(trace: _Trace, out: Tensor, one: Tensor, other: Any, alpha: float = 1) -> Description:
    score = trace.of(one)
    if alpha != 1 or trace.of(other) != ("at", ("maximum", score)):
        raise _Unknown
    return "shifted", score


def _number(trace: _Trace, out: Any, index: Tensor, *_: Any) -> Description:
    """How many targets there are, which softmax() asks for where nobody tells."""
    if trace.of(index) not in (("index",), ("number",)):
        raise _Unknown
    return ("number",)


def _exp(trace: _Trace, out: Tensor, x: Tensor) -> Description:
    if trace.of(x)[0] != "shifted":
        raise _Unknown
    return "exp", trace.of(x)[1]


_RULES: Mapping[str, Callable[..., Description]] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "expand", "unsqueeze"), _view),
    **dict.fromkeys(("alias", "detach", "slice"), _view),
    "new_zeros": lambda trace, out, *_, **__: ("zeros",),
    "empty_like": lambda trace, out, *_, **__: ("empty",),
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "div_": _div,
    "exp": _exp,
    "sum": _sum,
    "cat": _cat,
    "max": _number,
    "_local_scalar_dense": _number,
    "leaky_relu": _leaky_relu,
    "bernoulli_": _keep,
    "index_select": _at,
    "scatter_reduce_": _maximum,
    "scatter_reduce": _maximum,
    "scatter_add_": _total,
    "scatter_add": _total,
}


# What attentions are ##########################################################


def _found(message: Description, roles: Sequence[tuple[str, int]]) -> AttentionOf:
    """Returns the attention that a description of messages is."""
    what, (value, weights) = message[0], message[1:]
    p = 0.0
    if what != "weighted":
        raise _Unknown
    if weights[0] == "dropped":
        weights, p = weights[1:]
    if weights[0] != "softmax":
        raise _Unknown
    kind, key, query, att, slope, scale = _score(weights[1], roles)
    source = _operand(value, "source", value[2], roles)
    if (value[2] != 3 and kind != "additive") or (kind == "gatv2" and key != source):
        raise _Unknown
    key = -1 if kind == "gatv2" else key
    cuts = {part[3] if len(part) > 3 else 0 for part in _operands(message) if part[2] == 3}
    if len(cuts) > 1:
        raise _Unknown
    return AttentionOf(kind, source, key, query, att, slope, scale, p, max(cuts, default=0))


def _operands(found: Description) -> list[Description]:
    if found[0] == "operand":
        return [found]
    return [one for part in found if isinstance(part, tuple) for one in _operands(part)]


def _operand(one: Description, role: str, dims: int, roles: Sequence[tuple[str, int]]) -> int:
    """Returns the number of an operand with a row for each edge's source, or target."""
    if one[0] != "operand" or one[2] != dims or roles[one[1]] != (role, 0):
        raise _Unknown
    return int(one[1])


def _pair(one: Description, dims: int, roles: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Returns the operands of source rows and of target rows."""
    a, b = one[1:]
    if a[0] == "operand" and roles[a[1]][0] == "target":
        a, b = b, a
    return _operand(a, "source", dims, roles), _operand(b, "target", dims, roles)


def _score(
    score: Description, roles: Sequence[tuple[str, int]]
) -> tuple[str, int, int, str, float, float]:
    """Returns kind, key, query, parameter, slope and scale."""
    slope = scale = 1.0
    if score[0] == "scaled":
        score, scale = score[1:]
    if score[0] == "sum" and score[1][0] == "mul":
        product = score[1]
        if product[1][0] == "cat":
            pass  # Without a leaky ReLU after it.
        elif product[2][0] == "table" and scale == 1:
            inner = product[1]
            if inner[0] != "leaky_relu" or inner[1][0] != "add":
                raise _Unknown
            return "gatv2", *_pair(inner[1], 3, roles), product[2][1], inner[2], 1.0
        else:
            return "dot", *_pair(product, 3, roles), "", 1.0, scale
    if score[0] == "leaky_relu":
        score, slope = score[1:]
    if score[0] == "sum" and score[1][0] == "mul" and scale == 1:
        joined, table = score[1][1:]
        if joined[0] != "cat" or table[0] != "table":
            raise _Unknown
        key, query = _pair(joined, 3, roles)
        kind = "joined" if joined[1][1] == key else "joined queries"
        return kind, key, query, table[1], slope, 1.0
    if score[0] != "add" or scale != 1:
        raise _Unknown
    return "additive", *_pair(score, 2, roles), "", slope, 1.0
