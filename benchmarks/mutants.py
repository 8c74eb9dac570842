"""Mutation testing: small faults are put into the package one at a time, and the nearest tests must fail.

    python benchmarks/mutants.py                       # every fault listed in mutants.toml
    python benchmarks/mutants.py --jobs 16             # so many at a time, on a machine with as many cores
    python benchmarks/mutants.py --only geometry       # those whose name or file holds this text
    python benchmarks/mutants.py --draw 60 --seed 0    # swapped operators at random places instead

A mutant is killed if one of its tests fails. No listed mutant is equivalent: each changes observable behaviour, so
a survivor is a test to be written. Mutants of a package that is not installed are left out. Each job works
on its own copy of the checkout; a process that has imported PyTorch is forked for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COPIED = (
    "consilience",
    "tests",
    "docs",
    "recipes",
    "examples",
    "benchmarks",
    "README.md",
    "Makefile",
    "pyproject.toml",
)
SECONDS = 600
# that every test needs and no mutant changes; imported once, before the first fork
COMMON = ("torch", "torch._dynamo", "torch.func", "numpy", "scipy.stats", "sklearn.datasets", "pytest", "hypothesis")
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
FOLDERS = {
    "algorithms": ["contract", "server", "client"],
    "runs": ["runs", "faults"],
    "wire": ["wire", "faults"],
    "privacy": ["privacy", "server"],
}  # of tests, for drawn mutants of a package; else the folder of its name


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A text that stands once in a file, what to put in its place, and the tests that should notice."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    needs: str = ""  # a package without which the tests cannot run

    def tests_in(self, root: Path) -> tuple[str, ...]:
        """Those of its tests that a checkout has."""
        return tuple(test for test in self.tests if (root / test.partition("::")[0]).exists())


Job = tuple[Mutant | None, tuple[str, ...]]


def main() -> int:
    """Plant every mutant; code 1 if any survived or could not be planted."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    options.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="in a mutant's name, file or tests")
    options.add_argument("--draw", type=int, metavar="COUNT", help="random swaps of operators instead of the list")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--root", type=Path, default=ROOT, help="the checkout to mutate and test")
    given = options.parse_args()
    wanted = drawn(given.root, given.draw, given.seed) if given.draw else listed()
    wanted = [mutant for mutant in wanted if any(text in str(mutant) for text in given.only)]
    for name in COMMON:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as place:
        copies = [copied(given.root, Path(place) / str(number)) for number in range(given.jobs)]
        outcomes = {mutant.name: obstacle(mutant, given.root) for mutant in wanted}
        jobs: list[Job] = [(mutant, mutant.tests_in(given.root)) for mutant in wanted if not outcomes[mutant.name]]
        for (mutant, _), code in tested(jobs, copies):
            assert mutant is not None
            outcomes[mutant.name] = "killed" if code else "survived"
            print(f"{outcomes[mutant.name]:9} {mutant.name:60} {mutant.file}", flush=True)
        # what tests say of a mutant means nothing if they fail without it
        decisive = {tests for mutant, tests in jobs if mutant and outcomes[mutant.name] == "killed"}
        failing = {tests for (_, tests), code in tested([(None, tests) for tests in sorted(decisive)], copies) if code}
        for mutant, tests in jobs:
            if mutant and tests in failing:
                outcomes[mutant.name] = "not tried, its tests fail without it"
    for mutant in wanted:
        if outcomes[mutant.name] not in ("killed", "survived"):
            print(f"{mutant.name}: {outcomes[mutant.name]}")
    found = list(outcomes.values())
    print(", ".join(f"{found.count(outcome)} {outcome}" for outcome in dict.fromkeys(found)))
    return 0 if all(outcome == "killed" or outcome.startswith("left out") for outcome in found) else 1


