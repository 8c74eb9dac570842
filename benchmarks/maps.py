"""Cost of recording the map of clients: CPU seconds of the same run with and without it, alternating.

    python benchmarks/maps.py [--repeats 3] [key=value ...]

Ends within three minutes on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from consilience.experiments import runner
from consilience.experiments.config import config

CASES = {
    "mlp, 26 thousand parameters, 20 clients": ("algorithm=fedavg", "partition.clients=20"),
    "mlp, 1.3 million parameters, 20 clients": ("algorithm=fedavg", "partition.clients=20", "model.hidden=[1100,1100]"),
}
COMMON = ("rounds=12", "threads=1", "engine.lane=serial", "engine.device=cpu", "evaluation.every=0")


def seconds(settings: tuple[str, ...]) -> tuple[float, int]:
    """(processor seconds, bytes of the clients' record) of one run."""
    folder = Path(tempfile.mkdtemp()) / "run"
    try:
        began = time.process_time()
        runner.execute(config.load(None, settings), folder=folder)
        return time.process_time() - began, (folder / "clients.jsonl").stat().st_size
    finally:
        shutil.rmtree(folder.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    lines = []
    for name, case in CASES.items():
        own = (*COMMON, *case, *given.settings)
        seconds((*own, "rounds=1"))  # compiles
        pairs = [(seconds((*own, "evaluation.maps=false")), seconds(own)) for _ in range(given.repeats)]
        ratios = [on[0] / off[0] for off, on in pairs]
        size = pairs[0][1][1] - pairs[0][0][1]
        lines.append(f"{name:42} {statistics.median(ratios):6.3f} {min(ratios):6.3f} {max(ratios):6.3f} {size:9,}")
        print(f"{name}: {ratios}", flush=True)
    print(f"\n{'case (12 rounds)':42} {'ratio':>6} {'least':>6} {'most':>6} {'bytes':>9}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
