"""What a client does with the model it receives."""

from consilience.client.local_training import LocalTraining
from consilience.client.siamese_training import SiameseTraining
from consilience.client.solvers import SGD, Adam
from consilience.client.terms.contrastive import Contrastive
from consilience.client.terms.proximal import Proximal

__all__ = ["SGD", "Adam", "Contrastive", "LocalTraining", "Proximal", "SiameseTraining"]
