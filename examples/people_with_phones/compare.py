"""Thirty people with phones, personal layers or not: `python examples/people_with_phones/compare.py --data-dir DIR`.

One client per person, who walks, climbs, sits, stands or lies; the end of each of a person's recordings is the test.
Needs `uci_har_acc.npz`, see `docs/data.md`.
"""

import argparse
import statistics

import numpy as np
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.experiments.client_tests import personal_test
from consilience.experiments.evaluation import evaluate

USUAL = {"lr": 0.05, "epochs": 1, "batch_size": 32}
METHODS = {
    "each alone": lambda: cs.local_only(**USUAL),
    "FedAvg": lambda: cs.fedavg(**USUAL),
    "FedBN": lambda: cs.fedbn(**USUAL),  # normalisation stays on the phone
    "FedPer": lambda: cs.fedper(**USUAL),  # the last layer does
    "Ditto": lambda: cs.ditto(lam=1.0, **USUAL),  # a second, whole model does
}


class Recogniser(nn.Module):
    """Windows [B, 3, 128] of acceleration to six activities."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(3, 16, 7, stride=2), nn.BatchNorm1d(16), nn.ReLU()),
            *(nn.Conv1d(16, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(4), nn.Flatten()),
        )
        self.head = nn.Linear(32 * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def scores(federation: cs.Federation, algorithm: cs.Algorithm, *, rounds: int, seed: int) -> np.ndarray:
    """[30] share of each person's test windows that the model on this phone gets right."""
    torch.manual_seed(seed)
    engine = cs.Vectorised(cs.Task(Recogniser()), federation)
    *_, last = cs.run(algorithm, engine, rounds=rounds, seed=seed)
    own_models = personal_test(algorithm, engine)
    if own_models is not None:
        return own_models(last.snapshot.server).values
    return evaluate(engine.task, last.model, engine.store("test")).clients.values


def main() -> None:
    """Every method on the same people, start models and batches, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder with the file; else $CONSILIENCE_DATA, else ./data")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    data = cs.load_data("uci_har_acc", data_dir=given.data_dir)
    federation, _ = cs.federate(data, cs.partition("natural"), seed=0)
    print(f"{'accuracy in %, mean (spread)':28} {'all people':>15} {'worst tenth':>15}")
    for name, method in METHODS.items():
        rows = []
        for seed in range(given.seeds):
            found = np.sort(scores(federation, method(), rounds=given.rounds, seed=seed))
            rows.append((found.mean(), found[: len(found) // 10].mean()))
        cells = [(100 * statistics.fmean(cell), 100 * statistics.pstdev(cell)) for cell in zip(*rows)]
        print(f"{name:28}", *(f"{f'{mean:.1f} ({spread:.1f})':>15}" for mean, spread in cells), flush=True)


if __name__ == "__main__":
    main()
