"""Small models with rarer functions of PyTorch and PyG: see ``small_models``."""

from __future__ import annotations

import copy
import io

import numpy as np
import torch
import torch.nn.functional as F
from small_models import (
    CLASSES,
    DOUBLE,
    EDGES,
    NODES,
    WIDTH,
    between,
    mlp,
    model,
    parameter,
    steps,
)
from small_trainings import Encoder, classified, loss_of
from torch import nn
from torch.nn.utils import prune
from torch_geometric import nn as gnn
from torch_geometric import transforms as T
from torch_geometric.data import Data
from torch_geometric.utils import (
    add_random_edge,
    homophily,
    is_undirected,
    k_hop_subgraph,
    mask_feature,
    remove_self_loops,
    scatter,
    shuffle_node,
    spmm,
    to_dense_batch,
    to_networkx,
    to_scipy_sparse_matrix,
    to_torch_coo_tensor,
    unbatch,
)

# Written in place #############################################################


@between()
def runs_of_rows_written_beside_ids(x, data):
    x = x.clone()
    mask = torch.arange(WIDTH) % 3 == 1
    x[3:19:2, mask] += 1.0
    x[2, [0, 5]] = x[7, [1, 3]]
    x[-1, mask] = x[:, 0].sum()
    pairs = (x.unsqueeze(-1) * x.unsqueeze(1)).clone()
    square = mask.sum()
    pairs[5, :square, mask] = x[:square, :square].tanh()  # As many rows as columns.
    pairs[4:7, [0, 1], [2, 3]] = x[7:10, :2]
    turned = pairs.permute(1, 0, 2).contiguous()
    turned[[0, 2], 3] = turned[[1, 4], -2]
    return turned.sum(0) + pairs.mean(1)


@between(parameter(NODES, WIDTH))
def filled_in_a_loop(x, data, weight):
    out = torch.zeros_like(x)
    for i in range(0, NODES, 8):
        out[i] = x[i] * weight[i]
    return out + x


@between()
def operators_in_place(x, data):
    x = x.clone()
    x += 1
    x *= x.mean()
    x.clamp_(min=-2).sub_(x.mean(0))
    x.masked_fill_(data.train_mask.view(-1, 1), 0.5)
    return x.add_(torch.ones(WIDTH, dtype=x.dtype), alpha=2)


@between()
def allocated_and_filled(x, data):
    out = x.new_empty(x.size(0), 2 * WIDTH)
    out[:, :WIDTH] = x
    out[:, WIDTH:] = x.flip(-1)
    return out[:, ::2]


@between()
def torch_out_arguments(x, data):
    out = torch.empty_like(x)
    torch.mul(x.detach(), 2, out=out)
    return x + out


@between()
def index_fill_and_copy(x, data):
    ids = torch.tensor([3, 5, 7])
    return x.index_fill(0, ids, 0.0).index_copy(0, ids + 1, x[:3]).index_add(0, ids, x[5:8])


@between()
def masked_scatter_and_select(x, data):
    mask = data.train_mask.view(-1, 1).expand_as(x)
    chosen = torch.masked_select(x, mask)
    return torch.zeros_like(x).masked_scatter(mask, chosen * 2)


# Shapes #######################################################################


@between(parameter(WIDTH, NODES))
def transposed_parameter_dropped(x, data, weight):
    return F.dropout(weight.t() + x, 0.3)


@between()
def dropped_across(x, data):
    return F.dropout(x.t(), 0.3).t() + 0.1 * torch.randn_like(x.t()).t()


@between(lambda: nn.Sequential(nn.Linear(NODES, 16), nn.GELU(), nn.Linear(16, NODES)))
def mlp_mixer(x, data, net):
    return x + net(x.permute(1, 0)).permute(1, 0)


@between()
def pairs_of_nodes(x, data):
    pairs = torch.cat(
        [x.unsqueeze(1).expand(-1, NODES, -1), x.unsqueeze(0).expand(NODES, -1, -1)], -1
    )
    return x + pairs.tanh().mean(1)[:, WIDTH:]


