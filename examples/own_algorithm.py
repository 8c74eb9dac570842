"""A weighting of your own inside FedAvg, and what it changes: `python examples/own_algorithm.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

import consilience as cs
from consilience.core.checks import Positive, check
from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree
from consilience.server import ByExamples


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Clients that find their data hard count more: weights ~ (reported loss)^power."""

    power: Positive = 1.0
    needs_each_reply = True  # it reads each client's loss, so a secure sum would not do

    def __post_init__(self) -> None:
        check(self)

    def init(self, start: Tree, clients: int) -> Tree:
        """Nothing is remembered between rounds."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Weights on the simplex, in float64; the softmax of logarithms cannot overflow."""
        logs = self.power * cohort.reply["loss"].clamp(min=1e-12).log()
        return torch.softmax(logs.to(torch.float64), 0), state, {}


def main() -> None:
    """Plain FedAvg beside FedAvg with these weights, same clients and same batches."""
    data = cs.load_data("digits")
    federation, _ = cs.federate(data, cs.partition("dirichlet", clients=10, alpha=0.2), seed=0)
    for name, weighting in (("by examples", ByExamples()), ("by loss", LossWeights(power=0.5))):
        algorithm = cs.fedavg(lr=0.5, epochs=2, batch_size=32, weighting=weighting)
        module = cs.build_model("mlp", (1, 8, 8), 10, seed=0, hidden=(32,))
        result = cs.train(module, federation, algorithm, rounds=8, seed=0, progress=False)
        last = result.history[-1]
        accuracy, worst = last["accuracy"], last["client_accuracy_worst_tenth"]
        print(f"weighted {name:12} accuracy {accuracy:.3f}, worst tenth of the clients {worst:.3f}")


if __name__ == "__main__":
    main()
