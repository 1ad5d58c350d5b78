"""Errors of one worker that are raised on all of them, so that none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyg_sar.comm.communicator import Communicator


@contextmanager
def raised_everywhere(
    comm: Communicator, kind: type[Exception], what: str, *caught: type[Exception]
) -> Iterator[None]:
    """Raises what any worker meets in the block on all of them, as ``kind``. Collective.

    Args:
        comm: The workers; of all replicas, if there are several.
        kind: What is raised in the place of those that are ``caught``.
        what: How its text begins. The rank follows unless all met the same.
    """
    problem = None
    try:
        yield
    except caught as error:
        problem = f"{what}{error}"
    raise_any(kind, comm.from_everyone(problem))


def raise_any(kind: type[Exception], problems: Sequence[str | None]) -> None:
    """Raises the problems of workers, by rank; without the rank one that all of them have."""
    ranks = {text: rank for rank, text in reversed(list(enumerate(problems))) if text}
    everywhere = len(ranks) == 1 and all(problems)
    texts = sorted(ranks, key=ranks.__getitem__)
    if texts:
        named = [text if everywhere else f"{text} (rank {ranks[text]})" for text in texts]
        raise kind("; ".join(named))