@between()
def outer_products(x, data):
    return x + torch.einsum("ni,nj->nij", x, x).flatten(1)[:, :: WIDTH + 1]


@between()
def two_nodes_at_a_time(x, data):
    return (x.view(NODES // 2, 2, WIDTH).mean(1, keepdim=True) + x.view(-1, 2, WIDTH)).view(
        -1, WIDTH
    )


@between()
def rows_of_a_table_of_neighbors(x, data):
    table = torch.arange(3 * NODES).mul(7).remainder(NODES).view(NODES, 3)
    found = F.relu(x[table.view(-1)].view(NODES, 3, WIDTH), inplace=True)
    pairs = torch.cat([x, x.sin()]).view(2, NODES, WIDTH)
    return found.max(1).values + pairs[1]


@between()
def groups_written_through_a_view(x, data):
    x = x.clone()
    groups = x.view(NODES // 4, 4, WIDTH)
    groups[:, 0] = 0.5
    groups.mul_(2)
    groups[3].zero_()
    return x


@between()
def split_by_sizes(x, data):
    parts = torch.split(x, [10, 20, NODES - 30])
    return torch.cat([p - p.mean(0) for p in parts])


@between()
def unfolded(x, data):
    return x + F.pad(x, (0, 0, 1, 1)).unfold(0, 3, 1).mean(-1)


@between()
def tiled_and_folded(x, data):
    return x.repeat(2, 1)[NODES // 2 : NODES // 2 + NODES] + x.repeat_interleave(2, dim=0)[::2]


@between()
def stacked_rows(x, data):
    few = torch.stack([x[i] for i in (4, 2, 9)])
    return x + few.mean(0)


@between()
def dense_batches(x, data):
    batch = (torch.arange(NODES) >= 20).long()
    dense, mask = to_dense_batch(x, batch)
    return x + (dense.sum(1) / mask.sum(1, keepdim=True))[batch]


@between()
def unbatched(x, data):
    parts = unbatch(x, (torch.arange(NODES) >= 20).long())
    return torch.cat([p - p.mean(0) for p in parts])


# Numbers that are drawn #######################################################


@between(lambda: nn.ModuleList([nn.Dropout1d(0.3), nn.AlphaDropout(0.2)]))
def other_dropouts(x, data, nets):
    return nets[0](nets[1](x).unsqueeze(-1)).squeeze(-1)


@between(lambda: nn.RReLU())
def random_slopes(x, data, net):
    return net(x - x.mean(0))


@between()
def masks_drawn_in_other_ways(x, data):
    a = torch.empty(NODES, 1).bernoulli_(0.8)
    b = torch.rand_like(x) < 0.9
    c = torch.randint(0, 2, (NODES, 1))
    d = x.new_empty(NODES, 1).uniform_(0.5, 1.0)
    return x * a * b * c * d


@between()
def with_a_generator(x, data):
    g = torch.Generator().manual_seed(1)
    return x + 0.1 * torch.randn(x.shape, generator=g, dtype=x.dtype)


@between()
def drawn_by_numpy(x, data):
    ids = np.random.RandomState(0).choice(NODES, 10, replace=False)
    return x.index_add(0, torch.from_numpy(ids), x[ids])


@between()
def drawn_by_weights(x, data):
    weight = torch.bincount(data.edge_index[1], minlength=NODES).to(x.dtype)
    ids = torch.multinomial(weight, 10)
    return x + x[ids].mean(0)


@between()
def normal_of_means(x, data):
    return torch.normal(x, 0.1 + x.abs()) * 0.5 + x


@between(lambda: nn.Linear(WIDTH, 3))
def categorical_actions(x, data, net):
    action = torch.distributions.Categorical(logits=net(x)).sample()
    return x * (1 + action.view(-1, 1))


@between(lambda: nn.Linear(WIDTH, 1))
def relaxed_bernoulli(x, data, net):
    gate = torch.distributions.RelaxedBernoulli(torch.tensor(0.5).to(x.dtype), logits=net(x))
    return x * gate.rsample()


@between()
def dirichlet_mixture(x, data):
    w = torch.distributions.Dirichlet(torch.ones(3, dtype=x.dtype)).sample()
    return w[0] * x + w[1] * x.tanh() + w[2] * x.mean(0)


@between()
def gammas_and_betas(x, data):
    shape = x.exp() + 0.1
    beta = torch.distributions.Beta(shape, shape.mean(0)).rsample()
    return torch.distributions.Gamma(shape, 1.0).rsample() + beta


@between(lambda: gnn.SAGEConv(WIDTH, WIDTH))
def edges_added_at_random(x, data, conv):
    edge_index, _ = add_random_edge(data.edge_index, p=0.2, num_nodes=NODES)
    return conv(x, edge_index)


@between()
def features_masked_of_pyg(x, data):
    return mask_feature(x, 0.3)[0] + mask_feature(x, 0.3, mode="all")[0]


@between()
def nodes_shuffled_of_pyg(x, data):
    return x + shuffle_node(x)[0]


# Modules of torch #############################################################


@between(lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH))
def bilinear(x, data, net):
    return net(x, x.roll(1, dims=-1))


@between(lambda: nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)]))
def cells(x, data, nets):
    h, c = torch.zeros_like(x), x.new_zeros(NODES, WIDTH)
    for _ in range(2):
        h, c = nets[0](x, (h, c))
    return nets[1](x, h) + c


