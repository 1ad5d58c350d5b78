"""Tensors of the whole graph: every operator gives one process's numbers, or is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from combinations import everything, some
from oracle import parts
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.space import draws
from pyg_sar.tensors import NodeTensor, Rows, node_rows, pointwise, whole, wrap
from pyg_sar.tensors import rows as rows_module

N = 23
DOUBLE = torch.float64
Values = SimpleNamespace


def _values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(N, 6, dtype=DOUBLE, generator=draw),
        "y": torch.randint(0, 4, (N,), generator=draw),
        "m": torch.rand(N, generator=draw) < 0.5,
        "z": torch.randn(N, 2, 3, dtype=DOUBLE, generator=draw),
        "p": torch.randperm(N, generator=draw),
        "w": torch.randn(6, 4, dtype=DOUBLE, generator=draw),
        "owner": torch.randint(0, 3, (N,), generator=draw),
    }


def _layout() -> Rows:
    """The last of three workers owns nothing where there are two: rows lie anywhere."""
    comm = current()
    owner = _values()["owner"] % comm.world_size
    return node_rows(comm, (owner == comm.rank).nonzero().view(-1), N)


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=DOUBLE)


def _line(n: int) -> Tensor:
    return torch.arange(1.0, n + 1, dtype=DOUBLE)


def set_by_mask(v: Values) -> Tensor:
    out = torch.zeros_like(v.x)
    out[v.m] = v.x[v.m]
    return out


def set_by_ids(v: Values) -> Tensor:
    out = v.x.clone()
    out[v.ids[:5]] = 7.0
    return out


def set_plain(v: Values) -> Tensor:
    out = torch.zeros(N, 6, dtype=DOUBLE)
    out[v.m] = v.x[v.m]
    return out


def set_columns(v: Values) -> Tensor:
    out = v.x.clone()
    out[:, 1] = 3.0
    out[v.m, 2] = 4.0
    return out


def in_place(v: Values) -> Tensor:
    out = v.x * 1
    out += 1
    out.mul_(2)
    return out


def gru(v: Values) -> Tensor:
    with torch.random.fork_rng():
        cell = torch.nn.GRUCell(6, 4).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.fill_(0.1)
    return cell(v.x)


def written(write: Callable[[Values, Tensor], None]) -> Callable[[Values], Tensor]:
    """What is left of a copy of ``v.z`` after a write into it."""

    def run(v: Values) -> Tensor:
        out = v.z * 1
        write(v, out)
        return out

    return run


def put(t: Tensor, key: Any, value: Any) -> None:
    t[key] = value


WRITES: dict[str, Callable[[Values, Tensor], None]] = {
    "a row by a tensor": lambda v, t: put(t, torch.tensor(3), 7.0),
    "a row by a number of numpy": lambda v, t: put(t, np.int64(-3), _line(3)),
    "a row and a column": lambda v, t: put(t, (3, 1, 2), 7.0),
    "a row behind an ellipsis": lambda v, t: put(t, (..., 3, slice(None), 1), v.z[4, :, 0]),
    "a row behind a new axis": lambda v, t: put(t, (None, 3), v.z[None, 5]),
    "rows and columns": lambda v, t: put(t, (slice(2, 9, 3), 1), v.z[:3, 0]),
    "no rows": lambda v, t: put(t, (slice(5, 2), 1), 4.0),
    "a row of a transpose": lambda v, t: put(t.transpose(0, 1), (slice(None), 3), v.z[6]),
    "rows of a transpose": lambda v, t: put(
        t.permute(1, 2, 0), (0, slice(None), slice(1, 4)), v.z[1:4, 1].t()
    ),
    "columns by ids": lambda v, t: put(t, (slice(None), slice(None), [0, 2]), v.z[..., :2]),
    "columns by a mask": lambda v, t: put(t, (slice(None), _line(2) > 1), v.z[:, :1]),
    "entries of rows": lambda v, t: put(t, (slice(None), [0, 1], [0, 2]), v.x[:, :2]),
    "rows and last columns by ids": lambda v, t: put(
        t, (v.ids[:3], slice(None), torch.arange(3)), _line(6).view(3, 2)
    ),
    "a row in place": lambda v, t: t[3].mul_(v.z[4]).add_(t[5]),
    "a row by a tensor in place": lambda v, t: t[torch.tensor(3)].mul_(v.z[4]),
    "a part of a row in place": lambda v, t: t[-3][1].mul_(v.z[4, 0]),
    "a run in place": lambda v, t: t[2:9].mul_(v.z[4]),
    "a part of a run in place": lambda v, t: t[2:9][:, 1].mul_(v.z[:7, 0]),
    "rows of a transpose by a mask": lambda v, t: put(t.permute(1, 2, 0), (..., v.m), 2.0),
    "not of a contiguous copy": lambda v, t: t.transpose(1, 2).contiguous().add_(1),
    "not of a copy of another dtype": lambda v, t: t.to(torch.float32).mul_(2),
    "a narrowed run in place": lambda v, t: t.narrow(0, 4, 3).narrow(1, 0, 1).mul_(3),
    "a selected row in place": lambda v, t: t.select(0, 3).mul_(v.z[4]),
    "axes in place": lambda v, t: t.transpose_(0, 1).mul_(2).swapaxes_(1, 0),
    "columns of one row": lambda v, t: put(t, (torch.tensor([3]), torch.tensor([0, 1])), 7.0),
}


def outs(v: Values) -> Tensor:
    """Results that are written into several tensors, of all workers or of rows."""
    most, places = torch.zeros(6, dtype=DOUBLE), torch.zeros(6, dtype=torch.long)
    torch.max(v.x.detach(), 0, out=(most, places))
    order = torch.zeros_like(v.x), torch.zeros_like(v.x, dtype=torch.long)
    torch.sort(v.x.detach(), 1, out=order)
    chosen = torch.zeros(int(v.m.sum()), dtype=DOUBLE)
    torch.masked_select(v.x[:, 0].detach(), v.m, out=chosen)
    return order[0] * order[1] * most + places + chosen.sum()


def two_slices(v: Values) -> Tensor:
    return (v.x[1:] - v.x[:-1]) * v.x[:-1]


CASES: dict[str, Callable[[Values], Any]] = {
    "relu": lambda v: F.relu(v.x),
    "lin": lambda v: F.linear(v.x, v.w.t()),
    "lin3": lambda v: F.linear(v.z, torch.ones(4, 3, dtype=DOUBLE), torch.ones(4, dtype=DOUBLE)),
    "mm": lambda v: v.x @ v.w,
    "gram": lambda v: v.x.t() @ v.x,
    "sum": lambda v: v.x.sum(),
    "mean0": lambda v: v.x.mean(0),
    "mean0k": lambda v: v.x.mean(dim=0, keepdim=True),
    "sum1": lambda v: v.x.sum(1),
    "max": lambda v: v.x.max(),
    "amax0": lambda v: v.x.amax(0),
    "max1": lambda v: v.x.max(1).values,
    "max0": lambda v: v.x.max(0)[0],
    "argmax": lambda v: v.x.argmax(-1),
    "norm": lambda v: v.x.norm(),
    "norm1": lambda v: v.x.norm(dim=1),
    "norm0": lambda v: v.x.norm(p=1, dim=0),
    "normalize": lambda v: F.normalize(v.x),
    "std": lambda v: v.x.std(),
    "var0": lambda v: v.x.var(0),
    "std0": lambda v: (v.x - v.x.mean(0)) / v.x.std(0),
    "lsm": lambda v: F.log_softmax(v.x, 1),
    "sm": lambda v: v.x.softmax(-1),
    "sm0": lambda v: v.x.softmax(0),
    "mask": lambda v: v.x[v.m],
    "maskset": lambda v: torch.where(v.m.unsqueeze(1), v.x, 0.0),
    "pidx": lambda v: v.x[v.ids],
    "neg": lambda v: v.x[torch.tensor([-1, 0, 3, 3])],
    "row": lambda v: v.x[3],
    "col": lambda v: v.x[:, 2],
    "cols": lambda v: v.x[:, 1:4],
    "rows": lambda v: v.x[5:15],
    "rows2": lambda v: v.x[2::3],
    "rowsneg": lambda v: v.x[-4:],
    "permute": lambda v: v.z.permute(1, 0, 2).sum(0),
    "view": lambda v: v.z.view(N, 6) * v.x,
    "view2": lambda v: v.x.view(-1, 2, 3) + v.z,
    "flat": lambda v: v.z.flatten(1),
    "wide": lambda v: (v.z.reshape(-1, 3) * 2).view(N, 2, 3),
    "cat1": lambda v: torch.cat([v.x, v.z.flatten(1)], 1),
    "cat0p": lambda v: torch.cat([v.x, torch.ones(3, 6, dtype=DOUBLE)]),
    "stack": lambda v: torch.stack([v.x, v.x * 2]).mean(0),
    "stack-1": lambda v: torch.stack([v.x, v.x * 2], -1).max(-1)[0],
    "ce": lambda v: F.cross_entropy(v.x, v.y),
    "cem": lambda v: F.cross_entropy(v.x[v.m], v.y[v.m]),
    "nll": lambda v: F.nll_loss(F.log_softmax(v.x, -1)[v.m], v.y[v.m]),
    "cesum": lambda v: F.cross_entropy(v.x, v.y, reduction="sum"),
    "cew": lambda v: F.cross_entropy(v.x, v.y, weight=torch.arange(1.0, 7, dtype=DOUBLE)),
    "ls": lambda v: F.cross_entropy(v.x, v.y, label_smoothing=0.1),
    "cenone": lambda v: F.cross_entropy(v.x, v.y, reduction="none"),
    "bce": lambda v: F.binary_cross_entropy_with_logits(v.x[:, 0], (v.y > 1).double()),
    "bce2": lambda v: F.binary_cross_entropy(v.x.sigmoid(), (v.x.detach() > 0).double()),
    "mse": lambda v: F.mse_loss(v.x, v.z.flatten(1)),
    "mse_plain": lambda v: F.mse_loss(v.x, torch.ones(N, 6, dtype=DOUBLE)),
    "l1": lambda v: F.l1_loss(v.x, v.z.flatten(1)),
    "sl1": lambda v: F.smooth_l1_loss(v.x, v.z.flatten(1)),
    "kl": lambda v: F.kl_div(
        F.log_softmax(v.x, 1), F.softmax(v.z.flatten(1), 1), reduction="batchmean"
    ),
    "acc": lambda v: (v.x.argmax(1) == v.y).sum(),
    "accm": lambda v: int((v.x.argmax(1)[v.m] == v.y[v.m]).sum()) / int(v.m.sum()),
    "onehot": lambda v: F.one_hot(v.y),
    "onehot9": lambda v: F.one_hot(v.y, 9).double() @ torch.ones(9, 2, dtype=DOUBLE),
    "ln": lambda v: F.layer_norm(
        v.x, (6,), torch.arange(6.0, dtype=DOUBLE), torch.ones(6, dtype=DOUBLE)
    ),
    "ln of pairs, rows as bias": lambda v: F.layer_norm(v.x @ v.x.t(), (N,), _line(N), v.x[:, 0]),
    "elu": lambda v: F.elu(v.x),
    "prelu": lambda v: F.prelu(v.x, v.w[0, :1]),
    "gelu": lambda v: F.gelu(v.x),
    "leaky": lambda v: F.leaky_relu(v.x, 0.2),
    "emb": lambda v: F.embedding(v.y, v.w),
    "emb of columns": lambda v: F.embedding(torch.tensor([3, 0, 3]), v.x.t()),
    "columns of a sparse matrix": lambda v: (
        torch.eye(N, dtype=DOUBLE).to_sparse().index_select(1, v.p).to_dense()
    ),
    "wy": lambda v: v.w[v.y],
    "gather": lambda v: v.x.gather(1, v.y.view(-1, 1)),
    "pick": lambda v: v.x[torch.arange(N), v.y],
    "scat": lambda v: torch.zeros(4, 6, dtype=DOUBLE).scatter_add_(
        0, v.y.view(-1, 1).expand(-1, 6), v.x
    ),
    "scat of pairs, ids along columns": lambda v: (v.x @ v.x.t()).scatter_add(
        0, v.y.expand(N, N), v.x @ v.x.t()
    ),
    "idxadd": lambda v: torch.zeros(4, 6, dtype=DOUBLE).index_add_(0, v.y, v.x),
    "put": lambda v: v.x.clone().masked_fill(v.m.view(-1, 1), 0.0),
    "setm": lambda v: set_by_mask(v),
    "seti": lambda v: set_by_ids(v),
    "setcol": lambda v: set_columns(v),
    "nonzero": lambda v: v.m.nonzero().view(-1),
    "xnz": lambda v: v.x[v.m.nonzero().view(-1)],
    "sort": lambda v: v.x[:, 0].sort()[0],
    "topk": lambda v: v.x.topk(2, dim=1)[0],
    "unique": lambda v: v.y.unique(),
    "bincount": lambda v: v.y.bincount(),
    "cumsum": lambda v: v.x.cumsum(0),
    "plainmul": lambda v: v.x * torch.arange(float(N), dtype=DOUBLE).view(-1, 1),
    "plainmm": lambda v: torch.ones(5, N, dtype=DOUBLE) @ v.x,
    "xTplain": lambda v: v.x.t() @ torch.arange(float(N), dtype=DOUBLE),
    "nodep": lambda v: v.x[v.p],
    "nodep2": lambda v: v.x[v.p] * v.x,
    "mix": lambda v: v.x[v.ids] * v.x[torch.arange(N)],
    "bmm": lambda v: torch.bmm(v.z, v.z.transpose(1, 2)),
    "matmul3": lambda v: v.z @ torch.ones(3, 5, dtype=DOUBLE),
    "einsum": lambda v: torch.einsum("nhd,nhd->nh", v.z, v.z),
    "einsum2": lambda v: torch.einsum("nf,ng->fg", v.x, v.x),
    "cos": lambda v: F.cosine_similarity(v.x, v.z.flatten(1)),
    "lse": lambda v: v.x.logsumexp(0),
    "prod": lambda v: v.x.prod(0),
    "any": lambda v: v.m.any(),
    "all": lambda v: (v.x < 100).all(),
    "chunk": lambda v: v.x.chunk(2, 1)[1],
    "split": lambda v: v.x.split(10)[1],
    "unbind": lambda v: v.z.unbind(1)[1],
    "expand": lambda v: v.x.unsqueeze(1).expand(-1, 3, -1).sum(1),
    "repeat": lambda v: v.x.repeat(1, 2),
    "cdist": lambda v: torch.cdist(v.x, v.w.t()),
    "pad": lambda v: F.pad(v.x, (1, 1)),
    "clamp": lambda v: v.x.clamp(-1, 1),
    "clone": lambda v: v.x.clone(),
    "inplace": lambda v: in_place(v),
    "masked_select": lambda v: v.x[:, 0].masked_select(v.m),
    "float": lambda v: v.x.float(),
    "tolist": lambda v: v.y.tolist(),
    "len": lambda v: len(v.x),
    "shape": lambda v: torch.tensor(v.x.shape),
    "iter": lambda v: list(v.y)[2],
    "eq": lambda v: torch.equal(v.x, v.x.clone()),
    "addmv": lambda v: torch.mv(v.x, v.w[:, 0]),
    "dot": lambda v: torch.dot(v.x[:, 0], v.x[:, 1]),
    "min2": lambda v: torch.minimum(v.x, v.z.flatten(1)),
    "max2": lambda v: torch.max(v.x, v.z.flatten(1)),
    "median": lambda v: v.x.median(),
    "argmaxflat": lambda v: v.x.argmax() * 10**6 + v.x.t().argmin() * 1000 + v.z.argmax(),
    "argnan": lambda v: v.x.log().argmax(),
    "topkrows": lambda v: torch.cat([t.double() for t in v.x.topk(3, 0)]),
    "topkleast": lambda v: torch.cat([t.double() for t in v.x.t().topk(2, 1, False)]),
    "topkties": lambda v: torch.cat([t.double() for t in v.x.relu().topk(9, 0)]),
    "aminmax": lambda v: torch.stack(torch.aminmax(v.x)) * torch.aminmax(v.x, dim=0).max[0],
    "safesoft": lambda v: torch._safe_softmax(v.x.masked_fill(v.x[:1] > 0, float("-inf")), 0),
    "maskneg": lambda v: v.x[~v.m],
    "two": lambda v: v.x[v.m][v.y[v.m] > 1],
    "xmcol": lambda v: v.x[v.m, 1],
    "tri": lambda v: F.triplet_margin_loss(v.x, v.z.flatten(1), v.x * 2),
    "sigm": lambda v: torch.sigmoid(v.x).log().mean(),
    "lastrow": lambda v: v.x[-1],
    "pow": lambda v: (v.x**2).sum(-1).sqrt().mean(),
    "hub": lambda v: F.huber_loss(v.x, v.z.flatten(1)),
    "bcew": lambda v: F.binary_cross_entropy_with_logits(
        v.x, (v.x.detach() > 0).double(), pos_weight=torch.arange(1.0, 7, dtype=DOUBLE)
    ),
    "joined rows": lambda v: torch.cat([v.x, v.x[v.m]]),
    "into a plain tensor": set_plain,
    "gru cell": gru,
    "two slices": two_slices,
    "bilinear": lambda v: F.bilinear(v.x, v.z.flatten(1), v.w.t()[:, :, None] * _ones(4, 6, 6)),
    "outer": lambda v: torch.outer(v.x[:, 0], v.x[:, 1]),
    "product of all pairs": lambda v: (v.x @ v.x.t()).softmax(-1),
    "indices apart": lambda v: v.z.unsqueeze(1).expand(-1, 2, -1, -1)[:, [0, 1], :, [0, 2]],
    "distances": lambda v: torch.cdist(v.x, v.w.t()),  # as many rows take another way:
    "distances of many": lambda v: torch.cdist(v.x.repeat(1, 2), v.w.t().repeat(9, 2)),
    "weights of smoothed classes": lambda v: F.cross_entropy(
        v.x[:, :4] * 2, v.y, weight=_line(4), label_smoothing=0.2
    ),
    "values where": lambda v: v.x.masked_select(v.x > 0),
    "close": lambda v: torch.allclose(v.x, v.x + 1e-12),
    "sparse matrix of rows": lambda v: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.stack([v.p, v.y]), v.x[:, 0].detach(), (N, N)), v.x
    ),
    "matrix of rows in another form": lambda v: torch.sparse.mm(
        torch.sparse_coo_tensor(
            torch.stack([torch.arange(N) + 0 * v.y, v.y]),
            v.x[:, 0].detach(),
            (N, N),
            is_coalesced=True,
        ).to_sparse_csr(),
        v.x,
    ),
    "out= of several": outs,
    "matrices by keyword": lambda v: torch.matmul(input=v.x, other=v.w),
    "values by keyword": lambda v: torch.masked_select(input=v.x[:, 0], mask=v.m),
    "classes by keyword": lambda v: F.one_hot(input=v.y, num_classes=6) * v.x,
    "var_mean along an axis": lambda v: torch.cat(torch.var_mean(v.x, axis=0, keepdims=True)),
    "weighted differences": lambda v: F.l1_loss(v.x, v.x.detach().sin(), weight=v.x.abs()),
    "sum of products": lambda v: torch.addbmm(_ones(2, 4), v.z, v.w[:3].expand(N, 3, 4)),
    "out=": lambda v: torch.index_select(v.m, 0, v.y, out=v.m.new_empty(N)),
}


def inner(v: Values) -> Tensor:
    """All pairs of nodes."""
    return v.x @ v.x.t() + N * torch.eye(N, dtype=DOUBLE)


def without_diagonal(v: Values) -> Tensor:
    out = inner(v)
    out.fill_diagonal_(0.5)
    return out


def lower(v: Values) -> Tensor:
    out = v.x[:6] * 1
    out.tril_()
    return out


def recurrent(kind: type, state: bool = False, **options: Any) -> Callable[[Values], Any]:
    """A recurrent layer whose batch the nodes are: sequences ``[N, 2, 3]``, or ``[2, N, 3]``."""

    def run(v: Values) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layer = kind(3, 4, **options).double()
        steps = v.z if options.get("batch_first") else v.z.transpose(0, 1)
        if not state:
            return torch.cat([t.flatten() for t in tree_leaves(layer(steps))])
        h = torch.stack([v.x[:, :4], v.x[:, 1:5] * v.w[:, 0].sum()])
        out, last = layer(steps, (h, h * 2) if kind is torch.nn.LSTM else h)
        return torch.cat([out.flatten(), *(t.flatten() for t in tree_leaves(last))])

    return run


def attention(merge: bool) -> Callable[[Values], Tensor]:
    """All nodes attend to all others."""

    def run(v: Values) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layer = torch.nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True).double()
        if merge:
            return layer(torch.stack([v.x, v.x * 2]).transpose(0, 1))
        return layer(v.x[None])

    return run


LSTM, GRU, RNN = torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN
CASES |= {
    "diagonal": lambda v: inner(v).diagonal() + v.x[:, 0],
    "diagonal of the transpose": lambda v: inner(v).t().diagonal(),
    "another diagonal": lambda v: inner(v).diagonal(2),
    "fill_diagonal_": without_diagonal,
    "tril_": lower,
    "rows and columns by a mask": lambda v: inner(v)[v.m][:, v.m],
    "inverse": lambda v: inner(v).inverse() @ v.x,
    "solve": lambda v: torch.linalg.solve(inner(v), v.x),
    "pdist": lambda v: F.pdist(v.x),
    "cross": lambda v: torch.linalg.cross(v.z, v.z.flip(1), dim=-1),
    "glu": lambda v: F.glu(v.x),
    # PyTorch's own backward pass is wrong where the weight is not contiguous.
    "batch_norm": lambda v: F.batch_norm(v.x, None, None, *v.w.t()[:2].contiguous(), True),
    "group_norm": lambda v: F.group_norm(v.x, 2, v.w[:, 0], v.w[:, 1]),
    "instance_norm": lambda v: F.instance_norm(v.z),
    "conv1d": lambda v: F.conv1d(v.z, v.w.view(4, 2, 3), v.w[0]),
    "pools": lambda v: F.max_pool1d(v.z, 2) + F.avg_pool1d(v.z, 2) + F.lp_pool1d(v.z, 2, 2),
    "unfold": lambda v: v.x.unfold(1, 2, 2),
    "var_mean": lambda v: torch.cat(torch.var_mean(v.x, 0)),
    "pieces of no rows": lambda v: len(v.x[v.y > 9].split(3)) + len(v.x[:0].chunk(2)),
    "var_mean of all": lambda v: torch.stack(torch.var_mean(v.x, False)),
    "std_mean of rows": lambda v: torch.stack(torch.std_mean(v.x, 1)),
    "fft": lambda v: torch.fft.rfft(v.x).abs(),
    "fft along nodes": lambda v: torch.fft.fft(v.x, dim=0).abs(),
    "pinv": lambda v: torch.linalg.pinv(v.x),
    "merged": lambda v: v.z.transpose(0, 1).reshape(2 * N, 3) * 2,
    "merged and parted": lambda v: F.linear(torch.stack([v.x, v.x * 2]), v.w.t(), v.w[0]),
    "attention of all pairs": attention(False),
    "embedding of several ids in a row": lambda v: F.embedding(torch.arange(12).view(4, 3), v.x),
    "attention of each node": attention(True),
    "masked attention": lambda v: F.scaled_dot_product_attention(
        *[v.z.transpose(0, 1)[None]] * 3, attn_mask=inner(v) > inner(v).mean()
    ),
    "lstm": recurrent(LSTM, batch_first=True, num_layers=2, bidirectional=True),
    "lstm with a state": recurrent(LSTM, state=True, num_layers=2, bias=False),
    "gru": recurrent(GRU, state=True, bidirectional=True, batch_first=True),
    "rnn": recurrent(RNN, num_layers=2, nonlinearity="relu"),
    "nodes as steps": lambda v: recurrent(GRU)(SimpleNamespace(z=v.z.transpose(0, 1))),
    "lstm with projections": recurrent(LSTM, proj_size=2),
}
CASES |= {f"write {name}": written(write) for name, write in WRITES.items()}


def _run(names: list[str], within: Callable[[], Any] = nullcontext) -> dict[str, str]:
    """Each case on whole tensors and on node tensors: values, then gradients."""
    given, rows = _values(), _layout()
    found = {}
    for name in names:
        results = []
        for take in (lambda t: t.clone(), lambda t: wrap(t[rows.ids].clone(), rows, 0)):
            v = SimpleNamespace(**{key: take(given[key]) for key in "xyzmp"})
            v.ids, v.w = given["p"], given["w"].clone().requires_grad_()
            v.x.requires_grad_(), v.z.requires_grad_()
            with within():
                out = CASES[name](v)
            gradients: tuple[Any, ...] = ()
            if within is nullcontext and isinstance(out, Tensor) and out.requires_grad:
                weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
                loss = (out * weights).sum()
                gradients = torch.autograd.grad(loss, [v.x, v.z, v.w], allow_unused=True)
            results.append([whole(t, "test") for t in (out, *gradients)])
        places = [k for k, pair in enumerate(zip(*results, strict=True)) if not _equal(*pair)]
        found[name] = f"{name}: differs in {places}" if places else ""
    return found


def _equal(plain: Any, found: Any) -> bool:
    if not isinstance(plain, Tensor) or not isinstance(found, Tensor):
        absent = [t for t in (plain, found) if isinstance(t, Tensor)]
        if absent:  # A gradient that is zero, and one that is not there.
            return not bool(absent[0].any())
        return plain == found or (isinstance(plain, float) and abs(plain - found) < 1e-10)
    if plain.shape != found.shape or plain.dtype != found.dtype:
        return False
    plain, found = plain.detach(), found.detach()
    if not plain.is_floating_point():
        return torch.equal(plain, found)
    return torch.allclose(plain, found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_and_gradients_are_those_of_whole_tensors(world: int) -> None:
    names = list(CASES) if world == 3 else some(list(CASES), f"{world}", 2)
    for found in parts(_run, world, names):
        assert [text for text in found.values() if text] == []


def test_values_in_inference_mode() -> None:
    """There, operators that are composed of others come as they are."""

    def run() -> list[str]:
        names = list(CASES)
        outside = _run(names if everything() else names[::2], torch.inference_mode)  # made there
        with torch.inference_mode():
            return [*outside.values(), *_run(names if everything() else names[1::2]).values()]

    for found in parts(run, 2):
        assert [text for text in found if text] == []


REFUSED: dict[str, Callable[[Values], Any]] = {
    "runs of memory": lambda v: v.x.as_strided((N, 2), (5, 1)),
    "a shape that changes": lambda v: v.x.resize_(N, 1),
    "merged rows": lambda v: v.z.transpose(0, 1).reshape(3, 2 * N),
    "random numbers by others, transposed": lambda v: v.x.t().bernoulli_(v.x.t().sigmoid()),
    "out= of another shape": lambda v: torch.add(v.x, 1, out=torch.zeros(N, 5, dtype=DOUBLE)),
}


def _refused(name: str) -> str:
    given, rows = _values(), _layout()
    v = SimpleNamespace(**{k: wrap(given[k][rows.ids].clone(), rows, 0) for k in "xyzmp"})
    with pytest.raises(DistributedIndexError) as caught:
        REFUSED[name](v)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    for rank, text in enumerate(parts(_refused, 2, name)):
        assert f"rank {rank}" in text and "shape" in text
        assert name != "merged rows" or ".full_tensor() gives every worker all of them" in text


def _dropping(x: Tensor) -> list[Tensor]:
    """Attention and recurrent layers that drop."""
    steps = torch.stack([x + 1, x - 1])
    out = [F.scaled_dot_product_attention(steps, steps, steps, dropout_p=0.5)]
    for kind, by_nodes in ((torch.nn.LSTM, False), (torch.nn.GRU, True)):
        layer = kind(6, 3, 3, dropout=0.5, bidirectional=True, batch_first=by_nodes).to(x.dtype)
        out += tree_leaves(layer(steps.transpose(0, 1) if by_nodes else steps))
    return out


def _draws(x: Tensor) -> list[Tensor]:
    """What random numbers make of zeros ``[N, 6]``."""
    ids = torch.zeros_like(x, dtype=torch.long)
    wide = x.unsqueeze(0).expand(2, -1, -1)
    return [
        *(F.dropout(x + 1, 0.5), torch.randn_like(x), torch.rand_like(x), F.gumbel_softmax(x)),
        *(F.alpha_dropout(x + 1, 0.3), torch.bernoulli(x + 0.5), torch.randint_like(ids, 9)),
        *(F.dropout1d(x + 1, 0.5), F.feature_alpha_dropout(x + 1, 0.4), torch.poisson(x + 3)),
        *(torch.normal(x + 1, x + 2), torch.normal(x, 2.0), torch.normal(0.0, x + 1)),
        *((x * 1).normal_(), (x * 1).uniform_(1, 2), (x * 1).exponential_(), (x * 1).cauchy_()),
        *((x * 1).log_normal_(), (x * 1).geometric_(0.3), (x * 1).bernoulli_(x + 0.5)),
        *(torch.rand_like(wide), torch.binomial(x + 9, x + 0.5), (ids * 1).random_(3, 90)),
        *(torch._standard_gamma(x + 0.5), torch._sample_dirichlet(x + 0.5)),
        torch.nn.functional.dropout(torch.ones_like(wide), 0.4).sum(0),
        *_dropping(x),
    ]


def _drawn(piece: int) -> list[Tensor]:
    rows = _layout()
    x = wrap(torch.zeros(rows.count, 6, dtype=DOUBLE), rows, 0)
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_PIECE", piece)
        drawn = _draws(x)
        learned = (x + 1).requires_grad_()
        if draws._is_mersenne_twister(DOUBLE):  # Then other rows' numbers are not drawn.
            patch.setattr(pointwise, "drawn_rows", None)
        (gradient,) = torch.autograd.grad(F.dropout(learned, 0.5).sum(), learned)
    return [whole(t, "test") for t in (*drawn, gradient)] + [torch.rand(3)]


@pytest.mark.parametrize("piece", [2**22, 96])
def test_random_numbers_are_those_of_one_process(piece: int) -> None:
    """In one piece, and in pieces of 16 rows."""
    torch.manual_seed(5)
    expected = _draws(torch.zeros(N, 6, dtype=DOUBLE))
    expected += [F.dropout(torch.ones(N, 6, dtype=DOUBLE), 0.5), torch.rand(3)]
    for found in pyg_sar.launch(_drawn, 2, piece):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)


def _transposed(x: Tensor) -> Tensor:
    """The same numbers, column by column in memory."""
    return x.t().contiguous().t()


ORDERS: dict[str, Callable[[Tensor], Any]] = {
    "a column": lambda x: x[:, 3].uniform_(),
    "columns": lambda x: x[:, 2:5].normal_(),
    "columns by other numbers": lambda x: x[:, :2].bernoulli_((x[:, :2] + 0.5).clone()),
    "each second row": lambda x: x[::2].normal_(),
    "rows of columns": lambda x: x[:, 1:4][4:16].normal_(),
    "columns of rows": lambda x: x[2:18:2, 1:3].uniform_(),
    "rows, transposed": lambda x: x.t()[:, 4:16].uniform_(),
    "rows, split": lambda x: x.t().split(7, 1)[1].exponential_(),
    "like rows, transposed": lambda x: torch.randn_like((x + 1).t()[:, 4:16]),
    "dropped rows, transposed": lambda x: F.dropout(x.t()[:, 4:16] + 1, 0.5),
    "permuted": lambda x: F.dropout(x.view(-1, 2, 3).permute(2, 0, 1)[:, 2:9] + 1, 0.5),
    "softmax": lambda x: F.dropout(x.t().softmax(1).t(), 0.5),
    "cumsum": lambda x: F.dropout((x + 1).t().cumsum(1).t(), 0.5),
    "flip": lambda x: F.dropout((x + 1).t().flip(1), 0.5),
    "added": lambda x: F.dropout((x + 1).t().index_add(1, torch.arange(2), x[:2].t()), 0.5),
    "sorted": lambda x: F.dropout((x + 1).t().sort(1)[0].t(), 0.5),
    "chosen": lambda x: F.dropout((x + 1).t()[:, x[:, 0] < 1], 0.5),
    "multiplied": lambda x: F.dropout((torch.ones(6, 6).to(x) @ (x + 1).t()).t(), 0.5),
    "made contiguous": lambda x: F.dropout((x + 1).t().contiguous(), 0.5),
    "as other axes": lambda x: F.dropout((x + 1).t().reshape(2, 3, -1), 0.5),
    "gathered": lambda x: F.dropout((x + 1).t().gather(1, torch.arange(12).view(6, 2)), 0.5),
    "roll": lambda x: F.dropout((x + 1).t().roll(3, 1).t(), 0.5),
    "batch norm": lambda x: F.dropout(
        F.batch_norm(_transposed(x), None, None, None, x[0] + 1, True), 0.5
    ),
    "group norm": lambda x: F.dropout(
        F.group_norm(_transposed(x), 2, None, torch.ones(6).to(x)), 0.5
    ),
}
"""Draws into views and results that lie in memory in another order than that of their axes."""


def _in_orders(x: Tensor) -> dict[str, Any]:
    found = {}
    for name, draw in ORDERS.items():
        torch.manual_seed(5)
        written = x.clone()
        found[name] = [whole(t, "test") for t in (draw(written), written, torch.rand(2))]
    return found


@pytest.mark.parametrize("total", [N, 3])
def test_strides_are_those_of_one_process(total: int) -> None:
    """Also where a worker has one row, or none, which doesn't tell in which order axes lie."""

    def work(x: Tensor) -> list[Any]:
        x = x.requires_grad_()
        made = [x.t(), x[:, 1:3], x.t() * 2, x.view(-1, 2, 3).permute(1, 0, 2), x.expand(2, -1, -1)]
        made += [F.rrelu(x.t() * 1, training=False), x.t()[:, ::2], x.t().contiguous()]
        doubled = made[2]
        there = isinstance(doubled, NodeTensor)
        made += [pyg_sar.from_local(doubled.to_local(), doubled, 1) if there else doubled]
        (gradient,) = torch.autograd.grad((x @ torch.ones(6, 2).to(x)).t().exp().sum(), x)
        return [t.stride() for t in (*made, gradient)], [t.is_contiguous() for t in made]

    def on_parts() -> list[Any]:
        comm = current()
        own = torch.arange(comm.rank, total, comm.world_size)
        rows = node_rows(comm, own, total)
        return work(wrap(torch.zeros(rows.count, 6, dtype=DOUBLE), rows, 0))

    expected = work(torch.zeros(total, 6, dtype=DOUBLE))
    for found in parts(on_parts, 2):
        assert found == expected


