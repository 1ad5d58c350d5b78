"""Small models whose loss or training is their own: see ``small_models``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from small_models import CLASSES, DOUBLE, EDGES, FEATURES, NODES, WIDTH, Ready, mlp, model, steps
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import negative_sampling, structured_negative_sampling


class Encoder(nn.Module):
    """Two layers."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = gnn.GCNConv(FEATURES, WIDTH), gnn.SAGEConv(WIDTH, out)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.second(self.first(x, edge_index, weight).relu(), edge_index)


def loss_of(out: int = WIDTH, extra: Any = lambda: None) -> Any:
    """Registers a loss of what two layers give."""

    def register(function: Any) -> Any:
        def run(data: Data, ready: Ready) -> list[Any]:
            net = Encoder(out)
            net.extra = extra()
            net = ready(net.to(DOUBLE))
            rest = [] if net.extra is None else [net.extra]
            return steps(net, data, lambda: function(net(data.x, data.edge_index), data, *rest))

        run.__name__ = function.__name__
        model(run)
        return function

    return register


def classified(net: nn.Module, data: Data) -> Tensor:
    out = net(data.x, data.edge_index)
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


# Contrastive losses ###########################################################


@loss_of()
def contrast_of_all_pairs(z, data):
    one, other = F.normalize(z), F.normalize(z + 0.1 * torch.randn_like(z))
    return F.cross_entropy(one @ other.t() / 0.5, torch.arange(z.size(0)))


@loss_of()
def contrast_within_a_view(z, data):
    z = F.normalize(z, dim=-1)
    other = F.normalize(F.dropout(z, 0.3), dim=-1)
    between, within = torch.exp(z @ other.T / 0.4), torch.exp(z @ z.T / 0.4)
    positive = between.diag()
    return -torch.log(positive / (within.sum(1) + between.sum(1) - within.diag())).mean()


@model
def deep_graph_infomax(data, ready):
    net = Encoder()
    net.bilinear = nn.Parameter(torch.randn(WIDTH, WIDTH))
    net = ready(net.to(DOUBLE))

    def loss():
        positive = net(data.x, data.edge_index)
        negative = net(data.x[torch.randperm(data.x.size(0))], data.edge_index)
        summary = net.bilinear @ torch.sigmoid(positive.mean(dim=0))
        real, fake = torch.sigmoid(positive @ summary), torch.sigmoid(negative @ summary)
        return -torch.log(real + 1e-9).mean() - torch.log(1 - fake + 1e-9).mean()

    return steps(net, data, loss)


