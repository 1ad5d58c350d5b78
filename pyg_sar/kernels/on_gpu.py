"""Which operators compute on a GPU: Triton's kernels, or PyTorch.

[Note: kernels check themselves] These kernels were written where no GPU was at hand, and ran mostly
by Triton's interpreter alone (docs/gpu.md). So each, before its first use on a device with a dtype
and a shape of rows, computes a small case of this shape, which is compared with PyTorch's operators
in float64 on the CPU. Where the two differ, or the kernel doesn't compile, it is left out for such
tensors with a warning, and PyTorch computes on the device.

Triton is imported on the first use on a device, never by ``import pyg_sar``.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_sar.kernels import KernelWarning, fallback
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.kernels.scores import declared, row_shape

DEVICE = "cuda"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Of the largest number of what is compared, which in half precision was rounded once.
_TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
_CHUNK = 16  # so that a target of the small case has several chunks


def takes(rows: Tensor) -> bool:
    """Tells whether the kernels are made for tensors of this device and dtype."""
    return rows.device.type == DEVICE and rows.dtype in _DTYPES


@cache
def why_missing() -> str | None:
    """Returns why there is no Triton, or ``None`` where there is."""
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed"
    try:
        importlib.import_module("triton.language")
    except Exception as error:
        return f"the package 'triton' can't be imported: {_first_line(error)}"
    return None


@cache
def warn_if_missing() -> None:
    """Warns, once in a process, where there is a GPU and no Triton."""
    reason = why_missing()
    if reason is not None:
        warnings.warn(
            f"pyg_sar runs without its kernels for GPUs, with the same results but slower: {reason}"
            ". PyTorch for CUDA brings it, or `pip install triton`; SARPolicy(kernels='off') "
            "silences this",
            KernelWarning,
            stacklevel=2,
        )


def sums_operator(name: str, rows: Tensor) -> Callable[..., Any]:
    """The operator ``name`` of :mod:`pyg_sar.kernels.fallback` for rows ``[*, F]`` on a GPU."""
    width = rows.size(-1)
    if why_missing() is None and _agrees(name, rows.device, rows.dtype, width):
        found: Callable[..., Any] = getattr(_operators(), name)
        return found
    stand_in: Callable[..., Any] = getattr(fallback, name)
    return stand_in


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The constants that the attention kernels are compiled with.

    Attributes:
        kind: The score's number.
        heads: H.
        channels: C.
        features: Numbers of an edge, or ``None``.
        own_key: Keys are others than the values.
        own_query: There is a query.
        drop: 0 without dropout, else axes of the drop key: 1 (hashed) or 2 (bits).
        p: Probability of dropout.
        slope: Of the leaky ReLU.
        scale: Of inner products.
    """

    kind: int
    heads: int
    channels: int
    features: int | None
    own_key: bool
    own_query: bool
    drop: int
    p: float
    slope: float
    scale: float


def attention_operators(shape: AttentionShape, value: Tensor) -> Any:
    """The module with ``attention_`` and ``attention_backward_`` by Triton for a GPU's tensors.

    ``None`` where PyTorch computes them.
    """
    if why_missing() is not None or not _operators().fits(shape.heads, shape.channels):
        return None
    if not _agrees("attention_", value.device, value.dtype, shape):
        return None
    return _operators()


def _operators() -> Any:
    return importlib.import_module("pyg_sar.kernels.triton_operators")


# The check ####################################################################


@cache
def _agrees(name: str, device: torch.device, dtype: torch.dtype, shape: Any) -> bool:
    """Tells whether a kernel gives PyTorch's numbers. See [Note: kernels check themselves]."""
    with torch.no_grad(), torch.inference_mode(False):
        try:
            apart = _difference(name, device, dtype, shape)
            reason = f"gives numbers that are {apart:.1e} apart from PyTorch's"
            if apart <= _TOLERANCES[dtype if name == "gather_sum_" else wide_dtype(dtype)]:
                return True
        except Exception as error:  # Compilers raise all kinds.
            reason = f"fails ({type(error).__name__}: {_first_line(error)})"
    warnings.warn(
        f"pyg_sar's Triton kernel {name.rstrip('_')!r} for {dtype} on {device} {reason}, and is "
        f"left out: PyTorch's operators compute, with the same results but slower ({shape})",
        KernelWarning,
        stacklevel=3,
    )
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _difference(name: str, device: torch.device, dtype: torch.dtype, shape: Any) -> float:
    """The largest difference, relative to the largest number of each result (or to 1)."""
    run = _attention_results if isinstance(shape, AttentionShape) else _sums_results
    found = run(_operators(), _Small(device, dtype, dtype), name, shape, chunk=_CHUNK)
    expected = run(fallback, _Small(torch.device("cpu"), dtype, torch.float64), name, shape)
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        apart = (ours.cpu().double() - theirs.double()).abs().max()
        worst = max(worst, float(apart / theirs.abs().max().clamp(min=1)))
        worst = worst if bool(ours.isfinite().all()) else float("inf")
    return worst


