"""The cheap gradient is the gradient."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from consilience.core.tree import Tree
from consilience.task import gradients
from consilience.task.gradients import gradient

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def objective(params: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
    out = torch.tanh(X @ params["w"] + params["b"])
    return out.square().sum(), (out, {"twice": out * 2})


def some_params() -> Tree:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (3, 2), "b": (2,), "unused": (4,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def test_it_equals_the_transform_and_leaves_no_graph_behind() -> None:
    params = some_params()
    expected, (out, rest) = grad(objective, has_aux=True)(params)
    with torch.no_grad():
        got, (value, extra) = gradient(objective, params)
    for name, leaf in expected.items():
        torch.testing.assert_close(got[name], leaf, rtol=1e-14, atol=1e-14)
    assert torch.equal(value, out) and torch.equal(extra["twice"], rest["twice"])
    assert got["unused"].tolist() == [0] * 4
    assert not any(leaf.requires_grad for leaf in [*got.values(), *params.values(), value, extra["twice"]])


def test_an_objective_without_parameters_has_gradient_zero() -> None:
    with torch.no_grad():
        got, _ = gradient(lambda params: (X.sum(), ()), some_params())
    assert all(not leaf.any() for leaf in got.values())


def test_under_vmap() -> None:
    stacked = {name: torch.stack([leaf, leaf + 1, leaf * 2]) for name, leaf in some_params().items()}
    with torch.no_grad():
        got = vmap(lambda params: gradient(objective, params)[0])(stacked)
        for k in range(3):
            one, _ = gradient(objective, {name: leaf[k] for name, leaf in stacked.items()})
            for name, leaf in one.items():
                torch.testing.assert_close(got[name][k], leaf, rtol=1e-14, atol=1e-14)


def test_without_the_compiler_it_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under vmap, differentiated there, and outside of it."""
    stacked = {name: torch.stack([leaf, leaf + 1, leaf * 2]) for name, leaf in some_params().items()}

    def slope(params: Tree) -> tuple[Tensor, tuple[()]]:
        return gradient(objective, params)[0]["w"].square().sum(), ()

    def found() -> list[Tensor]:
        with torch.no_grad():
            under_vmap = vmap(lambda params: gradient(objective, params))(stacked)
            twice = vmap(lambda params: gradient(slope, params)[0])(stacked)
        return pytree.tree_leaves((under_vmap, twice, gradient(objective, some_params())))

    expected = found()
    monkeypatch.setattr(gradients, "sys", types.SimpleNamespace(modules={"torch._dynamo": None}))
    assert all(map(torch.equal, found(), expected))
    monkeypatch.setattr(gradients, "sys", types.SimpleNamespace(modules={}))
    assert all(map(torch.equal, found(), expected))
    assert not any(leaf.requires_grad for leaf in found())


def test_it_can_be_differentiated_where_gradients_are_on() -> None:
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    got, _ = gradient(lambda params: (params["w"] ** 3, ()), {"w": w})  # 3 w^2, whose derivative is 6 w
    (second,) = torch.autograd.grad(got["w"], w)
    assert second.item() == 12
