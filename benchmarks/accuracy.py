"""Accuracy on real graphs: plain PyG beside pyg_sar on 1, 2 and 4 workers.

    python benchmarks/accuracy.py --out docs/results.md

Every model is trained in single-process PyG, where pyg_sar has no part, and through pyg_sar from
the same initial parameters. With dropout the runs draw different random numbers, so that
accuracies are compared over seeds; without it loss curves are compared epoch by epoch.

    python benchmarks/accuracy.py --recipes --workers 1 --seeds 5 --out labels.md

trains through pyg_sar alone, for as many epochs as published, with and without labels as inputs,
and takes Correct and Smooth of each: the recipes' accuracies.

    python benchmarks/accuracy.py --recipes --graphs tolokers --results FILE --minutes 8

stops after so long, within a training run too, and reports the finished runs; the same command
goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accuracy_report import report, report_recipes
from real_graphs import GRAPHS, MODELS, Setting, build, load, parameter_groups, with_labels
from scipy.stats import rankdata
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import CorrectAndSmooth

import pyg_sar
from pyg_sar.tensors import NodeTensor
from pyg_sar.train import ratio_mask

EXACT_EPOCHS = 25
BOTH = ["plain", "labels"]
SHOWN = 0.5  # the share of training nodes whose labels are inputs in an epoch
SMOOTHING = 50, 0.8, 50, 0.8  # layers and alpha of correcting, and of smoothing
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training run. ``workers`` 0: plain PyG. ``exact``: without dropout.

    ``recipe`` ``'plain'`` or ``'labels'``: for as many epochs as published, without or with labels
    as inputs, and Correct and Smooth of the outputs; ``''``: neither. ``changes``: what is set
    otherwise, such as ``'lr=0.01 epochs=50'``.
    """

    graph: str
    model: str
    seed: int
    workers: int
    exact: bool = False
    dtype: str = "float32"
    recipe: str = ""
    changes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """When to stop, in seconds of ``time.time()``, and where a training run's state waits."""

    at: float
    folder: Path

    def file(self, job: Job, rank: int) -> Path:
        """The file of one run and worker."""
        return self.folder / f"{'-'.join(map(str, asdict(job).values()))}-{rank}.pt"


# Training ################################################################################


def setting_of(job: Job) -> Setting:
    """The published setting; without dropout and for few epochs where exactness is shown."""
    setting = GRAPHS[job.graph].settings[job.model]
    if job.recipe:
        setting = replace(setting, **setting.published)
    pairs = [change.split("=") for change in job.changes.split()]
    setting = replace(setting, **{name: type(getattr(setting, name))(v) for name, v in pairs})
    if not job.exact:
        return setting
    return replace(
        setting, dropout=0.0, attention_dropout=0.0, epochs=EXACT_EPOCHS, every=EXACT_EPOCHS
    )


