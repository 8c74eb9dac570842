"""What the server does with the replies."""

from consilience.server.averaging import Averaging
from consilience.server.combining.weighted_mean import WeightedMean
from consilience.server.dual_averaging import LayerwiseDual
from consilience.server.steps.replace import Replace
from consilience.server.weighting.by_examples import ByExamples
from consilience.server.weighting.capped import CappedWeights
from consilience.server.weighting.dual import DualWeights
from consilience.server.weighting.simprox import SimProxWeights
from consilience.server.weighting.uniform import UniformWeights

__all__ = [
    "Averaging",
    "ByExamples",
    "CappedWeights",
    "DualWeights",
    "LayerwiseDual",
    "Replace",
    "SimProxWeights",
    "UniformWeights",
    "WeightedMean",
]