@between(
    lambda: nn.ModuleList(
        [
            nn.PReLU(WIDTH),
            nn.GroupNorm(2, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Softplus(),
            nn.RMSNorm(WIDTH),
        ]
    )
)
def norms_of_rows(x, data, nets):
    for net in nets:
        x = net(x)
    return x


@between(lambda: nn.ModuleList([nn.InstanceNorm1d(WIDTH, affine=True), nn.LocalResponseNorm(2)]))
def norms_over_nodes_as_a_sequence(x, data, nets):
    return nets[1](nets[0](x.t().unsqueeze(0))).squeeze(0).t()


@between(lambda: nn.EmbeddingBag(10, WIDTH, mode="mean"))
def bags_of_words(x, data, bag):
    words = (data.x[:, :4].abs() * 3).long().clamp(max=9)
    return x + bag(words)


@between()
def adaptive_pooling(x, data):
    few = F.adaptive_avg_pool1d(x.t().unsqueeze(0), 4).squeeze(0).t()
    return x + F.interpolate(few.t().unsqueeze(0), NODES).squeeze(0).t()


@between(lambda: nn.Conv2d(1, 2, 3, padding=1))
def convolution_of_a_picture(x, data, conv):
    return x + conv(x.view(1, 1, NODES, WIDTH)).mean(1).view(NODES, WIDTH)


@between(lambda: nn.Conv1d(1, 2, 3, padding=1))
def convolution_of_each_row(x, data, conv):
    return x + conv(x.unsqueeze(1)).mean(1)


@between(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))
def orthogonal_weights(x, data, net):
    return net(x)


@between(lambda: gnn.GCNConv(WIDTH, WIDTH))
def layer_of_a_computed_weight(x, data, conv):
    if not prune.is_pruned(conv):
        prune.l1_unstructured(conv.lin, "weight", amount=0.3)
    return conv(x, data.edge_index)


