"""Rewritten products of a traced step on a GPU: biases of frozen layers, gradients of small embeddings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from consilience.engines.compiler import constant_casts
from consilience.engines.compiler.biases import add_biases_in_products
from consilience.engines.compiler.constant_casts import cast_constants_once
from consilience.engines.compiler.small_embeddings import FEW, multiply_small_embeddings
from consilience.engines.compiler.trace import Trace, trace

aten = torch.ops.aten


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def count(traced: Trace, operation: object) -> int:
    return sum(node.target == operation for node in traced.graph.nodes)


def test_a_frozen_layers_bias_is_part_of_its_product() -> None:
    weight, bias, trained = drawn(5, 4, seed=0), drawn(5, seed=1), drawn(3, 4, seed=2)
    rows = drawn(3, 6, 2, 4, seed=3)  # clients, rows, tokens, size

    def gradients(parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        def objective(scale: Tensor, x: Tensor) -> Tensor:
            return F.linear(x * scale, weight, bias).tanh().square().sum()

        return [vmap(grad(objective))(parameters[0], batch[0])]

    expected = gradients([trained], [rows])[0]
    traced = trace(gradients, [trained], [rows])
    assert count(traced, aten.addmm.default) == 0
    add_biases_in_products(traced)
    assert count(traced, aten.addmm.default) == 1
    torch.testing.assert_close(traced([trained], [rows])[0], expected, rtol=1e-13, atol=1e-13)


def test_a_bias_stays_apart_where_the_product_is_read_without_it() -> None:
    rows, weight, bias = drawn(6, 4, seed=0), drawn(4, 5, seed=1), drawn(5, seed=2)

    def both(given: list[Tensor]) -> list[Tensor]:
        product = given[0] @ weight
        return [product + bias, product.exp()]

    traced = trace(both, [rows])
    add_biases_in_products(traced)
    assert count(traced, aten.addmm.default) == 0


def test_the_gradient_of_a_small_embedding_is_autograds() -> None:
    tokens = torch.randint(0, 2, (3, 4, 7), generator=torch.Generator().manual_seed(0))
    small, large = drawn(3, 2, 5, seed=1), drawn(3, FEW, 5, seed=2)

    def gradients(tables: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        def objective(tables: list[Tensor], tokens: Tensor) -> Tensor:
            return sum(F.embedding(tokens, table).tanh().square().sum() for table in tables)

        return vmap(grad(objective))(tables, batch[0])

    expected = gradients([small, large], [tokens])
    traced = trace(gradients, [small, large], [tokens])
    assert count(traced, aten.embedding_dense_backward.default) == 2
    multiply_small_embeddings(traced)
    assert count(traced, aten.embedding_dense_backward.default) == 1, "three clients' large tables have more entries"
    for found, value in zip(traced([small, large], [tokens]), expected):
        torch.testing.assert_close(found, value, rtol=1e-13, atol=1e-13)


def test_frozen_weights_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, rows = drawn(5, 4, seed=0), drawn(5, seed=1), drawn(6, 4, seed=2)

    def half(given: list[Tensor]) -> list[Tensor]:
        x = given[0].to(torch.bfloat16)
        return [F.linear(x, weight.to(torch.bfloat16), bias.to(torch.bfloat16)), x @ weight.t().to(torch.bfloat16)]

    expected = half([rows])
    traced = trace(half, [rows])
    monkeypatch.setattr(constant_casts, "AT_MOST", 10)
    cast_constants_once(traced)
    assert count(traced, aten._to_copy.default) == 4, "too large to keep beside the weights"
    monkeypatch.undo()
    cast_constants_once(traced)
    assert count(traced, aten._to_copy.default) == 1, "the rows alone are cast at every step"
    for found, value in zip(traced([rows]), expected):
        assert torch.equal(found, value)
