"""Attention over a shard's edges: its scores, state and gradients, and checks of their shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_sar.kernels.scores import SCORES, Score, declared, number_of, row_shape

_PRODUCTS = 2**18  # held at a time, in a CPU's cache
_PRODUCTS_ON_GPUS = 2**24  # where launches cost more


class Segments(Protocol):
    """Edges sorted by the row that they add to.

    For the forward pass and target rows' gradients that is a target, and edges read source rows;
    for source rows' gradients (transposed) it is a source row, and edges read target rows.
    """

    @property
    def source(self) -> Tensor:
        """The row that each edge reads, ``[E]``, int32 or int64."""

    @property
    def offsets(self) -> Tensor:
        """The first edge of each segment, then their number, ``[U + 1]``, as ``source``."""

    @property
    def targets(self) -> Tensor | None:
        """The row that each segment adds to, ``[U]``, int64 ascending; ``None``: 0 .. U - 1."""

    @property
    def edges(self) -> Tensor | None:
        """Each edge's number, ``[E]``, as ``source``: its row of edge features and drop keys;
        ``None``: 0 .. E - 1."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """A score of :mod:`pyg_sar.kernels.scores` and what it reads, of M source and N target rows.

    Attributes:
        kind: The score's name.
        value: ``[M, H, C]``, floating point; more rows with ``places``. A score without softmax has
            one head.
        query: ``[N, H]`` or ``[N, H, C]``; ``None`` is 0 where keys are joined with narrow queries.
        key: ``[M, H]`` or ``[M, H, C]``; ``None`` instead of the latter: the values are the keys,
            and the gradients of both add up in that of ``value``. As many rows as ``value`` has.
        places: Where in ``value`` and ``key`` source rows 0 to M - 1 lie, ``[M]``, int32 or int64;
            ``None``: in order, and no others.
        att: ``[H, C]``, ``[2, H, C]``, or ``None``.
        edge_attr: ``[E, D]``, row e for edge number e; ``None``: no edge term. Where it is a factor
            ``[E, 1]``, and ``None`` is 1.
        edge_weight: ``[D, H]`` or ``[D, H, C]``, as keys are; goes with ``edge_attr``, but where
            that is a factor.
        bias: ``[H, C]``, which a layer adds to the output: of kernels that go over edges.
        slope: Leaky ReLU's negative slope; 1: none.
        scale: Of inner products.
        drop_key: ``[E]``, int32 or int64 of which 32 bits count: what an edge is known by to the
            dropout, the same in every pass and however edges are sharded. Or which heads are kept,
            ``[E, ceil(H / 32)]``, int32: bit h % 32 of word h // 32 is set. Needed where p > 0.
        seed: Of the dropout, 64 bits.
        p: Probability to drop a weight after the normalisation.
    """

    kind: str
    value: Tensor
    query: Tensor | None
    key: Tensor | None = None
    att: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None
    bias: Tensor | None = None
    slope: float = 1.0
    scale: float = 1.0
    drop_key: Tensor | None = None
    seed: int = 0
    p: float = 0.0
    places: Tensor | None = None

    @property
    def score(self) -> Score:
        """The declaration of the score."""
        return SCORES[self.kind]

    @property
    def num_sources(self) -> int:
        """M."""
        return self.value.size(0) if self.places is None else self.places.numel()

    def in_order(self) -> Attention:
        """The same without ``places``: a copy of these rows."""
        if self.places is None:
            return self
        key = None if self.key is None else self.key.index_select(0, self.places)
        return replace(self, value=self.value.index_select(0, self.places), key=key, places=None)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of floating point that are there, by name."""
        names = ("value", "query", "key", "att", "edge_attr", "edge_weight", "bias")
        return {n: t for n in names if (t := getattr(self, n)) is not None}

    def check(self, segments: Segments) -> None:
        """Raises ``ValueError`` or ``TypeError`` where something doesn't fit."""
        if self.places is not None and self.places.dim() != 1:
            raise ValueError(
                f"attention: expected 'places' of shape [M] (got {list(self.places.shape)})"
            )
        tensors = (self.value, self.query, self.key, self.att, self.edge_attr, self.edge_weight)
        check_terms(self.kind, *tensors)
        check_segments(segments.source, segments.offsets, segments.targets, segments.edges)
        numbered = segments.edges is not None
        check_per_edge(segments.source, numbered, self.edge_attr, self.drop_key, self.p)


