"""Errors of one worker that are raised on all of them, so that none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
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
    problems = comm.from_everyone(problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise kind(text if problems.count(text) == len(problems) else f"{text} (rank {rank})")
