"""Who takes part in a round."""

from consilience.selection.everyone import Everyone
from consilience.selection.sliding_window import SlidingWindow
from consilience.selection.uniform import Uniform

__all__ = ["Everyone", "SlidingWindow", "Uniform"]
