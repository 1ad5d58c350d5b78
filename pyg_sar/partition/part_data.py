"""The ``Data`` and ``HeteroData`` of a part, which know what PyG's transforms would do to them.

[Note: transforms] A transform gets a part's tensors and takes them for the whole graph's: most
would centre, normalise or draw over this worker's nodes, and nobody would notice. All of PyG's copy
what they get before they change it (``BaseTransform.__call__``), so the copy is where they can be
told from other code, without touching PyG: ``__copy__`` looks who called it. Those known to give
the whole graph's numbers pass, all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.pyg_calls import library_frames, public_name

_BOUNDED = (
    lambda t: not t.norm or t.max is not None,
    "norm=True takes the largest value of all edges: say norm=False, or max_value=...",
)

RIGHT: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "AddRemainingSelfLoops", "AddSelfLoops", "Compose", "Constant", "GCNNorm",
            "LinearTransformation", "LocalCartesian", "LocalDegreeProfile", "MaskToIndex",
            "OneHotDegree", "PointPairFeatures", "RemoveSelfLoops", "RemoveTrainingClasses",
            "ToDevice",
        ),
        (lambda t: True, ""),
    ),
    **dict.fromkeys(("Cartesian", "Distance", "Polar", "Spherical", "TargetIndegree"), _BOUNDED),
    "IndexToMask": (
        lambda t: t.sizes is None,
        "'sizes' are the whole graph's: leave them out",
    ),
}  # fmt: skip
"""Transforms that give a part the whole graph's numbers, on what condition, and what to do."""


class PartData(Data):
    """A worker's part of a graph: a ``Data``. See [Note: transforms]."""

    def __copy__(self) -> PartData:
        check_transform()
        copied: PartData = super().__copy__()
        return copied


class PartHeteroData(HeteroData):
    """A worker's part of a heterogeneous graph: a ``HeteroData``. See [Note: transforms]."""

    def __copy__(self) -> PartHeteroData:
        check_transform()
        copied: PartHeteroData = super().__copy__()
        return copied


def check_transform() -> None:
    """Raises where a transform copies a part of which it would take too much or too little.

    Raises:
        DistributedIndexError: Naming the transform, and the remedy.
    """
    for frame in library_frames():
        transform = frame.f_locals.get("self")
        if not isinstance(transform, BaseTransform):
            continue
        kind = type(transform)
        allowed, hint = lambda t: False, ""
        if kind.__module__.startswith("torch_geometric."):
            allowed, hint = RIGHT.get(kind.__name__, (allowed, hint))
        elif kind.forward is not BaseTransform.forward:
            hint = "If it changes each node by itself, call its forward(data)"
        if allowed(transform):
            return
        raise DistributedIndexError(
            f"'{public_name(kind.__module__, kind.__name__)}' on one worker's part of a "
            "distributed graph would take its nodes for all nodes, and give other numbers. Apply "
            f"it to the whole graph, before write_partitions(){'. ' if hint else ''}{hint}"
        )