class Complexity(nn.Module):
    """Weights of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        z = torch.polar(x.abs(), self.phase * x)
        return (z * z.mean(0).conj()).real


@between(Complexity)
def complex_numbers(x, data, net):
    return net(x)


@between(parameter(NODES // 2 + 1, WIDTH))
def filter_of_frequencies(x, data, weight):
    return torch.fft.irfft(torch.fft.rfft(x, dim=0) * weight, n=NODES, dim=0)


@between()
def frequencies_of_features(x, data):
    return torch.fft.fft(x, dim=-1).abs()


@between(lambda: nn.ParameterList([torch.randn(WIDTH)]))
def complex_parameter(x, data, weights):
    z = torch.complex(x, x.flip(-1)) * torch.complex(weights[0], weights[0].exp())
    return z.real + z.imag * z.abs().mean(0)


@between(mlp)
def mapped_over_rows(x, data, net):
    x = torch.vmap(lambda row: row * net(row).softmax(-1))(x)
    return x.unsqueeze_(1).mul_(2).squeeze_(1)


class Pairs(gnn.MessagePassing):
    """A message of two tensors, aggregated to two by a function that asks for the edges."""

    def forward(self, x, edge_index):
        total, largest = self.propagate(edge_index, x=x)
        return total + largest - largest.mean(0)

    def message(self, x_i, x_j):
        return x_j, x_i * x_j

    def aggregate(self, inputs, index, edge_index, dim_size):
        total = scatter(inputs[0], index, 0, dim_size, "sum") / dim_size
        return total, scatter(inputs[1], edge_index[0], 0, dim_size, "max")


@between(Pairs)
def layer_of_pairs(x, data, layer):
    return layer(x, data.edge_index)


class Messages(gnn.MessagePassing):
    """A layer of one's own, with a degree and a norm by hand."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.bincount(col, minlength=x.size(0)).clamp(min=1).to(x.dtype)
        norm = deg[row].rsqrt() * deg[col].rsqrt()
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_i, x_j, norm):
        return norm.view(-1, 1) * self.lin(torch.cat([x_i, x_j - x_i], -1))


@between(Messages)
def layer_of_ones_own(x, data, net):
    return net(x, data.edge_index)


