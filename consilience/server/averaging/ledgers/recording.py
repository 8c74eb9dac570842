"""A function of tensors as one CUDA graph: the host queues a thousand short kernels by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Recording:
    """Records a function, which may not read a value, when it is made; a call replays it on other values."""

    def __init__(self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], given: Sequence[Tensor]) -> None:
        self._given = [leaf.clone() for leaf in given]
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            function(self._given)  # libraries choose their kernels before a recording
        here.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=None, stream=aside):
            self._found = function(self._given)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the function gives for tensors of the same shapes and types."""
        torch._foreach_copy_(self._given, list(given))
        self._graph.replay()
        return [leaf.clone() for leaf in self._found]
