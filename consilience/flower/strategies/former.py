"""Refuses apps written for Flower's former strategies (flwr.server.strategy), and names what is former in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from consilience.core.settings import Invalid

ARGUMENTS = {
    *("fraction_fit", "min_fit_clients", "min_evaluate_clients", "min_available_clients", "initial_parameters"),
    *("on_fit_config_fn", "on_evaluate_config_fn", "evaluate_fn", "accept_failures", "fit_metrics_aggregation_fn"),
    "evaluate_metrics_aggregation_fn",
}
UPGRADE = "these are for apps of flwr.serverapp: Flower's documentation says how to upgrade an app"


def refuse_former_arguments(name: str, unknown: Iterable[str]) -> None:
    """Refuse a strategy's unknown arguments if one of them is a former strategy's."""
    former = next((key for key in unknown if key in ARGUMENTS), None)
    if former is not None:
        raise Invalid(f"{name}.{former} is an argument of Flower's former strategies (flwr.server.strategy); {UPGRADE}")


def refuse_former_server(name: str) -> NoReturn:
    """Refuse a strategy in a ServerApp of the former API, which would call methods that it does not have."""
    raise Invalid(f"{name} was given to a ServerApp of Flower's former API (flwr.server); {UPGRADE}")
