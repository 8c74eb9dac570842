"""DUW's Figure 2 from several starts: how much learned weights vary over T rounds; rows for the verdicts.

    python benchmarks/duw_variance.py --data path/to/data                    # half an hour of one core
    python benchmarks/duw_variance.py --data path/to/data --starts 4 --results folder

Starts that are stored are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reproduction_cells import RESULTS, ROOT, store, stored

from consilience.runs import identity

EXPERIMENT = "duw_variance"
SETTINGS = ("engine.lane=serial", "engine.device=cpu", "engine.compile=false", "threads=1")
LEARNING = ("--iterations", "40", "--lr", "0.01")  # the paper does not say how its weights were learned


def main() -> int:
    """Learn what is missing, start by start, and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder that holds mnist and duw_mnist")
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", default="2,5,10", help="numbers of rounds, with commas between")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    there = {row["seed"] for row in stored([RESULTS, given.results], EXPERIMENT)}
    for start in [start for start in given.starts if start not in there]:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "consilience", "learn"]
            command += [str(ROOT / "recipes" / "duw_variance.toml"), f"data_dir={given.data}", f"seed={start}"]
            command += [*SETTINGS, "--variance", given.rounds, *LEARNING, "--results", str(found), "--quiet"]
            subprocess.run([*command, "--out", str(Path(folder) / "weights.safetensors")], cwd=ROOT, check=True)
            store(given.results, EXPERIMENT, [row_of(json.loads(found.read_text(encoding="utf-8")))])
        print(f"start {start} is stored", flush=True)
    return 0


def row_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """A row as those of benchmarks/reproduce.py: its tests are the numbers of rounds."""
    import torch

    tests = [{"round": one["rounds"], "variance": one["variance"]} for one in found]
    row = {"method": "duw_fedavg", "seed": found[0]["seed"], "digest": "", "status": "finished", "tests": tests}
    row |= {"rounds": tests[-1]["round"], "planned": tests[-1]["round"], "final": tests[-1]["variance"]}
    row |= {"iterations": found[0]["iterations"], "device": "cpu", "torch": torch.__version__}
    return row | {"source": identity.source_digest()[:16]}


if __name__ == "__main__":
    raise SystemExit(main())
