"""Small models that use edges by hand between two layers: see ``small_models``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_models import (
    CLASSES,
    DOUBLE,
    EDGES,
    FEATURES,
    HEADS,
    NODES,
    WIDTH,
    between,
    linear,
    linears,
    mlp,
    parameter,
)
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.utils import (
    add_self_loops,
    coalesce,
    degree,
    dropout_edge,
    dropout_node,
    get_laplacian,
    scatter,
    softmax,
    subgraph,
    to_dense_adj,
    to_undirected,
)


def adjacency(data, dtype=DOUBLE) -> Tensor:
    """Returns the row-normalised adjacency matrix, sparse."""
    row, col = data.edge_index
    value = 1 / degree(col, NODES, dtype=dtype).clamp(min=1)[col]
    return torch.sparse_coo_tensor(torch.stack([col, row]), value, (NODES, NODES))


# Degrees, edges dropped and made ##############################################


@between()
def degree_by_bincount(x, data):
    deg = torch.bincount(data.edge_index[0], minlength=x.size(0))
    return torch.cat([x[:, 1:], deg.to(x.dtype).log1p().unsqueeze(-1)], dim=1)


@between()
def degree_by_scatter_add(x, data):
    ones = torch.ones(data.edge_index.size(1), dtype=x.dtype)
    deg = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, data.edge_index[1], ones)
    return x / (1 + deg).unsqueeze(-1)


@between(lambda: nn.Embedding(40, WIDTH))
def embedding_of_degrees(x, data, embedding):
    return x + embedding(degree(data.edge_index[1], x.size(0)).long())


@between(lambda: gnn.GCNConv(WIDTH, WIDTH))
def drop_edge_of_pyg(x, data, conv):
    edge_index, _ = dropout_edge(data.edge_index, p=0.3)
    return conv(x, edge_index)


@between(lambda: gnn.SAGEConv(WIDTH, WIDTH))
def drop_edge_by_permutation(x, data, conv):
    keep = torch.randperm(data.edge_index.size(1))[: EDGES // 2]
    return conv(x, data.edge_index[:, keep])


@between(lambda: gnn.SAGEConv(WIDTH, WIDTH))
def drop_node_of_pyg(x, data, conv):
    edge_index, _, mask = dropout_node(data.edge_index, p=0.3, num_nodes=x.size(0))
    return conv(x * mask.view(-1, 1), edge_index)


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def labelled_subgraph(x, data, conv):
    edge_index, _ = subgraph(data.train_mask, data.edge_index)
    return conv(x, edge_index)


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def relabelled_subgraph(x, data, conv):
    edge_index, _ = subgraph(data.train_mask, data.edge_index, relabel_nodes=True)
    out = x.clone()
    out[data.train_mask] = conv(x[data.train_mask], edge_index)
    return out


@between(lambda: gnn.SAGEConv(WIDTH, WIDTH))
def undirected(x, data, conv):
    return conv(x, to_undirected(data.edge_index))


@between(lambda: gnn.SAGEConv(WIDTH, WIDTH))
def both_directions(x, data, conv):
    row, col = data.edge_index
    return conv(x, torch.cat([data.edge_index, torch.stack([col, row])], dim=1))


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def loops_added_by_hand(x, data, conv):
    loop = torch.arange(x.size(0)).repeat(2, 1)
    return conv(x, torch.cat([data.edge_index, loop], dim=1))


@between(lambda: nn.ModuleList(gnn.GraphConv(WIDTH, WIDTH) for _ in range(2)))
def edges_by_homophily(x, data, convs):
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    return convs[0](x, data.edge_index[:, same]) - convs[1](x, data.edge_index[:, ~same])


@between(lambda: nn.ModuleList(gnn.GraphConv(WIDTH, WIDTH) for _ in range(3)))
def relations_in_a_loop(x, data, convs):
    out = 0
    for k, conv in enumerate(convs):
        out = out + conv(x, data.edge_index[:, data.edge_type == k])
    return out


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def nearest_by_cosine(x, data, conv):
    z = F.normalize(x, dim=-1)
    similar = z @ z.t()
    similar.fill_diagonal_(-1.0)
    neighbours = similar.topk(3, dim=-1).indices
    target = torch.arange(x.size(0)).repeat_interleave(3)
    return conv(x, torch.stack([neighbours.reshape(-1), target]))


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def nearest_by_distance_with_weights(x, data, conv):
    distance = torch.cdist(data.pos, data.pos)
    value, index = (-distance).topk(4, dim=1)
    row = torch.arange(x.size(0)).view(-1, 1).expand(-1, 4)
    return conv(x, torch.stack([index.flatten(), row.flatten()]), value.exp().flatten())


@between(lambda: gnn.GCNConv(WIDTH, WIDTH))
def graph_of_a_learned_similarity(x, data, conv):
    similar = torch.sigmoid(x @ x.t())
    edge_index = (similar > similar.mean()).nonzero().t()
    return conv(x, edge_index, similar[edge_index[0], edge_index[1]])


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def weights_of_edges_by_similarity(x, data, conv):
    row, col = data.edge_index
    return conv(x, data.edge_index, F.cosine_similarity(x[row], x[col]).relu())


@between(lambda: nn.ModuleList([nn.Linear(2 * WIDTH, 1), gnn.GCNConv(WIDTH, WIDTH)]))
def learned_mask_of_edges(x, data, nets):
    row, col = data.edge_index
    logit = nets[0](torch.cat([x[row], x[col]], dim=-1)).view(-1)
    noise = torch.rand_like(logit).clamp(1e-6, 1 - 1e-6)
    gate = torch.sigmoid((logit + noise.log() - (1 - noise).log()) / 0.5)
    return nets[1](x, data.edge_index, gate)


@between(lambda: nn.ModuleList([nn.Linear(3, 1), gnn.GraphConv(WIDTH, WIDTH)]))
def strongest_edges(x, data, nets):
    score = nets[0](data.edge_attr).squeeze(-1)
    value, keep = score.topk(EDGES // 2)
    return nets[1](x, data.edge_index[:, keep], value.sigmoid())


@between(lambda: gnn.GraphConv(WIDTH, WIDTH))
def two_hops_by_a_sparse_product(x, data, conv):
    adj = torch.sparse_coo_tensor(data.edge_index, torch.ones(EDGES, dtype=x.dtype), (NODES, NODES))
    two = (adj @ adj).coalesce()
    return conv(x, two.indices(), two.values())


# Messages by hand #############################################################


@between()
def sums_by_index_add(x, data):
    row, col = data.edge_index
    return torch.zeros_like(x).index_add_(0, col, x[row])


@between()
def sums_by_scatter_add(x, data):
    row, col = data.edge_index
    out = torch.zeros(x.size(0), x.size(1), dtype=x.dtype)
    return out.scatter_add_(0, col.view(-1, 1).expand(-1, x.size(1)), x[row])


@between()
def maxima_by_scatter_reduce(x, data):
    row, col = data.edge_index
    index = col.view(-1, 1).expand(-1, x.size(1))
    return torch.zeros_like(x).scatter_reduce(0, index, x[row], "amax", include_self=False)


@between()
def sums_by_index_put(x, data):
    row, col = data.edge_index
    return torch.zeros_like(x).index_put((col,), x[row], accumulate=True)


@between(lambda: nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU()))
def equivariant_layer_by_hand(x, data, net):
    row, col = data.edge_index
    distance = (data.pos[row] - data.pos[col]).square().sum(-1, keepdim=True)
    message = net(torch.cat([x[row], x[col], distance], dim=-1))
    return x + scatter(message, col, dim=0, dim_size=x.size(0), reduce="sum")


@between(parameter(HEADS, WIDTH))
def attention_over_edges_by_hand(x, data, a):
    row, col = data.edge_index
    h = x.view(-1, HEADS, WIDTH // HEADS)
    score = (torch.cat([h[row], h[col]], dim=-1) * a).sum(-1)
    score = F.leaky_relu(score, 0.2).exp()
    total = torch.zeros(x.size(0), HEADS, dtype=x.dtype).index_add_(0, col, score)
    alpha = score / total[col]
    out = torch.zeros_like(h).index_add_(0, col, h[row] * alpha.unsqueeze(-1))
    return out.flatten(1)


@between(parameter(WIDTH))
def softmax_over_edges_of_pyg(x, data, a):
    row, col = data.edge_index
    alpha = softmax(((x[row] + x[col]).tanh() * a).sum(-1), col, num_nodes=x.size(0))
    return scatter(alpha.view(-1, 1) * x[row], col, 0, dim_size=x.size(0))


@between(lambda: nn.ModuleList([nn.Linear(3, WIDTH), mlp()]))
def edge_features_updated(x, data, nets):
    row, col = data.edge_index
    edge = nets[0](data.edge_attr)
    for _ in range(2):
        edge = edge + nets[1]((x[row] + x[col] + edge).relu())
        x = x + scatter(edge, col, 0, x.size(0), "mean")
    return x


@between(linear)
def laplacian_of_edges(x, data, net):
    row, col = data.edge_index
    gradient = net(x)[row] - net(x)[col]
    flow = gradient * torch.tanh(gradient.abs().mean(0))
    return x + x.new_zeros(x.shape).index_add_(0, col, flow).index_add_(0, row, -flow)


# Spectral filters, diffusion ##################################################


@between(linears(3))
def powers_of_a_sparse_matrix(x, data, nets):
    adj, out = adjacency(data), nets[0](x)
    for net in nets[1:]:
        x = torch.sparse.mm(adj, x)
        out = out + net(x)
    return out


@between(linears(3))
def chebyshev_by_hand(x, data, nets):
    edge_index, weight = get_laplacian(data.edge_index, normalization="sym", num_nodes=x.size(0))
    lap = torch.sparse_coo_tensor(edge_index, weight.to(x.dtype), (NODES, NODES))
    before, now = x, lap @ x - x
    out = nets[0](before) + nets[1](now)
    before, now = now, 2 * (lap @ now - now) - before
    return out + nets[2](now)


@between()
def hubs_and_authorities(x, data):
    row, col = data.edge_index
    hub = torch.ones(NODES, dtype=x.dtype)
    for _ in range(3):
        authority = scatter(hub[row], col, dim_size=NODES)
        authority = authority / authority.norm()
        hub = scatter(authority[col], row, dim_size=NODES)
        hub = hub / hub.norm()
    return torch.cat([x[:, 2:], hub.view(-1, 1), authority.view(-1, 1)], dim=1)


@between(parameter(1))
def diffusion_in_steps(x, data, rate):
    adj, start = adjacency(data), x
    for _ in range(4):
        k1 = adj @ x - x
        k2 = adj @ (x + 0.25 * k1) - (x + 0.25 * k1)
        x = x + 0.25 * torch.sigmoid(rate) * (k1 + k2) / 2 + 0.01 * start
    return x


@between()
def heat_kernel_of_a_dense_matrix(x, data):
    adj = to_dense_adj(data.edge_index, max_num_nodes=x.size(0))[0].to(x.dtype)
    lap = torch.diag(adj.sum(1)) - adj
    return torch.matrix_exp(-0.1 * lap) @ x


@between(lambda: nn.Linear(4, WIDTH))
def laplacian_encodings(x, data, net):
    adj = to_dense_adj(data.edge_index, max_num_nodes=x.size(0))[0].to(x.dtype)
    adj = ((adj + adj.t()) > 0).to(x.dtype)
    deg = adj.sum(1).rsqrt()
    lap = torch.eye(x.size(0), dtype=x.dtype) - deg.view(-1, 1) * adj * deg
    values, _ = torch.linalg.eigh(lap)
    return x * (1 + net(values[:4]))


@between(lambda: nn.Linear(3, WIDTH))
def random_walk_encodings(x, data, net):
    adj = to_dense_adj(data.edge_index, max_num_nodes=x.size(0))[0].to(x.dtype)
    walk = adj / adj.sum(dim=1, keepdim=True).clamp(min=1)
    power, found = walk, []
    for _ in range(3):
        power = power @ walk
        found.append(power.diagonal())
    return x + net(torch.stack(found, dim=-1))


@between(lambda: gnn.DenseGCNConv(WIDTH, WIDTH))
def dense_layer(x, data, conv):
    adj = to_dense_adj(data.edge_index, max_num_nodes=x.size(0))
    return conv(x.unsqueeze(0), adj.to(x.dtype)).squeeze(0)


@between(linear)
def dense_adjacency_by_hand(x, data, net):
    adj = torch.zeros(x.size(0), x.size(0), dtype=x.dtype)
    adj[data.edge_index[1], data.edge_index[0]] = 1.0
    adj = adj + torch.eye(x.size(0), dtype=x.dtype)
    deg = adj.sum(1).pow(-0.5)
    return deg.view(-1, 1) * adj * deg @ net(x)


@between()
def smoothing_by_conjugate_gradients(x, data):
    row, col = data.edge_index

    def system(v):
        flow = v[row] - v[col]
        out = torch.zeros_like(v).index_add_(0, row, flow).index_add_(0, col, -flow)
        return v + 0.1 * out

    out, left = torch.zeros_like(x), x
    step, size = left, (left * left).sum(0)
    for _ in range(3):
        product = system(step)
        alpha = size / (step * product).sum(0).clamp(min=1e-12)
        out, left = out + alpha * step, left - alpha * product
        size, before = (left * left).sum(0), size
        step = left + size / before.clamp(min=1e-12) * step
    return out


@between(linear)
def fixed_point(x, data, net):
    adj, z = adjacency(data), torch.zeros_like(x)
    for _ in range(20):
        new = torch.tanh(adj @ (0.5 * net(z)) + x)
        done = (new - z).abs().max() < 1e-2
        z = new
        if done:
            break
    return z


@between()
def solved_in_closed_form(x, data):
    adj = to_dense_adj(data.edge_index, max_num_nodes=x.size(0))[0].to(x.dtype)
    adj = adj / adj.sum(1, keepdim=True).clamp(min=1)
    return 0.2 * torch.linalg.solve(torch.eye(x.size(0), dtype=x.dtype) - 0.8 * adj, x)


# Matrices of features #########################################################


@between()
def principal_components(x, data):
    centred = x - x.mean(0)
    _, _, v = torch.linalg.svd(centred + 0.1 * data.x @ torch.ones(FEATURES, WIDTH, dtype=x.dtype))
    return centred @ v[:4].t().abs() @ v[:4].abs()


@between()
def whitening_by_cholesky(x, data):
    cov = torch.cov(x.t()) + 0.1 * torch.eye(WIDTH, dtype=x.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(cov), x.t(), upper=False).t()


@between()
def orthogonal_columns(x, data):
    noise = torch.randn(x.shape, dtype=x.dtype)
    q, r = torch.linalg.qr(x + 0.1 * noise)
    return q * r.diagonal().sign()


@between()
def ridge_regression(x, data):
    target = F.one_hot(data.y, CLASSES).to(x.dtype)
    seen = x[data.train_mask]
    gram = seen.t() @ seen + torch.eye(WIDTH, dtype=x.dtype)
    weight = torch.linalg.solve(gram, seen.t() @ target[data.train_mask])
    return torch.cat([x[:, CLASSES:], x @ weight], dim=-1)


@between()
def low_rank_by_svd(x, data):
    u, s, v = torch.pca_lowrank(data.x, q=3, niter=1)
    return x + (u * s).abs() @ v.abs().t() @ torch.ones(FEATURES, WIDTH, dtype=x.dtype)


@between()
def gaussian_kernel(x, data):
    kernel = torch.exp(-torch.cdist(x, x).square() / 2)
    return kernel / kernel.sum(dim=1, keepdim=True) @ x


# Blocks of layers #############################################################


@between(lambda: nn.ModuleList([gnn.GCNConv(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)]))
def gated_recurrent_cell_over_steps(x, data, nets):
    h = x
    for _ in range(3):
        h = nets[1](nets[0](h, data.edge_index), h)
    return h


@between(
    lambda: nn.ModuleList(
        [
            *(gnn.SAGEConv(WIDTH, WIDTH) for _ in range(2)),
            nn.LSTM(WIDTH, 6, bidirectional=True, batch_first=True),
            nn.Linear(12, 1),
        ]
    )
)
def jumping_knowledge_by_an_lstm(x, data, nets):
    hidden = [x]
    for conv in nets[:2]:
        hidden.append(conv(hidden[-1], data.edge_index).relu())
    stacked = torch.stack(hidden, dim=1)
    alpha = nets[3](nets[2](stacked)[0]).squeeze(-1).softmax(dim=-1)
    return (stacked * alpha.unsqueeze(-1)).sum(dim=1)


@between(lambda: nn.ModuleList([nn.Linear(WIDTH, 3), *(mlp() for _ in range(3))]))
def mixture_of_experts_by_argmax(x, data, nets):
    weight, expert = nets[0](x).softmax(-1).max(dim=-1)
    out = torch.zeros_like(x)
    for k in range(3):
        mine = expert == k
        out[mine] = nets[k + 1](x[mine])
    return out * weight.unsqueeze(-1)


@between(
    lambda: nn.ModuleList([nn.Linear(WIDTH, 3), *(gnn.GCNConv(WIDTH, WIDTH) for _ in range(3))])
)
def mixture_of_layers(x, data, nets):
    gate = nets[0](x).softmax(-1)
    outs = torch.stack([conv(x, data.edge_index) for conv in nets[1:]], dim=1)
    return torch.einsum("nk,nkd->nd", gate, outs)


@between(lambda: nn.Linear(WIDTH, 3))
def gumbel_softmax_router(x, data, net):
    choice = F.gumbel_softmax(net(x), tau=0.5, hard=True)
    return x * (choice @ torch.tensor([[0.5], [1.0], [2.0]], dtype=x.dtype))


@between()
def quantised_straight_through(x, data):
    scale = x.abs().max() / 7
    rounded = (x / scale).round().clamp(-8, 7) * scale
    return x + (rounded - x).detach()


@between(parameter(6, WIDTH))
def vector_quantised(x, data, book):
    code = torch.cdist(x, book).argmin(-1)
    return x + (book[code] - x).detach() + 0.1 * book[code]


@between(lambda: nn.utils.parametrizations.weight_norm(gnn.Linear(WIDTH, WIDTH)))
def weight_normalisation(x, data, net):
    return net(x)


@between(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
def spectral_normalisation(x, data, net):
    return net(x)


@between(lambda: nn.ModuleDict({kind: gnn.SAGEConv(WIDTH, WIDTH) for kind in ("cites", "cited")}))
def dictionary_of_edges(x, data, convs):
    edges = {"cites": data.edge_index, "cited": data.edge_index.flip(0)}
    found = {kind: conv(x, edges[kind]) for kind, conv in convs.items()}
    return torch.stack(list(found.values())).mean(dim=0)


@between(
    lambda: gnn.Sequential(
        "x, edge_index", [(gnn.GCNConv(WIDTH, WIDTH), "x, edge_index -> x"), nn.ELU()]
    )
)
def sequential_of_pyg(x, data, net):
    return net(x, data.edge_index)


@between(linear)
def loops_and_coalesced(x, data, net):
    edge_index = coalesce(add_self_loops(data.edge_index, num_nodes=x.size(0))[0])
    row, col = edge_index
    weight = degree(row, x.size(0), dtype=x.dtype).rsqrt()
    return scatter((weight[row] * weight[col]).view(-1, 1) * net(x)[row], col, 0, x.size(0))
