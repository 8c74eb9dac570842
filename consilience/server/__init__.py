"""Server rules: aggregation of replies into the next model."""

from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.agreement import AgreementWeights
from consilience.server.averaging.weighting.by_size import ByExamples, UniformWeights
from consilience.server.averaging.weighting.capped import CappedWeights
from consilience.server.averaging.weighting.dual import DualWeights
from consilience.server.averaging.weighting.simprox import SimProxWeights
from consilience.server.rules.dual_averaging import LayerwiseDual

__all__ = [
    "AgreementWeights",
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
