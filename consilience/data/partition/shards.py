"""McMahan et al.'s pathological split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Invalid
from consilience.data.partition.apportion import rows_by_class


@dataclass(frozen=True, kw_only=True)
class Shards(Checked):
    """Rows sorted by label are cut into equal shards (to within one row); each client gets the same number of them."""

    clients: Count
    shards_per_client: Count = 2

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        _, rows = rows_by_class(labels, "shards")
        shards = self.clients * self.shards_per_client
        if shards > len(labels):
            raise Invalid(
                f"Shards.shards_per_client = {self.shards_per_client} for {self.clients} clients cuts "
                f"{shards} shards from {len(labels)} rows: at most {len(labels) // self.clients} each, or "
                f"{len(labels) // self.shards_per_client} clients"
            )
        rng = host(seed, "shards")
        by_label = np.concatenate([rng.permutation(of_class) for of_class in rows])
        pieces = np.array_split(by_label.astype(np.int64), shards)
        hands = rng.permutation(shards).reshape(self.clients, self.shards_per_client)
        return [np.sort(np.concatenate([pieces[shard] for shard in hand])) for hand in hands]
