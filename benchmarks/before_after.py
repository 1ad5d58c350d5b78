"""The benchmarks wire, hosts, memory, attention and kernels beside those of another checkout.

.. code-block:: bash

    git worktree add ../before COMMIT          # and build its kernels there
    sudo python benchmarks/before_after.py --before ../before --results pairs.json \
        --out before_after.md

Each case runs in both checkouts, one right after the other, by the functions of each one's script,
in a process of its own. The order changes from pair to pair; a ratio is one within a pair. Finished
pairs are kept in a file, from which the next run goes on. ``hosts`` needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from command_line import command

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS = {"s": 1.05, "MiB": 1.02, "MB": 1.02}  # after / before: times, memory, bytes received
QUARTERS = torch.tensor([0.25, 0.5, 0.75])
MODELS = ("sage", "gat")
Found = dict[str, float]
Pair = dict[str, Found]  # of "before" and "after"

# What one checkout measures, by the functions of its own script #############


def wire(script: Any, folder: str, model: str, workers: str) -> Found:
    """40,000 nodes, 1,000,000 edges; one worker with two threads, several with one each."""
    many, root = int(workers), Path(folder, "parts")
    graph = script.power_law_graph(40_000, 1_000_000, 100)
    script.pyg_sar.write_partitions(graph, many, root, "random")
    found, scales = {}, {"epoch, s": 1, "processor, s": 1, "received, MB": 1e6, "peak, MiB": 2**20}
    for way, switch in script.WAYS.items() if many > 1 else [("alone", "auto")]:
        numbers = script.measure(root, many, 2 if many == 1 else 1, switch, model, 5)
        for (name, scale), number in zip(scales.items(), numbers, strict=True):
            found[f"{way}: {name}"] = number / scale
    return found


def hosts(script: Any, folder: str, model: str, number: str) -> Found:
    """20,000 nodes, 500,000 edges; links of 1 Gb/s, all rows pulled, and with covers.

    Epochs with nothing sent are left out: that part of the script fails in commit 3c58639, where
    workers compare their parameters also then.
    """
    given = Namespace(push=["off", "auto"], wires=["exact"], hidden=128, epochs=4)
    vars(given).update(method="random", rate="1gbit", timeout=200)
    script.row_of = lambda first, speed, case, expected: case
    script.one_process = lambda spec, data: []  # for comparing losses, which is not done here
    script.__file__ = __file__  # torchrun's workers start below, in ``main``
    data, found = script.load_graph("synthetic:nodes=20000,degree=25"), {}
    for case in script.over_hosts(given, data, int(number), model):
        name = f"push {case['push']}, prefetch {case['prefetch']}"
        found[f"{name}: epoch, s"] = case["epoch"]
        found[f"{name}: sent, MB"] = case["total"] / 1e6
    return found


def memory(script: Any, folder: str, model: str, workers: str) -> Found:
    """50,000 nodes, 1,000,000 edges; the largest peak of a worker, over that before it begins."""
    make, roots = script.SyntheticGraph, []
    for size in ({"nodes": 50_000, "edges": 1_000_000}, {"nodes": 400, "degree": 5}):
        graph = script.synthetic_graph(make(**size, features=100, classes=script.CLASSES))
        roots.append(f"{folder}/{size['nodes']}")
        script.pyg_sar.write_partitions(graph, int(workers), roots[-1], "random")
    modes = {name: policy for name, policy in script.POLICIES.items() if "pushed" not in name}
    given = *roots, model, list(modes.values())
    how = {"threads_per_worker": 1, "env": script.HEAP}
    everyone = script.pyg_sar.launch(script.measure, int(workers), *given, **how)
    peaks = (max(peak for peak, *_ in found) for found in zip(*everyone, strict=True))
    return {f"mode {m}: peak, MiB": p / 2**20 for m, p in zip(modes, peaks, strict=True)}


def attention(script: Any, folder: str, *names: str) -> Found:
    """50,000 nodes, 1,000,000 edges; layers on one worker; then attention and sums alone."""
    torch.set_num_threads(2)
    kind = script.SyntheticGraph(nodes=50_000, edges=1_000_000, features=script.FEATURES)
    data, file, found = script.synthetic_graph(kind), f"{folder}/graph.pt", {}
    if not names:
        width, passes = script.attention_of(data.edge_index, 4, 32)
        fused, _ = script.sums(data.x, data.edge_index, width)
        times = script.least(15, passes, fused)
        return dict(zip(("attention 4x32, s", "fused sum of width 128, s"), times, strict=True))
    torch.save((data.x, data.edge_index), file)
    for name in names:
        layer = script.pyg_sar.distribute(script.make(name))
        work = script.Pass(layer, data.x, data.edge_index)

        def passes(parts: Callable[[], tuple[float, float]] = work.parts) -> tuple[float, ...]:
            start = time.process_time()
            return (*parts(), time.process_time() - start)

        (times,) = script.least(5 if name in MODELS else 21, passes)
        for what, seconds in zip(("forward", "backward", "processor"), times, strict=True):
            found[f"{name}: {what}, s"] = seconds
        peaks = [script.peak(name, True, file) for _ in range(3)]
        found[f"{name}: peak, MiB"] = statistics.median(peaks)
    return found


def kernels(script: Any, folder: str, direction: str) -> Found:
    """100,000 nodes, 2,000,000 edges; sums of gathered rows."""
    torch.set_num_threads(2)
    graph = script.SyntheticGraph(nodes=100_000, edges=2_000_000, features=0)
    ends = script.synthetic_graph(graph).edge_index
    edges = script.grouped(ends if direction == "by target" else ends.flip(0), 100_000)
    found: Found = {}
    file = f"{folder}/edges.pt"
    torch.save(vars(edges), file)
    for width in (16, 100, 256):
        rows = torch.randn(edges.nodes, width)
        for weighted in (False, True):
            way = {"kernel": script.one_way("kernel", edges, rows, weighted)}
            name = f"{'weighted' if weighted else 'plain'}, width {width}"
            wall, processor = script.alternately(way, 15)["kernel"]
            found |= {f"{name}: sum, s": wall, f"{name}: processor, s": processor}
        peak = script.peak_in_a_fresh_process("kernel", file, width, False)
        found[f"plain, width {width}: peak, MiB"] = peak / 2**20
    return found


BENCHMARKS: dict[str, Callable[..., Found]] = {
    run.__name__: run for run in (wire, hosts, memory, attention, kernels)
}
CASES: list[tuple[str, ...]] = [
    *(("wire", model, number) for model in MODELS for number in "124"),
    *(("hosts", model, "2") for model in MODELS),
    *(("memory", model, number) for model in MODELS for number in "124"),
    ("attention", "GATConv 4x8", "GATv2Conv 4x8", "TransformerConv 4x8"),
    ("attention", *MODELS),
    ("attention",),
    *(("kernels", direction) for direction in ("by target", "transposed")),
]


def script_of(checkout: Path, name: str) -> Any:
    """A script of a checkout, which this process is to import the package from as well."""
    sys.path[0] = str(checkout / "benchmarks")  # instead of this script's folder
    script = importlib.import_module(name)
    for module in (script, importlib.import_module("pyg_sar")):
        if not Path(str(module.__file__)).resolve().is_relative_to(checkout):
            raise SystemExit(f"{module.__file__} is not of {checkout}")
    return script


def inside(checkout: Path, case: list[str]) -> Found:
    """One case in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return BENCHMARKS[case[0]](script_of(checkout, case[0]), folder, *case[1:])


