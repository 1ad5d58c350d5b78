"""Who waits in vain: what is certain, and what must never be taken for it."""

from __future__ import annotations

import time

import pytest
import torch
from oracle import parts, workers

from pyg_sar.comm import watch
from pyg_sar.comm.group import current
from pyg_sar.comm.messages import (
    MEET,
    READ,
    RECEIVE,
    SEND,
    WROTE,
    Posts,
    State,
    explain,
    from_text,
    in_vain,
    mark_of,
    to_text,
)
from pyg_sar.errors import CommTimeoutError, WorkerError

Messages = list[tuple[str, int, str]]


def waits(*messages: tuple[str, int, str], before: Messages | None = None) -> State:
    """The state of a worker that waits for messages, after others."""
    posts = Posts()
    for message in before or []:
        posts.note(*message)
    with posts.waiting(messages):
        return posts.state("something")


def swap(peer: int, name: str) -> Messages:
    return [(SEND, peer, name), (RECEIVE, peer, name)]


def meet(world: int, rank: int, name: str) -> Messages:
    return [(MEET, peer, name) for peer in range(world) if peer != rank]


def test_different_operations():
    states = {0: waits(*swap(1, "mean")), 1: waits(*swap(0, "fetch"))}
    assert in_vain(states, ()).keys() == {0, 1}
    text = str(explain(in_vain(states, ()), states, ()))
    assert "rank 0 waits to send to rank 1 in something (mean)" in text
    assert "rank 1 waits to send to rank 0 in something (fetch)" in text


def test_the_same_operation_may_take_long():
    states = {0: waits(*swap(1, "fetch")), 1: waits(*swap(0, "fetch"))}
    assert in_vain(states, ()) == {}
    # One is done with it, and waits in the next: what it sent may still be on its way.
    states[1] = waits(*swap(0, "next"), before=swap(0, "fetch"))
    assert in_vain(states, ()) == {}


def test_who_computes_is_not_suspected():
    assert in_vain({0: waits(*swap(1, "fetch"))}, ()) == {}
    # 0 waits for 1, that for 2, which computes.
    states = {0: waits((RECEIVE, 1, "a")), 1: waits((RECEIVE, 2, "b"))}
    assert in_vain(states, ()) == {}
    # So with somebody who has just come back from a wait.
    assert in_vain({**states, 2: waits()}, ()) == {}
    # 2 waits, too: for nobody, but in a circle; then for somebody who sends; then it has ended.
    assert in_vain({**states, 2: waits((RECEIVE, 0, "c"))}, ()).keys() == {0, 1, 2}
    states[1] = waits((RECEIVE, 2, "b"), before=[(SEND, 2, "d")])
    assert in_vain({**states, 2: waits((RECEIVE, 1, "d"))}, ()) == {}
    assert in_vain({**states, 2: waits()}, {2}).keys() == {0, 1}


def test_those_who_go_on_are_left_out():
    """0 and 1 wait for each other, 2 for both, 3 for a message that is on its way."""
    states = {
        0: waits(*swap(1, "mean"), before=[(SEND, 3, "a")]),
        1: waits(*swap(0, "fetch")),
        2: waits((RECEIVE, 0, "x"), (RECEIVE, 1, "x")),
        3: waits((RECEIVE, 0, "a")),
    }
    assert in_vain(states, ()).keys() == {0, 1, 2}


def test_collectives_and_shared_memory():
    states = {rank: waits(*meet(3, rank, "sum")) for rank in range(3)}
    assert in_vain(states, ()) == {}
    states[2] = waits(*meet(3, 2, "max"))
    assert in_vain(states, ()).keys() == {0, 1, 2}
    # Letters are numbered by subject, and their writers don't wait.
    states = {
        0: waits((f"{READ} 1", 1, "rows")),
        1: waits((f"{READ} 2", 0, "rows"), before=[(f"{WROTE} 2", 0, "rows")]),
    }
    assert in_vain(states, ()).keys() == {0, 1}
    states[1] = waits((f"{READ} 2", 0, "rows"), before=[(f"{WROTE} 1", 0, "rows")])
    assert in_vain(states, ()) == {}


def test_a_state_travels():
    state = waits(*swap(1, "a"), before=swap(2, "b"))
    found = from_text(to_text(state))
    assert (found.wait_number, found.doing, tuple(found.waits)) == (
        state.wait_number,
        state.doing,
        state.waits,
    )
    assert found.posted == state.posted
    assert 0 <= mark_of("a") < 1 << 30 and mark_of("a") != mark_of("b")


# On workers ##################################################################

LABEL = ("conv", "forward", "fetch")


def exchange(dtype: torch.dtype = torch.float32) -> None:
    comm = current()
    for step in range(1, comm.world_size):
        dst, src = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        rows = torch.ones(3, 2, dtype=dtype)
        comm.exchange(rows, dst, torch.empty_like(rows), src, label=LABEL).wait()


def test_different_tensors():
    """Of parts; test_failures has workers."""

    def other_dtype() -> None:
        exchange(torch.float64 if current().rank == 1 else torch.float32)

    def other_sum() -> None:
        current().all_reduce(torch.ones(3 + current().rank))

    with pytest.raises(WorkerError, match=r"Rank \d expects 'conv forward fetch, float"):
        parts(other_dtype, 3)
    with pytest.raises(WorkerError, match=r"Rank \d expects 'all_reduce \(sum\) \[sum\], float32"):
        parts(other_sum, 2)


def test_a_worker_that_computes_keeps_the_others_waiting():
    """For longer than the time after which a wait is looked into."""

    def work() -> None:
        comm = current()
        watch.BEAT, watch.STUCK = 0.1, 0.3
        for step in range(2):
            if comm.rank == step:
                time.sleep(5 * watch.STUCK)
            exchange()
            comm.barrier()
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError, match="did not end within"):
                comm.exchange(None, 1, torch.empty(1), 1, label=LABEL).wait(0.3)
            comm.all_gather_object("it is over")
            comm.exchange(None, 1, torch.empty(1), 1, label=LABEL)
        else:
            time.sleep(1.0 if comm.rank == 1 else 0.0)
            if comm.rank == 1:
                comm.exchange(torch.ones(1), 0, None, 0, label=LABEL).wait()
            comm.all_gather_object("it is over")
            if comm.rank == 1:
                comm.exchange(torch.ones(1), 0, None, 0, label=LABEL).wait()

    workers(work, 3)
