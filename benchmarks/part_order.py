"""The order of parts in which a planned cache of rows reads the fewest rows.

Parts that need the same rows should follow each other. The search starts from the better of two
orders, the given one and a greedy one (each part is followed by that which shares the most halo
rows with it; HongTu, SIGMOD 2024, section 5.3), and takes on random changes that make the plan's
own cost smaller: a stretch of parts reversed, or one part put elsewhere.

[Note: the sample] A plan of a random sample of the rows, with a cache smaller in proportion, reads
about that fraction of the rows, so that the time of the search does not grow with the graph. The
order that was found is taken only if the plan of all rows reads fewer with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from row_loads import loads

from pyg_sar.exchange.row_plan import nearest, next_uses, plan_rows

_Ints = NDArray[Any]

SAMPLE = 20_000
"""About the halo rows of all parts that the search looks at."""


def order_parts(
    needs: Sequence[_Ints],
    first: Sequence[int] | _Ints,
    capacity: int,
    published_stay: bool = True,
    tries: int = 500,
) -> tuple[list[int], int]:
    """Searches an order of the parts in which few rows are read.

    The same arguments give the same order.

    Args:
        needs: Positions of the halo rows of each part, ascending, ``[H_k]`` integers.
        first: Where each part's published rows begin, and at last their number M, ``[P + 1]``.
        capacity: Rows that the cache may hold.
        published_stay: Whether rows may enter the cache when they are published.
        tries: Changes that are tried.

    Returns:
        The parts in their order, and the rows that a pass reads then; no more than in the order
        ``0, 1, ...``.

    Raises:
        ValueError: As of :func:`plan_rows`.
    """
    given = list(range(len(needs)))
    before = loads(plan_rows(needs, first, capacity, given, published_stay)).rows
    draw = np.random.default_rng(0)
    total = sum(rows.size for rows in needs)
    sampled = draw.random(int(first[-1])) * total < SAMPLE
    number = np.cumsum(sampled) - 1
    few = [number[rows[sampled[rows]]] for rows in needs]
    room = round(min(capacity, sampled.size) * float(sampled.mean())) if sampled.size else 0
    starts = (given, _greedy(few))
    cost, best = min((_cost(few, int(sampled.sum()), room, o, published_stay), o) for o in starts)
    for _ in range(tries if len(needs) > 2 else 0):
        changed = _changed(best, draw)
        found = _cost(few, int(sampled.sum()), room, changed, published_stay)
        if found <= cost:  # Equal ones may lead further.
            cost, best = found, changed
    after = loads(plan_rows(needs, first, capacity, best, published_stay)).rows
    return (best, after) if after < before else (given, before)


def _greedy(needs: Sequence[_Ints]) -> list[int]:
    left, order = list(range(1, len(needs))), [0][: len(needs)]
    while left:
        last = needs[order[-1]]
        shared = [np.intersect1d(last, needs[part], assume_unique=True).size for part in left]
        order.append(left.pop(int(np.argmax(shared))))
    return order


def _changed(order: list[int], draw: np.random.Generator) -> list[int]:
    i, j = sorted(draw.choice(len(order), 2, replace=False).tolist())
    if draw.random() < 0.5:
        return order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
    if draw.random() < 0.5:
        i, j = j, i
    rest = order[:i] + order[i + 1 :]
    return [*rest[:j], order[i], *rest[j:]]


def _cost(
    needs: Sequence[_Ints], num_rows: int, capacity: int, order: list[int], published_stay: bool
) -> int:
    """Counts the rows that a plan reads, without making one."""
    lists = [needs[part] for part in order]
    never, total = len(lists), 0
    following, opening = next_uses(lists, num_rows)
    held = opening if published_stay else np.full(num_rows, never, np.int32)
    _drop(held, never, capacity)
    for rows, uses in zip(lists, following, strict=True):
        total += int(np.count_nonzero(held[rows] == never))
        held[rows] = uses
        _drop(held, never, capacity)
    return total


def _drop(held: _Ints, never: int, capacity: int) -> None:
    """Keeps ``capacity`` rows, those that are needed soonest."""
    rows = np.flatnonzero(held != never)
    held[rows[~nearest(held[rows], capacity)]] = never
