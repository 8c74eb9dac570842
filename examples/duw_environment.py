"""DUW's environments I to IV on the authors' own MNIST rows: FedAvg, DR-FedAvg, DUW-FedAvg from several start models.

    python examples/duw_environment.py --data DIR --environment 2 --starts 0 1 2 --out results

Accuracies per round go to the screen and, as rows, into the JSON file `--results` (rows of the same environment, start,
algorithm, iterations and learning rate are replaced, all others stay), learned weights to
`results/environment_2_start_0.safetensors` and so on, which `duw_fedavg(schedule=...)` reads. With `--work DIR` the
state of learning is kept there, and a run that was interrupted goes on from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import consilience as cs
from consilience.core.tree import Tree
from consilience.environments import preset
from consilience.meta import Schedule, learning
from consilience.meta.learning import Iteration, learned
from consilience.task.task import Task

FILES = {1: "env1", 2: "env2", 3: "env34", 4: "env34"}
TEST_SCALES = {
    "accuracy": "same",
    "accuracy_authors_scale": "authors",
}  # the authors' code scales test pictures differently
SAVE_SECONDS = 5.0  # between two saved states of learning
SAME = ("environment", "start", "algorithm", "iterations", "lr")  # what makes two rows the same measurement


def main() -> None:
    """Learn and compare, start model by start model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder that holds mnist and duw_mnist")
    parser.add_argument("--environment", type=int, default=2, choices=list(FILES))
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 1, 2], help="seeds of the start models")
    parser.add_argument("--iterations", type=int, default=None, help="unfolded runs; the paper's number by default")
    parser.add_argument("--lr", type=float, default=None, help="of the weights; the paper's by default")
    parser.add_argument("--loss", default="task", help="of the weights: task, squared_error, squared_error_logits")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the learned weights")
    parser.add_argument("--work", type=Path, default=None, help="folder of the states of learning, to go on from")
    parser.add_argument("--results", type=Path, default=None, help="JSON file of rows; results/duw_ENVIRONMENT.json")
    given = parser.parse_args()
    paper = preset(f"duw_{given.environment}")
    unfolding = paper.settings["unfolding"]
    settings = {"iterations": given.iterations or unfolding["iterations"], "lr": given.lr or unfolding["lr"]}
    local = {key: paper.settings[key] for key in ("lr", "epochs", "batch_size")}
    rounds = paper.settings["rounds"]
    data = cs.load_data("duw_mnist", environment=FILES[given.environment], data_dir=given.data)
    federation, _ = cs.federate(data, cs.partition("natural"), seed=0)
    for start in given.starts:
        module = cs.build_model("mlp", (1, 28, 28), 10, seed=start, hidden=paper.settings["hidden"])
        engine = cs.Vectorised(
            Task(module), federation, environment=paper.environment, lane=given.lane, device=given.device, compile=False
        )
        began = time.monotonic()
        state = given.work and given.work / f"{given.environment}-{start}-{settings['lr']}-{given.loss}.safetensors"
        whole = state is None or not state.exists()
        schedule = learn(engine, local, {**settings, "rounds": rounds, "seed": start, "loss": given.loss}, state)
        seconds = round(time.monotonic() - began) if whole else None  # of a part only, where it went on from a state
        schedule.save(given.out / f"environment_{given.environment}_start_{start}.safetensors")
        print(schedule.text(), flush=True)
        tests = {name: rows(given.data, scale, engine.device) for name, scale in TEST_SCALES.items()}
        algorithms = {
            "fedavg": cs.fedavg(**local),
            "dr_fedavg": cs.dr_fedavg(q=1.0, **local),
            "duw_fedavg": cs.duw_fedavg(weighting=schedule.weighting(), **local),
        }
        found = []
        for name, algorithm in algorithms.items():
            row: dict[str, Any] = {"environment": given.environment, "start": start, "algorithm": name}
            row.update({scale: [] for scale in tests})
            for done in cs.run(algorithm, engine, rounds=rounds, seed=start):
                for scale, (x, y) in tests.items():
                    row[scale].append(round(accuracy(engine.task, done.model, x, y), 4))
            print(f"start {start} {name:10} " + " ".join(f"{v:.4f}" for v in row["accuracy"]), flush=True)
            found.append(row)
        learned_row = {**settings, "loss": given.loss, "seconds": seconds, "losses": ends(schedule)}
        found[-1] = {**found[-1], **learned_row, "weights": digits(schedule)}
        store(found, given.results or given.out / f"duw_{given.environment}.json")


def learn(engine: cs.Vectorised, local: dict[str, float], settings: dict[str, Any], state: Path | None) -> Schedule:
    """The schedule of one start model, saying how far it is; it goes on from the file `state` where there is one."""
    began = time.monotonic()

    def told(steps: Iterator[Iteration]) -> Iterator[Iteration]:
        saved = began
        for step in steps:
            now = time.monotonic()
            if step.number in (1, 2, 5) or step.number % 10 == 0:
                place = f"start {settings['seed']} iteration {step.number}/{settings['iterations']}"
                print(f"{place} loss {step.loss:.2f} {now - began:.0f} s", flush=True)
            if state is not None and now - saved > SAVE_SECONDS and step.number < settings["iterations"]:
                saved, part = now, state.with_suffix(".part")
                save_file(step.state, part)
                part.replace(state)
            yield step

    resume = load_file(state) if state is not None and state.exists() else None
    return learned(told(learning(cs.duw_fedavg(**local), engine, **settings, resume=resume)))


def ends(schedule: Schedule) -> list[float]:
    """The loss of the first and of the last unfolded run."""
    return [round(schedule.losses[at].item(), 2) for at in (0, -1)]


def digits(schedule: Schedule) -> list[list[float]]:
    """The weights, with six digits."""
    return [[round(weight, 6) for weight in row] for row in schedule.weights.tolist()]


def store(found: list[dict[str, Any]], path: Path) -> None:
    """Add rows to a file, in the place of those that measured the same."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in SAME)

    new = {key(row) for row in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = [row for row in known if key(row) not in new] + found
    lines = ",\n".join(" " + json.dumps(row) for row in merged)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


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
