"""Mutants: small faults planted in the package one at a time, and whether the tests nearest to them notice.

    python benchmarks/mutants.py --count 60 --seed 0 --out mutants.json     # plant, test, write down
    python benchmarks/mutants.py --again mutants.json    # the same faults on the present code and tests

A mutant is killed if a test of its own package's folder fails; survivors are printed with their line. Some survivors
change nothing that can be observed. Works on a copy of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
TESTS = {
    "algorithms": ["contract", "server", "client"],
    "runs": ["runs", "faults"],
    "wire": ["wire", "faults"],
    "privacy": ["privacy", "server"],
}
SECONDS = 400


def main() -> int:
    """Plant every mutant in turn; code 1 if any survived."""
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path)
    options.add_argument("--again", type=Path, help="the mutants of an earlier run, by file and line text")
    given = options.parse_args()
    wanted = json.loads(given.again.read_text()) if given.again else drawn(given.count, given.seed)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "site", "__pycache__", "*.egg-info")
        )
        shutil.copytree(ROOT / "consilience" / "runs", copy / "consilience" / "runs", dirs_exist_ok=True)
        if (ROOT / "tests" / "runs").exists():
            shutil.copytree(ROOT / "tests" / "runs", copy / "tests" / "runs", dirs_exist_ok=True)
        for mutant in wanted:
            mutant["outcome"] = tried(mutant, copy)
            print(
                f"{mutant['outcome']:9} {mutant['file']}: {mutant['before'].strip()}  ->  {mutant['after'].strip()}",
                flush=True,
            )
            if given.out:
                given.out.write_text(json.dumps(wanted, indent=1))
    counted = {outcome: sum(m["outcome"] == outcome for m in wanted) for outcome in ("killed", "survived", "gone")}
    print(", ".join(f"{number} {outcome}" for outcome, number in counted.items()))
    return 1 if counted["survived"] else 0


def drawn(count: int, seed: int) -> list[dict[str, str]]:
    """So many mutants, spread over the files by their length."""
    files = sorted(file for file in (ROOT / "consilience").rglob("*.py") if (ROOT / "tests" / room(file)).is_dir())
    luck, found = random.Random(seed), []
    while len(found) < count:
        file = luck.choices(files, [len(f.read_text().splitlines()) for f in files])[0]
        places = list(mutations(file))
        if places:
            before, after = luck.choice(places)
            found.append({"file": file.relative_to(ROOT).as_posix(), "before": before, "after": after})
    return found


def room(file: Path) -> str:
    """The package that a file belongs to."""
    return file.relative_to(ROOT / "consilience").parts[0].removesuffix(".py")


def mutations(file: Path) -> list[tuple[str, str]]:
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
        if not sign or sign in ("=", "if", "for") or lines.count(line) > 1 or start < 0:
            continue
        found.append((line, line[:start] + swap + line[start + len(sign) :]))
    return found


def tried(mutant: dict[str, str], copy: Path) -> str:
    """Whether the nearest tests fail with this fault."""
    file = copy / mutant["file"]
    if not file.exists() or mutant["before"] not in file.read_text(encoding="utf-8").splitlines():
        return "gone"
    text = file.read_text(encoding="utf-8")
    try:
        mutated = text.replace(mutant["before"] + "\n", mutant["after"] + "\n", 1)
        ast.parse(mutated)
        file.write_text(mutated, encoding="utf-8")
        own = Path(mutant["file"]).parts[1].removesuffix(".py")
        folders = [f"tests/{name}" for name in TESTS.get(own, [own]) if (copy / "tests" / name).is_dir()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *folders]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
        return "survived" if done.returncode == 0 else "killed"
    except SyntaxError:
        return "gone"
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
