"""Four hospitals, one model for all or one each: `python examples/four_hospitals/compare.py --data-dir DIR`.

Each hospital's test patients are classified by the model it would use: its own where a method has personal models,
the common one otherwise. Needs the UCI Heart Disease files, see `docs/data.md`.
"""

import argparse
import statistics

import numpy as np

import consilience as cs
from consilience.experiments.client_tests import personal_test
from consilience.experiments.evaluation import evaluate

USUAL = {"lr": 0.1, "epochs": 2, "batch_size": 16}
METHODS = {
    "each alone": lambda: cs.local_only(**USUAL),  # the lower baseline
    "FedAvg": lambda: cs.fedavg(**USUAL),
    "SCAFFOLD": lambda: cs.scaffold(**USUAL),  # one model for all, drift corrected
    "Ditto": lambda: cs.ditto(lam=1.0, **USUAL),  # a model each, with a proximal term to the common one
    "data in one place": lambda: cs.centralised(**USUAL),  # the upper baseline
}


def hospitals(data_dir: str | None, seed: int) -> cs.Federation:
    """One client per hospital; `seed` decides which 30 % of its patients are test patients."""
    data = cs.load_data("heart_disease", test_fraction=0.3, seed=seed, data_dir=data_dir)
    return cs.federate(data, cs.partition("natural"), seed=seed)[0]


def accuracies(federation: cs.Federation, algorithm: cs.Algorithm, *, rounds: int, seed: int) -> np.ndarray:
    """[4] share of right diagnoses among each hospital's test patients, after the last round."""
    module = cs.build_model("mlp", tuple(federation.train.x.shape[1:]), 2, seed=seed, hidden=(16,))
    clients = federation.pooled() if algorithm == METHODS["data in one place"]() else federation
    engine = cs.Vectorised(cs.Task(module), clients, device="cpu")
    *_, last = cs.run(algorithm, engine, rounds=rounds, seed=seed)
    own_models = personal_test(algorithm, engine)
    if own_models is not None:
        return own_models(last.snapshot.server).values
    return evaluate(engine.task, last.model, federation.test).clients.values


def most_common(federation: cs.Federation) -> np.ndarray:
    """[4] accuracy of predicting each hospital's most common diagnosis for every patient."""
    found = []
    for k in range(len(federation)):
        (_, train), (_, test) = federation.train.of(k), federation.test.of(k)
        found.append(float((test == train.mode().values).double().mean()))
    return np.array(found)


def main() -> None:
    """Every method on the same hospitals, start models and batches, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder with the files; else $CONSILIENCE_DATA, else ./data")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    federations = [hospitals(given.data_dir, seed) for seed in range(given.seeds)]
    print(f"{'accuracy in %, mean (spread)':28}", *(f"{name:>15}" for name in (*federations[0].names, "mean")))
    for name, method in {"most common diagnosis": None, **METHODS}.items():
        rows = []
        for seed, federation in enumerate(federations):
            if method is None:
                found = most_common(federation)
            else:
                found = accuracies(federation, method(), rounds=given.rounds, seed=seed)
            rows.append([*found, found.mean()])
        cells = [(100 * statistics.fmean(cell), 100 * statistics.pstdev(cell)) for cell in zip(*rows)]
        print(f"{name:28}", *(f"{f'{mean:.1f} ({spread:.1f})':>15}" for mean, spread in cells), flush=True)


if __name__ == "__main__":
    main()
