"""``Rows``: which rows of a tensor that all workers share lie where, and their exchange.

[Note: same rows] Whether two tensors have their rows in the same places is asked by all workers
together, and answered for all of them: on one worker two different selections may hold the same
rows (none, say). Answers are kept, as are selections by the same mask or the same ids.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from tqdm import tqdm

from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels.ops import why_missing
from pyg_sar.ledger import Label
from pyg_sar.space.distributed_index import version_of
from pyg_sar.wording import counted

GATHER_LIMIT = 1 << 31
"""Bytes that a worker gathers of one tensor, for ``.numpy()``, say."""

_LABEL: Label = ("", "", "node tensors")
_PIECE = 1 << 24  # bytes of rows on their way at a time
_LONG = 1 << 28  # bytes from which on progress is shown
_KEPT = 16  # answers, selections and plans remembered by a layout


class Writes:
    """How often was written into the memory that some node tensors share.

    Args:
        rows: The rows of the first of them, which autograd may have saved, and layers know again.
    """

    def __init__(self, rows: Tensor) -> None:
        self.count, self.rows = 0, rows

    def add(self) -> None:
        """Counts a write, in PyTorch's version of the rows as well."""
        self.count += 1
        torch.autograd.graph.increment_version(self.rows)


def written(tensor: Tensor) -> int:
    """Counts writes into a tensor, those by ``x.data`` too where it is a node tensor."""
    writes = getattr(tensor, "writes", None)
    return writes.count if isinstance(writes, Writes) else version_of(tensor)


