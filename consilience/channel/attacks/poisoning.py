"""Attacks on the data, before any training: flipped labels and a pixel backdoor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from consilience.channel.attacks.malicious import are_malicious, require_some
from consilience.core.federation import Federation, Rows
from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Fraction, Invalid, Whole, check_value
from consilience.core.task import Task
from consilience.core.tree import Tree


def flip_labels(federation: Federation, *, clients: Sequence[int] = (), fraction: float | None = None) -> Federation:
    """The federation with training labels c of malicious clients replaced by (classes - 1 - c); test rows unchanged."""
    if federation.classes is None or federation.classes < 2 or federation.train.y.dim() != 1:
        raise Invalid("flip_labels needs one class number per row, at least two classes")
    rows = _malicious_rows("flip_labels", federation, clients, fraction)
    y = federation.train.y.clone()
    y[rows] = federation.classes - 1 - y[rows]
    return _with_train(federation, federation.train.x, y)


@dataclass(frozen=True, kw_only=True)
class Trigger(Checked):
    """A square of `size` pixels in the lower right corner, set to `value`, that makes the model predict `target`."""

    target: Whole = 0
    size: Count = 3
    value: float = 1.0

    def stamp(self, x: Tensor) -> Tensor:
        """Images [n, channels, height, width] with the trigger on each."""
        if not isinstance(x, Tensor) or x.dim() != 4 or min(x.shape[-2:]) < self.size:
            raise Invalid(f"Trigger.size = {self.size} needs pictures [n, channels, height, width] at least that large")
        stamped = x.clone()
        stamped[..., -self.size :, -self.size :] = self.value
        return stamped


def plant_backdoor(
    federation: Federation,
    trigger: Trigger,
    *,
    clients: Sequence[int] = (),
    fraction: float | None = None,
    share: float = 0.5,
    seed: int = 0,
) -> Federation:
    """The federation in which some training rows of malicious clients have the trigger and the target's label."""
    share = check_value("share", share, Fraction)
    if trigger.target >= (federation.classes or 0):
        raise Invalid(f"Trigger.target = {trigger.target} is no class: there are {federation.classes or 'none'}")
    rows = _malicious_rows("plant_backdoor", federation, clients, fraction)
    rows = rows[torch.from_numpy(host(seed, "backdoor").random(len(rows)) < share)]
    x, y = federation.train.x, federation.train.y.clone()
    stamped = trigger.stamp(x[rows] if isinstance(x, Tensor) else x)
    x = x.clone()
    x[rows], y[rows] = stamped, trigger.target
    return _with_train(federation, x, y)


@torch.no_grad()
def attack_success(task: Task, model: Tree, test: Rows, trigger: Trigger) -> float:
    """Share of test images of other classes that are classified as the target once the trigger is added."""
    others = test.y != trigger.target
    if not bool(others.any()):
        raise Invalid(f"every test row is of class {trigger.target}, the target: success cannot be measured")
    stamped = trigger.stamp(test.x)[others]
    hits = [task.decide(task.apply(model, part, train=False)[0]) == trigger.target for part in stamped.split(1024)]
    return float(torch.cat(hits).double().mean())


def _malicious_rows(name: str, federation: Federation, clients: Sequence[int], fraction: float | None) -> Tensor:
    """Indices of the training rows that malicious clients own."""
    clients = tuple(check_value(f"{name}.clients", list(clients), tuple[Whole, ...]))
    fraction = check_value(f"{name}.fraction", fraction, Fraction | None)
    require_some(name, clients, fraction)
    if clients and max(clients) >= len(federation):
        raise Invalid(f"{name}: client {max(clients)} does not exist: there are {len(federation)}")
    ids = np.flatnonzero(are_malicious(np.arange(len(federation)), clients, fraction))
    rows = federation.train
    owned = [torch.arange(int(rows.sizes[k])) + rows.starts[k] for k in ids]
    return torch.cat(owned) if owned else torch.empty(0, dtype=torch.int64)


def _with_train(federation: Federation, x: Tensor, y: Tensor) -> Federation:
    return replace(federation, train=replace(federation.train, x=x, y=y))
