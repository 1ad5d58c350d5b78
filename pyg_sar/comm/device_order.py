"""The order of the issuing thread's work on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Lane:
    """Orders the issuer's work on a GPU after what the caller has queued there.

    The caller marks its stream; the issuer then works on a stream of its own, after the mark, and
    empties it before it goes on: an ended transfer is one whose data is there. Does nothing
    where CUDA isn't in use.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event | None:
        """Marks how far the caller's stream has to be."""
        if not torch.cuda.is_initialized():
            return None
        return torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Runs a block after the mark."""
        if mark is None:
            yield
            return
        if mark.device not in self._streams:
            self._streams[mark.device] = torch.cuda.Stream(mark.device)
        stream = self._streams[mark.device]
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
