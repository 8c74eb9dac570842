"""Faults at random against runs on this machine: kill -9, pauses, cut lines, clocks that jump, full disks.

python -m chaos --minutes 20 --seed 1                  (in benchmarks/; local and deployed runs in turn)
python -m chaos --seed 1 --case 17                     (one case again, with its schedule)

After every case: no saved round is lost, results have the bits of the undisturbed run, and no reply of the hostile
member was counted. A case that fails prints its schedule; its folders are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos.deployed import DeployedCases
from chaos.local import LocalCases

EVERY = 4  # cases, one of which is a deployment


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--only", choices=("local", "deployed"))
    parser.add_argument("--place", type=Path, help="a new folder for everything that is written")
    given = parser.parse_args(arguments)
    place = given.place or Path(tempfile.mkdtemp(prefix="chaos-"))
    kinds = {"local": LocalCases(place / "local"), "deployed": DeployedCases(place / "deployed")}
    end, number, failed = time.monotonic() + 60 * given.minutes, given.case or 0, 0
    done: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    while time.monotonic() < end and sum(done.values()) < (1 if given.case is not None else given.cases):
        draw = random.Random(f"{given.seed} {number}")
        kind = given.only or ("deployed" if number % EVERY == EVERY - 1 else "local")
        settings, schedule = kinds[kind].drawn(draw)
        began = time.monotonic()
        try:
            how = kinds[kind].run(f"case-{number}", settings, schedule)
            shutil.rmtree(place / kind / f"case-{number}", ignore_errors=True)
        except Exception as problem:  # the next case may hold
            failed += 1
            how = f"FAILED: {type(problem).__name__}: {problem}"
            print(json.dumps({"seed": given.seed, "case": number, "kind": kind, "settings": settings}), flush=True)
            print(json.dumps([asdict(fault) for fault in schedule], indent=1), flush=True)
            print(f"again: python -m chaos --seed {given.seed} --case {number}; folders in {place}", flush=True)
        happened.update(f"{fault.kind} {fault.target}" for fault in schedule)
        done[kind] += 1
        print(f"case {number} {kind} {' '.join(settings[:2])}: {how} ({time.monotonic() - began:.0f} s)", flush=True)
        number += 1
    print(f"\n{sum(done.values())} cases ({dict(done)}), {failed} failed; faults drawn: {dict(happened)}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of the hostile nodes have nothing left to do
