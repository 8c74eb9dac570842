"""What a client does with the model it receives."""

from consilience.client.evaluate import Evaluate
from consilience.client.local_training import LocalTraining
from consilience.client.solvers import SGD, Adam
from consilience.client.terms.proximal import Proximal

__all__ = ["SGD", "Adam", "Evaluate", "LocalTraining", "Proximal"]
