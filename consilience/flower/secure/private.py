"""Private secure sums: the summed part of a reply, and the noise that a client adds to its masked vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.flower.messages import wire
from consilience.flower.secure.terms import MODULUS, SecureTerms, VectorLayout
from consilience.privacy.noise_shares import NoiseShares
from consilience.server.rules.private_sum import WITHIN
from consilience.wire.template import Leaf, Template

PARAMS = "model/params/"
BOUND = "bound"


def template_of(whole: Template, noise: NoiseShares) -> Template:
    """The summed part of a reply: parameters, and one more value with an adaptive clip norm; no loss, no statistics."""
    leaves = {path: leaf for path, leaf in whole.leaves.items() if path.startswith(PARAMS)}
    if noise.adaptive is not None:
        leaves[WITHIN] = Leaf((), torch.float64)
    return Template(leaves)


def vector(reply: Tree, shared: Tree, noise: NoiseShares) -> np.ndarray:
    """[P] float64: the clipped update, as `template_of` lays it out."""
    mine = {"model": {"params": reply["model"]["params"]}}
    update = VectorLayout(Template.of(mine)).vector(mine, shared)
    return noise.contribution(update, float(shared[BOUND]))


def bound_in(content: Any) -> float:
    """The bound of an order."""
    try:
        one = wire.packed(content["shared"])[BOUND]
    except KeyError:
        raise Invalid("the server does not say to what length updates are clipped") from None
    return float(wire.arrays.from_bytes(one.data, one.shape, one.dtype))


def add_noise(configs: Any, terms: SecureTerms, bound: float, nodes: int) -> None:
    """Add this client's share of the noise to its masked vector, of whole numbers up to the modulus."""
    from flwr.common import bytes_to_ndarray, ndarray_to_bytes
    from flwr.common.secure_aggregation.secaggplus_constants import Key

    assert terms.noise is not None
    weight, masked = configs[Key.MASKED_PARAMETERS]
    values = bytes_to_ndarray(masked)
    drawn = terms.noise.drawn(bound, step=terms.step, values=len(values), needed=terms.needed(nodes))
    configs[Key.MASKED_PARAMETERS] = [weight, ndarray_to_bytes((values + drawn) % MODULUS)]
