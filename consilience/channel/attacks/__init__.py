"""Attacks to test robust rules: forged replies (channels) and poisoned data (functions)."""

from consilience.channel.attacks.forging import (
    ALittleIsEnough,
    GaussianUpdate,
    InnerProduct,
    Mimic,
    Scaling,
    SignFlip,
)
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
