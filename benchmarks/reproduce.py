"""Run the missing cells of the verdicts of docs/reproductions.md within the time given; each call adds seeds.

    python benchmarks/reproduce.py --list                              # the plan: what is missing, at what cost
    python benchmarks/reproduce.py --data path/to/data --minutes 9     # on a GPU and the processor, at most 9 minutes
    python benchmarks/reproduce.py --data path/to/data --device cpu --jobs 2 --minutes 60
    python benchmarks/reproduce.py --data path/to/data --again 4       # repeat four stored cells: same bits?
    python benchmarks/reproduce.py --merge folder                      # rows that another --results folder has

Cells run side by side in processes, at most six on the GPU (which MPS lets share it, where it can be started), and are
stored as soon as they are finished. When the time is up, running cells finish their round and are stored as
incomplete; with --work they continue from there next time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from multi_process_service import shared_gpu
from reproduction_cells import (
    RESULTS,
    Cell,
    Experiment,
    cells_of,
    missing,
    ordered,
    read_experiments,
    row_of,
    store,
    stored,
)
from reproduction_pool import Pool

from consilience.runs import identity

MOST_ON_GPU = 6
BEGAN = time.monotonic()  # the time given counts from here

Known = dict[str, tuple[list[Cell], list[dict[str, Any]]]]


def main() -> int:
    """Read the options, then list, merge, or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="the data directory")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where rows are stored; those in docs/results count too"
    )
    parser.add_argument("--work", type=Path, help="where runs are kept, to go on with; without it they are lost")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=("both", "cuda", "cpu"), default="both")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - MOST_ON_GPU - 1), help="processes on the processor"
    )
    parser.add_argument("--gpu-jobs", type=int, default=MOST_ON_GPU, help="processes on the GPU, at most 6")
    parser.add_argument(
        "--only", default="", help="experiments, with commas between; NAME:4 for the first four seeds of one"
    )
    parser.add_argument("--without", default="", help="methods to leave out, with commas between")
    parser.add_argument("--again", type=int, default=0, metavar="K", help="repeat K stored cells and compare the bits")
    parser.add_argument("--list", action="store_true", help="print the plan and run nothing")
    parser.add_argument(
        "--merge", type=Path, metavar="DIR", help="take over the rows of another folder, and run nothing"
    )
    options = parser.parse_args()
    experiments = chosen(options.only)
    if options.merge is not None:
        return merge(options.merge, options.results)
    known: Known = {}
    for one in experiments:
        rows = stored([RESULTS, options.results], one.name)
        cells = [cell for cell in cells_of(one, rows, options.data) if cell.method not in options.without.split(",")]
        known[one.name] = cells, rows
    if options.list:
        print_plan(known, options.data)
        return 0
    if options.data is None:
        parser.error("--data is missing: name the directory that holds the data sets")
    devices = usable(options.device)
    ready = {
        name: found
        for name, found in known.items()
        if found[0] and runnable(found[0][0].experiment, devices, options.data)
    }
    todo = repeats(ready, options.again) if options.again else ordered(ready)
    if not todo:
        print("nothing is left to run with these options; --list shows the plan")
        return 0
    return run(todo, ready, options)


def merge(folder: Path, results: Path) -> int:
    """Take over the rows of another folder; of one cell the longer run counts. Says whether repeated ones agree."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"--merge {folder}: no rows are there; name the --results folder of a run")
    for path in files:
        before, found = stored([results], path.stem), stored([results, folder], path.stem)
        store(results, path.stem, found)
        print(f"{path.stem}: {len(found) - len(before)} rows more, {len(found)} in all")
        repeated = [(old, new) for old in before for new in found if is_repeat(old, new)]
        if repeated:
            same = [same_bits(old, new) for old, new in repeated if old.get("torch") == new.get("torch")]
            print(
                f"  {len(repeated)} rows are replaced by a repeat, {len(same)} of them by the same version of PyTorch, "
                f"{sum(same)} of these with the same bits"
            )
    return 0


def is_repeat(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a row is another run of the same cell."""
    key = ("method", "seed", "digest")
    return old != new and [old.get(name) for name in key] == [new.get(name) for name in key]


def same_bits(before: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether two runs of a cell agree as far as both got, in what both have stored of each test."""
    pairs = list(zip(before["tests"], row["tests"]))
    same = all(old[key] == new[key] for old, new in pairs for key in old.keys() & new.keys())
    if before["status"] == row["status"] == "finished" and before.get("weights") and row.get("weights"):
        same = same and before["weights"] == row["weights"]
    return same


def chosen(names: str) -> tuple[Experiment, ...]:
    """The experiments named on the command line, or all."""
    every = {one.name: one for one in read_experiments()}
    wanted = dict(name.strip().partition(":")[::2] for name in names.split(",") if name.strip())
    for name, count in wanted.items():
        if name not in every:
            raise SystemExit(f"--only {name}: there is no such experiment, but {', '.join(every)}")
        if count and not (count.isdigit() and int(count)):
            raise SystemExit(f"--only {name}:{count}: after the colon give a number of seeds, at least 1")
    if not wanted:
        return tuple(every.values())
    return tuple(
        replace(every[name], seeds=every[name].seeds[: int(count) if count else None]) for name, count in wanted.items()
    )


def usable(wanted: str) -> tuple[str, ...]:
    """The kinds of device to run on."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: PyTorch finds no GPU here")
    there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return there if wanted == "both" else (wanted,)


