"""The server step of FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Replace:
    """The merged model becomes the global model."""

    def init(self, params: Tree) -> Tree:
        """No state."""
        return {}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """All the way."""
        return merged, state
