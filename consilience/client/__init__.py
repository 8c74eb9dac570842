"""What a client does with the model it receives."""

from consilience.client.local_training import LocalTraining
from consilience.client.solvers import SGD, Adam
from consilience.client.terms.proximal import Proximal

__all__ = ["SGD", "Adam", "LocalTraining", "Proximal"]
