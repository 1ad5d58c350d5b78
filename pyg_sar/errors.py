"""The exceptions of the package. User mistakes are ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class PygSarError(RuntimeError):
    """Base of the package's own errors."""


class CommTimeoutError(PygSarError, TimeoutError):
    """A transfer did not end in time, though no worker is known to be lost."""


class MismatchError(PygSarError):
    """The workers run different operations, so that none of them can go on.

    A layer, a loss or ``backward()`` that only some of them call, or tensors whose dtypes or widths
    differ. The message names ranks and operations (layer, phase, kind).
    """


class WorkerError(PygSarError):
    """A worker failed.

    Args:
        message: What happened.
        rank: The rank where the failure began (not one that only ended because of it).
        traceback: That rank's traceback as text, where it is known.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), rank=self.rank, traceback=self.traceback), (str(self),)


class LostWorkerError(WorkerError):
    """A worker is gone: killed, crashed, unreachable, or ended before the others.

    :attr:`rank` is the lost one.
    """


class PartitionError(PygSarError, ValueError):
    """A partition folder is damaged, incomplete, of another version or of another world size."""


class CheckpointError(PygSarError, ValueError):
    """A checkpoint cannot be written, read, or used with this model or these workers."""


class StoppedError(PygSarError):
    """A signal asked the workers to save a checkpoint and end."""


class DivergedError(PygSarError):
    """The loss is no longer a finite number."""


class ReportError(PygSarError, ValueError):
    """A report cannot be written to this folder."""


class StoreError(PygSarError):
    """Tensors can't be moved out of memory, or back: no store, no space, or a failing disk."""


class DistributedIndexError(PygSarError):
    """An operation on a distributed index has no distributed meaning here."""

    mixes_edges = False
    """A layer's message can't be computed from each worker's own edges; all workers raise it."""


class OneShotWarning(UserWarning):
    """A layer fetches its whole halo at once because its messages can't be computed in parts."""


def refuse_second_derivative(what: str, remedy: str) -> None:
    """Raises in a backward pass that is itself recorded (``create_graph=True``).

    Called where the gradient is computed by operations that autograd doesn't see: a derivative of
    it would lack all that they contribute. It is asked for at once, because autograd notices
    later only what depends on the incoming gradient.

    Args:
        what: Whose gradient it is, with its rank.
        remedy: What the user can do.

    Raises:
        NotImplementedError: When the backward pass is recorded.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{what}: second derivatives (create_graph=True) {remedy}")


@contextmanager
def named(place: str) -> Iterator[None]:
    """Notes on an error where it happened, if nothing more precise is noted yet."""
    try:
        yield
    except Exception as error:
        note_place(error, place)
        raise


def note_place(error: Exception, place: str) -> None:
    """Notes on an error where it happened, if nothing more precise is noted yet."""
    if not any(note.startswith("in ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in {place}")


def refuse_transforms(title: str) -> None:
    """Refuses a layer's call within ``torch.func``: its transforms don't see the other workers.

    Raises:
        DistributedIndexError: Within ``grad``, ``vmap``, ``jvp`` and what is made of them.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is None:
        return
    name, instead = _TRANSFORMS.get(transform.key().name, ("", "call it outside"))
    raise DistributedIndexError(
        f"{title} can't run within torch.func{name}, which does not transform what workers send "
        f"each other: {instead}"
    )


_REVERSE = "use torch.autograd.grad(), or backward()"
_TRANSFORMS = {
    "Grad": (".grad (nor vjp, jacrev, hessian)", _REVERSE),
    "Jvp": (".jvp (nor jacfwd, hessian)", _REVERSE),
    "Vmap": (".vmap (nor jacrev, jacfwd)", "call it once for each, in a loop"),
}
