"""The failure record: what the first worker to notice writes, and what all others raise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from pyg_sar.comm.issuer import Progress
from pyg_sar.comm.posts import Posts
from pyg_sar.errors import LostWorkerError, MismatchError, PygSarError, WorkerError

RESUME = (
    "The others can't go on without it: start all workers again; training resumes from the last "
    "checkpoint (pyg_sar.train.load_checkpoint)."
)

LAUNCHER = -1  # The "rank" of the process that started the workers.

OnFailure = Callable[[PygSarError], None]
GetProgress = Callable[[], Progress]


class Watch(ABC):
    """Finds out which worker failed, and tells the others when it's this one."""

    def start(self, on_failure: OnFailure, progress: GetProgress, posts: Posts) -> None:
        """Begins; ``on_failure`` is called, on any thread, once another worker has failed."""

    @abstractmethod
    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        """Returns why a transfer failed, having told the others."""

    @abstractmethod
    def report(self, error: BaseException) -> None:
        """Tells the others that this worker fails by its own ``error``."""

    def cause(self) -> PygSarError | None:
        """Returns which worker's failure explains that this one is told to end, if any."""
        return None

    def close(self) -> None:
        """Tells the others that this worker left, and ends."""


class NoWatch(Watch):
    """For launchers that end all workers themselves when one is lost (``mpirun``)."""

    def start(self, on_failure: OnFailure, progress: GetProgress, posts: Posts) -> None:
        pass

    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        return PygSarError(f"{doing} failed: {error}")

    def report(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


# The failure record ##########################################################


def lost(rank: int, how: str, by: int, doing: str) -> dict[str, Any]:
    """Returns the record of a lost worker."""
    return {"kind": "lost", "rank": rank, "how": how, "by": by, "doing": doing}


def failed(rank: int, error: BaseException) -> dict[str, Any]:
    """Returns the record of a worker that fails by its own error."""
    return {"kind": "error", "rank": rank, "how": f"{type(error).__name__}: {error}"[:4000]}


def unmatched(error: MismatchError, by: int) -> dict[str, Any]:
    """Returns the record of workers that run different operations."""
    return {"kind": "mismatch", "rank": by, "how": str(error)}


def to_error(record: Mapping[str, Any], me: int) -> PygSarError:
    """Returns the error to raise on rank ``me`` for a failure record."""
    rank, how = record["rank"], record["how"]
    if record["kind"] == "mismatch":
        return MismatchError(how)
    if record["kind"] == "error":
        return WorkerError(f"Rank {rank} failed, which ends rank {me} as well: {how}", rank=rank)
    who = "The launcher" if rank == LAUNCHER else f"Rank {rank}"
    seen = f"noticed by rank {record['by']} during: {record['doing']}"
    return LostWorkerError(f"{who} was lost: {how} ({seen}). {RESUME}", rank=rank)


def is_consequence(error: BaseException | None, rank: int) -> bool:
    """Returns whether ``error`` only tells rank ``rank`` of another rank's failure."""
    while error is not None:
        if isinstance(error, WorkerError) and error.rank != rank:
            return True
        error = error.__cause__ or error.__context__
    return False