def listed() -> list[Mutant]:
    """The mutants of the list beside this file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in table["mutant"]]


def copied(root: Path, to: Path) -> Path:
    """What tests need of a checkout."""
    to.mkdir()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy(root / name, to / name)
    return to


def obstacle(mutant: Mutant, root: Path) -> str:
    """Why a mutant cannot be tried here; "" if it can."""
    file = root / mutant.file
    if mutant.needs and importlib.util.find_spec(mutant.needs) is None:
        return f"left out, {mutant.needs} is not installed"
    if not file.exists() or file.read_text(encoding="utf-8").count(mutant.before) != 1:
        return "not planted, its text does not stand in the file once"
    return "" if mutant.tests_in(root) else "survived, there is no test"


def tested(jobs: list[Job], copies: list[Path]) -> Iterator[tuple[Job, int]]:
    """Every job with pytest's exit code (1 where it takes too long), as many at a time as there are copies."""
    waiting, free, running = list(reversed(jobs)), list(copies), dict[int, tuple[Job, Path, str, Any, float]]()
    while waiting or running:
        while waiting and free:
            (mutant, tests), copy = waiting.pop(), free.pop()
            text = plant(mutant, copy) if mutant else ""
            child = multiprocessing.get_context("fork").Process(target=_test, args=(copy, tests))
            child.start()
            running[child.sentinel] = (mutant, tests), copy, text, child, time.monotonic()
        multiprocessing.connection.wait(list(running), timeout=5)
        for sentinel, (job, copy, text, child, began) in list(running.items()):
            if child.exitcode is None and time.monotonic() - began > SECONDS:
                child.kill()
            if child.exitcode is not None:
                del running[sentinel]
                free.append(copy)
                if job[0]:
                    (copy / job[0].file).write_text(text, encoding="utf-8")
                yield job, child.exitcode


def plant(mutant: Mutant, copy: Path) -> str:
    """Write the fault into the copy; the text before."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    return text


def _test(copy: Path, tests: tuple[str, ...]) -> None:
    """Become `pytest TESTS` in the copy."""
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy)]
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    import pytest
    import torch

    torch.set_num_threads(1)
    code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests])
    os._exit(int(code))


def drawn(root: Path, count: int, seed: int) -> list[Mutant]:
    """So many mutants, spread over the files by their length; some change nothing that can be observed."""
    files = sorted(file for file in (root / "consilience").rglob("*.py") if folders(root, file))
    luck, found = random.Random(seed), []
    while len(found) < count:
        file = luck.choices(files, [len(f.read_text(encoding="utf-8").splitlines()) for f in files])[0]
        places = swaps(file)
        if places:
            before, after = luck.choice(places)
            where, name = file.relative_to(root).as_posix(), f"{before.strip()} -> {after.strip()}"
            found.append(Mutant(name=name, file=where, before=before, after=after, tests=folders(root, file)))
    return found


def folders(root: Path, file: Path) -> tuple[str, ...]:
    """The folders of tests of the package that a file belongs to."""
    own = file.relative_to(root / "consilience").parts[0].removesuffix(".py")
    return tuple(f"tests/{name}" for name in FOLDERS.get(own, [own]) if (root / "tests" / name).is_dir())


def swaps(file: Path) -> list[tuple[str, str]]:
    """(line, mutated line) for every operator that can be swapped, on lines that are unique in the file."""
    text = file.read_text(encoding="utf-8")
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        operator = getattr(node, "op", None) or (node.ops[0] if isinstance(node, ast.Compare) else None)
        swap = SWAPS.get(type(operator))
        if swap is None or not isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare)):
            continue
        left = node.values[0] if isinstance(node, ast.BoolOp) else node.left
        line = lines[left.end_lineno - 1]
        tail = line[left.end_col_offset :]
        sign = tail.lstrip(" )")[:3].split(" ")[0]
        start = left.end_col_offset + tail.find(sign) if sign else -1
        if not sign or sign in ("=", "if", "for") or text.count(line) > 1 or start < 0:
            continue
        mutated = line[:start] + swap + line[start + len(sign) :]
        with suppress(SyntaxError):
            ast.parse(text.replace(line, mutated))
            found.append((line, mutated))
    return found


if __name__ == "__main__":
    sys.exit(main())
