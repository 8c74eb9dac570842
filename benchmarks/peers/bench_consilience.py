"""consilience on a workload: the engine measures its lanes in the first round.  Usage: python bench_consilience.py W1"""

import time

BORN = time.time()

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
import workloads

import consilience
from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation, Rows
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.server.averaging.weighting.by_size import ByExamples, UniformWeights
from consilience.task.task import Task


@dataclass(frozen=True)
class Schedule:
    """The cohorts that every peer is given."""

    cohorts: tuple

    def choose(self, round, pool, seed):
        return np.array(self.cohorts[round])


def main(name, lane="auto"):
    w = workloads.get(name)
    fed = workloads.Federation(w)
    x, y = torch.from_numpy(np.array(fed.x_train)), torch.from_numpy(np.asarray(fed.y_train).astype(np.int64))
    rows = Rows.gather(x.unsqueeze(1) if x.dim() == 3 else x, y, fed.parts)  # reordered while they are bytes
    rows = replace(rows, x=rows.x.float().div_(255).sub_(fed.mean).div_(fed.std))
    task = Task(workloads.build_model(w))
    federation = Federation(train=rows, classes=10)
    engine = Vectorised(task, federation, lane=lane, rounds_ahead=w.rounds)
    algorithm = fedavg(
        lr=w.lr,
        epochs=w.epochs,
        batch_size=w.batch,
        selection=Schedule(cohorts=tuple(map(tuple, workloads.cohorts(w)))),
        weighting=ByExamples() if w.weighted else UniformWeights(),
    )
    stamps = [time.time()]
    for done in run(algorithm, engine, rounds=w.rounds):
        stamps.append(time.time())
    print(engine.choice, file=sys.stderr)
    acc = workloads.accuracy(task.trained(done.model), fed)
    examples = workloads.examples_by_round(w, fed)
    version = consilience.__version__ + f" torch {torch.__version__}"
    workloads.report("consilience", version, w, stamps, BORN, acc, examples)


if __name__ == "__main__":
    main(*sys.argv[1:])
