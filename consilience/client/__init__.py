"""Client rules: local training and other work on the received model."""

from consilience.client.adaptive_solvers import Adadelta, Adagrad, Adamax, Lion, NAdam, RMSprop
from consilience.client.augmentations import Crop, Cutout, Flip, MixUp, TokenDropout
from consilience.client.local_training import LocalTraining
from consilience.client.siamese_training import SiameseTraining
from consilience.client.solver_wrappers import Accumulated, Clipped, Scheduled
from consilience.client.solvers import SGD, Adam
from consilience.client.terms.contrastive import Contrastive
from consilience.client.terms.proximal import Proximal
from consilience.core.rate_schedules import Cosine, Exponential, Linear, Milestones, StepDecay, WarmUp

__all__ = [
    "SGD",
    "Accumulated",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "Clipped",
    "Contrastive",
    "Cosine",
    "Crop",
    "Cutout",
    "Exponential",
    "Flip",
    "Linear",
    "Lion",
    "LocalTraining",
    "Milestones",
    "MixUp",
    "NAdam",
    "Proximal",
    "RMSprop",
    "Scheduled",
    "SiameseTraining",
    "StepDecay",
    "TokenDropout",
    "WarmUp",
]
