"""How recipes are built for tests that run on every one of them, and what they are excused from, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import tiny
from torch import nn

from consilience import algorithms
from consilience.core.algorithm import Algorithm
from consilience.core.settings import options_of
from consilience.selection import Everyone
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.rules.public_rows import NoiseRows

CLIENTS = len(tiny.SIZES)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a recipe says of itself: options it cannot do without, and contract tests it is excused from, and why."""

    options: dict[str, Any] = field(default_factory=dict)
    excused: dict[str, str] = field(default_factory=dict)  # name of a test function -> reason
    models: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)  # where the usual ones will not do


SCHEDULE = ScheduleWeights(table=((0.1, 0.3, 0.05, 0.35, 0.2), (0.25, 0.15, 0.2, 0.3, 0.1)))
LOOKS = "it looks at its rows outside of training too: one more program, and its answers are counted"
PADDING = "it averages the zeros beyond a client's rank, also where nobody has trained"
NOISE = "every round adds noise, whoever came"

# models with adapters, in the form that a recipe trains
FROZEN_A = {
    name: functools.partial(tiny.module_for, algorithms.recipe("ffa_lora")(), build)
    for name, build in tiny.MODELS_WITH_ADAPTERS.items()
}
MERGEABLE = {
    name: functools.partial(tiny.module_for, algorithms.recipe("flora")(), build)
    for name, build in tiny.MODELS_WITH_ADAPTERS.items()
}

DECLARED: dict[str, Declared] = {
    "dr_fedavg": Declared(excused={"test_traced_steps_give_the_same_bits": LOOKS, "test_client_step_is_pure": LOOKS}),
    "dp_fedavg": Declared(
        options={"noise_seed": 0},
        models=tiny.MODELS_WITHOUT_STATISTICS,
        excused={
            "test_dropped_and_idle_clients_leave_sound_values": "its weights are one over the number expected",
            "test_a_round_in_which_nobody_answers_changes_nothing": NOISE,
            "test_broadcast_models_in_place_of_all_replies_keep_the_model": NOISE,
            "test_clients_without_steps_send_back_what_they_got": NOISE,
            "test_replies_memories_and_states_keep_their_structure": "its state lists what each round has spent",
        },
    ),
    "duw_fedavg": Declared(options={"weighting": SCHEDULE}),
    "duw_fednova": Declared(options={"weighting": SCHEDULE}),
    "fedaf": Declared(
        options={"shape": (1, 6, 6), "per_class": 2, "server_steps": 3},
        excused={"test_traced_steps_give_the_same_bits": LOOKS, "test_client_step_is_pure": LOOKS},
    ),
    "feddf": Declared(options={"public": NoiseRows(count=8, shape=(1, 6, 6)), "server_steps": 3}),
    "feddm": Declared(options={"shape": (1, 6, 6), "per_class": 2, "server_steps": 3}),
    "fedgen": Declared(options={"generator_steps": 3, "hidden": 8, "noise_size": 4}),
    "fedfa": Declared(excused={"test_traced_steps_give_the_same_bits": LOOKS, "test_bytes_match_the_trees": LOOKS}),
    "clustered_fl": Declared(options={"warm_up": 1, "eps_1": 100.0, "eps_2": 0.0, "max_clusters": 3}),
    "fedasync": Declared(options={"buffer": CLIENTS}),
    "local_only": Declared(
        excused={
            "test_inputs_are_not_modified": "its server learns nothing",
            "test_same_seed_same_bits_other_seed_other_model": "its server's model stays the initial one",
        }
    ),
    "fedit": Declared(models=tiny.MODELS_WITH_ADAPTERS),
    "ffa_lora": Declared(models=FROZEN_A),
    "flexlora": Declared(models=tiny.MODELS_WITH_ADAPTERS),
    "flora": Declared(models=MERGEABLE),
    "hetlora": Declared(
        options={"ranks": (2, 1, 2, 1, 1)},
        models=tiny.MODELS_WITH_ADAPTERS,
        excused={
            "test_broadcast_models_in_place_of_all_replies_keep_the_model": PADDING,
            "test_clients_without_steps_send_back_what_they_got": PADDING,
        },
    ),
    "fedprox_fedsplit": Declared(options={"step": 1.0}),
    "fedsplit": Declared(options={"step": 1.0, "keeps_z": True}),
    "fedsiam_da": Declared(models=tiny.MODELS_WITH_HEADS),
    "moon": Declared(models=tiny.MODELS_WITH_HEADS),
}


# every option of local training at once
COMBINED: dict[str, Any] = {
    "lr": 0.05,
    "epochs": 2,
    "batch_size": 4,
    "optimiser": "adamw",
    "weight_decay": 0.1,
    "lr_schedule": {"name": "warm_up", "length": 1, "then": {"name": "cosine", "horizon": 5}},
    "lr_schedule_in_round": {"name": "step_decay", "every": 2, "factor": 0.5},
    "server_lr_schedule": {"name": "linear", "horizon": 5, "floor": 0.5},
    "clip_norm": 0.5,
    "accumulate": 2,
    "augment": ["flip", {"name": "crop", "padding": 1}, {"name": "cutout", "size": 2}, "mixup"],
    "class_shares": "equal",
}


def model_of(name: str, model: str) -> Callable[[], nn.Module]:
    """The model of that name that a recipe is tested on."""
    return {**tiny.MODELS, **DECLARED.get(name, Declared()).models}[model]


def build(name: str, **options: Any) -> Algorithm:
    """The recipe with small batches and everybody taking part, as far as it has these options."""
    recipe = algorithms.recipe(name)
    usual = {"lr": 0.05, "epochs": 1, "batch_size": 4, "selection": Everyone()}
    wanted = {**usual, **options, **DECLARED.get(name, Declared()).options}
    return recipe(**{key: value for key, value in wanted.items() if key in options_of(recipe)})


def kinds() -> dict[Hashable, list[str]]:
    """Recipes by all that a lane meets of them: selection, client rule and channel to their last part, server rule.

    Two recipes of a kind give a lane the same program up to numbers. How an `Averaging` weighs and combines happens
    behind the lanes; its ledgers send something to the clients, so they count.
    """
    found: dict[Hashable, list[str]] = {}
    for name in algorithms.names():
        made = build(name)
        ledgers = made.server.ledgers if isinstance(made.server, Averaging) else ()
        seen_by_lanes = (made.selection, made.client, made.channel, ledgers)
        found.setdefault((type(made.server), _outline(seen_by_lanes), model_of(name, "mlp")), []).append(name)
    return found


@functools.cache
def representatives() -> tuple[str, ...]:
    """One recipe of each kind: the one excused from least, then the one with the fewest parts and options."""

    def plain(name: str) -> tuple[int, int]:
        return len(DECLARED.get(name, Declared()).excused), len(repr(build(name)))

    return tuple(sorted(min(names, key=plain) for names in kinds().values()))


def in_lanes(*lanes: str) -> list[tuple[str, str]]:
    """(recipe, lane): all lanes for one recipe of each kind, the first lane for the others."""
    chosen = representatives()
    return [(name, lane) for name in algorithms.names() for lane in (lanes if name in chosen else lanes[:1])]


def _outline(part: Any) -> Hashable:
    """A part's class and those of the parts in it, and which of its numbers and switches are set at all."""
    if isinstance(part, tuple):
        return tuple(_outline(member) for member in part)
    if is_dataclass(part):
        return type(part), *((each.name, _outline(getattr(part, each.name))) for each in fields(part))
    return bool(part)
