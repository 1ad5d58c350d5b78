"""Training in less memory than it takes: exact, within the limit, and an error where it can't be.

Resident sets are those of fresh processes, beyond what they had when their parts began.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from combinations import everything
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    GATConv,
    GraphSAGE,
    SAGEConv,
    Sequential,
    SimpleConv,
)

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.errors import StoreError
from pyg_sar.kernels import ops
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.store import part_store
from pyg_sar.store.pager import keep_freed
from pyg_sar.store.part_store import PartStore
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.report import Report, hosting_lines

pytestmark = [
    pytest.mark.skipif(not ops.built, reason="no C++ kernels"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pager is for Linux"),
]

HERE = Path(__file__).resolve().parent
KB, MB = 1 << 10, 1 << 20
NODES, DEGREE, FEATURES, CLASSES = 14_000, 8, 16, 5
TINY, WIDE = 320, 700
FRESH = {"STARTED": "from nothing"}  # An environment that no process of the tests has.
HOSTING = FRESH | {"MKL_DISABLE_FAST_MM": "1"}  # as launch does for parts
MODELS = {
    "gcn": lambda: GCN(FEATURES, 128, 3, CLASSES, norm="batch_norm"),
    "sage": lambda: GraphSAGE(FEATURES, 160, 3, CLASSES, norm="batch_norm"),
    "gat": lambda: GAT(FEATURES, 128, 3, CLASSES, heads=4, norm="batch_norm"),
    "gin": lambda: GIN(FEATURES, 128, 3, CLASSES, norm="batch_norm"),
    "deep": lambda: GAT(FEATURES, 64, 8, CLASSES, heads=4, norm="batch_norm"),
    "wide": lambda: Sequential(
        "x, edge_index",
        [
            (SAGEConv(FEATURES, WIDE), "x, edge_index -> x"),
            torch.nn.ReLU(),
            (SAGEConv(WIDE, CLASSES), "x, edge_index -> x"),
        ],
    ),
    "dropout": lambda: GAT(FEATURES, 128, 3, CLASSES, heads=2, norm="batch_norm", dropout=0.3),
}


def make_graph(nodes: int) -> Data:
    """Most edges join nodes with near numbers."""
    draw = torch.Generator().manual_seed(0)
    source = torch.arange(nodes).repeat_interleave(DEGREE)
    near = torch.randint(-nodes // 64, nodes // 64, (nodes * DEGREE,), generator=draw)
    far = torch.randint(nodes, (nodes * DEGREE,), generator=draw)
    target = torch.where(torch.rand(far.shape, generator=draw) < 0.02, far, source + near)
    return Data(
        x=torch.randn(nodes, FEATURES, generator=draw, dtype=torch.float64),
        edge_index=torch.stack([source, target % nodes]),
        y=torch.randint(CLASSES, (nodes,), generator=draw),
    )


def write(folder: Path, nodes: int, parts: int) -> str:
    root = folder / f"{nodes}_{parts}"
    pyg_sar.write_partitions(make_graph(nodes), parts, root, torch.arange(nodes) * parts // nodes)
    return str(root)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    folder = tmp_path_factory.mktemp("parts")
    return {(nodes, p): write(folder, nodes, p) for nodes in (TINY, NODES) for p in (8, 32)}


def make_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def gradients(model: torch.nn.Module, data: Data) -> Tensor:
    F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def everything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all that the other parts hold moved out at each turn, whatever the memory."""
    begin = PartStore.begin

    def begin_alone(store: Any, arena: int) -> None:
        begin(store, arena)
        for other in range(store._pager.arenas):
            if other != arena:
                store._pager.move_out(other)

    monkeypatch.setattr(PartStore, "begin", begin_alone)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A failure's traceback is in a cycle with its part's tensors; the pager's tests count them."""
    yield
    gc.collect()


# On the workers ##############################################################


def plain_step(name: str) -> tuple[Tensor, int]:
    """Plain PyG on the whole graph: gradients, and bytes beyond the start."""
    data = make_graph(NODES)
    gradients(make_model(name), make_graph(TINY))  # Brings in the libraries.
    keep_freed(False)
    gc.collect()
    start = reset_peak_memory(torch.device("cpu"))
    gradient = gradients(make_model(name), data)
    return gradient, peak_memory(torch.device("cpu")) - start


