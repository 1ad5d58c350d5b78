"""Says what hosted parts keep, compute again, and move to the store and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Ledger
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.wording import aligned, counted

PHASES = ("forward", "backward")


def backward_case(layer: Any) -> int:
    """Returns what a distributed layer's backward pass does.

    2: it gets source rows again, and runs the message again; 1: neither, as the sums suffice; 0:
    it has kept all messages.
    """
    choices = facts_of(layer).choices.values()
    needs = [choice.needs for choice in choices if choice.needs is not None]
    if not needs:
        return 0
    return 2 if any(need.needs_sources for need in needs) else 1


MOVED = {
    "read_bytes": ("bytes_read", 1),
    "written_bytes": ("bytes_written", 1),
    "bits_of_bytes": ("bits_of_bytes", 1),
    "waited_seconds": ("waited_ns", 1e-9),
}
"""Keys of a summary; what they count of a store, and the unit."""


def moved(comm: Communicator) -> list[float]:
    """Returns what this process has moved so far (:data:`MOVED`)."""
    found = {} if comm.host is None or comm.host.store is None else comm.host.store.counters()
    return [found.get(name, 0) * unit for name, unit in MOVED.values()]


class HostedRun:
    """Counts what the parts that a process hosts do from now on."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._before = comm, moved(comm)

    def summary(
        self, model: nn.Module, ledger: Ledger, num_nodes: int, epochs: int
    ) -> dict[str, Any]:
        """Returns what all parts kept, computed again and moved. Collective; empty without a host.

        That is ``parts`` of each worker; ``memory``, its limit in bytes, and ``store``, or
        ``None``; per epoch, of each worker, ``read_bytes`` and ``written_bytes`` of the store,
        ``bits_of_bytes``, those of tensors that were saved as bits, and the ``waited_seconds`` in
        which nothing was computed for the store's sake; and per layer ``case``
        (:func:`backward_case`), and for each phase how many halo rows one pass needs and how many
        of them it reads from the store, over all parts and per node.
        """
        host = self.comm.host
        if host is None:
            return {}
        now = [b - a for a, b in zip(self._before, moved(self.comm), strict=True)]
        everyone = self.comm.all_gather_object([now, ledger.gathers()])
        workers = [[everyone[part][0] for part in parts] for parts in host.hosted]
        each = {
            key: [max(found[k] for found in worker) / max(epochs, 1) for worker in workers]
            for k, key in enumerate(MOVED)
        }
        layers = {}
        for name, module in model.named_modules():
            if isinstance(module, DistMessagePassing):
                label = getattr(module, "ledger_name", name)
                rows = {p: _rows([g.get(label, {}) for _, g in everyone], p) for p in PHASES}
                for counts in rows.values():
                    counts["read_per_node"] = counts["read"] / max(num_nodes, 1)
                layers[name] = {"case": backward_case(module), **rows}
        return {
            "parts": [len(parts) for parts in host.hosted],
            "memory": None if host.store is None else host.store.memory,
            "store": None if host.store is None else host.store.directory,
            **each,
            "layers": layers,
        }


def _rows(gathers: list[Mapping[str, Mapping[str, int]]], phase: str) -> dict[str, float]:
    """Returns rows of one pass over all parts, on average."""
    found = [gather[phase] for gather in gathers if phase in gather]
    passes = max((counts["passes"] for counts in found), default=1)
    return {k: sum(counts[k] for counts in found) / passes for k in ("halo", "read")}


_CASES = {0: "all kept", 1: "sums kept, nothing again", 2: "rows and messages again"}


def describe_hosting(found: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table of what :meth:`HostedRun.summary` has found."""
    parts = found["parts"]
    each = "+".join(map(str, parts))
    memory = "no limit" if found["memory"] is None else f"memory={found['memory']:,} bytes each"
    store = (
        "no store: parts wait in memory" if found["store"] is None else f"store={found['store']}"
    )
    rows = [["layer", "backward pass", "halo rows", "read forward, per node", "backward"]]
    for name, layer in found["layers"].items():
        forward, backward = (layer[phase] for phase in PHASES)
        rows.append(
            [
                name or "(model)",
                _CASES[layer["case"]],
                f"{forward['halo']:,.0f}",
                *(f"{way['read']:,.0f}, {way['read_per_node']:.2f}" for way in (forward, backward)),
            ]
        )
    lines = [
        f"{counted(sum(parts), 'parts')} on {counted(len(parts), 'workers')} ({each}), "
        f"{memory}, {store}"
    ]
    lines += aligned(rows)
    if found["store"] is not None:
        written, read, bits = (
            ", ".join(f"{size / 1e6:,.1f}" for size in found[key])
            for key in ("written_bytes", "read_bytes", "bits_of_bytes")
        )
        lines.append("between layers: what PyTorch keeps is moved out and back")
        lines.append(f"ReLU and dropout: bits kept for these MB per epoch of each worker: {bits}")
        waited = ", ".join(f"{seconds:.2f}" for seconds in found["waited_seconds"])
        lines.append(f"moved per epoch, MB of each worker: {written} out, {read} in")
        lines.append(f"waited for that per epoch, seconds of each worker: {waited}")
    return lines
