"""Every option of every recipe does something or is refused, and is checked alike from Python and from a config."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import typing
from typing import Any

import pytest

import consilience as cs
from consilience import algorithms
from consilience.algorithms._common import Common
from consilience.core.settings import Invalid, Range, options_of
from consilience.experiments.config import config
from consilience.options import parts
from consilience.options.recipes import default_of, other_values
from consilience.selection import Everyone, SlidingWindow, Uniform
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.averaging.weighting.simprox import SimProxWeights
from consilience.server.rules.public_rows import NoiseRows

NEEDED = {
    "fedsplit": {"step": 1.0},
    "fedprox_fedsplit": {"step": 1.0},
    "feddf": {"public": NoiseRows(count=7)},
    "hetlora": {"ranks": (4, 2)},
}
ROBUST = ("bulyan", "centred_clipping", "coordinate_median", "geometric_median", "krum", "multi_krum", "trimmed_mean")
OWN_SERVER = ("weighting", "combine", "step", "ledgers", "server_lr_schedule")
CHANGED_STEPS = ("lr_schedule_in_round", "clip_norm", "clip_value", "accumulate")  # their sum is no longer known

# Options that change nothing while all others have their defaults, whatever their value: refused as having no effect.
IDLE = {
    "dp_fedavg": ("bound_lr", "count_noise"),  # without a quantile
    "duw_fedavg": ("rule_rounds",),  # without a rule
    **dict.fromkeys(ROBUST, ("combine",)),
    "clustered_averaging": OWN_SERVER,
    "duw_fednova": ("ledgers",),
    "fedamp": ("own_share", *OWN_SERVER),
    "fedatt": ("noise_seed",),
    "fedaf": ("terms", "memory", "personal_layers", "augment", *OWN_SERVER),
    "feddm": ("momentum", "lr_decay", "terms", "memory", "personal_layers", "augment", *OWN_SERVER),
    "fedma": ("combine", "step", "ledgers", "server_lr_schedule"),
    "fednova": ("combine", "step", "ledgers", "server_lr_schedule"),
    "fedsiam_da": ("personal_layers",),
    "local_only": ("personal_layers", "channel", *OWN_SERVER),
}
# Options for which a recipe supports nothing but its default: refused as incompatible.
UNSUPPORTED = {
    "duw_fedavg": ("schedule", "rule"),  # no such file
    "duw_fednova": ("schedule", "momentum", "terms", *CHANGED_STEPS),
    "fedamp": ("personal_layers",),
    "feddc": ("momentum", "personal_layers", *CHANGED_STEPS),
    "fedaf": ("channel", "accumulate"),
    "feddf": ("personal_layers",),
    "feddm": ("channel", "accumulate"),
    "feddyn": ("personal_layers",),
    "fedma": ("personal_layers",),
    "fednova": ("personal_layers", *CHANGED_STEPS),
    "fedrep": ("accumulate",),
    "fedprox_fedsplit": ("weighting",),  # needs keeps_z
    "fedsplit": ("weighting",),
    "fedswap": ("ledgers",),
    "flexlora": (
        "memory",
        "step",
        "ledgers",
        "server_lr_schedule",
    ),  # they follow factors, which are new in every round
    "flora": ("memory", "ledgers"),
    "scaffold": ("momentum", "personal_layers", *CHANGED_STEPS),
    "simfedswap": ("ledgers",),
}


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(Invalid) as caught:
        algorithms.recipe(name)(**{**NEEDED.get(name, {}), **options})
    return str(caught.value)


def outcomes(name: str, option: str) -> dict[str, str]:
    """What becomes of other values of an option: 'changed', 'same', or why they are refused."""
    recipe, needed = algorithms.recipe(name), NEEDED.get(name, {})
    plain = recipe(**needed)
    found = {}
    default = needed.get(option, default_of(recipe, option))
    for value in itertools.islice(other_values(options_of(recipe)[option].annotation, default), 20):
        if "changed" in found.values() or (len(found) == 5 and option in IDLE.get(name, ())):
            break
        try:
            built = recipe(**{**needed, option: value})
            found[repr(value)] = "same" if built == plain else "changed"
        except Invalid as problem:
            found[repr(value)] = str(problem)
    return found


@pytest.mark.parametrize("name", algorithms.names())
def test_every_option_changes_the_algorithm_or_is_refused_by_name(name: str) -> None:
    for option in options_of(algorithms.recipe(name)):
        found = outcomes(name, option)
        assert found, f"{name}.{option}: no other value is known"
        reasons = [reason for reason in found.values() if reason not in ("same", "changed")]
        if option in IDLE.get(name, ()):
            idle = [reason for reason in reasons if "has no effect" in reason]
            assert "changed" not in found.values() and idle, (name, option, found)
            assert all(option in reason or "Averaging" in reason or "Weights" in reason for reason in idle), found
        elif option in UNSUPPORTED.get(name, ()):
            assert reasons and "changed" not in found.values(), (name, option, found)
            assert not any("has no effect" in reason for reason in reasons), (name, option, found)
        else:
            assert "changed" in found.values(), (name, option, found)


def test_the_tables_of_exceptions_stay_small() -> None:
    total = sum(len(options_of(algorithms.recipe(name))) for name in algorithms.names())
    excepted = sum(map(len, IDLE.values())) + sum(map(len, UNSUPPORTED.values()))
    assert excepted == 104 and excepted < total / 14


def wrong_values(option: str, annotation: Any) -> dict[str, Any]:
    """Values of a wrong type, out of range, and unknown names, as far as an annotation knows such."""
    members = list(parts._members(annotation))
    wrong: dict[str, Any] = {}
    if any(member in (int, float) for member in members):
        wrong["type"] = "much"
    elif str in members:
        wrong["type"] = 3
    else:
        wrong["type"] = -7
    for note in ranges_in(annotation):
        low = note.above if note.above is not None else note.least - 1
        wrong["low"] = low
        if note.most is not None or note.below is not None:
            wrong["high"] = note.below if note.below is not None else note.most + 1
    if float in members:
        wrong["nan"] = math.nan
    if parts.protocol_in(annotation) or any(typing.get_origin(member) is typing.Literal for member in members):
        wrong["name"] = "no_such_name"
    return wrong


def ranges_in(annotation: Any) -> list[Range]:
    """The ranges of a plain number: of one alone, since what one member of a union refuses another may take."""
    found = [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Range)]
    inside = [member for member in typing.get_args(annotation) if member is not type(None)]
    if not found and typing.get_origin(annotation) is not tuple and len(inside) == 1:
        return ranges_in(inside[0])
    return found


@pytest.mark.parametrize("name", algorithms.names())
def test_wrong_values_are_refused_with_the_option_and_the_value(name: str) -> None:
    checked = 0
    for option, known in options_of(algorithms.recipe(name)).items():
        for value in wrong_values(option, known.annotation).values():
            message = refusal(name, **{option: value})
            assert message.startswith(f"{name}.{option} = {value!r}") or message.startswith(
                f"{name}.{option} = {float(value)!r}" if isinstance(value, (int, float)) else "?"
            ), message
            checked += 1
    assert checked >= 2 * len(options_of(algorithms.recipe(name)))
    assert refusal(name, lrate=1).startswith(f"{name}.lrate is not a setting (did you mean ")


@pytest.mark.parametrize("name", algorithms.names())
def test_a_config_refuses_the_same_values_in_the_same_words(name: str) -> None:
    own = [option for option in options_of(algorithms.recipe(name)) if option not in Common.__annotations__]
    shared = [option for option in options_of(algorithms.recipe(name)) if option in Common.__annotations__]
    for option in (*own, *(shared if name == "fedavg" else shared[:1])):
        values = wrong_values(option, options_of(algorithms.recipe(name))[option].annotation)
        for value in [v for kind, v in values.items() if kind != "nan"][:2]:
            table = {"algorithm": {"name": name, **NEEDED.get(name, {}), option: value}}
            with pytest.raises(Invalid) as caught:
                config.from_table(table)
            assert str(caught.value) == refusal(name, **{option: value}).replace(f"{name}.", "algorithm.")


def test_signatures_stay_readable() -> None:
    for name in algorithms.names():
        recipe = algorithms.recipe(name)
        kinds = {p.kind for p in inspect.signature(recipe).parameters.values()}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}, name
        assert recipe.__name__ == name and "Use when:" in (recipe.__doc__ or "")


# --- what people write in Python -------------------------------------------------------------------------------------


def test_names_tables_and_parts_mean_the_same() -> None:
    wanted = cs.fedavg(weighting=SimProxWeights(tau=0.3), selection=Uniform(fraction=0.5), optimiser="adam")
    assert cs.fedavg(weighting={"name": "simprox", "tau": 0.3}, selection=0.5, optimiser="Adam") == wanted  # type: ignore[arg-type, typeddict-item]
    assert cs.simprox(selection={"fraction": 0.5}) == cs.simprox(selection=SlidingWindow(fraction=0.5))  # type: ignore[typeddict-item]
    assert cs.fedavg(weighting="uniform", selection="everyone") == cs.fedavg(  # type: ignore[typeddict-item]
        weighting=UniformWeights(), selection=Everyone()
    )
    assert cs.fedavg(terms=["proximal"]).client == cs.fedprox(mu=0.1).client  # type: ignore[list-item, typeddict-item]


@dataclasses.dataclass
class OwnWeights:
    """A weighting of somebody's own, which is no part of the library."""

    needs_each_reply = False

    def init(self, start: Any, clients: int) -> Any:
        """No state."""

    def weigh(self, cohort: Any, model: Any, state: Any) -> Any:
        """Never called here."""