class Global(gnn.MessagePassing):
    """A layer of one's own that subtracts a mean over all nodes."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        x = x - x.mean(0)
        return self.propagate(edge_index, x=x) + x.max(0).values


@between(Global)
def layer_with_a_mean_over_all_nodes(x, data, net):
    return net(x, data.edge_index)


# Graphs by PyG and others #####################################################


@between(lambda: gnn.GCNConv(WIDTH, WIDTH))
def transformed_within_the_model(x, data, conv):
    data = T.Compose([T.ToUndirected(), T.AddSelfLoops()])(
        Data(x=x, edge_index=data.edge_index, num_nodes=NODES)
    )
    return conv(data.x, data.edge_index)


@between(lambda: nn.Linear(4, WIDTH))
def random_walk_transform(x, data, net):
    made = T.AddRandomWalkPE(4, attr_name="pe")(Data(edge_index=data.edge_index, num_nodes=NODES))
    return x + net(made.pe.to(x.dtype))


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def neighbourhood_of_a_node(x, data, conv):
    nodes, edge_index, mapping, _ = k_hop_subgraph(
        [3, 8], 1, data.edge_index, relabel_nodes=True, num_nodes=NODES
    )
    out = x.clone()
    out[nodes] = conv(x[nodes], edge_index)
    return out + out[nodes][mapping].mean(0)


@between()
def matrix_of_scipy(x, data):
    adj = to_scipy_sparse_matrix(data.edge_index, num_nodes=NODES).tocsr()
    deg = torch.from_numpy(np.asarray(adj.sum(1)).flatten()).to(x.dtype)
    return x / deg.clamp(min=1).view(-1, 1)


@between()
def centrality_of_networkx(x, data):
    import networkx

    graph = to_networkx(Data(edge_index=data.edge_index, num_nodes=NODES))
    rank = networkx.pagerank(graph)
    return x * torch.tensor([[rank[i]] for i in range(NODES)], dtype=x.dtype) * NODES


@between()
def sparse_functions_of_pyg(x, data):
    adj = to_torch_coo_tensor(data.edge_index, data.edge_weight, (NODES, NODES))
    return spmm(adj.t().coalesce().to_sparse_csr(), x, reduce="mean") + x


@between()
def asked_of_the_graph(x, data):
    if is_undirected(data.edge_index):
        return x
    ratio = homophily(data.edge_index, data.y, method="edge")
    edge_index, _ = remove_self_loops(data.edge_index)
    return x * ratio + edge_index.size(1) / EDGES


@between()
def ids_by_numpy(x, data):
    ids = np.where(data.train_mask.numpy())[0]
    np.random.RandomState(1).shuffle(ids)
    return x + x[torch.as_tensor(ids[:7])].mean(0)


@between()
def dictionary_of_python(x, data):
    groups = {}
    for node, label in enumerate(data.y.tolist()):
        groups.setdefault(label, []).append(node)
    return x + torch.stack([x[groups[k]].mean(0) for k in sorted(groups)])[data.y]


@between()
def sets_of_ids(x, data):
    ids = torch.nonzero(data.train_mask).view(-1)
    ids = ids[torch.randperm(ids.numel())][:9]
    known = torch.isin(torch.arange(NODES), ids)
    return torch.where(known.unsqueeze(1), x * 2, x)


@between()
def unique_rows(x, data):
    code = (x.detach() * 2).round().long()
    _, inverse, count = code.unique(dim=0, return_inverse=True, return_counts=True)
    return x * count[inverse].view(-1, 1)


@between()
def binned(x, data):
    edges = torch.linspace(-1, 1, 5, dtype=x.dtype)
    index = torch.bucketize(x.detach().contiguous(), edges)
    count = torch.histc(x.detach(), bins=6, min=-2, max=2)
    return x * (1 + index) + count.max() / NODES


@between()
def searched(x, data):
    value = data.x[:, 0].sort().values
    return x + torch.searchsorted(value, x[:, 0].contiguous()).view(-1, 1) / NODES


@between()
def third_smallest(x, data):
    return x - x.kthvalue(3, dim=0).values - x.mode(dim=0).values + x.cummax(dim=0).values * 0.1


# Losses and trainings #########################################################


@loss_of()
def derivatives_by_a_function(z, data):
    f = lambda w: (z.detach() @ w).tanh().sum()  # noqa: E731
    gradient = torch.func.grad(f)(torch.ones(WIDTH, dtype=z.dtype))
    return (z @ gradient).mean()


@loss_of(out=3)
def policy_gradient(out, data):
    policy = torch.distributions.Categorical(logits=out)
    action = policy.sample()
    reward = (action == data.y).to(out.dtype)
    return (
        -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.1 * policy.entropy().mean()
    )


@loss_of()
def sinkhorn_transport(z, data):
    kernel = torch.exp(-torch.cdist(z, z.roll(1, 0)))
    u = v = torch.ones(NODES, dtype=z.dtype)
    for _ in range(5):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.t() @ u)
    plan = u.view(-1, 1) * kernel * v
    return -(plan * kernel.log()).sum() / NODES


@loss_of()
def pairwise_distances(z, data):
    return F.pdist(z).square().mean() + F.pairwise_distance(z, z.mean(0)).mean()


@loss_of()
def log_determinant(z, data):
    cov = z.t() @ z / NODES + torch.eye(WIDTH, dtype=z.dtype)
    return -torch.logdet(cov) + torch.linalg.matrix_norm(z, "nuc") / NODES


@loss_of()
def functions_of_losses(z, data):
    a, b = z[: NODES // 2], z[NODES // 2 :]
    target = torch.ones(NODES // 2, dtype=z.dtype)
    return (
        F.cosine_embedding_loss(a, b, target)
        + F.margin_ranking_loss(a[:, 0], b[:, 0], target)
        + F.triplet_margin_loss(a, b, b.flip(0))
        + F.huber_loss(a, b)
        + F.gaussian_nll_loss(a, b, b.square() + 0.1)
        + F.poisson_nll_loss(a, b.abs())
        + F.hinge_embedding_loss(a, target.view(-1, 1).expand_as(a))
        + F.multilabel_soft_margin_loss(a, (b > 0).to(a.dtype))
    )


@model
def batches_of_node_ids(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ids = data.train_mask.nonzero().view(-1)
    loader = torch.utils.data.DataLoader(ids.tolist(), batch_size=10, shuffle=True)
    found = []
    for batch in loader:
        optimizer.zero_grad()
        out = net(data.x, data.edge_index)[batch]
        loss = F.cross_entropy(out, data.y[batch])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *net.state_dict().values()]


@model
def saved_and_loaded(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    found = steps(net, data, lambda: classified(net, data))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "out": net(data.x, data.edge_index).detach()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    again = ready(Encoder(CLASSES).to(DOUBLE))
    again.load_state_dict(kept["net"])
    return [*found, kept["out"], again(data.x, data.edge_index)]


@model
def copied_models_vote(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    nets = [net, copy.deepcopy(net)]
    found = [v for one in nets for v in steps(one, data, lambda one=one: classified(one, data))]
    votes = torch.stack([one(data.x, data.edge_index).argmax(-1) for one in nets])
    return [*found, votes.mode(0).values, votes.float().mean()]


@model
def data_copied_and_changed(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    data = copy.copy(data)
    data.x = (data.x - data.x.mean(0)) / data.x.std(0)
    data = data.clone().to("cpu")
    data.val_mask = ~data.train_mask
    data.train_id = torch.arange(NODES)[data.train_mask]
    found = steps(net, data, lambda: classified(net, data))
    return [*found, data.val_mask, data.train_id]


@model
def split_by_hand(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    train = torch.zeros(NODES, dtype=torch.bool)
    for c in range(CLASSES):
        ids = (data.y == c).nonzero(as_tuple=False).view(-1)
        train[ids[torch.randperm(ids.size(0))[:5]]] = True

    def loss():
        out = net(data.x, data.edge_index)
        return F.cross_entropy(out[train], data.y[train])

    return [*steps(net, data, loss), train]


@model
def split_of_edges(data, ready):
    net = ready(Encoder().to(DOUBLE))
    perm = torch.randperm(EDGES)
    seen, held = data.edge_index[:, perm[:120]], data.edge_index[:, perm[120:]]

    def loss():
        z = net(data.x, seen)
        return F.softplus(-(z[held[0]] * z[held[1]]).sum(-1)).mean()

    return steps(net, data, loss)


@model
def jacobian_of_a_node(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    x = data.x.clone().requires_grad_()
    out = net(x, data.edge_index)
    found = []
    for c in range(CLASSES):
        found += torch.autograd.grad(out[7, c], x, retain_graph=True)
    return [torch.stack([g.abs().sum() for g in found]), found[0][7], found[1].norm(dim=1)]


@model
def numbers_for_a_report(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    with torch.no_grad():
        out = net(data.x, data.edge_index)
    best = sorted(range(NODES), key=lambda i: -out[:, 0].tolist()[i])[:5]
    text = f"{out.mean():.6f} {out[3, 1].item():.6f} {float(out.max()):.6f}"
    table = [
        f"{a}:{b}" for a, b in zip(data.y[:4].tolist(), out.argmax(1)[:4].tolist(), strict=True)
    ]
    return [*best, out.detach().cpu().numpy().sum(), len(out), out.shape[0]] + [
        torch.tensor([ord(c) for c in part]) for part in [text, *table]
    ]


@model
def jacobians_by_functions(data, ready):
    net = ready(Encoder(1).to(DOUBLE))
    f = lambda x: net(x, data.edge_index).mean(0)  # noqa: E731
    return [torch.autograd.functional.jacobian(f, data.x)]


@model
def hidden_states_of_time(data, ready):
    net = ready(Encoder().to(DOUBLE))
    cell = nn.GRUCell(WIDTH, WIDTH).to(DOUBLE)
    optimizer = torch.optim.SGD([*net.parameters(), *cell.parameters()], 0.1)
    h = torch.zeros(NODES, WIDTH, dtype=DOUBLE)
    found = []
    for _ in range(3):
        h = cell(net(data.x, data.edge_index), h.detach())
        loss = (h - data.x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, h, *cell.state_dict().values()]


@model
def weights_of_recurrent_layers(data, ready):
    net = Encoder(CLASSES)
    net.gru = nn.GRUCell(WIDTH, WIDTH)
    net.start = nn.Parameter(torch.randn(WIDTH, WIDTH))
    net = ready(net.to(DOUBLE))

    def loss():
        weight, total = net.start, 0.0
        for _ in range(2):
            weight = net.gru(weight, weight)
            h = gnn.SimpleConv(aggr="mean")(data.x[:, :1], data.edge_index) * weight.sum()
            total = total + h.square().mean()
        return total + classified(net, data)

    return steps(net, data, loss)


@model
def double_precision_later(data, ready):
    net = ready(Encoder(CLASSES))
    net = net.double()
    return steps(net, data, lambda: classified(net, data))


@model
def parameters_added_later(data, ready):
    net = ready(Encoder(WIDTH).to(DOUBLE))
    net.head = nn.Linear(WIDTH, CLASSES).to(DOUBLE)
    return steps(net, data, lambda: F.cross_entropy(net.head(net(data.x, data.edge_index)), data.y))


@model
def gradients_by_hand(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    found = []
    for _ in range(2):
        gradients = torch.autograd.grad(classified(net, data), list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p -= 0.1 * g
                p.data.clamp_(-1, 1)
        found += gradients
    return [*found, *net.state_dict().values()]


@model
def zeros_for_what_no_loss_reaches(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    x, pos = data.x.clone().requires_grad_(), data.pos.clone().requires_grad_()
    wanted = [x, pos, nn.Parameter(torch.ones(2, dtype=DOUBLE)), *net.parameters()]
    loss = net(x, data.edge_index).square().mean()
    found = torch.autograd.grad(loss, wanted, create_graph=True, materialize_grads=True)
    sum(g.square().sum() for g in found).backward()
    only = torch.autograd.grad(outputs=pos.sum(), inputs=x, materialize_grads=True)
    return [*found, *only, x.grad, *[p.grad for p in net.parameters()]]


@model
def gradients_of_two_tasks(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    out = net(data.x, data.edge_index)
    tasks = [F.cross_entropy(out, data.y), F.mse_loss(out, data.pos)]
    rows = []
    for task in tasks:
        net.zero_grad()
        task.backward(retain_graph=True)
        rows.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    a, b = rows
    return [a - min(a @ b, torch.tensor(0.0).to(a.dtype)) / b.square().sum() * b]


@model
def lookahead_of_weights(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    slow = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    found = steps(net, data, lambda: classified(net, data))
    slow = slow + 0.5 * (nn.utils.parameters_to_vector(net.parameters()).detach() - slow)
    nn.utils.vector_to_parameters(slow, net.parameters())
    return [*found, *steps(net, data, lambda: classified(net, data))]


class Memory(Encoder):
    """A bank of features of all nodes, and a queue of others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))


@model
def queue_of_negatives(data, ready):
    net = ready(Memory().to(DOUBLE))

    def loss():
        z = F.normalize(net(data.x, data.edge_index), dim=1)
        picked = z[torch.randperm(NODES)[:4]]
        logits = torch.cat(
            [(picked * picked.detach()).sum(1, keepdim=True), picked @ net.queue.clone().t()], 1
        )
        place = int(net.place)
        net.queue[place : place + 4] = picked.detach()
        net.place[0] = (place + 4) % 16
        return F.cross_entropy(logits / 0.2, torch.zeros(4, dtype=torch.long))

    return steps(net, data, loss)
