"""Learning about learning: aggregation weights for every round and client, by unfolding whole federated runs."""

from consilience.meta.learning import learn_schedule, learning
from consilience.meta.schedule import Schedule

__all__ = ["Schedule", "learn_schedule", "learning"]