def test_draws_follow_the_order_in_memory_of_one_process() -> None:
    def work() -> dict[str, Any]:
        rows = _layout()
        return _in_orders(wrap(torch.zeros(rows.count, 6, dtype=DOUBLE), rows, 0))

    expected = _in_orders(torch.zeros(N, 6, dtype=DOUBLE))
    for found in parts(work, 2):
        torch.testing.assert_close(found, expected)


def _of_halves(x: Tensor, y: Tensor) -> list[Tensor]:
    """Sums that float16, which ends at 65504, does not hold; the last is inf in one process."""
    x = x.detach().requires_grad_()
    out = [x.mean(0), (x / 30).norm(), (x - 8000 + y[:, None]).var(0), F.nll_loss(-x, y)]
    (gradient,) = torch.autograd.grad(out[-1], x)
    return [*out[:-1], out[-1].clamp(max=9000), gradient]


def test_sums_of_half_precision_do_not_overflow() -> None:
    x, y = torch.full((N, 6), 9000.0, dtype=torch.float16), _values()["y"]

    def work() -> list[Tensor]:
        rows = _layout()
        both = (wrap(t[rows.ids].clone(), rows, 0) for t in (x, y))
        return [whole(t, "test").detach() for t in _of_halves(*both)]

    for found in parts(work, 2):
        torch.testing.assert_close(found, [t.detach() for t in _of_halves(x, y)])


