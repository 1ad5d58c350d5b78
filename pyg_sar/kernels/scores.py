r"""The scores of attention, each declared once: what it reads, its formula, its gradient.

Checks of shapes, PyTorch's operators (:mod:`pyg_sar.kernels.fallback`), Triton's kernels, the
engine's passes and the tests follow from here. Two compilers read the formulas, TorchScript as they
stand and Triton with its own meaning of ``leaky``, ``through_leaky``, ``over_channels``,
``per_channel`` and ``sigmoid``; so they are made of these and of arithmetic alone. The C++ kernels
have a structure for each score, of the same number, in ``extensions/attention_scores.h``.

With the edge term :math:`\epsilon_e = \mathrm{edge\_attr}_e \, \mathrm{edge\_weight}`, for each
head of an edge e = (j -> i):

.. math::
    s_e = \begin{cases}
    \mathrm{leaky}(k_j + q_i + \epsilon_e) & \text{additive} \\
    \sum_c \mathrm{att}_c \, \mathrm{leaky}(k_j + q_i + \epsilon_e)_c & \text{gatv2} \\
    \mathrm{leaky}(\mathrm{scale} \, \langle q_i, k_j + \epsilon_e \rangle) & \text{dot} \\
    \mathrm{leaky}((\langle \mathrm{att}_0, k_j \rangle + \langle \mathrm{att}_1, q_i \rangle)
        \, \sigma(\langle q_i, k_j \rangle)) & \text{mixed} \\
    \mathrm{leaky}(\langle \mathrm{att}, \mathrm{leaky}(k_j + \epsilon_e) \rangle + q_i)
        & \text{nested}
    \end{cases}

These are the scores of GATConv and RGATConv, GATv2Conv, TransformerConv (and AGNNConv, HGTConv,
SuperGATConv's "SD"; slope 1 but for the last), SuperGATConv's "MX", and GATEConv.

With ``dot`` the edge term is part of the value too. ``tanh`` (FAConv) has weights that are not
normalised: :math:`\mathrm{out}_i = \sum_e \tanh(k_j + q_i) \, \mathrm{edge\_attr}_e \, v_j`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Score(NamedTuple):
    """The tensors that a score reads. Rows are ``[H]`` where they are narrow, else ``[H, C]``.

    Attributes:
        name: ``kind`` of :class:`~pyg_sar.kernels.attention_terms.Attention`.
        narrow_key: A source row's key is narrow; a wide one may be the value.
        narrow_query: A target row's query is narrow.
        joined: Key, query and edge term are added up before all else; a narrow query may be absent.
        att: Rows ``[H, C]`` of the parameter ``att``: 0 (none), 1, or 2 (of keys, of queries).
        term: What the edge term is added to: ``'key'`` or ``'key and value'``; or ``'none'``, or
            ``'factor'``: a number of each edge that its weight is multiplied by.
        by_source: One pass over source rows gives all gradients; else those of the query, of
            parameters and of edges come by target.
        softmax: Weights are normalised. Those that aren't have no kernel of their own.
    """

    name: str
    narrow_key: bool
    narrow_query: bool
    joined: bool
    att: int
    term: str
    by_source: bool
    softmax: bool


def declared() -> list[Score]:
    """Returns the scores in the order of their numbers (``Kind`` of the C++ kernels)."""
    return [
        Score("additive", True, True, True, 0, "key", True, True),
        Score("gatv2", False, False, True, 1, "key", False, True),
        Score("dot", False, False, False, 0, "key and value", False, True),
        Score("mixed", False, False, False, 2, "none", False, True),
        Score("tanh", True, True, False, 0, "factor", True, False),
        Score("nested", False, True, False, 1, "key", False, True),
    ]


def number_of(kind: str) -> int:
    """Returns the number of a score.

    Raises:
        ValueError: There is none of this name.
    """
    names: list[str] = []
    for score in declared():
        if score.name == kind:
            return len(names)
        names.append(score.name)
    every = "', '".join(names)
    raise ValueError(f"attention: expected 'kind' to be one of ('{every}') (got '{kind}')")


def row_shape(narrow: bool, value: Tensor) -> list[int]:
    """The shape of a narrow or a wide row, with values ``[M, H, C]``."""
    return list(value.shape[1:2]) if narrow else list(value.shape[1:])


SCORES: dict[str, Score] = {score.name: score for score in declared()}
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(SCORES)}


# Formulas #####################################################################


def edge_scores(
    kind: int,
    x: Tensor,
    query: Tensor,
    att: Tensor,
    att_of_query: Tensor,
    slope: float,
    scale: float,
) -> Tensor:
    """Scores of edges, ``[B, H]``.

    Args:
        kind: The score's number.
        x: Each edge's key with its edge term, and with the query where these are joined.
        query: Each edge's query.
        att: ``[H, C]``, the first row of the parameter.
        att_of_query: The second.
        slope: Leaky ReLU's negative slope.
        scale: Of inner products.

    What a score doesn't have may be anything.
    """
    if kind == 0:
        scores = leaky(x, slope)
    elif kind == 1:
        scores = over_channels(leaky(x, slope) * att)
    elif kind == 2:
        scores = leaky(over_channels(query * x) * scale, slope)
    elif kind == 5:
        scores = leaky(over_channels(att * leaky(x, slope)) + query, slope)
    else:
        ends = over_channels(att * x) + over_channels(att_of_query * query)
        scores = leaky(ends * sigmoid(over_channels(query * x)), slope)
    return scores


def edge_gradients(
    kind: int,
    x: Tensor,
    query: Tensor,
    att: Tensor,
    att_of_query: Tensor,
    slope: float,
    scale: float,
    grad_scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``query``, ``att`` and ``att_of_query``, edge by edge.

    Those that a score doesn't have are of no use. The key, the edge term and a query that is joined
    have the gradient of ``x``.

    Args:
        kind, x, query, att, att_of_query, slope, scale: See :func:`edge_scores`.
        grad_scores: Gradients of the scores, ``[B, H]``.
    """
    if kind == 0:
        of_x = through_leaky(grad_scores, x, slope)
        of_query, of_att, of_att_2 = of_x, of_x, of_x
    elif kind == 1:
        of_x = through_leaky(per_channel(grad_scores) * att, x, slope)
        of_att = per_channel(grad_scores) * leaky(x, slope)
        of_query, of_att_2 = of_x, of_att
    elif kind == 2:
        inner = over_channels(query * x) * scale
        slopes = per_channel(through_leaky(grad_scores, inner, slope) * scale)
        of_x, of_query = slopes * query, slopes * x
        of_att, of_att_2 = of_x, of_x
    elif kind == 5:
        inner = leaky(x, slope)
        of_query = through_leaky(grad_scores, over_channels(att * inner) + query, slope)
        of_x = through_leaky(per_channel(of_query) * att, x, slope)
        of_att = per_channel(of_query) * inner
        of_att_2 = of_att
    else:
        ends = over_channels(att * x) + over_channels(att_of_query * query)
        gate = sigmoid(over_channels(query * x))
        whole = through_leaky(grad_scores, ends * gate, slope)
        of_ends = per_channel(whole * gate)
        of_inner = per_channel(whole * ends * gate * (1 - gate))
        of_x = of_ends * att + of_inner * query
        of_query = of_ends * att_of_query + of_inner * x
        of_att, of_att_2 = of_ends * x, of_ends * query
    return of_x, of_query, of_att, of_att_2


# What they are made of ########################################################


def leaky(x: Tensor, slope: float) -> Tensor:
    """A leaky ReLU; TorchScript's own gradient of it rounds the slope to float32."""
    return x if slope == 1.0 else torch.where(x > 0, x, x * slope)


def through_leaky(gradient: Tensor, x: Tensor, slope: float) -> Tensor:
    """The gradient of a leaky ReLU's argument ``x``."""
    return torch.where(x > 0, gradient, gradient * slope)


def over_channels(x: Tensor) -> Tensor:
    """Sums of rows' channels, ``[B, H]``."""
    return x.sum(-1)


def per_channel(x: Tensor) -> Tensor:
    """A number per head as one of all channels, ``[B, H, 1]``."""
    return x.unsqueeze(-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.sigmoid()
