"""Differential privacy: how much a released model can reveal about one client."""

from consilience.privacy.spending import (
    NOTHING,
    History,
    Mechanism,
    Spending,
    SpendsPrivacy,
    Spent,
    epsilon_of,
    epsilon_so_far,
    history,
    noise_for,
)

__all__ = [
    "NOTHING",
    "History",
    "Mechanism",
    "Spending",
    "SpendsPrivacy",
    "Spent",
    "epsilon_of",
    "epsilon_so_far",
    "history",
    "noise_for",
]