@model
def bootstrapped_with_a_moving_average(data, ready):
    net = Encoder()
    net.predictor = mlp()
    net = ready(net.to(DOUBLE))
    target = copy.deepcopy(net)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        x = F.dropout(data.x, 0.2)
        prediction = net.predictor(net(x, data.edge_index))
        with torch.no_grad():
            goal = target(data.x, data.edge_index)
        loss = 2 - 2 * F.cosine_similarity(prediction, goal.detach(), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(target.parameters(), net.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        found.append(loss.item())
    return [*found, *net.state_dict().values(), *target.state_dict().values()]


@loss_of()
def barlow_twins(z, data):
    other = z + 0.1 * torch.randn_like(z)
    z, other = (z - z.mean(0)) / z.std(0), (other - other.mean(0)) / other.std(0)
    c = z.t() @ other / z.size(0)
    on = (c.diagonal() - 1).pow(2).sum()
    return on + 0.01 * (c.pow(2).sum() - c.diagonal().pow(2).sum())


@loss_of()
def variance_and_covariance(z, data):
    std = torch.sqrt(z.var(dim=0) + 1e-4)
    cov = torch.cov(z.T)
    off = cov.flatten()[1:].view(WIDTH - 1, WIDTH + 1)[:, :-1]
    return F.relu(1 - std).mean() + off.pow(2).sum() / WIDTH


@loss_of()
def neighbours_are_alike(z, data):
    row, col = data.edge_index
    positive = F.logsigmoid((z[row] * z[col]).sum(-1)).mean()
    negative = F.logsigmoid(-(z[row] * z[torch.randint(0, NODES, (EDGES,))]).sum(-1)).mean()
    return -positive - negative


# Autoencoders #################################################################


@loss_of()
def inner_product_decoder(z, data):
    adj = torch.zeros(NODES, NODES, dtype=z.dtype)
    adj[data.edge_index[0], data.edge_index[1]] = 1.0
    weight = (adj.numel() - adj.sum()) / adj.sum()
    return F.binary_cross_entropy_with_logits(z @ z.t(), adj, pos_weight=weight)


@loss_of()
def negative_edges_sampled(z, data):
    negative = negative_sampling(data.edge_index, num_nodes=NODES, num_neg_samples=EDGES)
    edges = torch.cat([data.edge_index, negative], dim=1)
    label = torch.cat([torch.ones(EDGES), torch.zeros(negative.size(1))]).to(z.dtype)
    return F.binary_cross_entropy_with_logits((z[edges[0]] * z[edges[1]]).sum(-1), label)


@loss_of()
def ranked_against_negative_targets(z, data):
    i, j, k = structured_negative_sampling(data.edge_index, num_nodes=NODES)
    return F.softplus((z[i] * z[k]).sum(-1) - (z[i] * z[j]).sum(-1)).mean()


@loss_of(out=2 * WIDTH)
def variational_by_distributions(z, data, *_):
    q = torch.distributions.Normal(z[:, :WIDTH], F.softplus(z[:, WIDTH:]) + 1e-3)
    p = torch.distributions.Normal(
        torch.zeros(WIDTH, dtype=z.dtype), torch.ones(WIDTH, dtype=z.dtype)
    )
    sample = q.rsample()
    kl = torch.distributions.kl_divergence(q, p).sum(-1).mean()
    return (sample.sum(1) - data.x.sum(1)).square().mean() + 0.1 * kl


@model
def masked_autoencoder(data, ready):
    net = Encoder()
    net.token, net.decoder = nn.Parameter(torch.zeros(1, FEATURES)), gnn.GCNConv(WIDTH, FEATURES)
    net = ready(net.to(DOUBLE))

    def loss():
        perm = torch.randperm(NODES)
        masked = perm[: NODES // 2]
        x = data.x.clone()
        x[masked] = 0.0
        x[masked] += net.token
        z = net(x, data.edge_index)
        z[masked] = 0.0
        out = net.decoder(z, data.edge_index)
        return (1 - F.cosine_similarity(out[masked], data.x[masked], dim=-1)).pow(2).mean()

    return steps(net, data, loss)


@loss_of(extra=lambda: nn.Linear(WIDTH, FEATURES))
def features_reconstructed(z, data, decoder):
    return (
        F.mse_loss(decoder(z), data.x)
        + 1e-2 * z.abs().mean()
        + F.smooth_l1_loss(z[:, :3], data.pos)
    )


@loss_of(extra=lambda: nn.Linear(WIDTH, 3))
def positions_with_noise(z, data, head):
    noise = torch.randn(NODES, 3, dtype=z.dtype)
    sigma = torch.rand(NODES, 1, dtype=z.dtype) + 0.1
    return (head(z + sigma) + noise / sigma).square().sum(-1).mul(sigma.squeeze() ** 2).mean()


# Losses of classes ############################################################


@loss_of(out=CLASSES)
def focal_loss(out, data):
    each = F.cross_entropy(out, data.y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each)[data.train_mask].mean()


@loss_of(out=CLASSES)
def logits_adjusted_by_priors(out, data):
    prior = F.one_hot(data.y, CLASSES).to(out.dtype).mean(0)
    log = F.log_softmax(out + prior.log(), dim=-1)
    return -log.gather(1, data.y.view(-1, 1)).mean()


@loss_of(out=CLASSES)
def easiest_nodes_first(out, data):
    each = F.cross_entropy(out, data.y, reduction="none")
    return torch.topk(each, NODES // 2, largest=False).values.mean()


@loss_of(out=CLASSES)
def below_the_median_loss(out, data):
    each = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
    return each[each <= each.median()].mean()


@loss_of(out=CLASSES)
def pseudo_labels(out, data):
    with torch.no_grad():
        confidence, label = out.softmax(-1).max(-1)
        sure = (confidence > confidence.mean()) & ~data.train_mask
    known = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    return known + 0.5 * F.cross_entropy(out[sure], label[sure])


@loss_of(out=CLASSES)
def consistent_with_a_sharpened_mean(out, data):
    views = [F.dropout(out, 0.2).softmax(-1) for _ in range(2)]
    mean = torch.stack(views).mean(0)
    sharp = (mean.pow(2) / mean.pow(2).sum(dim=1, keepdim=True)).detach()
    return sum((v - sharp).pow(2).sum(1).mean() for v in views)


@loss_of(out=CLASSES)
def entropy_and_divergence(out, data):
    p = out.softmax(-1)
    entropy = -(p * p.clamp(min=1e-9).log()).sum(-1).mean()
    uniform = torch.full_like(p, 1 / CLASSES)
    return entropy + F.kl_div(p.log(), uniform, reduction="batchmean")


@loss_of(out=CLASSES)
def labels_mixed(out, data):
    perm = torch.randperm(NODES)
    return 0.7 * F.cross_entropy(out, data.y) + 0.3 * F.cross_entropy(out, data.y[perm])


@loss_of(out=CLASSES)
def soft_f1_score(out, data):
    p, target = out.softmax(-1), F.one_hot(data.y, CLASSES).to(out.dtype)
    hit = (p * target).sum(0)
    return (1 - 2 * hit / (p.sum(0) + target.sum(0))).mean()


@loss_of(out=CLASSES)
def margins_of_many_classes(out, data):
    return F.multi_margin_loss(out, data.y)


@loss_of(out=1)
def ranking_of_all_pairs(out, data):
    score, value = out.squeeze(-1), data.x[:, 0]
    higher = value.unsqueeze(0) > value.unsqueeze(1)
    return F.relu(0.5 - (score.unsqueeze(0) - score.unsqueeze(1)))[higher].mean()


@loss_of(out=1)
def listwise_ranking(out, data):
    order = data.x[:, 0].argsort(descending=True)
    score = out.view(-1)[order]
    return (score.flip(0).logcumsumexp(0).flip(0) - score).mean()


@loss_of()
def triplets_with_the_hardest(z, data):
    distance = torch.cdist(z, z)
    same = data.y.unsqueeze(0) == data.y.unsqueeze(1)
    positive = distance.masked_fill(~same, 0.0).max(dim=1).values
    negative = distance.masked_fill(same, 1e9).min(dim=1).values
    return F.relu(positive - negative + 1).mean()


@loss_of()
def prototypes_of_few_shots(z, data):
    known = torch.stack([z[data.train_mask & (data.y == c)].mean(0) for c in range(CLASSES)])
    rest = ~data.train_mask
    return F.cross_entropy(-torch.cdist(z[rest], known), data.y[rest])


@loss_of()
def center_loss(z, data):
    centres = torch.zeros(CLASSES, WIDTH, dtype=z.dtype)
    for c in range(CLASSES):
        centres[c] = z[data.y == c].mean(0).detach()
    return (z - centres[data.y]).square().sum(-1).mean()


@loss_of()
def modularity_of_clusters(z, data):
    s = z[:, :4].softmax(-1)
    row, col = data.edge_index
    deg = torch.bincount(row, minlength=NODES).to(z.dtype)
    ca = deg.view(1, -1) @ s
    return -((s[row] * s[col]).sum() / EDGES - (ca @ ca.t()).squeeze() / EDGES**2)


@loss_of()
def smooth_over_edges(z, data):
    row, col = data.edge_index
    dirichlet = (data.edge_weight * (z[row] - z[col]).pow(2).sum(-1)).sum()
    return dirichlet / z.square().sum() + torch.linalg.norm(z, ord=1, dim=1).var()


@loss_of()
def decorrelated(z, data):
    return torch.corrcoef(z.t()).triu(1).square().sum()


# Trainings ####################################################################


@model
def gradient_penalty(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))

    def loss():
        x = data.x.clone().requires_grad_(True)
        out = net(x, data.edge_index)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, data.y) + 0.1 * slope.norm(dim=-1).sub(1).square().mean()

    return steps(net, data, loss)


@model
def adversarial_features(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))

    def loss():
        delta = torch.empty_like(data.x).uniform_(-0.1, 0.1).requires_grad_()
        F.cross_entropy(net(data.x + delta, data.edge_index), data.y).backward()
        delta.data = delta.data + 0.05 * delta.grad.sign()
        delta.grad = None
        net.zero_grad()
        return F.cross_entropy(net(data.x + delta, data.edge_index), data.y)

    return steps(net, data, loss)


@model
def attack_on_weights_of_edges(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))

    def loss():
        weight = torch.ones(EDGES, dtype=DOUBLE, requires_grad=True)
        value = F.cross_entropy(net(data.x, data.edge_index, weight), data.y)
        (gradient,) = torch.autograd.grad(value, weight)
        keep = torch.ones(EDGES, dtype=DOUBLE)
        keep[gradient.topk(10).indices] = 0
        return F.cross_entropy(net(data.x, data.edge_index, keep), data.y)

    return steps(net, data, loss)