def _shown() -> tuple[Any, ...]:
    given, rows = _values(), _layout()
    y = wrap(given["y"][rows.ids], rows, 0)
    return repr(y), str(y), y.numpy().tolist(), y.tolist(), f"{y.sum()}", len(y), list(y.shape)


def test_what_leaves_torch_is_gathered() -> None:
    y = _values()["y"]
    expected = (repr(y), str(y), y.tolist(), y.tolist(), f"{y.sum()}", N, [N])
    assert parts(_shown, 3) == [expected] * 3


def test_gathering_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "GATHER_LIMIT", 100)

    def gather() -> str:
        given, rows = _values(), _layout()
        with pytest.raises(DistributedIndexError, match="all 23 rows on every worker") as caught:
            wrap(given["x"][rows.ids], rows, 0).numpy()
        return str(caught.value)

    assert all("Tensor.numpy()" in text for text in parts(gather, 2))


def test_plain_and_node_tensors_of_other_lengths_do_not_meet() -> None:
    def meet() -> None:
        given, rows = _values(), _layout()
        x = wrap(given["x"][rows.ids], rows, 0)
        with pytest.raises(RuntimeError, match="must match the size"):
            x + torch.ones(N + 1, 1)
        with pytest.raises(RuntimeError, match="must match the size"):
            x[wrap(given["m"][rows.ids], rows, 0)] + x
        with pytest.raises(IndexError, match="out of bounds"):
            x[torch.tensor([N])]

    parts(meet, 2)


