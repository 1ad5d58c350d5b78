"""``SARPolicy``: settings of how a layer runs distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How halo rows may travel.
WIRES: tuple[str, ...] = ("exact", "bfloat16", "float16", "int8", "int4", "int2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SARPolicy:
    r"""Settings of how :meth:`DistMessagePassing.propagate` aggregates over a distributed graph.

    All modes give the same numbers; they trade memory against work and traffic. With
    :math:`H_p` halo rows of :math:`F` values of :math:`b` bytes at worker :math:`p`:

    ====  ==============================  =====================  ======================
    mode  what happens                    remote rows resident   traffic in, per layer
    ====  ==============================  =====================  ======================
    1     sequential aggregation and      ``1 + prefetch``       :math:`2 H_p F b`, or
          rematerialization (SAR)         shards                 :math:`3 H_p F b` when
                                                                 the backward pass needs
                                                                 source values (case 2; but
                                                                 see ``push``)
    2     sequential aggregation, the     ``1 + prefetch``       :math:`2 H_p F b`
          graph kept until backward       shards, and all
                                          messages' inputs
    3     one shot: fetch the halo, then  the halo, and all      :math:`2 H_p F b`
          PyG's own ``propagate``         messages
    ====  ==============================  =====================  ======================

    In every mode each edge's message must be computed from that edge alone, and from reductions at
    its two ends: a worker has some edges only, in a numbering of its own. It is looked at once per
    kind of call, by its operators; whatever mixes edges, computes with ids of nodes or with how
    many edges or nodes there are (but for ``size_i`` and the like, where they are only numbers), or
    hands values to Python, is refused. A message that counts its own calls runs in one shot.

    Args:
        mode: 1, 2 or 3. Source: SAR (Mostafa, MLSys 2022), "SAR's training modes". Mode 3 is one
            shot for every aggregation: where one may depend on the order of a node's edges, they
            come by target and in the whole graph's order.
        prefetch: Shards fetched ahead by the prefetch thread (modes 1 and 2). 0 fetches each
            shard when it is needed; 1 hides a fetch behind the aggregation of one shard, at the
            cost of a second resident shard. Outgoing gradients then stay in flight behind the
            next shard where no shard is fetched meanwhile or workers share memory.
        message_budget: Bytes of messages and message inputs materialized at a time. ``None``: a
            quarter of what the worker's own rows of the layer take, so that it shrinks with the
            partition, but at least 4 MiB and at most 8 MiB.
        strategy: ``'auto'`` goes through the edges by source workers (sequential aggregation)
            where partial states merge, and else by chunks of targets with all their in-edges;
            ``'chunked'`` always takes the latter way. Modes 1 and 2; mode 3 takes neither.
        kernels: ``'auto'`` takes the C++ kernels, in modes 1 and 2, for sums and extrema of source
            rows, sums weighted by numbers of the edges, and softmax attention that they know: no
            message is materialized. With a warning where they were not built. On one process they
            also take plain edges. ``'off'``: by PyTorch's operators alone.
        push: ``'auto'`` lets sums of source rows, weighted by constants or not, take the fewest
            rows over the wire where workers are on several hosts and the wire is exact: for each
            pair of workers a minimum vertex cover says which source rows are pulled and for which
            targets partial sums are pushed (modes 1 and 2, with the kernels). So does the softmax
            attention that the kernels know, by the bytes that its rows take, where there are no
            edge features: queries go to the sources' worker, partial softmax states come back;
            in the backward pass what is known of a target goes there, and in mode 1 few source rows
            or none are fetched again. Where all workers read each other's memory, rows are pulled
            in the forward pass; the backward pass of sums and of additive attention is the sources'
            workers', which read what is known of their peers' targets. ``'off'`` pulls all rows and
            returns their gradients. Must be the same on all workers.
        wire: How halo rows and their gradients travel in :meth:`propagate`, in all modes:
            ``'exact'``; or rounded, in about half the bytes of float32, with gradients that
            differ from those of one process (:func:`pyg_sar.train.gradient_error` measures it):
            ``'bfloat16'`` (8 bits of precision), ``'float16'`` (11, each row with an exponent of
            its own); or in a quarter and less as integers of 8, 4 or 2 bits with a scale for each
            row, rounded stochastically: ``'int8'``, ``'int4'``, ``'int2'``. Integers, truth values
            and 16-bit floats always travel as they are, as does what a model reads outside
            :meth:`propagate`. What is rounded doesn't depend on where workers run, nor on which
            of them host several parts: those of one host then send rows, too, instead of reading
            them in place, and rows are always pulled. Must be the same on all workers.
        transform_first: Where a layer applies a linear map to sums or means of source rows and the
            map narrows them (``SAGEConv``, ``GraphConv``, ``RGCNConv`` and more of PyG's,
            docs/how_it_works.md), source rows are mapped first: halo rows then have the output's
            width, :math:`F' < F`, in the table above. The same up to rounding. Not where it would
            take more (constant features in training need :math:`2 F' < F`), nor on one process
            where a layer runs as PyG's. ``False``: in PyG's order. Must be the same on all workers.
        random: How layers draw random numbers for their edges while they train (dropout of
            attention weights): ``'same'``: as one process would, in its order, so that outputs and
            gradients are plain PyG's for the same ``torch.manual_seed``; ``'keyed'``: by a
            counter-based generator, the same for any number of workers and any partition. For both,
            seed all workers alike. ``None``: each worker its own, also for edges of which the other
            two don't know where they stand in the graph's list. See docs/whole-graph.md for what
            they cost. Must be the same on all workers.
        refresh_every: Steps from one exchange of halo rows and their gradients to the next, in
            training; in between a layer takes the rows and gradients of the last exchange (stale
            features, as in PipeGCN, Sancus and DistGNN). Above 1, gradients differ from those of
            one process (:func:`pyg_sar.train.gradient_error` measures it); evaluation is exact.
            Needs mode 3, and keeps the halo's rows of each layer. Must be the same on all workers.
        measure_every: In training by :class:`pyg_sar.Trainer`, the error of the gradients is
            measured in the first and then in every so many epochs, at the price of two more steps,
            and recorded by open ledgers. ``None``: never.

    Raises:
        ValueError: When an argument is out of range.
    """

    mode: int = 1
    prefetch: Literal[0, 1] = 1
    message_budget: int | None = None
    strategy: Literal["auto", "chunked"] = "auto"
    kernels: Literal["auto", "off"] = "auto"
    push: Literal["auto", "off"] = "auto"
    wire: Literal["exact", "bfloat16", "float16", "int8", "int4", "int2"] = "exact"
    transform_first: bool = True
    random: Literal["same", "keyed"] | None = "same"
    refresh_every: int = 1
    measure_every: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (1, 2, 3):
            raise ValueError(f"Expected 'mode' to be 1, 2 or 3 (got {self.mode!r})")
        if self.prefetch not in (0, 1):
            raise ValueError(f"Expected 'prefetch' to be 0 or 1 (got {self.prefetch!r})")
        if self.strategy not in ("auto", "chunked"):
            raise ValueError(
                f"Expected 'strategy' to be 'auto' or 'chunked' (got {self.strategy!r})"
            )
        if self.push not in ("auto", "off"):
            raise ValueError(f"Expected 'push' to be 'auto' or 'off' (got {self.push!r})")
        if self.kernels not in ("auto", "off"):
            raise ValueError(f"Expected 'kernels' to be 'auto' or 'off' (got {self.kernels!r})")
        if self.wire not in WIRES:
            raise ValueError(
                f"Expected 'wire' to be one of {', '.join(map(repr, WIRES))} (got {self.wire!r})"
            )
        if not isinstance(self.transform_first, bool):
            raise ValueError(
                f"Expected 'transform_first' to be True or False (got {self.transform_first!r})"
            )
        if self.random not in (None, "same", "keyed"):
            raise ValueError(
                f"Expected 'random' to be 'same', 'keyed' or None (got {self.random!r})"
            )
        steps = self.refresh_every
        if not _is_whole(steps) or steps < 1:
            raise ValueError(f"Expected 'refresh_every' to be an integer >= 1 (got {steps!r})")
        if steps > 1 and self.mode != 3:
            raise ValueError(f"refresh_every={steps} needs mode=3 (got mode={self.mode})")
        every = self.measure_every
        if every is not None and (not _is_whole(every) or every < 1):
            raise ValueError(
                f"Expected 'measure_every' to be an integer >= 1 or None (got {every!r})"
            )
        budget = self.message_budget
        if budget is not None and (not _is_whole(budget) or budget < 1):
            raise ValueError(
                f"Expected 'message_budget' to be a number of bytes >= 1 or None (got {budget!r})"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