@model
def meta_learning_by_functional_call(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))

    def loss():
        weights = dict(net.named_parameters())
        out = torch.func.functional_call(net, weights, (data.x, data.edge_index))
        inner = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
        out = torch.func.functional_call(net, moved, (data.x, data.edge_index))
        return F.cross_entropy(out[~data.train_mask], data.y[~data.train_mask])

    return steps(net, data, loss)


@model
def meta_learning_of_first_order(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    start = copy.deepcopy(net.state_dict())
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        value = classified(net, data)
        inner.zero_grad()
        value.backward()
        inner.step()
        found.append(value.item())
    moved = {k: start[k] + 0.5 * (v - start[k]) for k, v in net.state_dict().items()}
    net.load_state_dict(moved)
    return [*found, *net.state_dict().values(), net(data.x, data.edge_index)]


@model
def sharpness_aware(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(2):
        classified(net, data).backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = [p.grad * 0.05 / norm for p in net.parameters()]
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        value = classified(net, data)
        value.backward()
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return [*found, *net.state_dict().values()]


@model
def plateau_and_the_best_state(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    best, state, found = 0.0, None, []
    for _ in range(4):
        optimizer.zero_grad()
        classified(net, data).backward()
        optimizer.step()
        with torch.no_grad():
            out = net(data.x, data.edge_index)
            accuracy = (out.argmax(-1) == data.y)[~data.train_mask].double().mean().item()
            schedule.step(F.cross_entropy(out, data.y).item())
        if accuracy > best:
            best, state = accuracy, copy.deepcopy(net.state_dict())
        found += [accuracy, optimizer.param_groups[0]["lr"]]
    net.load_state_dict(state)
    return [*found, *net.state_dict().values()]


class Buffers(Encoder):
    """A memory of all nodes, and running statistics, written in place."""

    def __init__(self) -> None:
        super().__init__(CLASSES)
        self.register_buffer("memory", torch.zeros(NODES, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("centres", torch.zeros(CLASSES, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        h = self.first(x, edge_index).relu()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.seen += 1
        return self.second(h - self.mean, edge_index)


@model
def running_mean(data, ready):
    net = ready(Buffers().to(DOUBLE))
    return steps(net, data, lambda: classified(net, data))


@model
def memory_of_all_nodes(data, ready):
    net = ready(Buffers().to(DOUBLE))

    def loss():
        h = net.first(data.x, data.edge_index).relu()
        with torch.no_grad():
            net.memory.mul_(0.5).add_(h.detach(), alpha=0.5)
        return classified(net, data) + (h - net.memory).square().mean()

    return steps(net, data, loss)


@model
def memory_of_some_nodes(data, ready):
    net = ready(Buffers().to(DOUBLE))

    def loss():
        ids = torch.randperm(NODES)[:20]
        h = net.first(data.x, data.edge_index).relu()
        value = classified(net, data) + (h[ids] - net.memory[ids]).square().mean()
        net.memory[ids] = h[ids].detach()
        return value

    return steps(net, data, loss)


@model
def memory_assigned(data, ready):
    net = ready(Buffers().to(DOUBLE))

    def loss():
        h = net.first(data.x, data.edge_index).relu()
        value = classified(net, data) + F.mse_loss(h, net.memory)
        net.memory = h.detach()
        return value

    return steps(net, data, loss)


@model
def moving_centres_of_classes(data, ready):
    net = ready(Buffers().to(DOUBLE))

    def loss():
        h = net.first(data.x, data.edge_index).relu()
        for c in range(CLASSES):
            mask = data.train_mask & (data.y == c)
            net.centres[c] = 0.9 * net.centres[c] + 0.1 * h[mask].mean(0).detach()
        return classified(net, data) + (h - net.centres[data.y]).square().mean()

    return steps(net, data, loss)


@model
def energy_sampled_with_noise(data, ready):
    net = ready(Encoder(1).to(DOUBLE))

    def loss():
        x = torch.randn_like(data.x)
        for _ in range(2):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(net(x, data.edge_index).sum(), x)
            x = x - 0.1 * slope + 0.05 * torch.randn_like(x)
        return net(data.x, data.edge_index).mean() - net(x.detach(), data.edge_index).mean()

    return steps(net, data, loss)


@model
def adversarial_two_optimizers(data, ready):
    net, critic = ready(Encoder().to(DOUBLE)), nn.Linear(WIDTH, 1).to(DOUBLE)
    first = torch.optim.Adam(net.parameters(), 0.01)
    second = torch.optim.Adam(critic.parameters(), 0.01)
    found = []
    for _ in range(2):
        z = net(data.x, data.edge_index)
        prior = torch.randn(NODES, WIDTH, dtype=DOUBLE)
        loss = F.softplus(critic(z.detach())).mean() + F.softplus(-critic(prior)).mean()
        second.zero_grad()
        loss.backward()
        second.step()
        fooled = F.softplus(-critic(z)).mean()
        first.zero_grad()
        fooled.backward()
        first.step()
        found += [loss.item(), fooled.item()]
    return [*found, *net.state_dict().values(), *critic.state_dict().values()]


class Reverse(torch.autograd.Function):
    """Gradients with the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


@loss_of(extra=lambda: nn.Linear(WIDTH, 2))
def domains_confused(z, data, head):
    out = head(Reverse.apply(z))
    return F.cross_entropy(out, data.train_mask.long()) + z.square().mean()


@model
def checkpointed(data, ready):
    net = Encoder(CLASSES)
    net.norm = nn.BatchNorm1d(WIDTH)
    net = ready(net.to(DOUBLE))

    def loss():
        h = torch.utils.checkpoint.checkpoint(
            lambda x: net.norm(F.dropout(net.first(x, data.edge_index), 0.3).relu()),
            data.x,
            use_reentrant=False,
        )
        return F.cross_entropy(net.second(h, data.edge_index), data.y)

    return steps(net, data, loss)


@model
def gradients_of_features_kept(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    x = data.x.clone().requires_grad_()
    h = net.first(x, data.edge_index)
    h.retain_grad()
    F.cross_entropy(net.second(h.relu(), data.edge_index), data.y).backward()
    saliency = x.grad.abs().sum(-1)
    return [(h * h.grad).sum(0), saliency.topk(5).indices, saliency.mean(), h.grad.norm()]


@model
def fused_optimizers(data, ready):
    net, found = Encoder(CLASSES), []
    net.table = nn.Embedding(NODES, FEATURES)
    net = ready(net.to(DOUBLE))
    for kind, options in (
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ):
        optimizer = kind(net.parameters(), lr=0.01, fused=True, **options)
        for _ in range(2):
            optimizer.zero_grad()
            out = net(data.x + net.table.weight, data.edge_index)
            F.cross_entropy(out, data.y).backward()
            optimizer.step()
        found += [t.detach().clone() for t in net.state_dict().values()]
    return found


@model
def losses_weighted_by_uncertainty(data, ready):
    net = Encoder(CLASSES)
    net.sigma = nn.Parameter(torch.zeros(2))
    net = ready(net.to(DOUBLE))

    def loss():
        out = net(data.x, data.edge_index)
        each = torch.stack([F.cross_entropy(out, data.y), F.mse_loss(out, data.pos)])
        return (torch.exp(-net.sigma) * each + net.sigma).sum()

    return steps(net, data, loss)


@model
def learned_features(data, ready):
    net = Encoder(CLASSES)
    net.features = nn.Parameter(torch.randn(NODES, FEATURES))
    net = ready(net.to(DOUBLE))

    def loss():
        x = torch.where(data.train_mask.view(-1, 1), data.x, net.features)
        return F.cross_entropy(net(x, data.edge_index), data.y)

    return steps(net, data, loss)


@model
def mean_over_many_dropouts(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    net.train()
    with torch.no_grad():
        outs = [net(F.dropout(data.x, 0.3), data.edge_index).softmax(-1) for _ in range(4)]
        mean = torch.stack(outs).mean(0)
        entropy = -(mean * mean.log()).sum(-1)
        unsure = entropy.topk(5).indices
    return [mean, entropy, unsure, data.y[unsure], mean[unsure].argmax(1)]


@model
def metrics(data, ready):
    net = ready(Encoder(CLASSES).to(DOUBLE))
    with torch.no_grad():
        out = net(data.x, data.edge_index)
    prediction = out.argmax(dim=1)
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    for t, p in zip(data.y.tolist(), prediction.tolist(), strict=True):
        matrix[t, p] += 1
    flat = torch.bincount(data.y * CLASSES + prediction, minlength=CLASSES**2)
    score, positive = out[:, 0], data.y == 0
    rank = score.argsort().argsort() + 1
    count = positive.sum()
    auc = (rank[positive].sum() - count * (count + 1) / 2) / (count * (NODES - count))
    value, index = out.max(dim=0)
    return [matrix, flat, auc.item(), value, index, torch.unique(prediction, return_counts=True)[1]]
