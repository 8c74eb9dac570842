"""Ledgers of drift: control variates (SCAFFOLD) and the mean drift (FedDyn)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.tree import Tree, map_leaves, map_rows
from consilience.server.protocols import RoundOutcome


@dataclass(frozen=True, kw_only=True)
class ControlVariates:
    """c <- c + |S|/N mean_S (change of c_i): the mean of the control variates of all N clients."""

    name = "control_variate"  # its key in the state and in the broadcast
    needs_each_reply = False  # a sum is enough

    @property
    def reads(self) -> tuple[str, ...]:
        """What replies must hold."""
        return ("control_change",)

    def initial(self, start: Tree, clients: int) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def broadcast(self, ledger: Tree) -> Tree:
        """Send c to every client."""
        return ledger

    def update(self, ledger: Tree, round: RoundOutcome) -> tuple[Tree, Tree]:
        """Add the changes; the parameters are unchanged."""
        changes = round.cohort.reply["control_change"]
        total = map_rows(_sum, changes)
        return map_leaves(lambda c, change: c + change / round.clients, ledger, total), round.after


def _sum(stacked: Tensor) -> Tensor:
    return stacked.sum(0)


@dataclass(frozen=True, kw_only=True)
class MeanDrift:
    """H <- H + (1/N) sum_S (w_k - w) over all N clients, 0 for clients without a reply; H is added to the model.

    FedDyn's h is -alpha H, so that its step -h / alpha is H.
    """

    name = "mean_drift"  # its key in the state; it is not broadcast
    needs_each_reply = False  # a sum is enough

    def initial(self, start: Tree, clients: int) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def broadcast(self, ledger: Tree) -> Tree:
        """Nothing: clients do not need it."""
        return {}

    def update(self, ledger: Tree, round: RoundOutcome) -> tuple[Tree, Tree]:
        """Add this round's updates to H, and H to the parameters."""
        stacked = round.cohort.reply["model"]["params"]
        total = map_rows(_moves, stacked, round.before)
        ledger = map_leaves(lambda h, moves: h + moves / round.clients, ledger, total)
        return ledger, map_leaves(torch.add, round.after, ledger)


def _moves(stacked: Tensor, before: Tensor) -> Tensor:
    """[...] the sum of all updates [m, ...] from one model."""
    return (stacked - before).sum(0)
