"""For users of Flower: strategies to import in place of Flower's own, and the client side for them.

    from consilience.flower import SimProx as FedAvg   # was: from flwr.serverapp.strategy import FedAvg

Names are looked up when they are first used; the terms for a training loop of one's own need no Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consilience.flower.app import client_app
    from consilience.flower.strategies.memory import load_shared, personal_values, recall, remember
    from consilience.flower.strategies.serving import Limits
    from consilience.flower.strategies.strategy import TooFewNodes
    from consilience.flower.strategies.terms import (
        FedDCTerm,
        FedDynTerm,
        FedProxTerm,
        FedSiamTerm,
        FedSplitTerm,
        MoonTerm,
        ScaffoldState,
        correct_gradients,
        scaffold_reply,
    )

_MODULES = {
    "client_app": "app",
    "load_shared": "strategies.memory",
    "personal_values": "strategies.memory",
    "recall": "strategies.memory",
    "remember": "strategies.memory",
    "FedSiamTerm": "strategies.terms",
    "FedDCTerm": "strategies.terms",
    "FedDynTerm": "strategies.terms",
    "FedProxTerm": "strategies.terms",
    "FedSplitTerm": "strategies.terms",
    "MoonTerm": "strategies.terms",
    "ScaffoldState": "strategies.terms",
    "correct_gradients": "strategies.terms",
    "scaffold_reply": "strategies.terms",
    "Limits": "strategies.serving",
    "TooFewNodes": "strategies.strategy",
}

__all__ = [
    "FedDCTerm",
    "FedDynTerm",
    "FedProxTerm",
    "FedSiamTerm",
    "FedSplitTerm",
    "Limits",
    "MoonTerm",
    "ScaffoldState",
    "TooFewNodes",
    "client_app",
    "correct_gradients",
    "load_shared",
    "personal_values",
    "recall",
    "remember",
    "scaffold_reply",
]


def __getattr__(name: str) -> Any:
    """A public name from its module, or a strategy by its own."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        from consilience.flower.strategies.catalogue import STRATEGIES

        if name not in STRATEGIES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from consilience.flower.strategies.strategy import strategy

        found = strategy(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from consilience.flower.strategies.catalogue import STRATEGIES

    return sorted({*globals(), *_MODULES, *STRATEGIES})
