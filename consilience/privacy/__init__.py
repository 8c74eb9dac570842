"""How much a released model says about any one client, at most."""

from consilience.privacy.spending import (
    NOTHING,
    History,
    Mechanism,
    Spending,
    SpendsPrivacy,
    Spent,
    epsilon_of,
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
    "history",
    "noise_for",
]
