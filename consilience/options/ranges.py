"""Search ranges of `consilience tune`: a range for each numeric option of the recipes, or the reason for none.

A key is an option's name, or `recipe.option` if the option means something else in that recipe. Non-numeric options
choose between variants of a method, and are not tuned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consilience.core.settings import Invalid, Option, check, check_value, refuse_unknown
from consilience.options.parts import takes_numbers


@dataclass(frozen=True, kw_only=True)
class SearchRange:
    """The values from `low` to `high`, evenly or (`log`) by their logarithms; `whole`: whole numbers alone."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        check(self)
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise Invalid(f"SearchRange: low = {self.low:g} must be below high = {self.high:g}, both finite")
        if self.log and self.low <= 0:
            raise Invalid(f"SearchRange: low = {self.low:g} must be above 0 with log = true")
        if self.whole and (self.low % 1 or self.high % 1):
            raise Invalid(f"SearchRange: {self.low:g} to {self.high:g} must be whole numbers with whole = true")

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value, of the type that the option has."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)


def _log(low: float, high: float) -> SearchRange:
    return SearchRange(low=low, high=high, log=True)


def _even(low: float, high: float) -> SearchRange:
    return SearchRange(low=low, high=high)


def _whole(low: int, high: int) -> SearchRange:
    return SearchRange(low=low, high=high, whole=True)


_LOCAL_WORK = "local work and regularisation are the same for all methods of a comparison"
_SEED = "a seed"
_FAULTY = "how many clients may be faulty is an assumption, which data without faulty clients cannot show"
_PRIVACY = "decides the privacy guarantee, and every trial would spend budget"
_BUDGET = "decides how many replies a round has, and so the budget"
_TOPOLOGY = "given by the network"
_ROUNDING = "guards a division, and decides nothing"
_SIZE = "size of what the server trains: costs computing and traffic"

