"""Weights from client properties by a rule fitted to learned weights, for any number of clients."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Count, Invalid, Probability, check, check_value
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.fedadp import took_part
from consilience.server.geometry.geometry import measure_updates

Feature = Literal["size", "steps", "loss", "similarity", "arrival", "label_entropy"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
TERMS = 3  # of a coefficient: constant, progress, last round
FIT = "fit one with `consilience learn --rule FILE` or `fit_rule`"


@dataclass(frozen=True, kw_only=True)
class TransferredWeights:
    """weight_k ~ exp(sum_f (a_f + b_f progress + c_f [last round]) x_kf); progress runs from 0 to 1 over `rounds`.

    x_kf, each minus its mean over the cohort: log rows (size), log steps, log training loss, mean cosine of the
    update with the others' (similarity), the share of the rounds so far in which a reply arrived (arrival; or the known
    rates, if given), entropy of the labels over its largest value. A client without a reply keeps its last values.
    path: a rule's file, whose content is stored in the other options. rounds: of this run, if not the rule's.
    """

    path: str = ""
    features: tuple[Feature, ...] = ()
    coefficients: tuple[tuple[float, ...], ...] = ()  # [features, 3]
    rounds: Count | None = None
    arrival: tuple[Probability, ...] = ()
    needs_each_reply = True  # similarities need every update, the others each client's numbers

    def __post_init__(self) -> None:
        check_value("TransferredWeights.path", self.path, str)
        if self.path and not self.features:
            for key, value in load_rule(self.path).items():
                if key != "rounds" or self.rounds is None:
                    object.__setattr__(self, key, value)
        check(self)
        if len(set(self.features)) < len(self.features):
            raise Invalid(f"TransferredWeights.features = {self.features!r} names one twice")
        if [len(row) for row in self.coefficients] != [TERMS] * len(self.features):
            raise Invalid(f"TransferredWeights.coefficients needs {TERMS} numbers for each of {self.features!r}")
        if not np.isfinite(np.array(self.coefficients, dtype=np.float64)).all():
            raise Invalid("TransferredWeights.coefficients holds NaN or infinite numbers")

    @property
    def reads(self) -> tuple[str, ...]:
        """Entries that clients must add to their replies."""
        return ("labels",) if "label_entropy" in self.features else ()

    def init(self, start: Tree, clients: int) -> Tree:
        """The known features of every client; a missing rule is refused."""
        if not self.features or self.rounds is None:
            raise Invalid(f"the rule of TransferredWeights is empty: {FIT}")
        if self.arrival and len(self.arrival) != clients:
            raise Invalid(f"TransferredWeights.arrival has {len(self.arrival)} rates for {clients} clients")
        return unknown(start, clients)

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The rule's weights of this round's clients."""
        assert self.rounds is not None
        values, state = observe(self.features, cohort, model, state, self.arrival)
        coefficients = torch.tensor(self.coefficients, dtype=torch.float64, device=values.device)  # [F, 3]
        logits = values @ (coefficients @ terms(cohort.round, self.rounds).to(values.device))
        return torch.softmax(logits, 0), state, {}


def terms(round: int, rounds: int) -> Tensor:
    """[3] what the three coefficients of a feature are multiplied with in a round (counted from 0)."""
    progress = min(1.0, round / max(1, rounds - 1))
    return torch.tensor([1.0, progress, float(round == rounds - 1)], dtype=torch.float64)


def unknown(start: Tree, clients: int) -> Tree:
    """The state of `observe` before the first round: no features are known."""
    device = next(iter(start["params"].values())).device
    nothing = torch.zeros(clients, dtype=torch.float64, device=device)
    remembered: Tree = {name: nothing.clone() for name in FEATURES if name not in ("size", "arrival")}
    return {**remembered, "heard": nothing.clone(), "rounds": nothing.clone()}


def observe(
    names: tuple[Feature, ...], cohort: Cohort, model: Tree, state: Tree, arrival: tuple[float, ...] = ()
) -> tuple[Tensor, Tree]:
    """([m, F] features of the cohort's clients, each with mean 0, the state after this round)."""
    worked = took_part(cohort)
    ids = torch.from_numpy(np.asarray(cohort.ids)).to(worked.device)
    state = {**state, "rounds": state["rounds"] + 1, "heard": state["heard"].index_add(0, ids, worked.double())}
    columns, met = [], state["heard"][ids] > 0
    for name in names:
        known = met | (name in ("size", "arrival"))
        if name == "size":
            found = cohort.examples.clamp(min=1).log()
        elif name == "arrival":
            rates = (state["heard"] + 1) / (state["rounds"] + 2)  # Laplace smoothing
            found = (torch.tensor(arrival, dtype=torch.float64, device=ids.device) if arrival else rates)[ids]
        else:
            found = torch.where(worked, _measured(name, cohort, model, worked), state[name][ids])
            state = {**state, name: state[name].index_copy(0, ids, found)}
        mean = found[known].mean() if bool(known.any()) else 0.0
        columns.append(torch.where(known, found - mean, 0.0))
    return torch.stack(columns, 1), state


def _measured(name: Feature, cohort: Cohort, model: Tree, worked: Tensor) -> Tensor:
    """[m] one feature, valid for clients that worked."""
    if name == "steps":
        return torch.from_numpy(np.maximum(cohort.steps, 1)).to(worked.device, torch.float64).log()
    if name == "loss":
        return cohort.reply["loss"].to(torch.float64).clamp(min=1e-12).log()
    if name == "label_entropy":
        if "labels" not in cohort.reply:
            raise Invalid("the rule reads label_entropy, but clients do not count labels: use duw_fedavg(rule=...)")
        share = cohort.reply["labels"].to(torch.float64)  # [m, C]
        return -torch.special.xlogy(share, share).sum(1) / math.log(max(2, share.shape[1]))
    if len(cohort) == 1:
        return torch.zeros_like(cohort.examples)
    cosine = measure_updates(cohort.reply["model"]["params"], model["params"]).cosine.to(worked.device)
    others = worked.double().unsqueeze(0) * (1 - torch.eye(len(cohort), dtype=torch.float64, device=worked.device))
    return (cosine * others).sum(1) / others.sum(1).clamp(min=1)


def save_rule(rule: TransferredWeights, path: Path | str, **more: Any) -> None:
    """Write a rule as JSON, with optional notes."""
    held = {"features": rule.features, "coefficients": rule.coefficients, "rounds": rule.rounds, **more}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def load_rule(path: Path | str) -> dict[str, Any]:
    """features, coefficients and rounds from a file of `save_rule`."""
    if not os.path.isfile(path):
        raise Invalid(f"there is no rule at {str(path)!r}: {FIT}")
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        return {
            "features": tuple(str(name) for name in held["features"]),
            "coefficients": tuple(tuple(float(number) for number in row) for row in held["coefficients"]),
            "rounds": int(held["rounds"]),
        }
    except (ValueError, KeyError, TypeError) as problem:
        raise Invalid(f"{path} is not the file of a rule ({type(problem).__name__}: {problem}): {FIT}") from problem