def train(job: Job, data: Data, pause: Pause | None = None) -> dict[str, Any] | None:
    """Trains one model; the test metric is that of the epoch with the best validation.

    Returns ``None`` when it has stopped before its end, by ``pause``.
    """
    setting = setting_of(job)
    masks = {part: data[f"{part}_mask"][:, job.seed] for part in ("train", "val", "test")}
    x = data.x.to(getattr(torch, job.dtype))
    torch.manual_seed(job.seed)
    labels = job.recipe == "labels"
    inputs = x.size(1) + labels * data.num_labels
    model = build(job.model, inputs, data.num_labels, setting).to(x.dtype)
    if job.workers:
        model = pyg_sar.distribute(model)
    torch.manual_seed(1000 * (job.seed + 1))  # Dropout's draws.
    optimizer = torch.optim.Adam(parameter_groups(model, setting), lr=setting.lr)
    auc = GRAPHS[job.graph].metric == "auc"
    losses: list[float] = []
    measure = _area if auc else _accuracy
    best, metric, best_epoch = float("inf"), float("nan"), 0
    best_out: Any = None
    learnt, known = masks["train"], x
    if labels:
        known = with_labels(x, data, learnt, learnt)
    start, first = time.perf_counter(), 1
    kept = pause and pause.file(job, rank_of(job))
    if kept and kept.exists():
        state = torch.load(kept)
        first, losses, best, metric, best_epoch, best_out, seconds, random = state["run"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(random)
        start -= seconds
    for epoch in range(first, setting.epochs + 1):
        if pause and kept and _is_late(job, pause):
            seconds, random = time.perf_counter() - start, torch.get_rng_state()
            run = epoch, losses, best, metric, best_epoch, best_out, seconds, random
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run}
            torch.save(state, kept)
            return None
        model.train()
        optimizer.zero_grad()
        given, asked = x, learnt
        if labels:
            shown = ratio_mask(learnt, SHOWN, 1000 * job.seed + epoch)
            given, asked = with_labels(x, data, learnt, shown), learnt & ~shown
        loss = _loss(model(given, data.edge_index), data.y, asked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if epoch % setting.every:
            continue
        out = _predict(model, known, data)
        score = -_area(out, data, masks["val"]) if auc else _loss(out, data.y, masks["val"]).item()
        if score < best:
            best, metric, best_epoch = score, measure(out, data, masks["test"]), epoch
            best_out = out
        elif setting.patience and epoch - best_epoch >= setting.patience:
            break
    smoothed = None
    if job.recipe:
        soft = correct_and_smooth(best_out, data, learnt, job.workers > 0)
        smoothed = measure(soft, data, masks["test"])
    return {
        **asdict(job),
        "setting": asdict(setting),
        "metric": metric,
        "smoothed": smoothed,
        "best_epoch": best_epoch,
        "losses": losses,
        "seconds": time.perf_counter() - start,
    }


@torch.no_grad()
def correct_and_smooth(out: Tensor, data: Data, mask: Tensor, distributed: bool) -> Tensor:
    """PyG's ``CorrectAndSmooth`` of a model's outputs, by the labels of the training nodes."""
    post: Any = CorrectAndSmooth(*SMOOTHING)
    post = pyg_sar.distribute(post) if distributed else post
    y = data.y[mask]
    soft = post.correct(out.softmax(1), y, mask, data.edge_index)
    return post.smooth(soft, y, mask, data.edge_index)


@torch.no_grad()
def _predict(model: torch.nn.Module, x: Tensor, data: Data) -> Tensor:
    model.eval()
    out: Tensor = model(x, data.edge_index)
    return out


def _is_late(job: Job, pause: Pause) -> bool:
    """Whether the time is over, on any worker."""
    late = torch.tensor(int(time.time() > pause.at))
    return bool(pyg_sar.comm.current().all_reduce(late, "max") if job.workers else late)


def _loss(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(out[mask], y[mask])


def _accuracy(out: Tensor, data: Data, mask: Tensor) -> float:
    return (out.argmax(1) == data.y)[mask].double().mean().item()


def _area(out: Tensor, data: Data, mask: Tensor) -> float:
    """The area under the ROC curve: how often class 1 is ranked above class 0."""
    columns = torch.stack([out[:, 1] - out[:, 0], data.y.to(out.dtype), mask.to(out.dtype)], dim=1)
    if isinstance(columns, NodeTensor):
        columns = columns.full_tensor()
    score, label, kept = columns.unbind(1)
    score, positive = score[kept > 0], label[kept > 0] > 0
    ranks = torch.from_numpy(rankdata(score.numpy()))
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return (ranks[positive].sum().item() - ones * (ones + 1) / 2) / (ones * zeros)


# One process and several #################################################################


def rank_of(job: Job) -> int:
    """This worker's rank; 0 in one process."""
    return pyg_sar.comm.current().rank if job.workers else 0


def run_jobs(
    jobs: list[Job],
    get_data: Callable[[str], Data],
    results: Path,
    pause: Pause | None = None,
) -> None:
    """Runs jobs, graph by graph; rank 0 adds a line to the file of results after each."""
    torch.set_num_threads(1)
    _quiet()
    name, data = "", Data()
    for job in jobs:
        if job.graph != name:
            name, data = job.graph, get_data(job.graph)
        result = train(job, data, pause)
        if result is None:
            return
        if rank_of(job) == 0:
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            sys.stderr.write(
                f"{'exact ' if job.exact else ''}{job.graph} {job.model} {job.dtype} seed "
                f"{job.seed} workers {job.workers or 'none'} {job.recipe}: {result['metric']:.4f} "
                f"at epoch {result['best_epoch']} of {len(result['losses'])}, smoothed "
                f"{result['smoothed']}, {result['seconds']:.0f} s\n"
            )
            sys.stderr.flush()


def _quiet() -> None:
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")


def run_worker(jobs: list[Job], parts: str, results: str, pause: Pause | None) -> None:
    """What each worker of one world size does."""
    run_jobs(
        jobs,
        lambda name: pyg_sar.load_partition(Path(parts) / name),
        Path(results),
        pause,
    )


# The command #############################################################################


def jobs_of(args: argparse.Namespace, workers: int) -> Iterator[Job]:
    """All runs of one world size."""
    if args.recipes:
        for graph in args.graphs:
            for seed in range(args.seeds or GRAPHS[graph].seeds):
                for model, recipe in product(args.models, args.recipes):
                    case = {"model": model, "seed": seed, "recipe": recipe, "changes": args.changes}
                    yield Job(graph=graph, workers=workers, **case)
        return
    for graph in args.graphs:
        for model in args.models:
            case = {"graph": graph, "model": model, "workers": workers, "changes": args.changes}
            yield Job(**case, seed=0, exact=True)
            if model == args.models[-1]:
                yield Job(**case, seed=0, exact=True, dtype="float64")
            for seed in range(args.seeds or GRAPHS[graph].seeds):
                yield Job(**case, seed=seed)


def read_results(path: Path) -> dict[Job, dict[str, Any]]:
    """The finished runs of a file of results, but for those of other settings than today's."""
    lines = path.read_text().splitlines() if path.exists() else []
    results = {}
    for row in map(json.loads, lines):
        job = Job(**{key: row[key] for key in Job.__dataclass_fields__ if key in row})
        if row["setting"] == asdict(setting_of(job)):
            results[job] = row
    return results


def command(args: argparse.Namespace) -> str:
    """The command that makes this report, without the folders of this machine."""
    text = "python benchmarks/accuracy.py"
    if args.recipes:
        text += " --recipes" + "".join(f" {name}" for name in args.recipes if args.recipes != BOTH)
    if args.graphs != list(GRAPHS):
        text += f" --graphs {' '.join(args.graphs)}"
    if args.models != list(MODELS):
        text += f" --models {' '.join(args.models)}"
    if args.seeds:
        text += f" --seeds {args.seeds}"
    if args.workers != [1, 2, 4]:
        text += f" --workers {','.join(map(str, args.workers))}"
    if args.changes:
        text += f" --set {args.changes}"
    return f"{text} --out {'labels' if args.recipes else 'docs/results'}.md"


def worlds_of(args: argparse.Namespace) -> list[int]:
    """The world sizes; 0 is plain PyG."""
    return args.workers if args.recipes else [0, *args.workers]


def run_all(args: argparse.Namespace, results: Path, folder: Path) -> None:
    """Runs what is not in the file of results yet."""
    done = read_results(results)
    todo = {
        workers: [job for job in jobs_of(args, workers) if job not in done]
        for workers in worlds_of(args)
    }
    graphs: dict[str, Data] = {}
    for name in args.graphs:
        if any(job.graph == name for jobs in todo.values() for job in jobs):
            data = load(name, args.data, args.seeds or GRAPHS[name].seeds)
            data.num_labels = int(data.y.max()) + 1
            data.num_nodes_in_all = data.num_nodes
            graphs[name] = data
    for workers in args.workers:
        for name in {job.graph for job in todo[workers]}:
            pyg_sar.write_partitions(graphs[name], workers, folder / str(workers) / name)

    pause = None
    if args.minutes:
        pause = Pause(at=time.time() + 60 * args.minutes, folder=results.with_suffix(".paused"))
        pause.folder.mkdir(exist_ok=True)

    def launch(workers: int) -> None:
        if todo[workers]:
            given = todo[workers], str(folder / str(workers)), str(results), pause
            pyg_sar.launch(run_worker, workers, *given, threads_per_worker=1)

    # The single process and one worker compute with a core each, so they run side by side.
    with ThreadPoolExecutor(1) as executor:
        alone = todo.get(0, [])
        given = graphs.__getitem__, results, pause
        plain = executor.submit(run_jobs, alone, *given)
        for workers in args.workers:
            launch(workers)
            plain.result()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the .npz graphs")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--recipes", nargs="*", choices=BOTH, help="labels as inputs, smoothing (both by default)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings, such as epochs=10"
    )
    parser.add_argument("--seeds", type=int, help="seeds per model (default: by graph)")
    parser.add_argument(
        "--workers",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1, 2, 4],
        help="world sizes (default: 1,2,4)",
    )
    parser.add_argument("--results", type=Path, help="file of finished runs, to go on from")
    parser.add_argument("--minutes", type=float, help="stop after so long (with --results)")
    parser.add_argument("--out", type=Path, help="write the report here as well as to stdout")
    args = parser.parse_args()
    args.recipes = args.recipes or (None if args.recipes is None else BOTH)
    args.changes = " ".join(args.set)
    return args


def main() -> None:
    """Runs everything and prints the tables."""
    args = parse_arguments()
    _quiet()
    if args.minutes and not args.results:
        raise SystemExit("--minutes needs --results: the file that the next command goes on from")
    missing = [GRAPHS[n].file for n in args.graphs if not (args.data / GRAPHS[n].file).exists()]
    if missing:
        raise SystemExit(f"--data: '{args.data}' has no {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        results = args.results or Path(scratch) / "results.jsonl"
        run_all(args, results, Path(scratch))
        rows = read_results(results)
        jobs = [job for workers in worlds_of(args) for job in jobs_of(args, workers)]
    found = [rows[job] for job in jobs if job in rows or not args.minutes]
    if args.recipes:
        text = report_recipes(found, command(args), SHOWN, SMOOTHING)
    else:
        text = report(found, command(args), args.workers, EXACT_EPOCHS)
    sys.stdout.write(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