RANGES: dict[str, SearchRange | str] = {
    # what recipes share
    "lr": _log(1e-3, 1.0),
    "momentum": _LOCAL_WORK,
    "weight_decay": _LOCAL_WORK,
    "lr_decay": _LOCAL_WORK,
    "epochs": _LOCAL_WORK,
    "batch_size": _LOCAL_WORK,
    "clip_norm": _LOCAL_WORK,
    "clip_value": _LOCAL_WORK,
    "accumulate": _LOCAL_WORK,
    # terms of the clients' objectives
    "mu": _log(1e-4, 1.0),
    "moon.mu": _log(0.01, 10.0),
    "moon.temperature": _log(0.1, 2.0),
    "lam": _log(1e-3, 10.0),
    "feddc.alpha": _log(1e-3, 1.0),
    "feddyn.alpha": _log(1e-3, 1.0),
    "fedgen.alpha": _log(0.01, 10.0),
    "fedgen.beta": _log(0.01, 10.0),
    "fedgen.decay": _even(0.9, 1.0),
    "fedgen.diversity": _log(0.1, 10.0),
    "fedgen.generator_lr": _log(1e-4, 0.1),
    "fedgen.generator_steps": _SIZE,
    "fedgen.noise_size": _SIZE,
    "fedgen.hidden": _SIZE,
    "feddm.lr": _log(5e-3, 1.0),  # of Adam on the synthetic rows
    "feddm.radius": _log(0.5, 20.0),
    "feddm.server_lr": _log(1e-3, 0.3),
    "feddm.per_class": _SIZE,
    "feddm.server_steps": _SIZE,
    "feddm.server_batch_size": _SIZE,
    "fedaf.lr": _log(5e-3, 1.0),  # of the synthetic rows
    "fedaf.agreement": _log(1e-2, 10.0),
    "fedaf.knowledge": _log(1e-2, 10.0),
    "fedaf.temperature": _log(0.5, 10.0),
    "fedaf.server_lr": _log(1e-3, 0.3),
    "fedaf.clip": _ROUNDING,
    "fedaf.per_class": _SIZE,
    "fedaf.server_steps": _SIZE,
    "fedaf.server_batch_size": _SIZE,
    "feddf.server_lr": _log(1e-4, 1e-2),  # of Adam on the public rows
    "feddf.server_steps": _SIZE,
    "feddf.server_batch_size": _SIZE,
    "fedma.passes": "one pass over the clients is the published method",
    "duw_fedavg.rule_rounds": "the rounds of the run",
    "fedrep.head_epochs": _LOCAL_WORK,
    "layers": "which layers are personal depends on the model: name them with personal_layers",
    # the server's step
    "server_lr": _log(1e-3, 0.3),  # adaptive steps; Reddi et al. 2021 search 1e-3 .. 10 and find 1e-2 .. 0.3
    "fedavgm.server_lr": _log(0.1, 2.0),
    "fedavgm.beta": _even(0.0, 0.95),
    "beta1": "Reddi et al. 2021 keep it, as Adam's users do",
    "beta2": "Reddi et al. 2021 keep it, as Adam's users do",
    "tau": _log(1e-5, 0.1),
    "step": _log(1.0, 1000.0),  # of FedSplit's prox, which refuses lr >= 2 step: about 2 lr times the local steps
    "relaxation": _even(0.1, 1.0),
    # weights
    "lambda_0": _even(0.0, 1.0),
    "simprox.tau": _log(0.05, 5.0),
    "simprox_buffered.tau": _log(0.05, 5.0),
    "simprox.temperature": "not in the published method",
    "simprox.sketch": "an approximation that saves computing",
    "fedadp.beta": _even(1.0, 10.0),
    "fedfa.gamma": _even(0.0, 1.0),
    "fedatt.epsilon": _log(0.1, 2.0),
    "fedatt.p": "the norm is part of the published method",
    "fedatt.noise": "hides parameters, and can only cost accuracy",
    "noise_seed": _SEED,
    "simagg.eps": _ROUNDING,
    "q": _log(0.01, 5.0),
    "qffl.lipschitz": "1 / lr, which is tuned",
    "lambda_lr": _log(1e-3, 1.0),
    "fedasync.alpha": _even(0.1, 1.0),
    "buffer": _BUDGET,
    "concurrency": _BUDGET,
    # clusters and attention
    "clusters": _whole(2, 5),
    "cluster_seed": _SEED,
    "clustered_fl.eps_1": _log(0.05, 2.0),
    "clustered_fl.eps_2": _log(0.1, 4.0),
    "clustered_fl.gamma": _even(0.0, 0.9),
    "clustered_fl.warm_up": _whole(1, 20),
    "clustered_fl.max_clusters": _whole(2, 8),
    "fedamp.alpha": _log(0.01, 100.0),
    "fedamp.sigma": _log(0.1, 1000.0),
    "fedamp.own_share": _even(0.0, 0.95),
    "edges": _TOPOLOGY,
    "cloud_every": _TOPOLOGY,
    # swapping
    "swap_percentage": _even(0.0, 1.0),
    "h1": _LOCAL_WORK,
    "h2": _whole(1, 5),
    # robust rules
    "f": _FAULTY,
    "mix": _FAULTY,
    "keep": _FAULTY,
    "centred_clipping.tau": "the median distance unless given, which follows the updates",
    "iterations": _whole(1, 5),
    "nu": _ROUNDING,
    # privacy
    "dp_fedavg.bound": _PRIVACY,
    "dp_fedavg.noise": _PRIVACY,
    "dp_fedavg.rate": _PRIVACY,
    "dp_fedavg.epsilon": _PRIVACY,
    "dp_fedavg.delta": _PRIVACY,
    "dp_fedavg.quantile": _PRIVACY,
    "dp_fedavg.bound_lr": _PRIVACY,
    "dp_fedavg.count_noise": _PRIVACY,
}


def ruled(recipe: str, option: str) -> SearchRange | str | None:
    """The range of a recipe's option, or why it is not tuned; None if neither is known."""
    return RANGES.get(f"{recipe}.{option}", RANGES.get(option))


def space(
    recipe: str, known: Mapping[str, Option], given: Mapping[str, Any], changes: Mapping[str, SearchRange]
) -> dict[str, SearchRange]:
    """The search space of a recipe: its numeric options with a range, except those given; `changes` have precedence.

    A change is for `option`, in every recipe that has it, or for `recipe.option`.
    """
    own = {key: change for key, change in changes.items() if "." not in key and key in known}
    own |= {key.partition(".")[2]: change for key, change in changes.items() if key.partition(".")[0] == recipe}
    refuse_unknown(own, known, f"tune.ranges.{recipe}")
    found: dict[str, SearchRange] = {}
    for option, declared in known.items():
        range_ = own.get(option, ruled(recipe, option) if takes_numbers(declared.annotation) else None)
        if isinstance(range_, SearchRange) and option not in given:
            for end in range_.ends:
                check_value(f"tune.ranges.{recipe}.{option}", end, declared.annotation)
            found[option] = range_
    return found
