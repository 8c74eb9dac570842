"""Meta-learning: aggregation weights for every round and client, learned by deep unfolding of federated runs."""

from consilience.meta.learning import learn_schedule, learning
from consilience.meta.schedule import Schedule
from consilience.meta.transfer import FittedRule, fit_rule

__all__ = ["FittedRule", "Schedule", "fit_rule", "learn_schedule", "learning"]
