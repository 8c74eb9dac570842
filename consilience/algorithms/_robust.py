"""Shared code of the recipes with a robust combining rule."""

from __future__ import annotations

from consilience.algorithms._common import Common, averaged
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.combining.nearest_neighbour_mixing import NearestNeighbourMixing
from consilience.server.averaging.combining.tolerance import Faulty
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.protocols import Combine


def robust(combine: Combine, mix: Faulty | None, common: Common) -> Algorithm:
    """Local training, then robust aggregation; with `mix`, replies are first mixed with their nearest neighbours.

    Every reply counts the same unless a weighting is given, since a client could claim any number of examples.
    """
    if mix is not None:
        combine = NearestNeighbourMixing(f=mix, then=combine)
    options: Common = {"weighting": UniformWeights(), **common, "combine": combine}
    return averaged(**options)
