"""Counts the Python that one steady call of a layer runs: files, functions, calls.

.. code-block:: bash

    python benchmarks/calls.py            # 400 nodes, 2 workers; times beside PyG's
    python benchmarks/calls.py --walk     # the functions that pass or hold the edges, in order
    python benchmarks/calls.py --starts 5 # seconds that starting 2 workers, or 2 parts, takes

Also the package's size. A steady call is a forward and a backward pass after two of its kind. Files
and functions are those of pyg_sar that the calling thread enters at rank 0. Times are the median of
many calls, in milliseconds, and PyG's on the same edges of one worker.

The way of the edges is counted in the forward pass: calls of functions of pyg_sar one of whose
arguments is, or holds in a list, tuple or dict, the ``edge_index`` or the distributed edges that it
stands for, and methods of objects that hold them. A context manager counts where it begins and
where it ends. A climb is any call of a function of a higher wing (a folder of the package, see
``tests/test_house.py``) than that of the function of pyg_sar that calls it. ``MLP`` is a layer of a
user's, whose message no kernel knows: a small network of ``x_i``, ``x_j`` and ``edge_attr``.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv

import pyg_sar
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.tensors import NodeTensor
from pyg_sar.tools.graphs import load_graph


# PyG asks for the types of message()'s arguments: no annotations as strings in this file.
class MLPConv(MessagePassing):
    """A message of a user's, of which no formula is known."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        layers = torch.nn.Linear(16 + 16 + 4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)
        self.nn = torch.nn.Sequential(*layers)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        found: Tensor = self.nn(torch.cat([x_i, x_j, edge_attr], dim=-1))
        return found


LAYERS = {
    "SAGE": lambda: SAGEConv(16, 16),
    "GCN": lambda: GCNConv(16, 16),
    "GAT": lambda: GATConv(16, 4, heads=4),
    "MLP": lambda: MLPConv("add"),
    "MLP, max": lambda: MLPConv("max"),
}


def make_graph(nodes: int) -> Any:
    """A graph of ten edges per node, with features of nodes and of edges."""
    graph = load_graph(f"synthetic:nodes={nodes},degree=10,features=16")
    graph.edge_attr = torch.randn(graph.num_edges, 4)
    return graph


def arguments(layer: Any, data: Any) -> tuple[Tensor, ...]:
    """The arguments of a layer's call, features of nodes first."""
    given = data.x[:, :16].clone().requires_grad_(), data.edge_index
    return (*given, data.edge_attr) if isinstance(layer, MLPConv) else given


def entered(run: Any) -> Counter[tuple[str, int, str]]:
    """Calls of each function of the package that ``run`` makes on this thread."""
    return Counter((step.file, step.line, step.name) for step in walk(run))


@dataclass(frozen=True)
class Step:
    """A call of a function of the package.

    Attributes:
        file: Where it stands; ``line``: and at which line.
        name: Its qualified name.
        caller: The wing of the function of the package that called it; its own where none did.
        depth: How many functions of the package are around it.
        edges: It gets the edges, or is a method of an object that holds them.
    """

    file: str
    line: int
    name: str
    caller: str
    depth: int
    edges: bool

    @property
    def wing(self) -> str:
        """Its folder of the package."""
        return self.file.split("/pyg_sar/")[-1].split("/")[0].removesuffix(".py")

    def climbs(self, wings: Sequence[str]) -> bool:
        """Says if it is of a higher wing than its caller; ``wings``: in order."""
        return wings.index(self.wing) > wings.index(self.caller)


def holds_edges(value: Any, depth: int = 2) -> bool:
    """Says if a value is edges, or a list, tuple or dict that has them this deep."""
    if type(value) is dict:
        value = [*value.values()]
    if type(value) in (list, tuple):
        return depth > 0 and any(holds_edges(one, depth - 1) for one in value)
    if type(value) is NodeTensor:
        return value._edges[0] is not None
    return type(value) is DistEdgeIndex


def attributes_of(owner: Any) -> list[Any]:
    """The attributes of an object, those of a class with slots as well."""
    slots = [name for kind in type(owner).__mro__ for name in vars(kind).get("__slots__", ())]
    return [*getattr(owner, "__dict__", {}).values(), *(getattr(owner, n, None) for n in slots)]


def walk(run: Any, edges: bool = False) -> list[Step]:
    """The calls of functions of the package that ``run`` makes on this thread, in order.

    ``edges``: asks which get them.
    """
    found: list[Step] = []
    within: list[Step] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are frames of their own in Python 3.11; they are part of their function.
        if "/pyg_sar/" not in code.co_filename or code.co_name[0] == "<":
            return
        if event == "return" and within:
            within.pop()
        if event != "call":
            return
        given = frame.f_locals
        owner = given.get("self")
        held = [] if owner is None or isinstance(owner, torch.nn.Module) else attributes_of(owner)
        gets = edges and any(map(holds_edges, (*given.values(), *held)))
        step = Step(code.co_filename, code.co_firstlineno, code.co_qualname, "", len(within), gets)
        caller = within[-1].wing if within else step.wing
        found.append(replace(step, caller=caller))
        within.append(step)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def steady_calls(root: str, name: str, timed: int) -> dict[str, Any]:
    """Calls of the forward and backward pass of a layer, and its times, at this worker."""
    torch.set_num_threads(1)
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    layers: Any = pyg_sar.distribute(torch.nn.ModuleList([LAYERS[name]()]))
    layer = layers[0]
    given = arguments(layer, data)
    gradient = torch.ones_like(layer(*given))
    for _ in range(2):
        layer(*given).backward(gradient)
    way = walk(lambda: layer(*given), edges=True)
    found = []
    for _ in range(3):  # Memory that others return is taken back in this call, or in the next.
        outs: list[torch.Tensor] = []
        forward = entered(lambda: outs.append(layer(*given)))  # noqa: B023
        backward = entered(lambda: outs[0].backward(gradient))  # noqa: B023
        found.append((forward, backward))
    forward, backward = min(found, key=lambda one: len(one[0] + one[1]))
    times: list[tuple[float, float]] = []
    for _ in range(timed):
        start = time.perf_counter()
        out = layer(*given)
        middle = time.perf_counter()
        out.backward(gradient)
        times.append((middle - start, time.perf_counter() - middle))
    return {"forward": forward, "backward": backward, "times": times, "way": way}


