"""Client selection: which clients train in a round."""

from consilience.selection.by_availability import ByAvailability
from consilience.selection.by_loss import ByLoss, PowerOfChoice
from consilience.selection.everyone import Everyone
from consilience.selection.poisson import Poisson
from consilience.selection.sliding_window import SlidingWindow
from consilience.selection.uniform import Uniform

__all__ = ["ByAvailability", "ByLoss", "Everyone", "Poisson", "PowerOfChoice", "SlidingWindow", "Uniform"]