def counters() -> Mapping[str, int]:
    host: Any = current().host  # type: ignore[attr-defined]
    return {} if host.store is None else host.store.counters()


def part_step(root: str, name: str) -> tuple[Tensor, Mapping[str, int]]:
    """A part's gradients, and bytes moved so far."""
    data = pyg_sar.load_partition(root)
    return gradients(pyg_sar.distribute(make_model(name)), data), counters()


def hosted_steps(
    root: str, tiny: str, name: str, parts: int, memory: int, store: Path
) -> tuple[list[Tensor], int, Mapping[str, int]]:
    """All parts' gradients, bytes beyond the start, and bytes moved.

    Before, a pass over a tiny graph brings in the libraries.
    """
    pyg_sar.run(part_step, tiny, name, parts=parts)
    gc.collect()
    start = reset_peak_memory(torch.device("cpu"))
    found = pyg_sar.run(part_step, root, name, parts=parts, memory=memory, store=store)
    peak = peak_memory(torch.device("cpu")) - start
    return [gradient for gradient, _ in found], peak, found[-1][1]


def train(root: str, epochs: int) -> tuple[list[float], Tensor, int]:
    """Losses, parameters and bytes read of some epochs."""
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(make_model("dropout"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, parameters, counters().get("bytes_read", 0)


# Within the limit, exactly ####################################################

LIMITS = {"gcn": 72, "sage": 64, "gat": 72, "gin": 64, "deep": 80, "wide": 72}
CASES = [
    *((name, 32) for name in ("gcn", "sage", "gin", "wide")),
    ("sage", 8),
    ("deep", 8),
    ("gat", 8),
]


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_exact_in_a_fourth_of_the_memory(name, parts, roots, tmp_path):
    limit = LIMITS[name] * MB
    expected, most = pyg_sar.launch(plain_step, 1, name, env=FRESH)[0]
    given = roots[NODES, parts], roots[TINY, parts], name, parts, limit, tmp_path
    found, peak, moved = pyg_sar.launch(hosted_steps, 1, *given, timeout=120, env=HOSTING)[0]
    for gradient in found:
        assert (gradient - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert peak <= limit
    assert most >= 4 * limit
    least = 40 if (name, parts) == ("gcn", 32) else 100  # Of GCN little is kept beside its rows.
    assert moved["bytes_read"] + moved["bytes_written"] >= least * MB
    assert moved["overrun_bytes"] == 0
    if name == "wide":
        assert NODES * WIDE * 8 > limit


# To the bit ###################################################################


def test_the_same_bits_with_a_store_without_and_on_any_number_of_workers(tmp_path):
    """With dropout, whose random numbers each part draws in its own turn."""
    root = write(tmp_path, 3000, 6)
    (tmp_path / "store").mkdir()
    given = {"parts": 6, "store": tmp_path / "store"}
    first = pyg_sar.run(train, root, 2, parts=6)
    for limit in (28, 20, 14):  # What earlier tests have left in the heap takes nothing of it.
        stored = pyg_sar.run(train, root, 2, memory=limit * MB, **given)
        if stored[-1][2] > MB:
            break
    assert stored[-1][2] > MB
    for found in (stored, pyg_sar.launch(train, 3, root, 2, memory=64 * MB, **given)):
        for (losses, parameters, _), (losses_1, parameters_1, _) in zip(found, first, strict=True):
            assert losses == losses_1
            assert torch.equal(parameters, parameters_1)


def test_parts_without_edges_between_take_their_turns_in_order(tmp_path):
    """Small messages between parts, as for degrees, leave some of them ahead of others."""
    root = write(tmp_path, TINY, 32)
    alone = pyg_sar.run(part_step, root, "gcn", parts=32)
    stored = pyg_sar.run(part_step, root, "gcn", parts=32, memory=64 * MB, store=tmp_path)
    for (a, _), (b, _) in zip(alone, stored, strict=True):
        assert torch.equal(a, b)


def written_while_parts_wait(root: str) -> tuple[int, int]:
    """Bytes written while all parts wait in a sum of rows: forward, backward. The first part's."""
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(SimpleConv(aggr="mean"))
    x = data.x.clone().requires_grad_()
    gradient = torch.ones_like(x)
    written = []
    for _ in range(2):  # The first makes the plans.
        current().barrier()
        written.append(counters()["bytes_written"])
        out = layer(x, data.edge_index)
        written.append(counters()["bytes_written"])
        current().barrier()
        written.append(counters()["bytes_written"])
        out.backward(gradient)
        written.append(counters()["bytes_written"])
    return written[5] - written[4], written[7] - written[6]


def test_no_sum_waits_for_rows(small, tmp_path, monkeypatch):
    """Memory for it is taken when they are there, and inputs are in the file already."""
    everything_waits(monkeypatch)
    found = pyg_sar.run(written_while_parts_wait, small, parts=8, memory=200 * MB, store=tmp_path)
    assert found[0] == (0, 0)


def moved_by_a_step(root: str) -> tuple[float, float]:
    """What a layer's step reads and writes, in sizes of its rows."""
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(SAGEConv(8 * FEATURES, CLASSES).double())
    x = data.x.repeat(1, 8).requires_grad_()
    moved = []
    for _ in range(2):  # The first makes the plans.
        x.grad = None
        current().barrier()
        moved.append(counters())
        out = layer(x, data.edge_index)
        out.backward(torch.ones_like(out))
        current().barrier()
        moved.append(counters())
    size = x.numel() * x.element_size()
    return tuple((moved[3][k] - moved[2][k]) / size for k in ("bytes_read", "bytes_written"))


def test_own_rows_are_read_once_in_each_pass(small, tmp_path, monkeypatch):
    """Those that a layer maps and adds to its sums, with which their gradient is made."""
    everything_waits(monkeypatch)
    read, written = pyg_sar.run(moved_by_a_step, small, parts=8, memory=200 * MB, store=tmp_path)[0]
    assert read < 3
    assert written < 1.5


def rooms_of_rows(root: str, rooms: list[int]) -> list[int]:
    """Bytes for which room was made in a pass over published rows, when the first part has them."""
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(SimpleConv())
    layer(data.x, data.edge_index)  # makes the plan
    current().barrier()
    if current().rank == 0:
        rooms.clear()
    layer(data.x, data.edge_index)
    return list(rooms)


def test_published_rows_take_memory_part_by_part(small, tmp_path, monkeypatch):
    rooms: list[int] = []
    monkeypatch.setattr(PartStore, "make_room", lambda _, size: rooms.append(size))
    given = {"parts": 8, "memory": 200 * MB, "store": tmp_path}
    found = pyg_sar.run(rooms_of_rows, small, rooms, **given)
    source, target = make_graph(4000).edge_index
    cut = source[source * 8 // 4000 != target * 8 // 4000].unique()
    assert found[0] == [FEATURES * 8 * n for n in (cut * 8 // 4000).bincount().tolist()]


# What is between workers, and what is computed again #########################


def rooms_of_a_step(root: str, cache: int | None) -> tuple[list[int], int, Tensor]:
    """Bytes for which this worker's pager made room; exchanges with the other one; gradients."""
    host: Any = current().host  # type: ignore[attr-defined]
    store, outer = host.store, host.outer
    if cache is not None:
        store.fix(100 * MB, cache)
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(SAGEConv(FEATURES, FEATURES).double())
    x = data.x.clone().requires_grad_()
    model(x, data.edge_index).sum().backward()  # makes the plans
    model.zero_grad()
    x.grad = None
    if not hasattr(store, "rooms"):
        store.rooms, unpaged = [], store.unpaged
        store.unpaged = lambda size=0: (store.rooms.append(size), unpaged(size))[1]
        outer.number, exchange = itertools.count(), outer.exchange_all
        outer.exchange_all = lambda *a, **how: (next(outer.number), exchange(*a, **how))[1]
    out = model(x, data.edge_index)
    (out * torch.arange(1, FEATURES + 1)).sum().backward()
    rooms, exchanges = [size for size in store.rooms if size], next(copy.copy(outer.number))
    rows = [out.detach().to_local(), x.grad.to_local()]
    gradients = [*rows, *(parameter.grad for parameter in model.parameters())]
    return rooms, exchanges, torch.cat([one.view(-1) for one in gradients])


def test_rows_between_workers_go_a_few_at_a_time(tmp_path):
    """Both ways together in half of a cache; numbers are PyG's, and bits those of rows at once."""
    graph = make_graph(TINY)
    source, target = graph.edge_index
    worker = [ids * 2 // TINY for ids in (source, target)]
    cut = worker[0] != worker[1]
    sent = [torch.unique(source[cut & (worker[0] == w)]).numel() for w in (0, 1)]
    # Owners of sources read gradients of targets.
    back = [torch.unique(target[cut & (worker[1] == w)]).numel() for w in (0, 1)]
    root, row = write(tmp_path, TINY, 4), FEATURES * 8
    given: Any = {"parts": 4, "memory": 100 * MB, "store": tmp_path}
    at_once = pyg_sar.launch(rooms_of_a_step, 2, root, None, **given)
    by_threes = pyg_sar.launch(rooms_of_a_step, 2, root, 4 * 3 * row + 1, **given)
    for part in range(4):
        assert at_once[part][0][0] == 2 * max(sent) * row
        assert set(by_threes[part][0]) == {2 * 3 * row}
        assert at_once[part][1] == 2  # forward and backward
        assert by_threes[part][1] == -(-max(sent) // 3) - (-max(back) // 3)
    torch.manual_seed(0)
    plain, x = SAGEConv(FEATURES, FEATURES).double(), graph.x.requires_grad_()
    out = plain(x, graph.edge_index)
    (out * torch.arange(1, FEATURES + 1)).sum().backward()
    expected = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    parts = [found[2].split([TINY // 4 * FEATURES] * 2 + [expected.numel()]) for found in at_once]
    rows = [torch.cat([part[k] for part in parts]).view(TINY, FEATURES) for k in (0, 1)]
    torch.testing.assert_close(rows, [out.detach(), x.grad], rtol=1e-10, atol=1e-10)
    for part in parts:
        torch.testing.assert_close(part[2], expected, rtol=1e-10, atol=1e-10)
    by_twos = pyg_sar.launch(rooms_of_a_step, 3, root, 4 * 2 * 2 * row, **given)
    for part in range(4):  # The workers have one part, one, and two.
        assert set(by_twos[part][0]) == {2 * 2 * 2 * row}
        assert torch.equal(by_twos[part][2], at_once[part][2])
        assert torch.equal(by_threes[part][2], at_once[part][2])


class Again(torch.nn.Module):
    """A GAT whose layers, ReLU and dropout are computed again, or kept."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        sizes = (FEATURES, 64), (64, 64), (64, CLASSES)
        self.convs = torch.nn.ModuleList(GATConv(a, b, dropout=0.2) for a, b in sizes)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(64) for _ in range(2))
        self.again = again

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.call(self.update, norm(self.call(conv, x, edge_index)))
        return self.convs[-1](x, edge_index)

    def call(self, part: Any, *given: Tensor) -> Tensor:
        found: Tensor = (
            checkpoint(part, *given, use_reentrant=False) if self.again else part(*given)
        )
        return found

    @staticmethod
    def update(x: Tensor) -> Tensor:
        return F.dropout(x.relu(), 0.3)


def updates(root: str, again: bool) -> tuple[Tensor, Tensor, int]:
    """Gradients and random state after a pass whose updates are computed again, or kept.

    Also bytes that this worker saved as bits so far.
    """
    data = pyg_sar.load_partition(root)
    torch.manual_seed(1)
    model = pyg_sar.distribute(Again(again).double())
    return gradients(model, data), torch.random.get_rng_state(), counters().get("bits_of_bytes", 0)


def test_updates_computed_again_or_saved_as_bits_give_the_same_bits(tmp_path, monkeypatch):
    """Dropout draws the same numbers again, though other parts draw theirs in between.

    ReLU and dropout between the layers save bits.
    """
    everything_waits(monkeypatch)
    root, given = write(tmp_path, 2000, 4), {"parts": 4, "memory": 200 * MB, "store": tmp_path}
    kept = pyg_sar.run(updates, root, False, parts=4)
    again, bits = (pyg_sar.run(updates, root, how, **given) for how in (True, False))
    for expected, *others in zip(kept, again, bits, strict=True):
        for found in others:
            assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True))
    assert max(size for *_, size in bits) == 2 * 2 * 2000 * 64 * 8


# What is said of it ###########################################################


def reported(root: str, folder: Path) -> int:
    """A part's training for an epoch with a report; bytes of halo rows read from the store."""
    data = pyg_sar.load_partition(root)
    data.train_mask = torch.ones_like(data.y, dtype=torch.bool)
    model = pyg_sar.distribute(GraphSAGE(FEATURES, WIDE, 3, CLASSES).double())
    with pyg_sar.Ledger(current()) as ledger:
        callbacks = [Report(folder / "report")]
        pyg_sar.Trainer(model, data, TrainConfig(epochs=1), callbacks=callbacks).fit()
    return ledger.received_bytes(transport="store")


def test_a_report_says_what_was_kept_and_moved(tmp_path, monkeypatch):
    """Rows of the middle layer, 22 MB of all nodes, don't fit into the cache of 20 MiB."""
    monkeypatch.setattr(part_store, "PUBLISHED", 0)  # as if they took more than half of the memory
    nodes, parts, memory = 4000, 3, 160 * MB
    owner = torch.arange(nodes) % parts
    pyg_sar.write_partitions(make_graph(nodes), parts, tmp_path / "parts", owner)
    given = str(tmp_path / "parts"), tmp_path
    loaded = pyg_sar.run(reported, *given, parts=parts, memory=memory, store=tmp_path)
    found = json.loads((tmp_path / "report" / "summary.json").read_text())["hosting"]
    assert (found["parts"], found["memory"], found["store"]) == ([parts], memory, str(tmp_path))
    source, target = make_graph(nodes).edge_index
    cut = owner[source] != owner[target]
    halo = torch.unique(source[cut] * parts + owner[target[cut]]).numel()
    layers = found["layers"].values()
    assert [layer["forward"]["halo"] for layer in layers] == [halo] * 3
    assert [layer["case"] for layer in layers] == [1] * 3  # sums of rows
    # The gradients of other parts' targets; the first layer's inputs need none.
    there = torch.unique(target[cut] * parts + owner[source[cut]]).numel()
    assert [layer["backward"]["halo"] for layer in layers] == [0, there, there]
    read = [layer["forward"]["read"] for layer in layers]
    back = [layer["backward"]["read"] for layer in layers]
    assert read[0] == read[2] == 0 < read[1] < halo
    assert back[0] == back[2] == 0 < back[1] < there
    # Two forward passes, as the epoch ends with an evaluation.
    assert sum(loaded) == (2 * read[1] + back[1]) * WIDE * 8
    assert found["read_bytes"][0] >= sum(loaded)
    assert found["waited_seconds"][0] > 0
    text = "\n".join(hosting_lines(tmp_path / "report"))
    assert f"3 parts on 1 worker (3), memory={memory:,} bytes each, store={tmp_path}" in text
    assert f"{read[1]:,.0f}, {read[1] / nodes:.2f}" in text
    assert f"{found['written_bytes'][0] / 1e6:,.1f} out" in text
    assert f"seconds of each worker: {found['waited_seconds'][0]:.2f}" in text


# What fails ###################################################################


def failure_of(root: str, **how: Any) -> str:
    with pytest.raises(StoreError) as caught:
        pyg_sar.run(part_step, root, "sage", parts=8, timeout=60, **how)
    return str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("small"), 4000, 8)


def test_any_limit_gives_the_numbers_or_a_remedy(small, tmp_path):
    """Also after a failure, in the same process."""
    expected = pyg_sar.run(part_step, small, "sage", parts=8)[0][0]
    ended: list[bool] = []
    sizes = (1, 4 * KB, MB, 2 * MB, 4 * MB, 8 * MB, 12 * MB, 16 * MB, 24 * MB, 200 * MB)
    sizes = sizes if everything() else (1, *sizes[1::2])
    for size in sizes:
        try:
            found = pyg_sar.run(part_step, small, "sage", parts=8, memory=size, store=tmp_path)
        except StoreError as error:
            ended.append(False)
            assert "memory=" in str(error)
            assert "allow more memory (at least" in str(error).lower()
            continue
        ended.append(True)
        for gradient, _ in found:
            assert torch.equal(gradient, expected)
    assert not ended[0] and ended[-1]
    # Twice the memory never fails where less did not: allocators keep a few MB, more or less.
    least = min(size for size, well in zip(sizes, ended, strict=True) if well)
    assert all(well for size, well in zip(sizes, ended, strict=True) if size >= 2 * least)


def test_no_store_and_too_little_memory(small):
    text = failure_of(small, memory=8 * MB)
    assert "memory=8,388,608" in text


def kernel_step(size: int) -> None:
    """A kernel's result alone doesn't fit; its input is NumPy's memory."""
    rows = torch.from_numpy(np.ones((size // 512, 64)))
    torch.ops.pyg_sar.scale_rows(rows, *[torch.ones(64, dtype=rows.dtype)] * 3)


def test_what_a_kernel_is_refused_is_told_as_what_an_operator_is(tmp_path):
    with pytest.raises(StoreError, match=rf"tensor of {64 * MB} bytes.*more memory \(at least"):
        pyg_sar.run(kernel_step, 64 * MB, parts=2, memory=48 * MB, store=tmp_path, timeout=60)


def fused_step(size: int) -> int:
    """A step of an operator that changes five tensors; bytes read from the store."""
    parameter = torch.nn.Parameter(torch.ones(size // 4))
    parameter.grad = torch.ones(size // 4)
    torch.optim.Adam([parameter], amsgrad=True, fused=True).step()
    current().barrier()
    return counters()["bytes_read"]


def test_an_operator_that_does_not_fit_names_parts_and_memory_that_do(tmp_path):
    how: Any = {"parts": 2, "store": tmp_path, "timeout": 60}
    with pytest.raises(StoreError, match=r"an operator.* bytes more at once") as caught:
        pyg_sar.run(fused_step, 12 * MB, memory=48 * MB, **how)
    assert "about 4 instead of 2: pyg-sar partition --parts 4" in str(caught.value)
    found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert found is not None
    read = pyg_sar.run(fused_step, 12 * MB, memory=int(found[1].replace(",", "")), **how)
    assert max(read) <= 3 * 5 * 12 * MB


@pytest.mark.parametrize("name", ["absent", "file", "/proc"])
def test_a_store_that_takes_no_file(name, small, tmp_path):
    (tmp_path / "file").touch()
    text = failure_of(small, memory=64 * MB, store=tmp_path / name)
    assert f"store={str(tmp_path / name)!r}" in text


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    if not done:
        pytest.skip("a file system can't be mounted: needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named(small, full_disk):
    text = failure_of(small, memory=16 * MB, store=full_disk)
    assert str(full_disk) in text
    assert os.listdir(full_disk) == []


def train_forever(root: str) -> None:
    while True:
        train(root, 1)
        print("epoch", flush=True)


def killed_ones(root: str, store: str, number: str) -> None:
    """Processes that train, one after the other, until each is killed."""
    torch.set_num_threads(1)
    for _ in range(int(number)):
        child = os.fork()
        if child == 0:
            try:
                pyg_sar.run(train_forever, root, parts=8, memory=100 * MB, store=store)
            finally:
                os._exit(1)
        print(child, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def test_nothing_is_left_by_a_killed_process(small, tmp_path):
    """Killed after some parts' epochs, wherever the others are then."""
    code = "import sys, test_larger_than_memory as t\nt.killed_ones(*sys.argv[1:])"
    kills = (0, 3, 11) if everything() else (3,)  # at so many parts' epochs
    command = [sys.executable, "-c", code, small, str(tmp_path), str(len(kills))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for lines in kills:
            child = int(process.stdout.readline())
            for _ in range(lines + 1):
                assert process.stdout.readline() == "epoch\n"
            os.kill(child, signal.SIGKILL)
            # What it had printed by then comes first.
            rest = iter(process.stdout.readline, f"ended {-signal.SIGKILL}\n")
            assert set(rest) <= {"epoch\n"}
            assert os.listdir(tmp_path) == []
    assert process.returncode == 0
