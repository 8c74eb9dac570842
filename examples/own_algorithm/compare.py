"""Is it better than FedAvg? `python examples/own_algorithm/compare.py`: same clients, start models and batches."""

import argparse
import statistics

from hard_first import hard_first

import consilience as cs

USUAL = {"lr": 0.2, "epochs": 2, "batch_size": 32}


def main() -> None:
    """Digits over ten clients with few classes each, once per seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    data = cs.load_data("digits")
    methods = {"FedAvg": cs.fedavg(**USUAL), "hard first": hard_first(power=0.5, **USUAL)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for seed in range(given.seeds):
        federation, _ = cs.federate(data, cs.partition("dirichlet", clients=10, alpha=0.2), seed=seed)
        for name, algorithm in methods.items():
            module = cs.build_model("mlp", (1, 8, 8), 10, seed=seed, hidden=(32,))
            last = cs.train(module, federation, algorithm, rounds=given.rounds, seed=seed, progress=False).history[-1]
            found[name].append((100 * last["accuracy"], 100 * last["client_accuracy_worst_tenth"]))
    print(f"{'in %, mean (spread)':20} {'accuracy':>12} {'worst tenth':>12}")
    for name, rows in found.items():
        cells = [f"{statistics.fmean(cell):.1f} ({statistics.pstdev(cell):.1f})" for cell in zip(*rows)]
        print(f"{name:20}", *(f"{cell:>12}" for cell in cells))
    wins = sum(new[1] > old[1] for old, new in zip(found["FedAvg"], found["hard first"]))
    print(f"hard first is better for the worst tenth in {wins} of {given.seeds} seeds")


if __name__ == "__main__":
    main()
