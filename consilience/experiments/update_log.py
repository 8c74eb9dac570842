"""Records the geometry of clients' updates, so that a report can draw a map of the clients.

A client's update w_k - w is reduced by a random projection (a count sketch) that is the same in all rounds, so that
updates of different rounds can be compared. What is recorded tells who resembles whom: it stays in the clients' file,
and is never recorded where clients are real or where the run promises differential privacy.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.capabilities import capability
from consilience.core.exchange import Cohort
from consilience.core.protocols import ServerRule
from consilience.core.remote import each
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.privacy.spending import SpendsPrivacy
from consilience.server.geometry.geometry import sketch_tensor

MOST_CLIENTS = 64
"""The number of clients recorded of a larger cohort: the same ones in every round in which they participate."""

MOST_PARAMETERS = 1 << 20
"""Parameters up to which all are read; of larger models every n-th."""

WIDE, NARROW = 1024, 64
"""Numbers per client: cosines of the round are computed from the first (error about 0.03), the second are stored."""

_KEY = rng.key(0, "map of clients")


def recorded(setting: bool | None, server: ServerRule, *, deployed: bool) -> bool:
    """Whether a run records updates: if no real client is exposed by it, unless it is switched off."""
    private = capability(server, SpendsPrivacy) is not None
    if setting and (private or deployed):
        why = "real clients" if deployed else f"differential privacy ({type(server).__name__})"
        raise Invalid(
            f"evaluation.maps = true is not supported with {why}: the record would tell whose data resemble whose. "
            "Leave evaluation.maps out"
        )
    return setting is not False and not private and not deployed


def is_due(round: int) -> bool:
    """Whether a round is recorded: all of the first 32, then 16 for each doubling (95 of 500 rounds)."""
    return round % (1 << max(0, round.bit_length() - 5)) == 0


def update_row(cohort: Cohort, before: Tree) -> dict[str, Any]:
    """Clients, lengths of their updates, cosines between them and a projection; replies must be whole models."""
    kept = _kept(cohort)
    if not len(kept):
        return {}
    params, anchors = cohort.reply["model"]["params"], before["params"]
    params = params if len(kept) == len(cohort) else tree.take(params, kept)
    names = [name for name, value in anchors.items() if value.numel()]
    stride = -(-sum(anchors[name].numel() for name in names) // MOST_PARAMETERS)
    columns = [params[name] for name in names], [anchors[name] for name in names], list(range(len(names)))
    wide = torch.stack(each(_projected, *columns, given=(stride,))).sum(0).cpu()  # [m, WIDE]
    lengths = wide.square().sum(1).sqrt()
    unit = torch.nan_to_num(wide / lengths[:, None], nan=0.0, posinf=0.0, neginf=0.0)  # zero updates: no direction
    cosine = (unit @ unit.T).clamp(-1, 1)
    below = torch.tril_indices(len(kept), len(kept), -1)
    narrow = unit.reshape(len(kept), -1, NARROW).sum(1)  # sums of sums are a count sketch again
    return {
        "updates": {
            "clients": cohort.ids[kept].tolist(),
            "lengths": [float(f"{value:.4g}") for value in (lengths * stride**0.5).tolist()],
            "cosines": packed(cosine[below[0], below[1]]),
            "projections": packed(narrow),
        }
    }


def packed(values: Tensor) -> str:
    """Numbers of two bytes (float16, little-endian) in base64."""
    return base64.b64encode(values.numpy().astype("<f2").tobytes()).decode()


def _kept(cohort: Cohort) -> np.ndarray:
    """Indices of the recorded clients in the cohort: all that replied, or a fixed sample."""
    places = np.arange(len(cohort)) if cohort.heard is None else np.flatnonzero(cohort.heard)
    if len(places) <= MOST_CLIENTS:
        return places
    with np.errstate(over="ignore"):
        order = np.argsort(rng.fold(_KEY, cohort.ids[places].astype(np.int64)), kind="stable")
    return np.sort(places[order[:MOST_CLIENTS]])


def _projected(value: Tensor, anchor: Tensor, place: int, stride: int) -> Tensor:
    """[m, WIDE] of one tensor."""
    some, start = value.flatten(1)[:, ::stride].float(), anchor.flatten()[::stride].float()
    return sketch_tensor(some, start, 0, WIDE, rng.key(_KEY, place))