class Arguments(NamedTuple):
    """The operators' arguments after their own tensors: an :class:`Attention` and its segments.

    Attributes:
        kind: The score's number.
        low, high: The words of the seed, by :func:`pyg_sar.kernels.fallback.split_seed`.
        drop_key: int32, where p > 0.
    """

    kind: int
    value: Tensor
    key: Tensor | None
    query: Tensor | None
    att: Tensor | None
    edge_attr: Tensor | None
    edge_weight: Tensor | None
    slope: float
    scale: float
    source: Tensor
    offsets: Tensor
    targets: Tensor | None
    edges: Tensor | None
    drop_key: Tensor | None
    low: int
    high: int
    p: float


@dataclass(frozen=True, slots=True)
class AttentionState:
    """The sums that shards add to, target by target; ``acc`` is not normalised yet.

    Attributes:
        acc: ``[N, H, C]``, float32 for half precision, else of the inputs' dtype.
        maximum: What the scores so far are measured from, ``[N, H]``: the largest, or a number that
            none exceeds by more than rounding; minus infinity without an edge, else at least the
            lowest finite number.
        normaliser: Sum of exp(score - maximum), ``[N, H]``.
    """

    acc: Tensor
    maximum: Tensor
    normaliser: Tensor

    @classmethod
    def start(cls, num_targets: int, value: Tensor) -> AttentionState:
        """The state before the first shard.

        Args:
            num_targets: N.
            value: ``[M, H, C]``, for H, C, dtype and device.
        """
        wide = wide_dtype(value.dtype)
        acc = value.new_zeros(num_targets, *value.shape[1:], dtype=wide)
        maximum = acc.new_full(acc.shape[:2], -torch.inf)
        return cls(acc, maximum, torch.zeros_like(maximum))

    def merge_(self, rows: Tensor, other: AttentionState) -> None:
        r"""Adds the edges that another state of some targets was made of, in place.

        .. math::
            m'_i = \max(m_i, m_k), \qquad \mathrm{acc}_i \leftarrow
                e^{m_i - m'_i} \mathrm{acc}_i + e^{m_k - m'_i} \mathrm{acc}_k

        and the normalisers alike.

        Args:
            rows: The target i of each row k of ``other``, ``[K]``, int64, none twice.
            other: A state in which every target has an edge.
        """
        before = self.maximum[rows]
        highest = torch.maximum(before, other.maximum)
        old, new = (before - highest).exp_(), (other.maximum - highest).exp_()
        self.maximum[rows] = highest
        self.normaliser[rows] = self.normaliser[rows] * old + other.normaliser * new
        acc = self.acc[rows].mul_(old.unsqueeze(-1))
        self.acc[rows] = acc.addcmul_(other.acc, new.unsqueeze(-1))

    def finish(self) -> Tensor:
        """``acc / normaliser`` ``[N, H, C]``, 0 for targets without in-edges; ``acc`` is reused."""
        none = self.maximum == -torch.inf
        self.acc.div_(self.normaliser.masked_fill(none, 1).unsqueeze(-1))
        return self.acc

    def check(self, attention: Attention) -> None:
        """Raises ``ValueError`` or ``TypeError`` where it doesn't fit the attention."""
        rows, shape = self.acc.size(0), list(attention.value.shape)
        wide = wide_dtype(attention.value.dtype)
        if attention.query is not None and rows != attention.query.size(0):
            raise ValueError(
                f"attention: expected 'acc' with the {attention.query.size(0)} rows of 'query' "
                f"(got {list(self.acc.shape)})"
            )
        for name, expected in (("acc", [-1, *shape[1:]]), ("maximum", [rows, shape[1]])):
            expect(name, getattr(self, name), expected, wide)
        expect("normaliser", self.normaliser, [rows, shape[1]], wide)


