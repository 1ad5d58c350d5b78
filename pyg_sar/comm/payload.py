"""What travels: tensors made ready to be sent, objects as bytes, and the count of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_sar.ledger import Label

Outgoing = Tensor | Callable[[], Tensor | None] | None
"""What to send: a tensor, a function that packs it on the issuing thread, or nothing."""

COLLECTIVE = -1
"""The peer that ledgers are told for collectives."""

SUM: Label = ("", "", "sum")
GATHER: Label = ("", "", "gather")
BROADCAST: Label = ("", "", "broadcast")
OBJECT: Label = ("", "", "object")
BARRIER: Label = ("", "", "barrier")


def spoken(label: Label) -> str:
    """A label in words: those of its parts that are there."""
    return " ".join([part for part in label if part])


class Counting(Protocol):
    """What a communicator reports its transfers to: a ledger."""

    def transfer(
        self, label: Label, peer: int, *, sent: int, received: int, transport: str
    ) -> None:
        """Records bytes that went to or came from ``peer``."""


def pack(send: Outgoing) -> Tensor:
    """Returns what to send, contiguous; an empty tensor for nothing."""
    tensor = send() if callable(send) else send
    if tensor is None:
        return torch.empty(0)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def count(
    ledgers: Sequence[Counting],
    label: Label,
    sends: Mapping[int, int],
    recvs: Mapping[int, int],
    transport: str,
) -> None:
    """Tells ledgers of the bytes that went to and came from single ranks."""
    for ledger in ledgers:
        for peer, size in sends.items():
            ledger.transfer(label, peer, sent=size, received=0, transport=transport)
        for peer, size in recvs.items():
            ledger.transfer(label, peer, sent=0, received=size, transport=transport)


def count_all(
    ledgers: Sequence[Counting], label: Label, sent: int, received: int, transport: str
) -> None:
    """Tells ledgers of a collective."""
    for ledger in ledgers:
        ledger.transfer(label, COLLECTIVE, sent=sent, received=received, transport=transport)


def num_bytes(tensor: Tensor) -> int:
    """Returns the size of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def encode(obj: Any) -> Tensor:
    """Returns the bytes of ``obj`` as JSON.

    Raises:
        TypeError: When it has no JSON form.
    """
    try:
        text = json.dumps(obj)
    except (TypeError, ValueError) as error:
        raise TypeError(f"'obj' must have a JSON form: {error}") from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Returns the object whose :func:`encode` is ``data``."""
    return json.loads(data.cpu().numpy().tobytes())