def host(spec: str) -> None:
    """What torchrun starts on each host: the script's worker, with no epochs that send nothing."""
    script = script_of(Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]), "hosts")
    script.Silent = contextlib.nullcontext
    script.worker(spec)


# Both ########################################################################


def run(checkout: Path, case: tuple[str, ...]) -> Found:
    """Measures one case in a process of its own.

    Raises:
        SystemExit: When the script of that checkout fails.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", str(checkout), *case]
    setting = {**os.environ, "PYTHONPATH": str(checkout)}
    if case[0] == "kernels":  # as the script says
        setting["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(
        command, env=setting, cwd=checkout, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(case)} failed in {checkout}:\n{done.stdout}{done.stderr}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def go_on(args: argparse.Namespace, results: dict[str, list[Pair]]) -> None:
    """Measures pairs, of the case that has fewest first, until there are enough or time is over."""
    trees = {"before": args.before.resolve(), "after": REPOSITORY}
    end, longest = time.monotonic() + 60 * args.minutes, 0.0
    wanted = [case for case in CASES if case[0] in args.benchmarks]
    while time.monotonic() + longest < end:
        case = min(wanted, key=lambda case: len(results.get(", ".join(case), [])))
        pairs = results.setdefault(", ".join(case), [])
        if len(pairs) >= args.pairs:
            return
        start = time.monotonic()
        order = list(trees.items())[:: 1 if len(pairs) % 2 == 0 else -1]
        pairs.append({name: run(tree, case) for name, tree in order})
        longest = max(longest, time.monotonic() - start)
        print(f"{', '.join(case)}: {time.monotonic() - start:.0f} s", flush=True)
        if args.results:
            args.results.write_text(json.dumps(results))


def table(results: dict[str, list[Pair]]) -> list[str]:
    """One row per case and figure: medians, the median ratio with its middle half, and a mark."""
    lines = [
        "| benchmark | case | figure | before | after | after / before | middle half | pairs | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, pairs in results.items():
        for name in pairs[0]["before"] if pairs else ():
            old, new = ([pair[k][name] for pair in pairs] for k in ("before", "after"))
            both = [(a, b) for a, b in zip(old, new, strict=True) if a or b]
            if not both:  # nothing is sent
                continue
            ratios = [b / a if a else float("inf") for a, b in both]
            low, middle, high = torch.tensor(ratios).quantile(QUARTERS).tolist()
            above = "above" if middle > LIMITS[name.rsplit(" ", 1)[1]] else ""
            cells = [
                *case.split(", ", 1),
                name,
                *(f"{statistics.median(v):.4g}" for v in (old, new)),
            ]
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", str(len(pairs)), above]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def document(args: argparse.Namespace, results: dict[str, list[Pair]]) -> str:
    asked = ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    about = [f"* `{name}`: {str(run.__doc__).splitlines()[0]}" for name, run in BENCHMARKS.items()]
    head = [
        f"# Benchmarks before and after: commit {commit} and this version",
        "",
        f"{date.today()}, `{command(args)} --before BEFORE`, {os.cpu_count()} "
        f"cores, {platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), torch "
        f"{torch.__version__}, torch-geometric {torch_geometric.__version__}. Random parts, the "
        "same in both. Figures are medians over the pairs; a ratio is one within a pair, and its "
        f"median stands beside its middle half. Marked are those above {LIMITS['s']} (times) and "
        f"{LIMITS['MiB']} (memory, bytes).",
        "",
        *about,
        "",
    ]
    return "\n".join([*head, *table(results), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the other checkout, its kernels built")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--pairs", type=int, default=4, help="of each case")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="no pair starts that would end later"
    )
    parser.add_argument("--results", type=Path, help="keeps finished pairs, and goes on from them")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return host(args.worker)
    if args.inside:
        print(json.dumps(inside(Path(args.inside[0]), args.inside[1:])))
        return
    if args.before is None:
        parser.error("--before is needed")
    kept = args.results is not None and args.results.exists()
    results: dict[str, list[Pair]] = json.loads(args.results.read_text()) if kept else {}
    go_on(args, results)
    text = document(args, results)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
