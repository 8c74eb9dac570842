"""Similarity of models by their adapters only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from consilience.core import tree
from consilience.core.settings import Checked, Invalid
from consilience.core.tree import Tree
from consilience.layers.adapters import LORA, Factors, is_factor, pairs_of, product
from consilience.server.geometry.model_similarity import Bounded, Layerwise, ModelSimilarity


@dataclass(frozen=True, kw_only=True)
class Adapters(Checked):
    """`similarity` of the adapters' products B A [out, in], one matrix per layer, or of their two factors.

    Different pairs of factors can have the same product, which is what the model uses.
    """

    compare_on: Literal["products", "factors"] = "products"
    similarity: ModelSimilarity = field(default_factory=Layerwise)
    factors: Factors = LORA

    @property
    def bounded(self) -> bool:
        """As the wrapped similarity."""
        return isinstance(self.similarity, Bounded) and self.similarity.bounded

    def compare(self, models: Tree, ancestor: Tree) -> Tensor:
        """[m, m] over the adapters."""
        return self.similarity.compare(self._seen(models, stacked=True), self._seen(ancestor, stacked=False))

    def _seen(self, params: Tree, *, stacked: bool) -> Tree:
        if self.compare_on == "products":
            params = tree.here(params)
            return {pair.key: product(params, pair) for pair in pairs_of(params, self.factors, stacked=stacked)}
        seen = {name: value for name, value in params.items() if is_factor(name, self.factors)}
        if not seen:
            raise Invalid(
                f"similarity = adapters, but no parameter is named {' or '.join(self.factors)}: compare whole models"
            )
        return seen
