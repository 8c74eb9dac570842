"""How much a released model says about any one client, at most."""

from consilience.privacy.spending import Spending, SpendsPrivacy, Spent, noise_for

__all__ = ["Spending", "SpendsPrivacy", "Spent", "noise_for"]
