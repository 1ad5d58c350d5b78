"""``SARPolicy``: settings of how a layer runs distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyg_sar.files import check_argument, check_whole
from pyg_sar.usage import WIRES


@dataclass(frozen=True, kw_only=True, slots=True)
class SARPolicy:
    r"""Settings of how :meth:`DistMessagePassing.propagate` aggregates over a distributed graph.

    .. code-block:: python

        model = pyg_sar.distribute(model, pyg_sar.SARPolicy(mode=2))  # for all layers
        model.convs[0].policy = pyg_sar.SARPolicy(mode=3)  # for one, on all workers alike

    All modes give the same numbers. They differ in memory, computation and bytes sent. The halo of
    worker :math:`p` is the set of other workers' nodes that its edges come from; a shard is the
    part of it that one other worker owns. With :math:`H_p` halo rows of :math:`F` values of
    :math:`b` bytes:

    ====  ==============================  =====================  ======================
    mode  what happens                    remote rows in memory  bytes sent per layer
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

    In every mode a message must be computed from its edge alone, and from reductions at the edge's
    two ends, because a worker has only some edges, in a numbering of its own. The operators of a
    message are examined once per kind of call. A message is refused when it mixes edges, computes
    with ids of nodes or with how many edges or nodes there are (but for ``size_i`` and the like,
    where they are only numbers), or hands values to Python. A message that counts its own calls
    runs in one shot.

    Args:
        mode: 1, 2 or 3. Source: SAR (Mostafa, MLSys 2022), "SAR's training modes". In mode 3 an
            aggregation that may depend on the order of a node's edges gets them in the whole
            graph's order.
        prefetch: Shards fetched ahead by the prefetch thread (modes 1 and 2). 0 fetches each
            shard when it is needed; 1 hides a fetch behind the aggregation of one shard, at the
            cost of a second resident shard. Outgoing gradients then stay in flight behind the
            next shard where no shard is fetched meanwhile or workers share memory.
        message_budget: Bytes of messages and of their inputs that are in memory at a time.
            ``None``: a quarter of what the worker's own rows of the layer take, but at least 4 MiB
            and at most 8 MiB.
        strategy: ``'auto'`` goes through the edges by source workers (sequential aggregation)
            where an aggregation can be combined from the results of shards, and else by chunks of
            targets with all their in-edges. ``'chunked'`` always goes by chunks. For modes 1
            and 2; mode 3 does neither.
        kernels: ``'auto'`` takes the C++ kernels, in modes 1 and 2, for sums and extrema of source
            rows, sums weighted by numbers of the edges, and known softmax attention: no message is
            stored. A warning says so where they were not built. In one process they also take plain
            edges. ``'off'``: PyTorch's operators alone.
        push: ``'auto'`` sends the fewest rows where workers are on several hosts and the wire is
            exact (modes 1 and 2, with the kernels). For sums of source rows, weighted by constants
            or not, a minimum vertex cover of the edges between two workers says which source rows
            are pulled (sent to the targets' worker) and for which targets partial sums are pushed
            (computed by the sources' worker, and sent). Known softmax attention without edge
            features minimises bytes in the same way: queries go to the sources' worker, and partial
            softmax states come back; in the backward pass values of targets go there, and in mode 1
            few source rows or none are fetched again. Where all workers read each other's memory,
            rows are pulled in the forward pass. In the backward pass of sums and of additive
            attention the sources' workers read values of targets and compute the gradients.
            ``'off'`` pulls all rows and sends back their gradients. Must be the same on all
            workers.
        wire: How halo rows and their gradients are sent in :meth:`propagate`, in all modes.
            ``'exact'``: as they are. All others round, so that gradients differ from those of one
            process (:func:`pyg_sar.train.gradient_error` measures by how much): in about half the
            bytes of float32 ``'bfloat16'`` (8 bits of precision) and ``'float16'`` (11, each row
            with an exponent of its own); in a quarter and less ``'int8'``, ``'int4'``, ``'int2'``,
            integers of 8, 4 or 2 bits with a scale for each row, rounded stochastically. Integers,
            booleans and 16-bit floats are always sent as they are, and so is what a model reads
            outside :meth:`propagate`. The rounding doesn't depend on where workers run, nor on
            which of them host several parts: workers of one host then send rows, too, instead of
            reading them in place, and rows are always pulled. Must be the same on all workers.
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
            seed all workers alike. ``None``: each worker draws its own. This also serves edges
            whose place in the graph's edge list is not known, which the other two refuse. Their
            costs are in docs/whole-graph.md. Must be the same on all workers.
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
        for name, wanted in _CHOICES.items():
            value = getattr(self, name)
            said = ", ".join(map(repr, wanted[:-1])) + f" or {wanted[-1]!r}"
            check_argument(value in wanted, name, value, said)
        fits = isinstance(self.transform_first, bool)
        check_argument(fits, "transform_first", self.transform_first, "True or False")
        check_whole("refresh_every", self.refresh_every)
        check_whole("measure_every", self.measure_every, optional=True)
        check_whole("message_budget", self.message_budget, optional=True)
        if self.refresh_every > 1 and self.mode != 3:
            raise ValueError(
                f"refresh_every={self.refresh_every} needs mode=3 (got mode={self.mode})"
            )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": (1, 2, 3),
    "prefetch": (0, 1),
    "strategy": ("auto", "chunked"),
    "push": ("auto", "off"),
    "kernels": ("auto", "off"),
    "wire": WIRES,
    "random": ("same", "keyed", None),
}
"""Settings of a policy that are one of a few values."""
