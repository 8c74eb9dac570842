"""Seconds of CPU time of consilience's start-up on a workload, by part.  Usage: python startup.py W1

Start-up ends with the first round, less a steady round.  CPU time depends less on other processes than the clock
does, but not little: repeat it, and take the least.
"""

import resource
import sys
from collections.abc import Iterator


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


stamps = {"Python": cpu()}
import numpy  # noqa: F401

stamps["import numpy"] = cpu()
import torch  # noqa: F401

stamps["import torch"] = cpu()
import bench_consilience

from consilience.engines.vectorised.tuning import Tuner

stamps["import consilience"] = cpu()
rounds: list[float] = []
choosing = 0.0


def run(*args, **options) -> Iterator[object]:
    """The training loop, noting the CPU time before the first round and after every round."""
    stamps["data and engine"] = cpu()
    for done in training(*args, **options):
        rounds.append(cpu())
        yield done


def choose_lane(*args) -> None:
    """The choice of the lane, noting its CPU time in the first round."""
    global choosing
    began = cpu()
    choose(*args)
    choosing += cpu() - began if not rounds else 0.0


training, bench_consilience.run = bench_consilience.run, run
choose, Tuner.choose_lane = Tuner.choose_lane, choose_lane

if __name__ == "__main__":
    bench_consilience.main(*sys.argv[1:])
    before = 0.0
    for name, stamp in stamps.items():
        print(f"{name:20s} {stamp - before:.2f}")
        before = stamp
    steady = (rounds[-1] - rounds[0]) / (len(rounds) - 1)
    print(f"{'choice of the lane':20s} {choosing:.2f}")
    print(f"{'start-up':20s} {rounds[0] - steady:.2f}")