def test_copies_where_torch_has_views_are_written_as_these() -> None:
    def write() -> None:
        given, rows = _values(), _layout()
        plain = given["x"].clone()
        x = wrap(given["x"][rows.ids].clone(), rows, 0)
        for t in (x, plain):
            t[3].zero_()
            t[4] += 1
            t[5][1:3].mul_(2)
            t[-2][0] = 7.0
            t[2:9][1:5].sub_(1)
            t[2:9:3][:, 2] += 5
            t.split(10)[1].mul_(3)
            t.t()[:, 6:8].neg_()
            for row in t[10:12]:
                row += 2
            F.relu(t[13], inplace=True)
            t[:6].diagonal().add_(4)
            torch.nn.init.ones_(t[15])
            t[16].chunk(2)[1].zero_()
            for number in t[17]:
                number.neg_()
        torch.testing.assert_close(whole(x, "test"), plain)
        with pytest.raises(DistributedIndexError, match="copy of rows"):
            torch.add(x[3], 1, out=x[4])
        with pytest.raises(DistributedIndexError, match="_foreach_add_.* copy of rows"):
            torch._foreach_add_([x[3]], 1.0)
        run, row, across = x[2:5], x[3], x.t()[:6].diagonal()
        part = row.chunk(2)[0]
        x.data[0] = 0.0
        linear = lambda: F.linear(run, torch.eye(run.size(1)))  # noqa: E731
        add, double = (lambda: run + 1), (lambda: run[:, 1] * 2)
        plain = (lambda: row + 1, lambda: x + row, lambda: row.zero_(), lambda: part.sum())
        for stale in (add, double, linear, run.to_local, run.tolist, *plain, lambda: x + across):
            with pytest.raises(DistributedIndexError, match="was written since"):
                stale()
        for memory in (x.numpy(), x[3].numpy()):
            with pytest.raises(ValueError, match="read-only"):
                memory[0] = 1
        learned = torch.nn.Parameter(x[3])
        (x @ learned).sum().backward()
        torch.testing.assert_close(learned.grad, x.detach().sum(0))
        assert torch.equal(deepcopy(x[3]), pickle.loads(pickle.dumps(x[3])))
        leaf = x.detach().requires_grad_()
        leaf.square().sum().backward()
        assert torch.equal(deepcopy(leaf).grad, leaf.grad)

    parts(write, 2)