@dataclass(frozen=True, slots=True)
class _Small:
    """Draws a small graph and its numbers, the same for every device.

    Args:
        device: Where.
        given: The dtype whose numbers these are.
        used: The dtype that they have.
    """

    device: torch.device
    given: torch.dtype
    used: torch.dtype

    SOURCES, TARGETS, EDGES = 7, 9, 90

    def edges(self, shard: int = 0) -> tuple[Tensor, Tensor]:
        """Sources and targets, sorted by target; one of them has most edges, and some have none."""
        draw = torch.Generator().manual_seed(shard)
        target = torch.randint(self.TARGETS - 2, (self.EDGES,), generator=draw)
        target[: self.EDGES // 2] = 3
        source = torch.randint(self.SOURCES - 1, (self.EDGES,), generator=draw)
        return source.to(self.device), target.sort().values.to(self.device)

    def grouped(self, key: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Edges by key, of the keys that occur: what each reads, offsets, keys and numbers."""
        numbers = key.argsort(stable=True)
        keys, counts = key.unique(return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return other[numbers].int(), offsets.int(), keys, numbers.int()

    def numbers(self, seed: int, *shape: int, wide: bool = False) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        dtype = wide_dtype(self.used) if wide else self.used
        drawn = torch.randn(*shape, generator=draw, dtype=torch.float64)
        return drawn.to(self.given).to(dtype).to(self.device)


def _sums_results(kernels: Any, small: _Small, name: str, width: int, **how: int) -> list[Tensor]:
    source, target = small.edges()
    by_target = small.grouped(target, source)
    rows = small.numbers(0, small.SOURCES, width)
    out = small.numbers(1, small.TARGETS, width)
    weight = small.numbers(2, small.EDGES, wide=True)
    if name == "gather_sum_":
        plain = out.clone()
        kernels.gather_sum_(plain, rows, *by_target[:3], None, None, **how)
        kernels.gather_sum_(out, rows, *by_target[:3], weight, by_target[3], **how)
        return [plain, out]
    if name == "edge_dot":
        return [kernels.edge_dot(rows, out, *by_target, **how)]
    found: list[Tensor] = []
    rows = rows.round()  # Several rows reach an extremum.
    for largest in (True, False):
        best = torch.full_like(out, -torch.inf if largest else torch.inf)
        ties, total = torch.zeros_like(best), small.numbers(3, small.SOURCES, width)
        at = source.int()[:0], torch.zeros(1, dtype=torch.int32, device=small.device), None
        kernels.extremum_(best, ties, rows, *at, largest)
        kernels.extremum_(best, ties, rows, *by_target[:3], largest)
        by_source = small.grouped(source, target)
        hits = kernels.extremum_backward_(total, rows, out, best, *by_source[:3])
        found += [best.masked_fill(best.isinf(), 0), ties, total, hits]
    return found


def _attention_results(
    kernels: Any, small: _Small, name: str, shape: AttentionShape, **how: int
) -> list[Tensor]:
    heads, channels = shape.heads, shape.channels
    score = declared()[shape.kind]
    sources, targets, edges = small.SOURCES, small.TARGETS, small.EDGES
    value = small.numbers(1, sources, heads, channels)
    of_key, of_query = (row_shape(n, value) for n in (score.narrow_key, score.narrow_query))
    key = small.numbers(2, sources, *of_key) if shape.own_key else None
    query = small.numbers(3, targets, *of_query) if shape.own_query else None
    att = None
    if score.att:
        att = small.numbers(4, *((2,) if score.att == 2 else ()), heads, channels)
    attr = weight = drop = None
    if shape.features is not None:
        attr = small.numbers(5, edges, shape.features)
        weight = small.numbers(6, shape.features, *of_key)
    if shape.drop:
        words = () if shape.drop == 1 else ((heads + 31) // 32,)
        draw = torch.Generator().manual_seed(7)
        bounds = -(2**31), 2**31
        drop = torch.randint(*bounds, (edges, *words), generator=draw).int().to(small.device)
    terms = shape.kind, value, key, query, att, attr, weight, shape.slope, shape.scale
    dropped = drop, *fallback.split_seed(2**40 + 5), shape.p
    acc = small.numbers(8, targets, heads, channels, wide=True).zero_()
    top = torch.full_like(acc[:, :, 0], -torch.inf)
    norm = torch.zeros_like(top)
    ends = [small.edges(shard) for shard in (0, 1)]
    for source, target in ends:
        kernels.attention_(acc, top, norm, *terms, *small.grouped(target, source), *dropped, **how)
    none = top == -torch.inf
    out = acc / norm.masked_fill(none, 1).unsqueeze(-1)
    results = [out, top.masked_fill(none, 0)]
    grad = small.numbers(9, targets, heads, channels, wide=True)
    known = grad, top, norm, (grad * out).sum(-1)
    source, target = ends[0]
    for transposed in (True, False):
        wanted = [
            None if t is None else torch.zeros_like(t, dtype=acc.dtype)
            for t in (value, key, query, att, attr, weight)
        ]
        by_source = range(6) if score.by_source else range(2)
        for k in range(6):
            if (k in by_source) != transposed:
                wanted[k] = None
        by = small.grouped(source, target) if transposed else small.grouped(target, source)
        given = (*wanted, *known, *terms, *by, *dropped, transposed)
        if kernels is fallback:
            kernels.attention_backward_(*given)
        elif transposed:  # Rows are found where they lie.
            there = torch.arange(sources, device=small.device).flip(0)
            rows = [None if t is None else t.flip(0) for t in (value, key)]
            own = shape.kind, *rows, *terms[3:]
            given = (*wanted, *known, *own, *by, *dropped, transposed)
            kernels.attention_backward_(*given, there.int(), **how)
        elif not score.by_source:
            kernels.attention_backward_(*given, None, **how)
        results += [t for t in wanted if t is not None]
    return results