def test_parts_of_ones_own_are_taken() -> None:
    own = OwnWeights()
    assert cs.fedavg(weighting=own).server.weighting is own  # type: ignore[attr-defined, typeddict-item]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fedavg", {"optimiser": "rmspropp"}, "fedavg.optimiser = 'rmspropp' is not one of sgd, adam, adamw, rmsprop"),
        ("fedavg", {"weighting": UniformWeights}, "UniformWeights is a class, not a part: write UniformWeights(...)"),
        ("fedavg", {"channel": ["clip", "noise"]}, "several in sequence are {name = 'chain', channels = [...]}"),
        ("fedavg", {"weighting": Everyone()}, "fedavg.weighting = Everyone() is not one of agnostic"),
        ("fedavg", {"weighting": "unifrom"}, "(did you mean 'uniform'?)"),
        ("fedavg", {"weighting": {"name": "simprox", "tua": 1}}, "fedavg.weighting.tua is not a setting"),
        ("fedavg", {"selection": 1}, "could mean one client or all"),
        ("fedavg", {"selection": 1.0}, "could mean one client or all"),
        ("fedavg", {"selection": 10}, "for 10 clients use the selection 'uniform' with count = 10"),
        ("fedavg", {"selection": -0.5}, "is not a fraction of the clients"),
        ("fedavg", {"selection": True}, "fedavg.selection = True is not one of"),
        ("fedavg", {"terms": "proximal"}, "fedavg.terms = 'proximal' must be a list"),
        ("simprox", {"of": "updates"}, "simprox.of is now called compare_on"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(name: str, options: dict[str, Any], words: str) -> None:
    assert words in refusal(name, **options)


def test_settings_have_names_and_required_ones_are_missed() -> None:
    with pytest.raises(Invalid, match=r"fedavg\(0\.1\): settings have names"):
        cs.fedavg(0.1)  # type: ignore[call-arg]
    with pytest.raises(Invalid, match=r"fedsplit\.step is missing: fedsplit needs it \(number > 0\)"):
        algorithms.recipe("fedsplit")()


# --- options without effect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "fedadam",
            {"server_lr": 0.5, "step": Replace()},
            "server_lr = 0.5 has no effect with step = Replace()",
        ),
        ("simprox", {"tau": 0.3, "weighting": "uniform"}, "tau = 0.3 has no effect with weighting = UniformWeights()"),
        ("afl", {"lambda_lr": 0.3, "weighting": "uniform"}, "lambda_lr = 0.3 has no effect with weighting = "),
        ("fedfa", {"gamma": 0.1, "weighting": "uniform"}, "gamma = 0.1 has no effect with weighting = "),
        ("simagg", {"eps": 0.1, "combine": "median"}, "eps = 0.1 has no effect with combine = Median()"),
        ("fedavg", {"optimiser": "adam", "momentum": 0.9}, "momentum = 0.9 has no effect with optimiser = 'adam'"),
        ("fedavg", {"optimiser": "adamw", "lr_decay": 0.9}, "lr_decay = 0.9 has no effect with optimiser = 'adamw'"),
        ("fedatt", {"noise_seed": 3}, "noise_seed = 3 has no effect with noise = 0.0: set noise as well"),
        ("fedsiam_da", {"per_layer": True, "weighting": "uniform"}, "has no effect with per_layer = True"),
        ("fedsiam_da", {"compare_on": "updates", "weighting": "uniform"}, "compare_on = 'updates' has no effect with"),
        ("local_only", {"channel": "quantise"}, "has no effect in local_only"),
        ("simprox_buffered", {"tau": 0.3, "weighting": "uniform"}, "simprox_buffered.tau = 0.3 has no effect with"),
        ("simprox", {"similarity": "cosine", "tau": 0.3}, "SimProxWeights.tau = 0.3 has no effect with similarity"),
        ("simprox", {"temperature": 0.5, "softmax": False}, "SimProxWeights.softmax = False has no effect with"),
        ("hierarchical_averaging", {"groups": [[0], [1]], "clusters": 3}, "clusters = 3 has no effect with groups"),
    ],
)
def test_options_without_effect_are_refused_with_the_reason(name: str, options: dict[str, Any], words: str) -> None:
    said = refusal(name, **options)
    assert said.startswith(name) and words in said
    written = {key: parts.write(value) for key, value in options.items()}
    with pytest.raises(Invalid) as caught:
        config.from_table({"algorithm": {"name": name, **written}})
    assert str(caught.value) == said.replace(name, "algorithm", 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedadam", {"server_lr": 0.01, "step": Replace()}),
        ("fedavg", {"optimiser": "adam", "momentum": 0.0, "lr_decay": 1.0}),
        ("feddm", {"terms": (), "memory": (), "momentum": 0.0}),
        ("fedavg", {"weighting": "by_examples", "selection": "everyone", "step": "replace"}),
        ("simprox", {"tau": 0.5, "weighting": "uniform"}),
        ("fedatt", {"noise_seed": 0, "noise": 0.0}),
    ],
)
def test_defaults_may_be_stated_where_they_have_no_effect(name: str, options: dict[str, Any]) -> None:
    kept = {key: value for key, value in options.items() if key in ("step", "weighting", "optimiser")}
    assert algorithms.recipe(name)(**options) == algorithms.recipe(name)(**kept)


@pytest.mark.parametrize("name", algorithms.names())
def test_a_stored_config_states_every_default_and_reads_back(name: str) -> None:
    found = config.from_table({"algorithm": {"name": name, **NEEDED.get(name, {})}})
    assert config.from_table(found.table()).algorithm.built == found.algorithm.built