def plain_times(name: str, timed: int) -> list[tuple[float, float]]:
    """PyG's own layer on one worker's share of such a graph."""
    torch.set_num_threads(1)
    layer = LAYERS[name]()
    given = arguments(layer, make_graph(200))
    times = []
    for _ in range(timed + 2):
        start = time.perf_counter()
        out = layer(*given)
        middle = time.perf_counter()
        out.sum().backward()
        times.append((middle - start, time.perf_counter() - middle))
    return times[2:]


def summary(found: dict[str, Any]) -> dict[str, int]:
    """Files, functions and calls of both passes."""
    both = found["forward"] + found["backward"]
    return {
        "files": len({file for file, _, _ in both}),
        "functions": len(both),
        "calls": sum(both.values()),
    }


def way_of(found: dict[str, Any], wings: Sequence[str]) -> dict[str, int]:
    """Calls on the way of the edges, and climbs; ``wings``: in order."""
    return {
        "calls that pass or hold the edges": sum(step.edges for step in found["way"]),
        "climbs": sum(step.climbs(wings) for step in found["way"]),
    }


def print_way(steps: Sequence[Step], wings: Sequence[str]) -> None:
    """Prints the calls on the way of the edges, and the climbs, in order."""
    for step in steps:
        climbs = step.climbs(wings)
        if step.edges or climbs:
            place = f"{step.file.split('/pyg_sar/')[-1]}:{step.line}"
            mark = ("*" if step.edges else " ") + ("^" if climbs else " ")
            print(f"  {mark} {step.wing:9} {'  ' * step.depth}{step.name} ({place})")


def nothing() -> None:
    """Returns at once: a call of it takes what its start takes."""


def start_times(rounds: int) -> dict[str, list[float]]:
    """Seconds of each start, all imported: of two worker processes, of two parts in this one."""
    found: dict[str, list[float]] = {"launch(fn, 2)": [], "run(fn, parts=2)": []}
    for _ in range(rounds):
        for way, times in found.items():
            start = time.perf_counter()
            if way == "launch(fn, 2)":
                pyg_sar.launch(nothing, 2)
            else:
                pyg_sar.run(nothing, parts=2)
            times.append(time.perf_counter() - start)
    return found


CORE = ("engine/run.py", "engine/schedule.py", "exchange/rows.py", "exchange/halo_rows.py")


def size() -> tuple[int, int, int]:
    """Modules, lines, and lines of the loop, its schedules, row sources and row sinks."""
    package = Path(pyg_sar.__file__).parent
    lines = {file: len(file.read_text().splitlines()) for file in package.rglob("*.py")}
    modules = [file for file in lines if file.name != "__init__.py"]
    core = sum(lines[package / name] for name in CORE)
    return len(modules), sum(lines.values()), core


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--timed", type=int, default=200)
    parser.add_argument("--list", action="store_true", help="name every function")
    parser.add_argument("--walk", action="store_true", help="name the functions that edges pass")
    parser.add_argument("--starts", type=int, help="time so many starts of workers, no layers")
    args = parser.parse_args()
    if args.starts:
        for way, times in start_times(args.starts).items():
            print(f"{way}: {median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")
        return
    print("{} modules, {:,} lines, {:,} of them the core".format(*size()))
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    wings = import_module("test_house").WINGS
    graph = make_graph(400)
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(graph, 2, root, overwrite=True)
        for name in LAYERS:
            found = pyg_sar.launch(steady_calls, 2, root, name, args.timed)[0]
            here, plain = found["times"], plain_times(name, args.timed)
            ms = [
                [1e3 * median(column) for column in zip(*rows, strict=True)]
                for rows in (here, plain)
            ]
            counts = {**summary(found), **way_of(found, wings)}
            numbers = ", ".join(f"{n} {what}" for what, n in counts.items())
            print(
                f"{name}: {numbers}; forward {ms[0][0]:.2f} ms (PyG {ms[1][0]:.2f}), "
                f"backward {ms[0][1]:.2f} ms (PyG {ms[1][1]:.2f})"
            )
            if args.walk:
                print_way(found["way"], wings)
            if args.list:
                for phase in ("forward", "backward"):
                    for (file, line, function), count in found[phase].items():
                        place = file.split("/pyg_sar/")[-1] + f":{line}"
                        print(f"  {phase:8} {count:4} {place} {function}")


if __name__ == "__main__":
    main()