def known_by(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what other tensors of the same values have, too, as far as is known.

    See [Note: derivations]. Of a plain tensor, and in inference mode, nothing is.
    """
    number = getattr(tensor, "derivation", None)
    return (id(tensor), written(tensor)) if number is None else ("derivation", number)


def unchanged_as(tensor: Tensor, workers: int) -> int:
    """Returns a number that stays the same until something is written into a tensor.

    In one process the tensor is the user's: NumPy, or ``x.data``, may write into it, which PyTorch
    doesn't count, so what it holds tells. Not on a GPU, for which it would have to be waited, nor
    in a transform of ``torch.func``, where tensors have no memory of their own.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if workers > 1 or transformed or tensor.device.type != "cpu":
        return version_of(tensor)
    held = bytes_of(tensor)
    if why_missing() is not None:
        return zlib.crc32(held.numpy().data)
    found: int = torch.ops.pyg_sar.checksum(held)
    return found


_COMPARED = 2**22  # bytes of a tensor; of more the sum of words besides
_FIRST = 2**12  # numbers that are read of what operators and gradients hold
_TABLES = 256  # of which it is kept what was read, until that is compared
_NEAR = 64  # nodes of a graph in which leaves are looked for


def note_plain(tensor: Tensor, comm: Communicator) -> None:
    """Notes what a plain tensor holds, of which each worker takes its rows, or ids of rows.

    All workers must hold the same. The next sum of gradients, or of rows, compares what they have
    noted (:func:`notes`), so that no other message is sent. Of a gradient, and of what learns, the
    first numbers tell.
    """
    if comm.world_size == 1 or tensor.layout != torch.strided:
        return
    if tensor.requires_grad or torch._C._current_graph_task_id() != -1:
        note_first(tensor, comm)
        return
    version = version_of(tensor)
    if version >= 0 and comm.noted.get(tensor) == version:
        return
    words = bytes_of(tensor)
    mark = zlib.crc32(words[:_COMPARED].cpu().numpy().tobytes(), comm.plain)
    if words.numel() > _COMPARED:
        even = words[_COMPARED : words.numel() // 4 * 4].view(torch.int32)
        mark = zlib.crc32(repr(int(even.sum(dtype=torch.int64))).encode(), mark)
    comm.plain = mark
    comm.noted[tensor] = version


def note_first(tensor: Tensor, comm: Communicator) -> None:
    """Notes the first numbers of a plain tensor beside rows of workers, as a weight is.

    A GPU's are not read, for which it would have to be waited.

    Raises:
        DistributedIndexError: It learns, and another part of this process uses it, too.
    """
    _claim(tensor, comm)
    first = _first(tensor)
    if first is not None:
        comm.beside = zlib.crc32(bytes_of(first).numpy().tobytes(), comm.beside)


def _claim(tensor: Tensor, comm: Communicator) -> None:
    """Claims what a plain tensor learns for this part: the leaves that it is, or was computed of.

    Raises:
        DistributedIndexError: Another part of this process has used one.
    """
    if comm.host is None or not tensor.requires_grad:
        return
    if tensor.is_leaf:
        return comm.host.claim(tensor, comm.rank)
    nodes: list[Any] = [tensor.grad_fn]
    for node in nodes:  # Those near by: longer histories are of node tensors, which are claimed.
        if hasattr(node, "variable"):
            comm.host.claim(node.variable, comm.rank)
        if len(nodes) < _NEAR:
            nodes += [parent for parent, _ in node.next_functions if parent is not None]


def _first(tensor: Tensor) -> Tensor | None:
    """Returns the first numbers of a tensor that are noted; nothing of a GPU's."""
    there = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel()
    if not there:
        return None
    while tensor.numel() > _FIRST:
        axis = next(d for d, n in enumerate(tensor.shape) if n > 1)
        fewer = tensor.size(axis) * _FIRST // tensor.numel()
        tensor = tensor.narrow(axis, 0, max(fewer, 1))
    return tensor


def note_table(table: Tensor, indices: Sequence[Tensor | None], comm: Communicator) -> None:
    """Notes the first numbers of a plain table that rows of workers are read of.

    Each worker reads some. What none reads may be anything: memory that ``torch.empty`` gave, say.
    So what was read is kept until the notes are compared (:func:`compare_notes`).

    Args:
        table: The table.
        indices: This worker's, one for each axis, ``None`` for whole axes; trailing ones are left
            out.
        comm: The workers.
    """
    _claim(table, comm)
    first = _first(table) if comm.world_size > 1 else None
    if first is None or first._is_zerotensor():
        return
    if comm.tables_told:  # All workers had the same, else there was an error.
        comm.tables, comm.tables_told = [], False
    if len(comm.tables) == _TABLES:
        return note_first(table, comm)
    named = [n if i is not None else 1 for n, i in zip(table.shape, indices, strict=False)]
    read = torch.zeros(named + [1] * (table.dim() - len(named)), dtype=torch.bool)
    read[tuple(slice(None) if i is None else i for i in indices)] = True
    read = read.expand(table.shape).as_strided(first.shape, read.expand(table.shape).stride())
    held = bytes_of(first.detach().clone(memory_format=torch.contiguous_format))
    mark = zlib.crc32(held.numpy().tobytes())
    comm.tables.append((mark, held.view(first.numel(), -1), read.reshape(-1)))


def _tables_alike(comm: Communicator) -> bool:
    """Returns whether tables hold the same in the rows that any worker read. Collective."""
    tables = [(numbers, read) for _, numbers, read in comm.tables]
    sizes = comm.all_gather_object([list(numbers.shape) for numbers, _ in tables])
    if any(size != sizes[0] for size in sizes):
        return False
    reads = torch.cat([read for _, read in tables]).to(comm.device, torch.int32)
    by_any = comm.all_reduce(reads, "max", label=_LABEL).bool().cpu()
    parts = by_any.split([len(read) for _, read in tables])
    held = [numbers[part] for (numbers, _), part in zip(tables, parts, strict=True)]
    marks = comm.all_gather_object([zlib.crc32(one.numpy().tobytes()) for one in held])
    return all(mark == marks[0] for mark in marks)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor; of what is repeated, as in gradients of sums, once.

    Raises:
        DistributedIndexError: When it stands for many gradients at once.
    """
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise DistributedIndexError(
            "torch.autograd.grad(is_grads_batched=True), and jacobian(vectorize=True), don't "
            "transform what workers send each other: ask for one gradient after the other"
        )
    if tensor._is_zerotensor():  # A derivative of abs, which has no memory.
        return torch.zeros(1, dtype=torch.uint8)
    whole = tensor.detach()
    for axis in reversed(range(whole.dim() if whole.numel() else 0)):
        if whole.stride(axis) == 0:
            whole = whole.select(axis, 0)
    whole = whole.resolve_conj().resolve_neg().contiguous()
    # The stride of a single number may be any, of which view() takes 1 only.
    return whole.as_strided([whole.numel()], [1]).view(torch.uint8)


def notes(comm: Communicator) -> list[str]:
    """Returns a line for each kind of what a worker notes, alike on all workers of a graph.

    That is the state that random generators had when dropout, say, drew last, what plain tensors
    held of which rows were taken, what stood beside rows, tables that rows were read of, and of
    which tensors rows were added up.
    """
    comm.tables_told = True
    beside = comm.beside if comm.compares else 0
    tables = hash(tuple(mark for mark, _, _ in comm.tables)) if comm.compares else 0
    words = f"beside rows: {beside}", f"tables: {tables}", f"added up: {comm.added_up}"
    drawn = f"drawn: {comm.drawn}, {comm.drawn_by_others}"
    return [drawn, f"plain: {comm.plain}", *words]


def compare_notes(comm: Communicator) -> None:
    """Compares what the workers noted, and begins anew. Collective.

    Raises:
        ValueError: on every worker, when they noted different things; where a distributed model's
            parameter differs, it is named.
    """
    # Unlike processors round in other ways what was computed alike.
    everyone = comm.all_gather_object((*_processor(comm.device), *notes(comm)))
    kinds, models, drawn, plain, beside, tables, added_up = zip(*everyone, strict=True)
    alike = len({*models}) == 1
    counts = alike and len({*tables}) > 1 and not _tables_alike(comm)
    # Else each step would come here, and what comes after an error.
    comm.compares &= alike
    comm.drawn = comm.drawn_by_others = comm.plain = comm.beside = comm.added_up = 0
    comm.noted.clear()
    comm.tables = []
    for found, compared, error in (
        (drawn, True, _UNLIKE_DRAWS),
        (plain, len({*kinds}) == 1, _UNLIKE_PLAIN),
        (added_up, True, _UNLIKE_SUMS),
        (beside, alike, _UNLIKE_BESIDE),
        (tables, counts, _UNLIKE_BESIDE),
    ):
        rank = next((r for r, note in enumerate(found) if note != found[0]), 0)
        if rank and compared:
            if error is _UNLIKE_BESIDE:
                _compare_models(comm)
            both = f"rank {rank} and rank 0"
            raise ValueError(error.format(both=both, who=both.capitalize(), rank=comm.rank))


def _compare_models(comm: Communicator) -> None:
    """Compares the distributed models of all workers, where these have the same. Collective.

    Raises:
        ValueError: on every worker, with the name of what differs.
    """
    found = [(owner(), name) for owner, name in comm.shared_parameters.values()]
    everyone = comm.all_gather_object([name for owner, name in found if owner is not None])
    if all(names == everyone[0] for names in everyone):
        for owner in dict.fromkeys(owner for owner, _ in found if owner is not None):
            owner.compare_model(comm, owner.settings())


_UNLIKE_DRAWS = (
    "The random generators of {both} are in different states (this is rank {rank}), so that "
    "dropout, say, draws different numbers: call torch.manual_seed() alike on all workers, and "
    "draw nothing on some of them alone. Make a torch.Generator of your own in the function that "
    "runs on each worker: parts of one process that share one draw from it in turn"
)
_UNLIKE_PLAIN = (
    "{who} hold different values in a plain tensor beside tensors of the graph "
    "(this is rank {rank}): in ids or a mask that choose nodes, or in a row for each node, say. "
    "Seed what draws it alike on all workers (also numpy.random and random, which "
    "torch.manual_seed() doesn't seed; SciPy's eigs and eigsh take v0=), or take it from the data"
)
_UNLIKE_SUMS = (
    "{who} added up rows of different tensors of the graph (this is rank {rank}): of another mask, "
    "attribute or layer, or after other operators. All workers must do the same in the same order; "
    "a loop over a set goes in another order in each process: give it a list, or sorted(...)"
)
_UNLIKE_BESIDE = (
    "{who} got different numbers beside tensors of the graph (this is rank "
    "{rank}): parameters of a model that was not distributed, weights of classes or of a loss, "
    "say, a temperature, a bound, an argument of a layer, a rate of dropout, a learned tensor "
    "outside of the model, or the number of a snapshot, or called other operators. Call "
    "pyg_sar.distribute(model), which names the parameter; do the same on all workers, and seed "
    "what draws numbers (also numpy.random and random, which torch.manual_seed() doesn't seed; "
    "SciPy's eigs and eigsh take v0=)"
)


def _processor(device: torch.device) -> tuple[str, str]:
    """Returns what tells kinds of processors apart, and their model and number of threads."""
    kind = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kind = f"{kind} {torch.cuda.get_device_name(device)}"
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    model = next((line for line in lines if line.startswith("model name")), "")
    return kind, f"{model}, {torch.get_num_threads()} threads"


def all_to_all(
    parts: Sequence[Tensor], comm: Communicator, theirs: Sequence[int] | None = None
) -> list[Tensor]:
    """Sends a tensor to each worker, and returns those that each worker sent here.

    Args:
        parts: ``[k_q, *]`` for each worker q, alike but for their first axis.
        comm: The workers.
        theirs: How many rows each worker sends here, where known.
    """
    if theirs is None:
        counts = torch.tensor([part.size(0) for part in parts], device=comm.device)
        theirs = [int(c[comm.rank]) for c in comm.all_gather(counts, label=_LABEL)]
    got = [parts[0].new_empty(n, *parts[0].shape[1:]) for n in theirs]
    got[comm.rank] = parts[comm.rank]
    others = [rank != comm.rank for rank in range(comm.world_size)]
    sends = [
        p.contiguous() if away and p.numel() else None
        for p, away in zip(parts, others, strict=True)
    ]
    receives = [t if away and t.numel() else None for t, away in zip(got, others, strict=True)]
    comm.exchange_all(sends, receives, label=_LABEL).wait()
    return got


def every_rows(rows: Tensor, comm: Communicator) -> list[Tensor]:
    """Returns every worker's rows ``[k_q, *]``, in rank order, without a gradient. Collective."""
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [int(n) for n in comm.all_gather(count, label=_LABEL)]
    padded = rows.new_zeros(max([*counts, 1]), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    everyone = comm.all_gather(padded, label=_LABEL)
    return [part[:n] for part, n in zip(everyone, counts, strict=True)]


class Fetch:
    """A plan by which each worker gets rows that it names from their owners.

    Args:
        owner: The worker of each row wanted here, ``[K]``.
        place: The row's number there, ``[K]``.
        num_local: Rows that this worker holds.
        comm: The workers.
    """

    def __init__(self, owner: Tensor, place: Tensor, num_local: int, comm: Communicator) -> None:
        self.comm, self.num_local = comm, num_local
        away = torch.tensor([int((owner != comm.rank).any())], device=comm.device)
        self._here = not int(comm.all_reduce(away, "max", label=_LABEL))  # on all workers
        self._row = place.contiguous()  # PyTorch is slower with others.
        self._each: tuple[Tensor, list[int], list[Tensor]] | None = None
        if self._here:
            return
        # A row that is wanted more than once travels once.
        span = int(place.max()) + 1 if place.numel() else 1
        wanted, self._row = torch.unique(owner * span + place, return_inverse=True)
        self._owner, self._place = wanted // span, wanted % span
        self._counts = torch.bincount(self._owner, minlength=comm.world_size).tolist()
        self._sends = all_to_all(list(self._place.split(self._counts)), comm)

    def get(self, local: Tensor) -> Tensor:
        """Returns the rows that are wanted here: ``[num_local, *]`` to ``[K, *]``."""
        if self._here:
            return local.index_select(0, self._row)
        sends = [local.index_select(0, rows) for rows in self._sends]
        return torch.cat(all_to_all(sends, self.comm, self._counts)).index_select(0, self._row)

    def put(self, rows: Tensor, out: Tensor, accumulate: bool) -> Tensor:
        """Writes, or adds, rows ``[K, *]`` into those of their owners, ``out`` in place."""
        if self._here:
            return _put(out, self._row, rows, accumulate)
        mine = rows.new_zeros(sum(self._counts), *rows.shape[1:])
        parts = _put(mine, self._row, rows, accumulate).split(self._counts)
        theirs = [rows.numel() for rows in self._sends]
        for index, part in zip(self._sends, all_to_all(parts, self.comm, theirs), strict=True):
            _put(out, index, part, accumulate)
        return out

    def sent(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sends each row ``[K, *]`` to the owner of the row that it names.

        Returns:
            The numbers of own rows that were named, on any worker, and the rows sent to them.
        """
        if self._here:
            return self._row, rows
        if self._each is None:
            owner, place = self._owner[self._row], self._place[self._row]
            order = owner.argsort(stable=True)
            counts = torch.bincount(owner, minlength=self.comm.world_size).tolist()
            self._each = order, counts, all_to_all(place[order].split(counts), self.comm)
        order, counts, named = self._each
        parts = rows.index_select(0, order).split(counts)
        theirs = [places.numel() for places in named]
        return torch.cat(named), torch.cat(all_to_all(parts, self.comm, theirs))


def _put(out: Tensor, index: Tensor, rows: Tensor, accumulate: bool) -> Tensor:
    if not accumulate or rows.dtype == torch.bool or rows.is_cuda:
        return out.index_put_((index,), rows, accumulate)  # On a GPU in the same order each time.
    # On a CPU several times as quick where ids repeat.
    return out.scatter_add_(0, index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows), rows)


class Rows:
    """The rows of a tensor of ``total`` rows that lie on this worker: each lies on one.

    Args:
        comm: The workers.
        total: Rows on all of them.
        count: Rows here.
        ids: Their places in the whole, int64 ``[count]``, or a function that finds them: they are
            asked for only where rows change places, are gathered, or are drawn at random.

    Attributes:
        parent: The rows that these were selected from, if so.
        source: Their numbers among this worker's rows of the parent, ``[count]``.
        ends: Of edges: the rows of the nodes that they join, targets first.
        compared: Of nodes of a message flow graph: the layers whose models were shown to compute
            the same on the whole graph.
        parts: Of joined rows each part by its place: its layout, and its first row's number here.
        shared: Whether all workers hold a tensor of these rows.
        serial: A number that no other layout has.
        origins: What these were ``"widened"`` or ``"repeated"`` from, by which and how many times.
    """

    def __init__(
        self, comm: Communicator, total: int, count: int, ids: Tensor | Callable[[], Tensor]
    ) -> None:
        self.comm, self.total, self.count = comm, total, count
        self._ids, self.serial = ids, next(comm.serials)
        self.parent: Rows | None = None
        self.source: Tensor | None = None
        self.ends: tuple[Rows, ...] = ()
        self.compared: WeakSet[Any] | None = None
        self.parts: dict[tuple[int, int], tuple[Rows, int]] = {}
        self.shared = False
        self.origins: dict[tuple[str, int], Rows] = {}
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._sorted: tuple[Tensor, Tensor] | None = None
        self._directory: Tensor | None = None
        self.tells_order: bool | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Rows({self.count} of {self.total} at rank {self.comm.rank})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return self

    @property
    def ids(self) -> Tensor:
        """Places of this worker's rows in the whole. Collective where they are not known yet."""
        if not isinstance(self._ids, Tensor):
            with torch.inference_mode(False):
                self._ids = self._ids()
        return self._ids

    def keep(self, key: Any, alive: Any, make: Callable[[], Any]) -> Any:
        """Returns what was made for ``key`` earlier, or makes it. ``alive`` keeps ids unique."""
        if isinstance(alive, Tensor) and alive.is_inference():
            return make()  # Nobody counts writes into it.
        plain = isinstance(alive, Tensor) and not hasattr(alive, "writes")
        if plain and key in self._kept and not torch.equal(alive, self._kept[key][2]):
            del self._kept[key]  # NumPy, or x.data, has written into it, which nobody counts.
        if key not in self._kept:
            with torch.inference_mode(False):
                copy = alive.detach().clone() if plain else None
                self._kept[key] = (alive, make(), copy)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def check_part(self) -> None:
        """Raises where another part of this process has taken the rows of this one.

        Raises:
            DistributedIndexError: On the other part, which would wait for all others forever.
        """
        here = current()
        if here is not self.comm and here.host is not None:
            raise DistributedIndexError(
                f"Part {here.rank} got a tensor of part {self.comm.rank} (of {self.total} rows): "
                "each part loads, or makes, its own within the function that it runs"
            )

    def agree(self, mine: bool) -> bool:
        """Returns whether all workers say yes."""
        flag = torch.tensor([int(mine)], device=self.comm.device)
        return bool(self.comm.all_reduce(flag, "min", label=_LABEL))

    def tell_order(self) -> bool:
        """Returns whether each worker's rows tell in which order axes lie: none has only one."""
        if self.tells_order is None:
            self.tells_order = self.agree(self.count > 1)
        return self.tells_order

    def lie(self, order: list[int], gaps: bool) -> tuple[list[int], bool]:
        """Returns the order of axes, and whether there are gaps, as those who have rows know it."""
        if self.tell_order():
            return order, gaps
        code = sum(d << 4 * k for k, d in enumerate(order)) + 1
        facts = [code, int(gaps)] if self.count > 1 else [0, 0]
        told = torch.tensor(facts, device=self.comm.device)
        code, most = self.comm.all_reduce(told, "max", label=_LABEL).tolist()
        return [code - 1 >> 4 * k & 15 for k in range(len(order))] if code else order, bool(most)

    def same(self, other: Rows) -> bool:
        """Returns whether two layouts are equal, on all workers. See [Note: same rows]."""
        if self is other:
            return True
        if self.total != other.total:
            return False
        equal = lambda: torch.equal(self.ids, other.ids)  # noqa: E731
        return bool(self.keep(("same", id(other)), other, lambda: self.agree(equal())))

    # Other rows ##############################################################

    def selected(self, local: Tensor, mask: Tensor) -> Rows:
        """Returns the rows where a mask holds, in the order of the whole. Collective.

        Args:
            local: This worker's part of it, bool ``[count]``.
            mask: The tensor that it is part of, by which the selection is known again.
        """
        return self.keep(
            ("mask", *known_by(mask)), mask, lambda: self._selected(local.nonzero().view(-1))
        )

    def _selected(self, source: Tensor) -> Rows:
        count = torch.tensor([source.numel()], device=self.comm.device)
        total = int(self.comm.all_reduce(count, label=_LABEL))

        def ids() -> Tensor:
            own = self.ids[source]
            everyone = every_rows(own, self.comm)
            return torch.searchsorted(torch.cat(everyone).sort().values, own)

        rows = Rows(self.comm, total, source.numel(), ids)
        rows.parent, rows.source = self, source
        return rows

    def places(self) -> tuple[Tensor, Tensor]:
        """Returns the worker of each row of the whole, and its number there. Collective at first.

        Both are int32 ``[total]``, on every worker.
        """
        if self._places is None:
            with torch.inference_mode(False):
                ids = self.ids
                worker = torch.empty(self.total, dtype=torch.int32, device=ids.device)
                number = torch.empty_like(worker)
                for rank, theirs in enumerate(every_rows(ids, self.comm)):
                    worker[theirs] = rank
                    number[theirs] = _numbers(theirs).int()
                self._places = worker, number
        return self._places

    def taken(self, index: Tensor) -> Rows:
        """Returns the rows of the whole that ``index`` ``[K]``, alike on all workers, names.

        Raises:
            IndexError: When it names none of the ``total`` rows.
        """
        return self.keep(("ids", id(index), written(index)), index, lambda: self._taken(index))

    def _taken(self, index: Tensor) -> Rows:
        note_plain(index, self.comm)
        index = self.checked(index)
        local = self.local(index)
        here = (local >= 0).nonzero().view(-1)
        rows = Rows(self.comm, index.numel(), here.numel(), here)
        rows.parent, rows.source = self, local[here]
        return rows

    def checked(self, index: Tensor) -> Tensor:
        """Returns ids with negative ones counted from the end."""
        if index.numel():
            low, high = (int(n) for n in index.aminmax())
            if low < -self.total or high >= self.total:
                raise self._beyond(low if low < -self.total else high)
            if low < 0:
                index = torch.where(index < 0, index + self.total, index)
        return index

    def _checked_together(self, index: Tensor) -> tuple[Tensor, int]:
        """Returns ids, another list on each worker, with negative ones counted from the end.

        Returns:
            The ids, and the least that any worker gave.

        Raises:
            IndexError: On all workers, when one of them names none of the rows.
        """
        low, high = (int(n) for n in index.aminmax()) if index.numel() else (0, 0)
        facts = torch.tensor([-low, high], device=self.comm.device)
        low, high = self.comm.all_reduce(facts, "max", label=_LABEL).tolist()
        if -low < -self.total or (high >= self.total and self.total + high > 0):
            raise self._beyond(high if high >= self.total else -low)
        return torch.where(index < 0, index + self.total, index) if low > 0 else index, -low

    def _beyond(self, index: int) -> IndexError:
        return IndexError(f"index {index} is out of bounds for dimension 0 with size {self.total}")

    def _in_order(self) -> tuple[Tensor, Tensor]:
        """Returns this worker's ids in ascending order, and the numbers of their rows."""
        if self._sorted is None:
            with torch.inference_mode(False):
                self._sorted = self.ids.sort()
        return self._sorted

    def local(self, ids: Tensor) -> Tensor:
        """Returns this worker's numbers of rows by their places in the whole, -1 where not here."""
        values, order = self._in_order()
        if not values.numel():
            return torch.full_like(ids, -1)
        at = torch.searchsorted(values, ids.contiguous()).clamp_(max=values.numel() - 1)
        return torch.where(values[at] == ids, order[at], -1)

    def sliced(self, start: int, stop: int, step: int) -> Rows:
        """Returns every ``step``-th row from ``start`` to before ``stop``."""
        total = len(range(start, stop, step))

        def make() -> Rows:
            ids = self.ids
            inside = (ids >= start) & (ids < stop) & ((ids - start) % step == 0)
            source = inside.nonzero().view(-1)
            rows = Rows(self.comm, total, source.numel(), (ids[source] - start) // step)
            rows.parent, rows.source, rows.compared = self, source, self.compared
            return rows

        return self.keep(("slice", start, stop, step), None, make)

    def widened(self, width: int) -> Rows:
        """Returns the rows of a tensor of which each of these became ``width``."""

        def ids() -> Tensor:
            own = self.ids
            inner = torch.arange(width, device=own.device)
            return (own.view(-1, 1) * width + inner).view(-1)

        return self._more("widened", width, ids)

    def repeated(self, times: int) -> Rows:
        """Returns the rows of a tensor in which these follow each other ``times`` times over."""

        def ids() -> Tensor:
            own = self.ids
            first = torch.arange(times, device=own.device) * self.total
            return (first.view(-1, 1) + own).view(-1)

        return self._more("repeated", times, ids)

    def _more(self, how: str, times: int, ids: Callable[[], Tensor]) -> Rows:
        """Returns the layout of so many times as many rows, of which it is kept what they were."""
        make = lambda: Rows(self.comm, self.total * times, self.count * times, ids)  # noqa: E731
        rows: Rows = self.keep((how, times), None, make)
        rows.origins[how, times] = self
        return rows

    def share(self, total: int) -> Rows:
        """Returns ``total`` rows in equal runs: what replicated rows become beside these."""
        world, rank = self.comm.world_size, self.comm.rank
        first, last = total * rank // world, total * (rank + 1) // world

        def make() -> Rows:
            ids = torch.arange(first, last, device=self.comm.device)
            rows = Rows(self.comm, total, last - first, ids)
            rows.shared = True
            return rows

        return self.keep(("share", total), None, make)

    def joined(self, others: Sequence[Rows]) -> Rows:
        """Returns these rows followed by others."""
        parts = (self, *others)
        starts = list(accumulate((p.total for p in parts), initial=0))

        def make() -> Rows:
            def ids() -> Tensor:
                return torch.cat([p.ids + s for p, s in zip(parts, starts, strict=False)])

            here = list(accumulate((p.count for p in parts), initial=0))
            rows = Rows(self.comm, starts[-1], here[-1], ids)
            rows.ends = next((p.ends for p in parts if p.ends), ())
            for part, start, first in zip(parts, starts, here, strict=False):
                rows.parts[start, start + part.total] = part, first
            if all(part is self for part in others):
                rows.origins["repeated", len(parts)] = self
            return rows

        return self.keep(("joined", *map(id, others)), others, make)

    def of_replicas(self, across: Communicator) -> Rows:
        """Returns these rows of replica 0, followed by those of each other one. Collective.

        Args:
            across: The workers of this rank in all replicas.
        """

        def make() -> Rows:
            facts = torch.tensor([[self.total, self.count]], device=self.comm.device)
            totals, counts = torch.cat(every_rows(facts, across)).T.tolist()
            starts = list(accumulate(totals, initial=0))

            def ids() -> Tensor:
                everyone = every_rows(self.ids, across)
                return torch.cat([i + s for i, s in zip(everyone, starts, strict=False)])

            return Rows(self.comm, sum(totals), sum(counts), ids)

        return self.keep(("replicas",), None, make)

    # Moving rows #############################################################

    def cut(self, whole: Tensor, axis: int) -> Tensor:
        """Returns this worker's rows of a tensor that all workers hold, as they lie there."""
        ids = self.ids.to(whole.device)
        if whole.layout != torch.strided:
            return whole.to_sparse_coo().index_select(axis, ids)
        if whole.stride(axis) == 0:
            return whole.narrow(axis, 0, min(1, self.total)).expand(
                *(self.count if d == axis % whole.dim() else n for d, n in enumerate(whole.shape))
            )
        if whole.is_contiguous():
            return whole.index_select(axis, ids)
        steps = whole.stride()
        order = sorted(range(whole.dim()), key=lambda d: -steps[d])
        place = order.index(axis % whole.dim())
        own = whole.permute(order).index_select(place, ids)
        return own.permute([order.index(d) for d in range(whole.dim())])

    def whole(self, local: Tensor, axis: int, what: str) -> Tensor:
        """Returns all workers' rows, on each of them, to the bit. Collective.

        Args:
            local: This worker's.
            axis: The axis of the rows.
            what: The operation that asks, for errors.

        Raises:
            DistributedIndexError: When they take more than :data:`GATHER_LIMIT` bytes.
        """
        comm, device = self.comm, self.ids.device
        if local.device != device:
            return self.whole(local.to(device), axis, what).to(local.device)
        row = math.prod(local.shape) // max(self.count, 1) * local.element_size()
        if self.count == 0:
            row = (
                math.prod(n for d, n in enumerate(local.shape) if d != axis) * local.element_size()
            )
        size = row * self.total
        if size > GATHER_LIMIT:
            raise DistributedIndexError(
                f"{what} needs all {counted(self.total, 'rows')} on every worker, {size >> 20} "
                f"MiB, more than {GATHER_LIMIT >> 20} MiB (rank {comm.rank}). Select rows or "
                "columns first"
            )
        if comm.world_size == 1:
            found = local.movedim(axis, 0)[self._in_order()[1]]  # Of every dtype, unlike copying.
            return found.movedim(0, axis).contiguous()
        with torch.inference_mode(False):
            moved = local.movedim(axis, 0).clone(memory_format=torch.contiguous_format)
            rows = _bytes(moved) if moved.numel() else None
            ids = every_rows(self.ids, comm)
            out = moved.new_empty(self.total, *moved.shape[1:])
            if out.numel():
                flat = _bytes(out)
                step = max(_PIECE // row, 1)
                longest = max(part.numel() for part in ids)
                first = range(0, longest, step)
                for begin in tqdm(
                    first, f"gathering {what}", disable=comm.rank != 0 or size < _LONG, leave=False
                ):
                    length = min(step, longest - begin)
                    buffer = flat.new_zeros(length, row)
                    if rows is not None:
                        part = rows[begin : begin + length]
                        buffer[: len(part)] = part
                    for theirs, got in zip(ids, comm.all_gather(buffer, label=_LABEL), strict=True):
                        some = theirs[begin : begin + length]
                        flat[some] = got[: some.numel()]
            # Some operators read memory without a look at its strides: that of COO to CSR.
            return out.movedim(0, axis).contiguous()

    def fetch(self, ids: Tensor) -> Fetch:
        """Returns a plan to get rows of the whole, named on each worker by itself. Collective.

        Args:
            ids: Their places ``[K]``, none negative.
        """
        make = lambda: Fetch(*self.homes(ids), self.count, self.comm)  # noqa: E731
        return self.keep(("fetch", id(ids), written(ids)), ids, make)

    def fetch_by(self, index: Any, lowest: int) -> Fetch:
        """Returns the plan for a node tensor that holds one id per row, in one axis or repeated.

        Args:
            index: The ids, known again by :attr:`NodeTensor.column`.
            lowest: The least id allowed, ``-total`` or 0. Negative ones count from the end.

        Raises:
            IndexError: On all workers, when one of them names none of the rows.
        """
        tensor, number = index.column
        local = index.local.movedim(index.axis, 0)
        ids = local.as_strided((local.size(0),), local.stride()[:1])

        def make() -> tuple[Fetch, int]:
            checked, least = self._checked_together(ids.long())
            return Fetch(*self.homes(checked), self.count, self.comm), least

        if tensor.derivation is None:
            plan, least = make()  # Nobody counts writes into it.
        else:
            plan, least = self.keep(("fetch", *known_by(tensor), number), None, make)
        if least < lowest:
            raise self._beyond(least)
        return plan

    def homes(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the worker of each row that this worker names, and its number there. Collective.

        Args:
            ids: Their places in the whole ``[K]``, none negative.
        """
        comm, world = self.comm, self.comm.world_size
        # A row's home, by its place in the whole, knows where it lies: N / W entries each.
        if self._directory is None:
            span = max(-(-self.total // world), 1)
            own = self.ids
            facts = torch.stack([own, torch.full_like(own, comm.rank), _numbers(own)], 1)
            order = (own // span).argsort(stable=True)
            counts = torch.bincount(own // span, minlength=world).tolist()
            told = torch.cat(all_to_all(list(facts[order].split(counts)), comm))
            table = told.new_full((span, 2), -1)
            table[told[:, 0] - span * comm.rank] = told[:, 1:]
            self._directory = table
        span = len(self._directory)
        home = ids // span
        order = home.argsort(stable=True)
        counts = torch.bincount(home, minlength=world).tolist()
        asked = all_to_all(list(ids[order].split(counts)), comm)
        answers = [self._directory[part - span * comm.rank] for part in asked]
        found = torch.cat(all_to_all(answers, comm))
        if found.numel() and int(found.min()) < 0:  # No worker holds such a row.
            raise DistributedIndexError(_UNLIKE_PLAIN.format(who="Workers", rank=comm.rank))
        places = torch.empty_like(found)
        places[order] = found
        return places[:, 0], places[:, 1]

    def moved(self, local: Tensor, axis: int, other: Rows) -> Tensor:
        """Returns the rows in the places of ``other``. Collective."""
        plan = self.fetch(other.ids)
        out = plan.get(local.movedim(axis, 0)).movedim(0, axis)
        return out.contiguous() if local.is_contiguous() else out


def _numbers(ids: Tensor) -> Tensor:
    return torch.arange(ids.numel(), device=ids.device)


def _bytes(rows: Tensor) -> Tensor:
    """Returns contiguous rows as bytes, ``[n, bytes]``, in the same memory."""
    return rows.view(-1).view(torch.uint8).view(rows.size(0), -1)


def node_rows(comm: Communicator, ids: Tensor, total: int) -> Rows:
    """Returns the layout of a graph's nodes, or edges, by the global ids of this worker's."""
    return Rows(comm, total, ids.numel(), ids)