@dataclass(frozen=True, slots=True)
class Cotangent:
    """The numbers of each target that the backward pass starts from.

    Attributes:
        grad_out: dL/dout, ``[N, H, C]``, of the state's dtype.
        maximum: Of the state after the last shard, ``[N, H]``.
        normaliser: The same.
        delta: <dL/dout, out>, ``[N, H]``.
    """

    grad_out: Tensor
    maximum: Tensor
    normaliser: Tensor
    delta: Tensor

    @classmethod
    def of(
        cls,
        grad_out: Tensor,
        out: Tensor,
        maximum: Tensor,
        normaliser: Tensor,
        bias: Tensor | None = None,
    ) -> Cotangent:
        """From dL/dout and ``out + bias``, both ``[N, H, C]`` and of any strides."""
        grad_out = grad_out.to(maximum.dtype).contiguous()
        delta = torch.empty_like(maximum)
        # Some rows at a time: a product of all would be one more tensor of their size.
        most = _PRODUCTS if out.device.type == "cpu" else _PRODUCTS_ON_GPUS
        count = max(most // max(out.shape[1:].numel(), 1), 1)
        parts = (tensor.split(count) for tensor in (delta, grad_out, out))
        for found, gradient, values in zip(*parts, strict=True):
            values = values.to(maximum.dtype)
            torch.sum(gradient * (values if bias is None else values - bias), -1, out=found)
        return cls(grad_out, maximum, normaliser, delta)

    def check(self, attention: Attention) -> None:
        """Raises ``ValueError`` or ``TypeError`` where it doesn't fit the attention."""
        rows, row = self.grad_out.size(0), list(attention.value.shape[1:])
        wide = wide_dtype(attention.value.dtype)
        if attention.query is not None:
            rows = attention.query.size(0)
        expect("grad_out", self.grad_out, [rows, *row], wide)
        for name in ("maximum", "normaliser", "delta"):
            expect(name, getattr(self, name), [rows, row[0]], wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGradients:
    """Gradients to add to, each of its tensor's shape and the state's dtype; ``None``: not wanted.

    Attributes:
        value: ``[M, H, C]``.
        key: M rows of those of ``key``; ``None`` where the values are the keys.
        query: The shape of ``query``.
        att: The shape of ``att``.
        edge_attr: ``[E, D]``; the rows of the shard's edges are written, not added to.
        edge_weight: The shape of ``edge_weight``.
    """

    value: Tensor | None = None
    key: Tensor | None = None
    query: Tensor | None = None
    att: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None

    def wanted(self) -> dict[str, Tensor]:
        """Returns the gradients that are wanted, by name."""
        return {f.name: t for f in fields(self) if (t := getattr(self, f.name)) is not None}

    def only(self, names: tuple[str, ...]) -> AttentionGradients:
        """Returns the gradients of ``names``."""
        return AttentionGradients(**{n: t for n, t in self.wanted().items() if n in names})

    def check(self, attention: Attention) -> None:
        """Raises ``ValueError`` or ``TypeError`` where one doesn't fit the attention."""
        given, wide = attention.tensors(), wide_dtype(attention.value.dtype)
        for name, tensor in self.wanted().items():
            if name not in given:
                raise ValueError(f"attention: a gradient of '{name}' is wanted, and it is None")
            shape = list(given[name].shape)
            if name in ("value", "key"):
                shape[0] = attention.num_sources
            expect(f"gradient of {name}", tensor, shape, wide)


def fits(tensor: Tensor, shape: list[int]) -> bool:
    """Tells whether a tensor has a shape, in which -1 is any length."""
    if tensor.dim() != len(shape):
        return False
    for axis, length in enumerate(shape):
        if length != -1 and tensor.size(axis) != length:
            return False
    return True


def described(shape: list[int] | None) -> str:
    """A shape with ``*`` for any length; ``None`` for no tensor."""
    if shape is None:
        return "None"
    return "[" + ", ".join(["*" if n < 0 else str(n) for n in shape]) + "]"


def expect(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    """Raises where a tensor has another shape or dtype."""
    if not fits(tensor, shape):
        raise ValueError(
            f"attention: expected '{name}' of shape {described(shape)} (got {list(tensor.shape)})"
        )
    if tensor.dtype != dtype:
        raise TypeError(f"attention: expected '{name}' of dtype {dtype} (got {tensor.dtype})")


# Checks that TorchScript compiles, too ########################################


def check_terms(
    kind: str,
    value: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    att: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
) -> None:
    """Raises ``ValueError`` or ``TypeError`` where tensors don't fit ``kind`` or each other."""
    if torch.jit.is_scripting():
        score = declared()[number_of(kind)]
    else:
        score = SCORES[kind] if kind in SCORES else declared()[number_of(kind)]
    if value.dim() != 3 or not value.is_floating_point():
        raise ValueError(
            "attention: expected 'value' of shape [M, H, C], floating point (got "
            f"{list(value.shape)}, {value.dtype})"
        )
    if not score.softmax and value.size(1) != 1:
        raise ValueError(
            f"attention: expected a single head with kind '{kind}' (got 'value' of shape "
            f"{list(value.shape)})"
        )
    of_key, of_query = row_shape(score.narrow_key, value), row_shape(score.narrow_query, value)
    may_lack = score.joined and score.narrow_query
    check_term("query", query, kind, value, [-1] + of_query, may_lack)  # noqa: RUF005
    check_term("key", key, kind, value, [value.size(0)] + of_key, not score.narrow_key)  # noqa: RUF005
    row = list(value.shape[1:])
    pair: list[int] | None = [score.att] + row if score.att == 2 else row  # noqa: RUF005
    check_term("att", att, kind, value, None if score.att == 0 else pair, False)
    attr: list[int] | None = None
    weight: list[int] | None = None
    if edge_attr is not None and score.term != "none":
        attr = [-1, 1] if score.term == "factor" else [-1, -1]
        if score.term != "factor":
            weight = [edge_attr.size(-1)] + of_key  # noqa: RUF005
    check_term("edge_attr", edge_attr, kind, value, attr, False)
    check_term("edge_weight", edge_weight, kind, value, weight, False)


def check_term(
    name: str,
    tensor: Tensor | None,
    kind: str,
    value: Tensor,
    shape: list[int] | None,
    optional: bool,
) -> None:
    """Raises where a tensor of the attention has another shape or dtype, or isn't there."""
    if tensor is None:
        if shape is None or optional:
            return
        raise ValueError(
            f"attention: expected '{name}' of shape {described(shape)} with kind '{kind}' and "
            f"'value' of shape {list(value.shape)} (got None)"
        )
    if shape is None or not fits(tensor, shape):
        raise ValueError(
            f"attention: expected '{name}' of shape {described(shape)} with kind '{kind}' and "
            f"'value' of shape {list(value.shape)} (got {list(tensor.shape)})"
        )
    if tensor.dtype != value.dtype:
        raise TypeError(
            f"attention: expected '{name}' of the dtype of 'value', {value.dtype} (got "
            f"{tensor.dtype})"
        )


def check_per_edge(
    source: Tensor, numbered: bool, edge_attr: Tensor | None, drop_key: Tensor | None, p: float
) -> None:
    """Raises ``ValueError`` or ``TypeError`` where what edges carry doesn't fit them."""
    if not 0 <= p <= 1:
        raise ValueError(f"attention: expected 'p' between 0 and 1 (got {p})")
    if p > 0 and drop_key is None:
        raise ValueError("attention: dropout needs a 'drop_key' for each edge (got None)")
    if drop_key is not None and drop_key.dtype != torch.int32 and drop_key.dtype != torch.int64:
        raise TypeError(f"attention: expected int32 or int64 'drop_key' (got {drop_key.dtype})")
    if numbered:
        return  # Where edges are numbered, there may be more rows than edges.
    for name, tensor in (("edge_attr", edge_attr), ("drop_key", drop_key)):
        if tensor is not None and tensor.size(0) != source.numel():
            raise ValueError(
                f"attention: expected '{name}' with a row for each of the {source.numel()} edges "
                f"(got shape {list(tensor.shape)})"
            )


def check_segments(
    source: Tensor, offsets: Tensor, targets: Tensor | None, edges: Tensor | None
) -> None:
    """Raises ``ValueError`` or ``TypeError`` where a shard's edges don't fit together."""
    if source.dtype != torch.int32 and source.dtype != torch.int64:
        raise TypeError(f"attention: expected int32 or int64 'source' (got {source.dtype})")
    for name, index in (("offsets", offsets), ("edges", edges)):
        if index is not None and index.dtype != source.dtype:
            raise TypeError(
                f"attention: expected '{name}' of the dtype of 'source', {source.dtype} (got "
                f"{index.dtype})"
            )
    if source.dim() != 1 or offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(
            "attention: expected 'source' of shape [E] and 'offsets' of shape [U + 1] (got "
            f"{list(source.shape)} and {list(offsets.shape)})"
        )
    if targets is not None:
        expect("targets", targets, [offsets.numel() - 1], torch.int64)
    if edges is not None and edges.shape != source.shape:
        raise ValueError(
            f"attention: expected 'edges' for each of the {source.numel()} edges (got shape "
            f"{list(edges.shape)})"
        )


def check_offsets(name: str, source: Tensor, offsets: Tensor) -> None:
    """Raises ``ValueError`` where ``offsets`` don't say where each edge belongs.

    The kernels check this by themselves.
    """
    counts = offsets[1:] - offsets[:-1]
    if int(offsets[0]) != 0 or int(offsets[-1]) != source.numel() or bool((counts < 0).any()):
        raise ValueError(
            f"{name}: expected 'offsets' that ascend from 0 to the number of edges, "
            f"{source.numel()}"
        )


def check_sums(
    name: str,
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    weight: Tensor | None,
    numbers: bool = True,
) -> None:
    """Raises ``ValueError`` or ``TypeError`` where a sum's tensors don't fit together.

    The C++ kernels check this by themselves; Triton's leave it to the device to read
    ``numbers`` in ``offsets``.
    """
    if out.dim() != 2 or rows.dim() != 2 or out.size(1) != rows.size(1):
        raise ValueError(
            f"{name}: expected 'out' and 'rows' of shapes [N, F] and [M, F] (got "
            f"{list(out.shape)} and {list(rows.shape)})"
        )
    if out.dtype != rows.dtype:
        raise TypeError(
            f"{name}: expected 'out' and 'rows' of one dtype (got {out.dtype} and {rows.dtype})"
        )
    if source.dim() != 1 or offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            f"{name}: expected 'source' and 'offsets' of shapes [E] and [U + 1] (got "
            f"{list(source.shape)} and {list(offsets.shape)})"
        )
    if targets is not None and list(targets.shape) != [offsets.numel() - 1]:
        raise ValueError(
            f"{name}: expected 'targets' of shape [{offsets.numel() - 1}] (got "
            f"{list(targets.shape)})"
        )
    if weight is not None and weight.shape != source.shape:
        raise ValueError(
            f"{name}: expected a 'weight' for each of the {source.numel()} edges (got shape "
            f"{list(weight.shape)})"
        )
    if numbers:
        check_offsets(name, source, offsets)
