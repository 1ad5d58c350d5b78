"""Who failed: heartbeats and a failure record in the workers' store.

[Note: Naming the lost worker]
When a worker is killed, the transfers with it fail at its neighbours; these end, and then their
neighbours' transfers fail too. Which rank a failed transfer names is therefore chance. The first
worker to notice finds out who is really gone (a process of this host that no longer exists, a
heartbeat that stopped) and writes that into the store's ``failure`` record, where the first
writer wins; all others read it there. A worker that fails by its own error writes that. The
process that hosts the store must not end before the others have read the record, so it waits for
their acknowledgements, for a few seconds at most.

A waiter is also woken when no transfer fails but none can succeed either: its peer's process is
gone and the operation under way has made no progress since.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pyg_sar.errors import CommTimeoutError, LostWorkerError, PygSarError, WorkerError
from pyg_sar.issuer import Progress
from pyg_sar.rendezvous import Place, is_dead

BEAT = 0.5  # Seconds between two heartbeats.
STUCK = 3.0  # Seconds without progress after which to ask whether it can still come.
STUCK_DEAD = 8.0  # The same, where a process ended without finalize().
QUIET = 5.0  # Seconds without heartbeat that explain a failed transfer.
SILENT = 60.0  # Seconds without heartbeat after which a peer is lost, failed transfer or not.
INQUIRY = 8.0  # Seconds to find out why a transfer failed.
LINGER = 5.0  # Seconds to keep the store for those who still have to read it.

RESUME = (
    "The others can't go on without it: start all workers again; training resumes from the last "
    "checkpoint (pyg_sar.load_checkpoint)."
)

ENDED = "its process ended without a word (killed, out of memory, or crashed)"
ASK = 20.0  # Seconds that the store may take to answer.
LAUNCHER = -1  # The "rank" of the process that started the workers.

OnFailure = Callable[[PygSarError], None]
GetProgress = Callable[[], Progress]


class Watch(ABC):
    """Finds out which worker failed, and tells the others when it's this one."""

    def start(self, on_failure: OnFailure, progress: GetProgress) -> None:
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

    def start(self, on_failure: OnFailure, progress: GetProgress) -> None:
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


def to_error(record: Mapping[str, Any], me: int) -> WorkerError:
    """Returns the error to raise on rank ``me`` for a failure record."""
    rank, how = record["rank"], record["how"]
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


# Through the store ###########################################################


