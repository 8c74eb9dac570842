"""What hostile clients do, to test robust rules: forged replies (channels) and poisoned data (functions)."""

from consilience.channel.attacks.a_little_is_enough import ALittleIsEnough
from consilience.channel.attacks.inner_product import InnerProduct
from consilience.channel.attacks.mimic import Mimic
from consilience.channel.attacks.own_update import GaussianUpdate, Scaling, SignFlip
from consilience.channel.attacks.poisoning import Trigger, attack_success, flip_labels, plant_backdoor

__all__ = [
    "ALittleIsEnough",
    "GaussianUpdate",
    "InnerProduct",
    "Mimic",
    "Scaling",
    "SignFlip",
    "Trigger",
    "attack_success",
    "flip_labels",
    "plant_backdoor",
]