def test_a_selection_is_known_again_and_a_changed_mask_is_not() -> None:
    def select() -> None:
        given, rows = _values(), _layout()
        x = wrap(given["x"][rows.ids].clone(), rows, 0)
        mask = wrap(given["m"][rows.ids].clone(), rows, 0)
        first = x[mask]
        assert isinstance(first, NodeTensor) and x[mask].rows is first.rows
        mask[:3] = True
        changed = given["m"].clone()
        changed[:3] = True
        assert x[mask].shape == given["x"][changed].shape
        torch.testing.assert_close(whole(x[mask], "test"), given["x"][changed])
        mask.data[3:6] = False
        changed[3:6] = False
        assert x[mask].size(0) == int(changed.sum())
        ids = np.arange(5)
        shared = torch.from_numpy(ids)
        for _ in range(2):  # NumPy writes without PyTorch's knowing.
            torch.testing.assert_close(whole(x[shared], "test"), given["x"][shared])
            ids += 7
        with torch.inference_mode():
            other = mask.clone()
            assert x[other].size(0) == int(changed.sum())
            other.logical_not_()
            assert x[other].size(0) == N - int(changed.sum())

    parts(select, 2)


def _written(z: Tensor) -> Tensor:
    """Writes into parts of conjugates, which are views."""
    out = z.clone()
    out.conj().imag.mul_(3)
    out.conj()[2:5].real[1] = out[0].imag
    out.imag.conj()[7:] = 2
    return out.mul(1 + 2j)


COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "a square of lengths": lambda z: (z * z.conj()).real.sum(),
    "resolved": lambda z: (z.conj().resolve_conj() * 1j).imag.sum(),
    "parts of a conjugate": lambda z: z.conj().imag.cos().sum() + z.conj().real.cos().sum(),
    "a product": lambda z: (torch.exp(1j * z.real) * z * z).abs().square().sum(),
    "polar": lambda z: torch.polar(z.real.abs(), z.imag).imag.square().sum(),
    "matrices": lambda z: (z.mH @ z).abs().sum() + torch.vdot(z[:, 0], z[:, 1]).imag,
    "a variance": lambda z: torch.view_as_real(z.conj().resolve_conj()).var(0).sum(),
    "sums of pairs": lambda z: torch.view_as_real(z.T).sum(-1).square().sum(),
    "a row, and rows": lambda z: z.conj()[2].imag.sum() + z.conj()[[3, 1]].imag.square().sum(),
    "written parts": lambda z: torch.view_as_real(_written(z)).var(0).sum(),
}


def test_conjugates_keep_their_bits_with_gradients() -> None:
    draw = torch.Generator().manual_seed(1)
    z = torch.randn(N, 3, dtype=torch.complex128, generator=draw)

    def found(make: Callable[[], Tensor]) -> list[Tensor]:
        out = []
        for run in COMPLEX.values():
            given = make().requires_grad_()
            loss = run(given)
            out += [loss, *torch.autograd.grad(loss, given)]
        return [whole(t, "test").detach().resolve_conj() for t in out]

    def work() -> list[Tensor]:
        rows = _layout()
        with pytest.raises(DistributedIndexError, match="as_strided_copy"):
            torch.as_strided_copy(wrap(z[rows.ids], rows, 0).T, (2, 2), (1, 1))
        return found(lambda: wrap(z[rows.ids].clone(), rows, 0))

    expected = found(z.clone)
    for worker in parts(work, 2):
        torch.testing.assert_close(worker, expected)