class StoreWatch(Watch):
    """A watch through the workers' store.

    Args:
        store: A connection to the store, for the watch alone.
        place: Place of this worker.
        everyone: What each rank is, from the roll call.
    """

    def __init__(
        self, store: dist.Store, place: Place, everyone: Sequence[Mapping[str, Any]]
    ) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self.others = [rank for rank in range(place.world_size) if rank != place.rank]
        self.everyone = everyone
        self.host = None if place.agent_store else 0
        self._store = store
        self._store_error: BaseException | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._record: dict[str, Any] | None = None
        self._beats = {rank: (-1, time.monotonic()) for rank in self.others}
        self._notes: dict[int, dict[str, Any]] = {}
        self._deaths: dict[int, float] = {}
        self._count = 0
        self._last_start = (0, time.monotonic())
        # Not a daemon: ended inside the store's C++ by the interpreter's shutdown, it would abort
        # the process. It ends with the main thread instead.
        self._thread = threading.Thread(target=self._loop, name="pyg_sar watch", daemon=False)

    def start(self, on_failure: OnFailure, progress: GetProgress) -> None:
        self._on_failure, self._progress = on_failure, progress
        self._thread.start()

    def _loop(self) -> None:
        main = threading.main_thread()
        while main.is_alive():
            record = self._look()
            if record is None and (suspect := self._stalled()) is not None:
                record = self._publish(suspect)
            if record is not None:
                self._acknowledge()
                # Its own error is this rank's already: who wrote the record raises it.
                if record["kind"] != "error" or record["rank"] != self.rank:
                    self._on_failure(to_error(record, self.rank))
                return
            if self._stop.wait(BEAT):
                return

    # What there is to see ----------------------------------------------------

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Asks the store; ``None`` once it is gone (it never comes back)."""
        with self._lock:
            if self._store_error is not None:
                return None
            try:
                return question()
            except dist.DistError as error:
                self._store_error = error
                return None

    def _beat(self, left: bool = False) -> None:
        progress = self._progress()
        self._count += 1
        note = {"beat": self._count, "left": left, **progress._asdict()}
        self._ask(lambda: self._store.set(f"beat/{self.rank}", json.dumps(note)))

    def _look(self) -> dict[str, Any] | None:
        """Beats, and looks at everything once; returns the failure record, if any."""
        with self._lock:
            now = time.monotonic()
            self._beat()
            # Deaths before notes: whoever is seen dead has written its last note by then.
            for rank in self.others:
                if rank not in self._deaths and is_dead(self.everyone[rank]):
                    self._deaths[rank] = now
            if self._record is None and self._ask(lambda: self._store.check(["failure"])):
                self._record = json.loads(self._ask(lambda: self._store.get("failure")) or "null")
            present = [r for r in self.others if r in self._notes or self._came(r)]
            keys = [f"beat/{rank}" for rank in present]
            notes = self._ask(lambda: self._store.multi_get(keys)) if keys else None
            for rank, text in zip(present, notes or [], strict=False):
                note = json.loads(text)
                if note["beat"] != self._beats[rank][0]:
                    self._beats[rank] = (note["beat"], now)
                self._notes[rank] = note
            return self._record

    def _came(self, rank: int) -> bool:
        return bool(self._ask(lambda: self._store.check([f"beat/{rank}"])))

    def _left(self, rank: int) -> bool:
        return bool(self._notes.get(rank, {}).get("left"))

    def _suspect(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of who made a transfer fail by all that was seen, if anybody."""
        dead = [rank for rank in self._deaths if not self._left(rank)]
        dead.sort(key=lambda rank: (self._did_its_part(rank), self._deaths[rank]))
        # The store's host outlives every failure but its own (it waits for the others to read).
        if self._store_error is not None and self.host in dead:
            dead = [self.host]
        if dead:
            return lost(dead[0], ENDED, self.rank, doing)
        return self._orphaned(doing) or self._silent(doing, QUIET)

    def _stalled(self) -> dict[str, Any] | None:
        """Returns the record of a lost worker that the pending operation waits for in vain."""
        now = time.monotonic()
        progress = self._progress()
        if progress.pending == 0 or progress.started != self._last_start[0]:
            self._last_start = (progress.started, now)
        since = now - self._last_start[1]
        if since < STUCK:
            return None
        for rank, when in self._deaths.items():
            # A process may end without finalize() when it has done its part.
            if min(since, now - when) > STUCK_DEAD and not self._did_its_part(rank):
                return lost(rank, ENDED, self.rank, progress.doing)
        orphaned = self.host is None or not self._did_its_part(self.host)
        return (
            (self._orphaned(progress.doing) if orphaned else None)
            or self._deserted(progress.doing)
            or self._silent(progress.doing, SILENT)
        )

    def _did_its_part(self, rank: int) -> bool:
        """Returns whether ``rank`` has been through the operation that this rank is in."""
        return bool(self._notes.get(rank, {}).get("ended", 0) >= self._progress().started)

    def _orphaned(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of the lost host of the store."""
        if self._store_error is None or (self.host is not None and self._left(self.host)):
            return None
        how = "it hosts the workers' store, which can't be reached any more"
        return lost(LAUNCHER if self.host is None else self.host, how, self.rank, doing)

    def _silent(self, doing: str, limit: float) -> dict[str, Any] | None:
        """Returns the record of a worker that gave no sign of life for ``limit`` seconds."""
        if self._store_error is not None:
            return None
        for rank, (_, when) in self._beats.items():
            silence = time.monotonic() - when
            if silence > limit and not self._left(rank):
                return lost(rank, f"no sign of life for {silence:.0f} s", self.rank, doing)
        return None

    def _deserted(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of a worker that left, though this operation needs it."""
        for rank in self.others:
            if self._left(rank) and not self._did_its_part(rank):
                how = "its program had already ended (do all ranks run the same operations?)"
                return lost(rank, how, self.rank, doing)
        return None

    # What there is to say ----------------------------------------------------

    def _publish(self, record: dict[str, Any]) -> dict[str, Any]:
        """Writes the failure record; returns the one that was first."""
        with self._lock:
            if self._record is None:
                text = self._ask(lambda: self._store.compare_set("failure", "", json.dumps(record)))
                self._record = json.loads(text) if text else record
            return self._record

    def _acknowledge(self) -> None:
        self._ask(lambda: self._store.set(f"seen/{self.rank}", "1"))
        if self.host == self.rank:
            self._linger(lambda rank: bool(self._ask(lambda: self._store.check([f"seen/{rank}"]))))

    def _linger(self, finished: Callable[[int], bool]) -> None:
        """Waits until all others that live are finished with the store."""
        end = time.monotonic() + LINGER
        waiting = list(self.others)
        while waiting and time.monotonic() < end:
            waiting = [r for r in waiting if not (is_dead(self.everyone[r]) or finished(r))]
            time.sleep(0.02)

    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        said = str(error).lower()
        late = isinstance(error, TimeoutError) or "timed out" in said or "timeout" in said
        begin = time.monotonic()
        record: dict[str, Any] | None = None
        while True:
            record = self._look()
            if record is None and (suspect := self._suspect(doing)) is not None:
                record = self._publish(suspect)
            waited = time.monotonic() - begin
            if record is None and waited > 1.0 and (gone := self._deserted(doing)) is not None:
                record = self._publish(gone)
            if record is not None or waited > (0.0 if late else INQUIRY):
                break
            time.sleep(0.02)
        if record is None:
            reason = self._tell_time(error, doing) if late else self._tell(error, doing)
            record = self._publish(failed(self.rank, reason))
            if record["rank"] == self.rank and record["kind"] == "error":
                self._acknowledge()
                return reason
        self._acknowledge()
        return to_error(record, self.rank)

    def _tell(self, error: BaseException, doing: str) -> PygSarError:
        return PygSarError(
            f"Rank {self.rank}: {doing} failed though all workers seem alive: {error}"
        )

    def _tell_time(self, error: BaseException, doing: str) -> CommTimeoutError:
        mine = self._progress().started
        lines = []
        for rank, note in sorted(self._notes.items()):
            state = "in" if note["pending"] else "idle after"
            number, doing_there = note["started"], note["doing"]
            lines.append(f"rank {rank} is {state} its operation {number} ({doing_there})")
        return CommTimeoutError(
            f"Rank {self.rank}: {doing} (its operation {mine}) did not end in time: {error}. "
            f"All workers are alive: {'; '.join(lines) or 'no other was heard of'}. Do all ranks "
            f"run the same operations in the same order? If one is only slow, raise init(timeout=)"
        )

    def cause(self) -> PygSarError | None:
        end = time.monotonic() + 1.0
        while True:
            record = self._look() or self._suspect(self._progress().doing)
            if record is not None:
                return to_error(self._publish(record), self.rank)
            if time.monotonic() > end:
                return None
            time.sleep(0.02)

    def report(self, error: BaseException) -> None:
        if is_consequence(error, self.rank):
            return
        self._publish(failed(self.rank, error))
        self._acknowledge()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LINGER)
        self._beat(left=True)  # The last beat: no other may follow it.
        if self._record is None and self.host == self.rank:
            self._linger(self._has_left)

    def _has_left(self, rank: int) -> bool:
        text = self._ask(lambda: self._store.get(f"beat/{rank}")) if self._came(rank) else None
        return self._store_error is not None or bool(text and json.loads(text)["left"])
