"""Workers that run one script: one acts for all of them, and all draw the same numbers."""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable
from typing import Any

from pyg_sar.comm.devices import seed_generators
from pyg_sar.comm.group import Communicator
from pyg_sar.errors import PygSarError
from pyg_sar.partition.global_view import STATES, random_digest, share_random_states


class Together:
    """The workers of one script. Its methods are collective."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.alone = False
        """While rank 0 acts for all, nothing is to be done together."""
        self._calls = 0
        self._seeds = random.Random()

    # One for all -------------------------------------------------------------

    def first(self, work: Callable[[], Any]) -> Any:
        """Returns what ``work()`` returns at rank 0, where alone it runs: what has a JSON form.

        The others wait. Afterwards the random states of all are those of rank 0. An error is raised
        at every rank; where its type is not Python's own, the others raise a ``RuntimeError``.
        """
        failure: Exception | None = None
        outcome: list[Any] = []
        if self.comm.rank == 0:
            before = self.states()
            self.alone, acted = True, self.alone
            try:
                outcome = ["result", work(), self.states() != before]
            except Exception as error:  # Whatever it is, the others must not wait for more.
                failure = error
                outcome = ["error", type(error).__name__, str(error)]
            finally:
                self.alone = acted
        kind, *rest = self.comm.broadcast_object(outcome)
        if failure is not None:
            raise failure
        if kind == "error":
            name, text = rest
            found = getattr(builtins, name, RuntimeError)
            known = isinstance(found, type) and issubclass(found, Exception)
            raise (found if known and found is not UnicodeDecodeError else RuntimeError)(text)
        result, drew = rest
        if drew:
            share_random_states(self.comm)
        return result

    # Random numbers ----------------------------------------------------------

    def seed_all(self) -> None:
        """Gives all workers one seed, which rank 0 draws."""
        seed = self.comm.broadcast_object(random.SystemRandom().getrandbits(63))
        seed_generators(seed)
        self._seeds = random.Random(seed)

    def new_seed(self) -> int:
        """Returns a seed for what would take one from the system, the same on all workers."""
        return self._seeds.getrandbits(32)

    def states(self) -> str:
        """Returns what tells the states of this worker's generators from others."""
        return random_digest(self.comm.device).hex()

    def count_call(self) -> None:
        """Counts calls of models; at the 1st, 2nd, 4th, ... it checks the random states."""
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            self.check_states(f"call {self._calls} of a model")

    def check_states(self, where: str) -> None:
        """Checks that all workers have drawn the same random numbers; an error names the ranks."""
        everyone = self.comm.all_gather_object(self.states(), label=STATES)
        other = [rank for rank, found in enumerate(everyone) if found != everyone[0]]
        if other:
            raise PygSarError(
                f"At {where} rank(s) {other} have drawn other random numbers than rank 0, so the "
                "workers no longer run the same script. Seeds and decisions must not depend on "
                "the time, the process or the rank"
            )
