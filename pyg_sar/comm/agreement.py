"""Errors of one worker that are raised on all of them, so that none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyg_sar.comm.communicator import Communicator
from pyg_sar.errors import MismatchError

_PROBLEM = "A problem, or none: "


@contextmanager
def raised_everywhere(
    comm: Communicator, kind: type[Exception], what: str, *caught: type[Exception]
) -> Iterator[None]:
    """Raises what any worker meets in the block on all of them, as ``kind``. Collective.

    Args:
        comm: The workers; of all replicas, if there are several.
        kind: What is raised in the place of those that are ``caught``.
        what: How its text begins. The rank follows unless all met the same.

    Raises:
        MismatchError: Some workers told each other something else meanwhile.
    """
    problem = ""
    try:
        yield
    except caught as error:
        problem = f"{what}{error}" or type(error).__name__
    said = comm.from_everyone(f"{_PROBLEM}{problem}")
    others = [k for k, one in enumerate(said) if not str(one).startswith(_PROBLEM)]
    if others:
        raise MismatchError(
            f"Ranks {others} called another function than rank {comm.rank}, in which all workers "
            "tell each other something: call the same on all of them, in the same order"
        )
    problems = [one.removeprefix(_PROBLEM) for one in said]
    for rank, text in enumerate(problems):
        if text:
            raise kind(text if problems.count(text) == len(problems) else f"{text} (rank {rank})")
