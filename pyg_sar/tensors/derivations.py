"""Numbers of tensors of ids and masks, by which what was made of them is known again.

[Note: derivations] A layer's ``forward`` may derive edges anew in each pass: it removes loops,
joins others, looks up degrees. The values are computed each time. Layouts of selected rows, plans
of exchanges and distributed edges would be, too, and take far longer. But an operator gives the
same for the same: a result of integers or bools gets the number of an earlier result of the same
operator in the same layout, if its arguments have the same numbers (compilers call this value
numbering). What is written, or drawn at random, gets a new number. All workers call the same
operators in the same order, so all find the same again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.tensors.rows import bytes_of

_MOST = 1024  # derivations that are remembered
KINDS = (torch.int64, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Unknown(Exception):
    """An argument of which it is not known whether it is the same."""


def note_derivation(comm: Communicator, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Gives results of an operator their numbers. See [Note: derivations]."""
    results = [*_with_ids(out)]
    if not results or torch.Tag.nondeterministic_seeded in func.tags:
        return
    try:
        given = _described((args, kwargs))
    except _Unknown:
        return
    if comm.derivations is None:
        comm.derivations = OrderedDict()
    known: OrderedDict[Any, int] = comm.derivations
    for place, tensor in results:
        key = func, given, place, tensor.rows.serial, tensor.axis
        tensor.derivation = known.setdefault(key, tensor.derivation)
        known.move_to_end(key)
    while len(known) > _MOST:
        known.popitem(last=False)


def _with_ids(out: Any) -> Iterator[tuple[int, Any]]:
    """Yields results that are node tensors of integers or bools, and their places."""
    for place, one in enumerate(out if isinstance(out, list | tuple) else [out]):
        ids = hasattr(one, "_derivation") and one._local.dtype in KINDS
        if ids and one.derivation is not None:
            yield place, one


def _described(value: Any) -> Any:
    """Returns what is equal for equal arguments, and for no others.

    Raises:
        _Unknown: Where that isn't known.
    """
    if isinstance(value, Tensor):
        return _described_tensor(value)
    if isinstance(value, list | tuple):
        return type(value), *map(_described, value)
    if isinstance(value, dict):
        return tuple((name, _described(one)) for name, one in value.items())
    if isinstance(value, bool | int | float | complex):
        return type(value), repr(value)
    if value is None or isinstance(value, str | torch.dtype | torch.device):
        return value
    if isinstance(value, torch.layout | torch.memory_format):
        return value
    raise _Unknown


def _described_tensor(tensor: Any) -> Any:
    if hasattr(tensor, "_derivation"):
        if tensor._local.dtype not in KINDS or tensor.derivation is None:
            raise _Unknown
        return "derivation", tensor.derivation
    on_cpu = tensor.device.type == "cpu"
    if type(tensor) is not Tensor or not on_cpu or tensor.layout != torch.strided:
        raise _Unknown
    repeated = [step == 0 for step in tensor.stride()]
    found = hashlib.blake2b(bytes_of(tensor).numpy().data, digest_size=16).digest()
    return tensor.dtype, *tensor.shape, *repeated, found
