"""Families of algorithms by purpose, as `consilience list` shows them."""

from __future__ import annotations

from collections.abc import Iterable

FAMILIES: dict[str, tuple[str, ...]] = {
    "baselines": ("fedavg", "local_only", "centralised"),
    "against the drift of local training": (
        *("fedprox", "scaffold", "feddyn", "feddc", "moon", "fednova", "fedsiam_da"),
        *("fedsplit", "fedprox_fedsplit"),
    ),
    "optimisers at the server": ("fedavgm", "fedadagrad", "fedadam", "fedyogi"),
    "weights of clients": (
        *("simprox", "duw_fedavg", "duw_fednova", "fedadp", "fedatt", "fedfa", "simagg"),
        "hierarchical_averaging",
    ),
    "fairness between clients": ("afl", "qffl", "dr_fedavg"),
    "personal models": ("ditto", "fedper", "fedrep", "fedbn", "fedamp"),
    "clusters and hierarchies": ("ifca", "clustered_fl", "clustered_averaging", "hierarchical"),
    "exchange of models": ("fedswap", "simfedswap"),
    "robust to hostile clients": (
        *("krum", "multi_krum", "bulyan", "coordinate_median", "trimmed_mean", "geometric_median"),
        "centred_clipping",
    ),
    "asynchronous": ("fedasync", "fedbuff", "simprox_buffered"),
    "distillation, synthetic data, matching": ("feddf", "fedgen", "fedaf", "feddm", "fedma"),
    "low-rank adapters": ("fedit", "ffa_lora", "flexlora", "flora", "hetlora"),
    "differential privacy": ("dp_fedavg",),
}
OTHERS = "others"


def by_family(names: Iterable[str]) -> dict[str, list[str]]:
    """The names under their families, in this order; those of no family come last."""
    left = set(names)
    found = {title: [name for name in members if name in left] for title, members in FAMILIES.items()}
    found[OTHERS] = sorted(left.difference(*FAMILIES.values()))
    return {title: members for title, members in found.items() if members}
