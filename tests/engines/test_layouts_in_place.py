"""Updates of lists of tensors whose strides say the same in different numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from consilience.engines.compiler.in_place import add_all, copy_all, laid_out_as

LAST = torch.channels_last


def test_strides_of_dimensions_with_one_value_do_not_count() -> None:
    """A kernel of 1 x 1 is contiguous and channels-last at once, and so is one with a single input channel."""
    for shape in ((6, 5, 1, 1), (6, 1, 3, 3)):
        target = torch.zeros(shape)
        source = torch.arange(target.numel(), dtype=torch.float32).reshape(shape).to(memory_format=LAST)
        source = source.as_strided(shape, torch.empty(shape, device="meta").to(memory_format=LAST).stride())
        assert source.stride() != target.stride()
        shown = laid_out_as(target, source)
        assert shown is not None and shown.stride() == target.stride() and torch.equal(shown, source)


def test_other_layouts_and_shapes_are_told_apart() -> None:
    target = torch.zeros(2, 3, 4, 5)
    assert laid_out_as(target, target.to(memory_format=LAST)) is None
    assert laid_out_as(torch.zeros(1, 4), torch.zeros(1, 1).expand(1, 4)) is None
    assert laid_out_as(torch.zeros(4, 1), torch.zeros(1, 1)) is None


@pytest.mark.parametrize("alpha", [1.0, -0.5])
def test_all_layouts_are_added_and_copied(alpha: float) -> None:
    def drawn(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(4, 3, *size, generator=generator) for size in ((1, 1), (3, 3), (3, 3))]

    targets, sources = drawn(0), drawn(1)
    sources = [source.to(memory_format=LAST) for source in sources[:2]] + sources[2:]
    wanted = [target + alpha * source for target, source in zip(targets, sources)]
    add_all(targets, sources, alpha)
    assert all(torch.allclose(one, other) for one, other in zip(targets, wanted))
    copy_all(targets, sources)
    assert all(torch.equal(one, other) for one, other in zip(targets, sources))
