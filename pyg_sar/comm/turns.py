"""Turns: which of the parts of one process computes now."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS
from torch.autograd import forward_ad, graph, profiler
from torch.nn.modules import module
from torch.nn.utils import parametrize
from torch.optim import optimizer

from pyg_sar.comm.devices import random_states, set_random_states
from pyg_sar.comm.messages import REMEDY, to_error, unmatched
from pyg_sar.errors import DistributedIndexError, MismatchError, PygSarError

STEP = 0.5  # Seconds between two looks at whether other processes have failed.


_WORDS = 4 * 624 + 4  # bytes of a Mersenne twister in NumPy: its words, and the place in them
_SDP = torch.backends.cuda
_WARNINGS = [n for n in ("filters", "showwarning", "_showwarnmsg_impl") if hasattr(warnings, n)]
_HOOKS = tuple(
    held
    for place in (module, optimizer)
    for name, held in vars(place).items()
    if name.startswith("_global_") and isinstance(held, dict)
)
"""Hooks of all modules and all optimizers of a process."""


def _set_hooks(held: Sequence[dict[Any, Any]]) -> None:
    for hooks, value in zip(_HOOKS, held, strict=True):
        hooks.clear()
        hooks.update(value)


def _variables(
    place: Any, *names: str
) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """Returns how variables of a module are read, and set."""

    def write(held: list[Any]) -> None:
        for name, value in zip(names, held, strict=True):
            setattr(place, name, value)

    return lambda: [getattr(place, name) for name in names], write


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda held: torch.set_anomaly_enabled(*held),
    ),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda held: torch.use_deterministic_algorithms(held[0], warn_only=held[1]),
    ),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_SDP.flash_sdp_enabled, _SDP.enable_flash_sdp),
    (_SDP.mem_efficient_sdp_enabled, _SDP.enable_mem_efficient_sdp),
    (_SDP.math_sdp_enabled, _SDP.enable_math_sdp),
    (_SDP.cudnn_sdp_enabled, _SDP.enable_cudnn_sdp),
)
"""Settings of a whole process that a part may change: how each is read, and set."""

VARIABLES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (lambda: [hooks.copy() for hooks in _HOOKS], _set_hooks),
    _variables(module, "_global_is_full_backward_hook"),
    _variables(graph, "_allow_mutation_on_saved_tensors_enabled"),
    (lambda: vars(PRINT_OPTS).copy(), vars(PRINT_OPTS).update),
    _variables(sys, "stdout", "stderr"),  # contextlib.redirect_stdout
    _variables(warnings, *_WARNINGS),  # warnings.catch_warnings
    # Its keys are of a part's own modules. A context empties it at the end of the last part alone.
    _variables(parametrize, "_cache_enabled", "_cache"),
)
"""The same of what stays in its process: no worker starts with that of another process."""


class ProcessState:
    """Holds what a part may set for all of its process, as in a process of its own.

    The states of the default random generators, which are PyTorch's (of a GPU, too), NumPy's and
    Python's, :data:`SETTINGS` and, unless it is sent to another process, :data:`VARIABLES`. NumPy's
    state takes longest to read and to write: both are left out where its words are known, from the
    state ``before``, and no normal number waits beside them.
    """

    def __init__(self, device: torch.device, before: ProcessState | None = None) -> None:
        self.device = device
        self.torch = random_states(device)
        self.numpy: Any = None
        self.words = b""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is np.random.MT19937:
            self.words = ctypes.string_at(bits.ctypes.state_address, _WORDS)
            if before is not None and before.words == self.words:
                self.numpy = before.numpy
        if self.numpy is None:
            self.numpy = np.random.get_state()
            if self.words and self.numpy[3]:  # Whether it was taken, the words don't tell.
                self.words = b""
        self.python = random.getstate()
        self.settings = [read() for read, _ in SETTINGS]
        self.variables = [read() for read, _ in VARIABLES]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "variables": None}

    def restore(self, held: ProcessState) -> None:
        """Makes the generators go on from here, and sets the settings of a process in the state
        ``held``.
        """
        set_random_states(self.torch, self.device)
        if not self.words or self.words != held.words:
            np.random.set_state(self.numpy)
        random.setstate(self.python)
        for table, own, other in (
            (SETTINGS, self.settings, held.settings),
            (VARIABLES, self.variables, held.variables),
        ):
            if own is not None and own != other:
                for (_, write), value in zip(table, own, strict=True):
                    write(value)


class Turns:
    """Lets the threads of some parts compute one at a time, in a fixed cyclic order.

    A part computes until it waits for something. Then the next part behind it, in cyclic order,
    whose wait is over computes; the part itself comes last. Once all have come to one place of the
    program (:meth:`restart`), the first part goes on first. So the order of turns depends on the
    program alone, not on the system's scheduling, and is the same in each pass. Each part has
    random states and settings of its own: they are exchanged with the turn.

    ``check`` raises once something outside this process has failed; ``outside`` returns whether
    such a thing may still end a wait; ``begin`` and ``end`` are called when a part's turn begins
    and ends, with the part, on its thread.
    """

    def __init__(
        self,
        parts: Sequence[int],
        check: Callable[[], None],
        outside: Callable[[], bool],
        begin: Callable[[int], None],
        end: Callable[[int], None],
        device: torch.device | None = None,
    ) -> None:
        self._parts = list(parts)
        self._check, self._outside = check, outside
        self._begin, self._end = begin, end
        lock = threading.RLock()
        self._lock = lock
        self._woken = {part: threading.Condition(lock) for part in self._parts}
        self._current: int | None = None
        self._last = self._parts[-1]
        self._anew = False
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._doing: dict[int, str] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._profiled = profiler._is_profiler_enabled
        self._device = device or torch.device("cpu")
        self._held = ProcessState(self._device)  # What the process is in.
        self._states = dict.fromkeys(self._parts, self._held)
        self.record: Mapping[str, Any] | None = None
        """The failure that ends all parts, if one does."""
        self.count = 0
        """Turns so far."""

    def begin(self, part: int) -> None:
        """Waits for a part's first turn."""
        with self._lock:
            self._begun.add(part)
            self._await(part, lambda: True, "the start")

    def wait(self, part: int, ready: Callable[[], bool], doing: str) -> None:
        """Ends a part's turn, and waits until ``ready()`` and its next one.

        ``ready`` is called by any thread, time and again; it must be quick. ``doing`` is what the
        part waits for, for messages.

        Raises:
            DistributedIndexError: Within forward-mode derivatives, or a profile.
            MismatchError: All parts wait, and nothing can end that.
            PygSarError: Another part or worker has failed.
        """
        self._refuse_what_is_shared()
        with self._lock:
            self._release(part)
            self._await(part, ready, doing)

    def restart(self) -> None:
        """Lets the first part that can go on have the next turn: called by the computing part."""
        self._anew = True

    def look(self) -> None:
        """Gives the turn to a part for which something outside this process has ended a wait."""
        with self._lock:
            self._choose()

    def leave(self, part: int) -> None:
        """Ends the last turn of a part."""
        with self._lock:
            self._ended.add(part)
            if self._current == part:
                self._release(part)
            self._choose()

    def fail(self, record: Mapping[str, Any]) -> None:
        """Ends all waits by a failure (:mod:`pyg_sar.comm.messages`); the first call counts."""
        with self._lock:
            if self.record is None:
                self.record = record
            self._wake_all()

    def _refuse_what_is_shared(self) -> None:
        """Refuses that a turn ends within what a process has but one of, without a way to keep it.

        A part that ends its level of derivatives ends the others', whose derivatives were then
        zero; PyTorch's profiler ends the process where it is started twice.
        """
        within = ""
        if forward_ad._current_level >= 0:
            within = (
                "Forward-mode derivatives (torch.func.jvp, jacfwd, hessian and linearize, "
                "torch.autograd.forward_ad) can't be taken of rows of several parts in one "
                "process, which has one level of them for all of its parts: use "
                "torch.autograd.grad() or backward()"
            )
        elif profiler._is_profiler_enabled and not self._profiled:
            within = (
                "torch.profiler.profile() can't run in one of several parts of one process, which "
                "has one profiler: leave it out"
            )
        if within and len(self._parts) > 1:
            raise DistributedIndexError(f"{within}, or start as many workers as parts")

    def _release(self, part: int) -> None:
        self._end(part)
        self._states[part] = self._held = ProcessState(self._device, self._states[part])
        self._current, self._last = None, self._parts[-1] if self._anew else part
        self._anew = False

    def _await(self, part: int, ready: Callable[[], bool], doing: str) -> None:
        self._waiting[part], self._doing[part] = ready, doing
        self._choose()
        try:
            while self._current != part:
                if self.record is not None:
                    raise to_error(self.record, part)
                self._check()
                self._woken[part].wait(STEP)
                self._choose()
        finally:
            self._waiting.pop(part, None)
        if self.record is not None:
            raise to_error(self.record, part)
        self._states[part].restore(self._held)
        self.count += 1
        self._begin(part)

    def _choose(self) -> None:
        """Gives the turn to the next part that can go on."""
        starting = len(self._begun) < len(self._parts)
        if self._current is not None or self.record is not None or starting:
            return
        if self._give_next():
            return
        left = len(self._parts) - len(self._ended) - len(self._waiting)
        stuck = self._waiting and not left and not self._outside() and not self._broken()
        if stuck and not self._give_next():  # A transfer may have ended since it was asked for.
            waits = [f"part {k} waits for {self._doing[k]}" for k in sorted(self._waiting)[:8]]
            over = [f"part {k}'s program has ended" for k in sorted(self._ended)[:8]]
            error = MismatchError(
                f"The parts run different operations: {'; '.join(waits + over)}. {REMEDY}"
            )
            self.record = unmatched(error, self._last)
            self._wake_all()

    def _give_next(self) -> bool:
        """Gives the turn to the next part that can go on; returns whether there is one."""
        place = self._parts.index(self._last) + 1
        for part in self._parts[place:] + self._parts[:place]:
            ready = self._waiting.get(part)
            if ready is not None and ready():
                self._current = part
                self._woken[part].notify()
                return True
        return False

    def _wake_all(self) -> None:
        for woken in self._woken.values():
            woken.notify_all()

    def _broken(self) -> bool:
        try:
            self._check()
        except PygSarError:
            return True
        return False
