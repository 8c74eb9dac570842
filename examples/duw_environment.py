"""DUW's environments I to IV on the authors' own MNIST rows: FedAvg, DR-FedAvg, DUW-FedAvg from several start models.

    python examples/duw_environment.py --data DIR --environment 2 --starts 0 1 2 --out results

Accuracies per round are printed and written to `results/environment_2_starts_0_1_2.json`, learned weights to
`results/environment_2_start_0.safetensors` and so on, which `duw_fedavg(schedule=...)` reads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import consilience as cs
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.environments import preset
from consilience.meta import Schedule, learning

FILES = {1: "env1", 2: "env2", 3: "env34", 4: "env34"}
TEST_SCALES = ("same", "authors")  # the authors' code scales test pictures differently from training pictures


def main() -> None:
    """Learn and compare, start model by start model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder that holds mnist and duw_mnist")
    parser.add_argument("--environment", type=int, default=2, choices=list(FILES))
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 1, 2], help="seeds of the start models")
    parser.add_argument("--iterations", type=int, default=None, help="unfolded runs; the paper's number by default")
    parser.add_argument("--lr", type=float, default=None, help="of the weights; the paper's by default")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args()
    paper = preset(f"duw_{given.environment}")
    unfolding = paper.settings["unfolding"]
    settings = {"iterations": given.iterations or unfolding["iterations"], "lr": given.lr or unfolding["lr"]}
    local = {key: paper.settings[key] for key in ("lr", "epochs", "batch_size")}
    rounds, found = paper.settings["rounds"], []
    for start in given.starts:
        data = cs.load_data("duw_mnist", environment=FILES[given.environment], data_dir=given.data)
        federation, _ = cs.federate(data, cs.partition("natural"), seed=0)
        module = cs.build_model("mlp", (1, 28, 28), 10, seed=start, hidden=paper.settings["hidden"])
        engine = cs.Vectorised(
            Task(module), federation, environment=paper.environment, lane=given.lane, device=given.device
        )
        schedule = learn(engine, local, {**settings, "rounds": rounds, "seed": start})
        schedule.save(given.out / f"environment_{given.environment}_start_{start}.safetensors")
        print(schedule.text(), flush=True)
        tests = {scale: rows(given.data, scale, engine.device) for scale in TEST_SCALES}
        algorithms = {
            "fedavg": cs.fedavg(**local),
            "dr_fedavg": cs.dr_fedavg(q=1.0, **local),
            "duw_fedavg": cs.duw_fedavg(weighting=schedule.weighting(), **local),
        }
        for name, algorithm in algorithms.items():
            scores: dict[str, list[float]] = {scale: [] for scale in TEST_SCALES}
            for done in cs.run(algorithm, engine, rounds=rounds, seed=start):
                for scale, (x, y) in tests.items():
                    scores[scale].append(accuracy(engine.task, done.model, x, y))
            found.append({"start": start, "algorithm": name, **scores})
            for scale, values in scores.items():
                print(f"start {start} {name:10} {scale:7} " + " ".join(f"{v:.4f}" for v in values), flush=True)
        report = {**settings, "results": found}
        (given.out / f"environment_{given.environment}_starts_{'_'.join(map(str, given.starts))}.json").write_text(
            json.dumps(report, indent=1)
        )


def learn(engine: cs.Vectorised, local: dict[str, float], settings: dict[str, Any]) -> Schedule:
    """The schedule of one start model, saying how far it is."""
    began, losses = time.monotonic(), []
    for step in learning(cs.duw_fedavg(**local), engine, **settings):
        losses.append(step.loss)
        if step.number in (1, 2, 5) or step.number % 10 == 0:
            place = f"start {settings['seed']} iteration {step.number}/{settings['iterations']}"
            print(f"{place} loss {step.loss:.2f} {time.monotonic() - began:.0f} s", flush=True)
    return Schedule(weights=step.weights, losses=torch.tensor(losses, dtype=torch.float64), gradient=step.gradient)


def rows(data_dir: str, scale: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 10,000 test pictures of MNIST, scaled as the training pictures or as in the authors' code."""
    data = cs.load_data("duw_mnist", environment="fig2", test_scale=scale, data_dir=data_dir)
    return data.test_x.to(device), data.test_y.to(device)


@torch.no_grad()
def accuracy(task: Task, model: Tree, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of correct decisions."""
    output, _ = task.apply(model, x, train=False)
    return float((task.decide(output) == y).double().mean())


if __name__ == "__main__":
    main()
