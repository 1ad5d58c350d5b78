"""No worker makes all rows in a backward pass where one of its own rows would do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import error, parts
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GraphNorm, InstanceNorm, LayerNorm, PairNorm, global_mean_pool
from torch_geometric.utils import scatter
from torch_geometric.utils import softmax as pyg_softmax

import pyg_sar
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.node_tensor import tensors_in
from pyg_sar.tensors.rows import node_rows

N, WIDTH, PARTS = 4000, 8, 4
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(N, WIDTH, generator=DRAW, dtype=torch.float64)
Y = torch.randint(WIDTH, (N,), generator=DRAW)
MASK = torch.rand(N, generator=DRAW) < 0.5
V = torch.rand(WIDTH, generator=DRAW, dtype=torch.float64) + 0.5
IDS = torch.randperm(N, generator=DRAW)[:500]

LOSSES = {
    "sum": lambda x, y, m: x.sum(),
    "mean": lambda x, y, m: x.mean(),
    "sum(0)": lambda x, y, m: (x.sum(0) * V).sum(),
    "mean(0)": lambda x, y, m: (torch.mean(x, dim=0, keepdim=True) * V).sum(),
    "mean of columns": lambda x, y, m: x.t().mean(1).mul(V).sum() + x[None].mean((0, 1)).norm(),
    "relu": lambda x, y, m: x.relu().mean(),
    "amax(0)": lambda x, y, m: x.amax(0).sum() + x.min(),
    "std(0)": lambda x, y, m: x.std(0).sum() + x.var(),
    "var_mean": lambda x, y, m: sum(t.sum() for t in torch.var_mean(x, 0)),
    "std_mean": lambda x, y, m: sum(t.sum() for t in torch.std_mean(x)),
    "norm": lambda x, y, m: x.norm() + x.norm(dim=0).sum() + x.norm(dim=-1).mean(),
    "logsumexp": lambda x, y, m: x.logsumexp(0).sum(),
    "index_select": lambda x, y, m: x.index_select(0, IDS).sum(),
    "mask": lambda x, y, m: x[m].mean(),
    "ids": lambda x, y, m: x[IDS].mean(),
    "slice": lambda x, y, m: x[5:1000].mean() + x[:, 2].mean() + x.narrow(0, 0, 2000).sum(),
    "split": lambda x, y, m: sum(t.sum() for t in (*x.split(1000), *x.chunk(2, 1), *x.unbind(1))),
    "gather": lambda x, y, m: x.gather(1, y[:, None]).mean(),
    "softmax": lambda x, y, m: (x.softmax(1) * x).mean() + (x.softmax(1).mean(0)).log().sum(),
    "cross_entropy": lambda x, y, m: F.cross_entropy(x, y) + F.cross_entropy(x[m], y[m]),
    "smooth": lambda x, y, m: F.cross_entropy(x, y, V, label_smoothing=0.1),
    "each": lambda x, y, m: F.cross_entropy(x, y, reduction="none")[m].mean(),
    "bce": lambda x, y, m: F.binary_cross_entropy_with_logits(x, (x > 0).double(), pos_weight=V),
    "mse": lambda x, y, m: F.mse_loss(x, 2 * x.detach()) + F.l1_loss(x, 2 * x.detach()),
    "kl": lambda x, y, m: F.kl_div(x, x.detach().softmax(1), reduction="batchmean"),
    "kl sum": lambda x, y, m: F.kl_div(x, x.detach(), reduction="sum", log_target=True),
    "poisson": lambda x, y, m: F.poisson_nll_loss(x, x.detach().abs()),
    "gaussian": lambda x, y, m: F.gaussian_nll_loss(x, 2 * x.detach(), 1 + x.detach().abs()),
    "hinge": lambda x, y, m: F.hinge_embedding_loss(x, x.detach().sign(), reduction="sum"),
    "ranking": lambda x, y, m: F.margin_ranking_loss(x, 2 * x.detach(), x.detach().sign()),
    "triplet": lambda x, y, m: F.triplet_margin_loss(x, 2 * x.detach(), x.detach() + 1),
    "cosine": lambda x, y, m: F.cosine_embedding_loss(x, 2 * x.detach(), y % 2 * 2 - 1),
    "labels": lambda x, y, m: F.multilabel_soft_margin_loss(x, (x > 0).double()),
    "parameter": lambda x, y, m: ((x * V + V) @ torch.diag(V)).mean() + F.linear(x, V).mean(),
    "expand": lambda x, y, m: (x.mean(0).expand_as(x) * x).sum() + x.repeat(1, 2).mean(),
    "where": lambda x, y, m: torch.where(m[:, None], x, 0).mean() + torch.where(x > 0, x, V).sum(),
    "stack": lambda x, y, m: torch.stack([x, 2 * x]).mean() + torch.stack([x, x], 1).amax(1).mean(),
    "cat": lambda x, y, m: torch.cat([x, x]).mean() + torch.cat([x, x], 1).square().mean(),
    "cat of flat": lambda x, y, m: torch.cat([x.flatten(), (2 * x).flatten()]).sum(),
    "layer_norm": lambda x, y, m: F.layer_norm(x, (WIDTH,), V).mean(),
    "batch_norm": lambda x, y, m: F.batch_norm(x, None, None, V, training=True).pow(3).sum(),
    "norms": lambda x, y, m: sum(
        norm.double()(x).pow(3).sum() for norm in (PairNorm(), LayerNorm(WIDTH), GraphNorm(WIDTH))
    ),
    "pool": lambda x, y, m: global_mean_pool(InstanceNorm(WIDTH)(x).pow(3) + x, None).sum(),
    "reshape": lambda x, y, m: x.view(-1).sum() + x.reshape(-1).mean(),
    "masked": lambda x, y, m: x.masked_fill(m[:, None], 0).mean() + (x.T * m).sum() / m.sum(),
    "softmax(0)": lambda x, y, m: (x.softmax(0) * x).sum() + (x.log_softmax(0) * V).mean(),
    "cumsum(0)": lambda x, y, m: (x.cumsum(0) * V).tanh().mean() + x.t().cumsum(1).std(),
    "logcumsumexp(0)": lambda x, y, m: x.logcumsumexp(0).mean(),
    "flip": lambda x, y, m: (x.flip(0, 1) * x).mean() + (x.roll((3, 1), (0, 1)) * x).sum(),
    "max(0)": lambda x, y, m: (x.max(0).values * V).sum() + x.t().min(1, keepdim=True)[0].norm(),
    "argmax(0)": lambda x, y, m: x.mean() * (x.argmax(0) + x.argmin(0) + x.max(0)[1]).sum(),
    "prod(0)": lambda x, y, m: ((1 + x / 50).prod(0) * V).sum() + torch.prod(1 + x / 90),
    "row": lambda x, y, m: x[3].sum() + x[-1].norm() + x.select(0, 5).mean() + x[7, 2].cos(),
    "softmax of groups": lambda x, y, m: (pyg_softmax(x, y, num_nodes=WIDTH) * x).pow(2).sum(),
    "scatter": lambda x, y, m: (
        scatter(x, y, 0, WIDTH, "max").pow(2).sum() + scatter(x, y, 0, 9, "min").sin().sum()
    ),
    "dtype": lambda x, y, m: x.float().sum(0, dtype=x.dtype).norm() + x.mean(dtype=x.dtype),
    "penalty": lambda x, y, m: (
        torch.autograd.grad(x.pow(3).mean(), x, create_graph=True)[0].norm(2, 1).mean()
    ),
}


class LargestPlain(TorchDispatchMode):
    """Counts the bytes of the largest plain tensor that operators make."""

    size, made_by = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(t, NodeTensor) for t in tensors_in(args, kwargs)):
            with self:
                return NodeTensor.__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if not isinstance(tensor, NodeTensor) and not tensor.is_meta:  # which takes no memory
                size = tensor.untyped_storage().nbytes()
                if size > self.size:
                    self.size, self.made_by = size, str(func)
        return out


def pass_of(loss, place):
    x = place(X).requires_grad_()
    y, mask = place(Y), place(MASK)
    with LargestPlain() as found:
        value = loss(x * 1, y, mask)
        value.backward()
    gradient = x.grad
    kind = type(gradient)
    gradient = gradient.full_tensor() if kind is NodeTensor else gradient
    return value.detach(), gradient, kind, found.size, found.made_by


def passes():
    comm = pyg_sar.comm.current()
    ids = torch.arange(comm.rank, N, comm.world_size)
    rows = node_rows(comm, ids, N)
    return [pass_of(loss, lambda t: NodeTensor(t[ids], rows, 0)) for loss in LOSSES.values()]


def test_no_worker_makes_all_rows():
    expected = [pass_of(loss, torch.clone) for loss in LOSSES.values()]
    for found in parts(passes, PARTS):
        for name, right, result in zip(LOSSES, expected, found, strict=True):
            value, gradient, kind, size, made_by = result
            assert error(value, right[0]) < 1e-10 and error(gradient, right[1]) < 1e-10, name
            assert kind is NodeTensor, name
            assert size <= 2 * X.nbytes // PARTS, (name, made_by)


def test_the_first_of_equal_rows_is_found():
    """As torch does where values are equal, or NaN; the last worker has no rows."""
    draw = torch.Generator().manual_seed(1)
    values = torch.randint(3, (12, 5), generator=draw).double()
    values[[4, 7], 1] = float("nan")
    values[:, 2] = -float("inf")

    def found(kinds):
        comm, got = pyg_sar.comm.current(), []
        ids = torch.arange(12).flip(0)[comm.rank :: comm.world_size - 1]
        rows = node_rows(comm, ids if comm.rank + 1 < comm.world_size else ids[:0], 12)
        for t in kinds:
            x = NodeTensor(t[rows.ids], rows, 0)
            assert torch.fft.rfft(x.double(), dim=1).shape == (12, 3)  # takes no batch of nothing
            got += [*x.max(0), *x.t().min(1, keepdim=True)]
            if t.dtype != torch.bool:
                got += [x.argmax(0), x.argmin(0, True)]
                continue
            for function in (x.argmax, x.softmax, x.log_softmax):  # torch has none of these
                with pytest.raises(RuntimeError):
                    function(0)
        return got

    kinds = [values, values.nan_to_num(neginf=-7).long(), values > 0]
    expected = []
    for x in kinds:
        expected += [*x.max(0), *x.t().min(1, keepdim=True)]
        expected += [] if x.dtype == torch.bool else [x.argmax(0), x.argmin(0, True)]
    for got in parts(found, 5, kinds):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def third_derivative(x):
    """Of what is nonlinear in a weight of each row, and in sums over rows."""
    weight = torch.diag(V).requires_grad_()
    rows = x * weight.sum()
    found = F.linear(x, weight).pow(4).mean() + rows.mean(0).pow(4).sum() + rows[5].pow(3).sum()
    found = found + rows.softmax(0).pow(2).sum() + rows.log_softmax(0).mean() + rows.flip(0)[9, 1]
    found = found + (rows.cumsum(0) / N).sin().mean() + rows.max(0)[0].pow(3).sum()
    found = found + (1 + rows / N).prod(0).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(found, weight, create_graph=True)
        found = gradient.pow(3).sum()
    return gradient.detach()


def test_third_derivatives():
    expected = third_derivative(X)

    def found():
        comm = pyg_sar.comm.current()
        ids = torch.arange(comm.rank, N, comm.world_size)
        return third_derivative(NodeTensor(X[ids], node_rows(comm, ids, N), 0))

    for gradient in parts(found, 3):
        assert error(gradient, expected) < 1e-10