def runnable(experiment: Experiment, devices: tuple[str, ...], data: str) -> bool:
    """Whether its device and its data are here; what is missing is said."""
    if experiment.device not in devices:
        return False
    absent = [name for name in experiment.data if not (Path(data) / name).exists()]
    if absent:
        print(f"{experiment.name}: left out, {data} has no {', '.join(absent)}", flush=True)
    return not absent


def print_plan(known: Known, data: str | None) -> None:
    """The order of what is missing, and its cost."""
    totals: dict[str, float] = {}
    for cell in ordered(known):
        totals[cell.experiment.device] = totals.get(cell.experiment.device, 0.0) + cell.seconds
    print(
        f"{'experiment':34} {'device':6} {'methods':>7} {'seeds stored':>12} {'cells missing':>13} {'minutes each':>12}"
    )
    first = list(dict.fromkeys(cell.experiment.name for cell in ordered(known)))
    for name in [*first, *(name for name in known if name not in first)]:
        cells, rows = known[name]
        todo, methods = missing(cells, rows), {cell.method for cell in cells}
        seeds = {cell.seed for cell in cells} - {cell.seed for cell in todo}
        each = sum(cell.seconds for cell in cells) / len(cells) / 60
        one = cells[0].experiment
        absent = [folder for folder in one.data if data and not (Path(data) / folder).exists()]
        note = f"   no {', '.join(absent)} in {data}" if absent else ""
        print(f"{name:34} {one.device:6} {len(methods):7} {len(seeds):12} {len(todo):13} {each:12.1f}{note}")
    for device, seconds in totals.items():
        at_once = MOST_ON_GPU if device == "cuda" else 1
        print(f"{device}: about {seconds / at_once / 60:.0f} minutes with {at_once} processes")


def repeats(known: Known, count: int) -> list[Cell]:
    """Stored cells to run again: the cheapest of every experiment, then the next ones."""
    by_experiment = []
    for cells, rows in known.values():
        whole = {(row["method"], row["seed"], row.get("digest")) for row in rows if row["status"] == "finished"}
        here = [cell for cell in cells if (cell.method, cell.seed, cell.digest) in whole]
        by_experiment.append(list(enumerate(sorted(here, key=lambda cell: cell.seconds))))
    flat = sorted((pair for one in by_experiment for pair in one), key=lambda pair: (pair[0], pair[1].seconds))
    return [cell for _, cell in flat[:count]]


def run(todo: list[Cell], known: Known, options: argparse.Namespace) -> int:
    """Hand out cells until they are done or the time is up; 1 if a repeated cell gave other bits."""
    deadline = BEGAN + 60 * options.minutes
    source, rows = identity.source_digest(), {name: found[1] for name, found in known.items()}
    kept = options.work is not None and not options.again
    differing, left = 0, len(todo)
    with contextlib.ExitStack() as stack:
        work = options.work if kept else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gpu_jobs = max(1, min(options.gpu_jobs, MOST_ON_GPU, sum(cell.experiment.device == "cuda" for cell in todo)))
        if any(cell.experiment.device == "cuda" for cell in todo) and gpu_jobs > 1:
            print(stack.enter_context(shared_gpu()), flush=True)
        pool = stack.enter_context(Pool.opened(todo, gpu_jobs, options.jobs))
        folders = {cell.key: cell.folder(work, source) for cell in todo}
        for cell, text, facts in pool.serve(todo, deadline, folders):
            row = row_of(cell, folders[cell.key], facts) if facts else None
            status = row["status"] if row else "not stored"
            print(f"{time.strftime('%H:%M:%S')} {'/'.join(map(str, cell.key))}: {status}, {text}", flush=True)
            if row is None:
                continue
            if options.again:
                differing += not compared(cell, row, rows[cell.experiment.name])
            else:
                store(options.results, cell.experiment.name, [row])
            if row["status"] != "cut short":
                left -= 1
                shutil.rmtree(folders[cell.key], ignore_errors=True)
    if left:
        print(f"{left} of {len(todo)} runs are left: call this again; if none was begun, give more --minutes")
    return 1 if differing else 0


def compared(cell: Cell, row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Print whether a repeated cell gave the stored bits; a run that was cut short is compared as far as it got."""
    before = next(r for r in rows if (r["method"], r["seed"], r.get("digest")) == (cell.method, cell.seed, cell.digest))
    same = same_bits(before, row)
    other = [f"{key}: {before[key]} -> {row[key]}" for key in ("device", "torch", "source") if before[key] != row[key]]
    said = "same bits" if same else "OTHER BITS"
    tests = min(len(before["tests"]), len(row["tests"]))
    print(f"  {said} in {tests} tests{'; ' + '; '.join(other) if other else ''}", flush=True)
    return same


if __name__ == "__main__":
    raise SystemExit(main())