def test_reductions_of_integers_have_the_dtype_or_error_of_torch() -> None:
    def found(x: Tensor) -> list[Any]:
        out = []
        for name in ("mean", "var", "std", "norm", "logsumexp", "prod", "sum"):
            for kind in (torch.int64, torch.uint8, torch.bool):
                try:
                    out.append(whole(getattr(torch, name)(x.to(kind), dim=0), "test"))
                except RuntimeError as error:
                    out.append(str(error))
        return out

    def work() -> list[Any]:
        rows = _layout()
        return found(wrap(x[rows.ids], rows, 0))

    x = _values()["y"].view(-1, 1) + torch.arange(3)
    expected = found(x)
    for worker in parts(work, 2):
        for one, other in zip(worker, expected, strict=True):
            assert one == other if isinstance(other, str) else one.dtype == other.dtype
            torch.testing.assert_close(one, other) if isinstance(other, Tensor) else None


TORCH_REFUSES: dict[str, Callable[[Tensor], Any]] = {
    "no probability": lambda x: F.binary_cross_entropy(x * 9 + 2, x * 0),
    "no target": lambda x: F.binary_cross_entropy(x * 0, x * 9 + 2),
    "two dtypes": lambda x: F.binary_cross_entropy(x * 0, x.float() * 0),
    "negative": lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
    "softmax of integers": lambda x: x.long().softmax(0),
    "loss of integers": lambda x: F.mse_loss(x.long(), x.long()),
    "ids that count from the end": lambda x: x.index_select(0, torch.tensor([2, -1])),
    "such ids of an embedding": lambda x: F.embedding(torch.tensor([2, -1]), x),
    "such ids of sums": lambda x: torch.zeros(N).index_add(0, torch.full((N,), -1), x[:, 0]),
}


def test_what_torch_refuses_is_refused() -> None:
    """With its own error, though PyTorch's decompositions would give numbers."""

    def problems(x: Tensor) -> list[str]:
        found = []
        for call in TORCH_REFUSES.values():
            with pytest.raises((RuntimeError, IndexError)) as error:
                call(x)
            found.append(str(error.value))
        return found

    def work() -> list[str]:
        rows = _layout()
        return problems(wrap(torch.zeros(rows.count, 6, dtype=DOUBLE), rows, 0))

    expected = problems(torch.zeros(N, 6, dtype=DOUBLE))
    assert parts(work, 2) == [expected] * 2
