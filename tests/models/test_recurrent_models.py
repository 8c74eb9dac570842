"""The LSTMs equal torch's, and padding never counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from consilience import models
from consilience.core.settings import Invalid


def torch_twin(model: nn.Module, size: int, hidden: int) -> nn.LSTM:
    """torch's own LSTM with the same weights (its second bias is zero: ours are one)."""
    twin = nn.LSTM(size, hidden, num_layers=len(model.layers), batch_first=True).double()
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            getattr(twin, f"weight_ih_l{i}").copy_(layer.input_gates.weight)
            getattr(twin, f"weight_hh_l{i}").copy_(layer.state_gates.weight)
            getattr(twin, f"bias_ih_l{i}").copy_(layer.input_gates.bias)
            getattr(twin, f"bias_hh_l{i}").zero_()
    return twin


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_equals_torch_lstm_values_and_gradients(layers: int) -> None:
    model = models.build("char_lstm", (9,), 4, vocabulary=11, embedding=3, hidden=5, layers=layers).double()
    twin = torch_twin(model, 3, 5)
    x, y = tokens(6, 9), torch.arange(6) % 4
    states, (final, _) = twin(model.embedding(x))
    torch.testing.assert_close(model.features(x), final[-1], rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.layers.parameters()))
    named = [getattr(twin, f"{kind}_l{i}") for i in range(layers) for kind in ("weight_ih", "bias_ih", "weight_hh")]
    theirs = torch.autograd.grad(F.cross_entropy(model.head(states[:, -1]), y), named)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_final_state_is_that_of_the_last_live_position() -> None:
    model = models.build("char_lstm", (7,), 4, vocabulary=11, hidden=5).double()
    twin = torch_twin(model, 8, 5)
    lengths = [7, 1, 4, 6]
    x = tokens(4, 7)
    for row, length in enumerate(lengths):
        x[row, length:] = 0
    packed = nn.utils.rnn.pack_padded_sequence(model.embedding(x), lengths, batch_first=True, enforce_sorted=False)
    _, (final, _) = twin(packed)
    torch.testing.assert_close(model.features(x), final[-1], rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.data())
def test_padding_anywhere_changes_nothing(sentence: list[int], data: st.DataObject) -> None:
    model = models.build("text_lstm", (9,), 3, vocabulary=11, embedding=3, hidden=4).double()
    padded = list(sentence)
    while len(padded) < 9:
        padded.insert(data.draw(st.integers(0, len(padded))), 0)
    short, long = model(torch.tensor([sentence])), model(torch.tensor([padded]))
    torch.testing.assert_close(short, long, rtol=1e-12, atol=1e-12)


def test_an_empty_text_gives_the_heads_bias_and_finite_gradients() -> None:
    model = models.build("text_lstm", (5,), 3, vocabulary=11, embedding=3, hidden=4)
    logits = model(torch.zeros(2, 5, dtype=torch.int64))
    assert torch.equal(logits, model.head.bias.expand(2, 3))
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_padding_row_of_the_embedding_gets_no_gradient() -> None:
    model = models.build("char_lstm", (3,), 3, vocabulary=5)
    model(torch.tensor([[1, 2, 0], [3, 0, 0]])).sum().backward()
    moved = model.embedding.weight.grad.abs().sum(1) > 0
    assert moved.tolist() == [False, True, True, True, False]


def test_forget_gates_start_open_and_the_rest_as_torch_does() -> None:
    model = models.build("char_lstm", (3,), 3, vocabulary=5, hidden=100)
    for layer in model.layers:
        assert torch.equal(layer.input_gates.bias[100:200], torch.ones(100))
        assert float(layer.state_gates.weight.detach().abs().max()) == pytest.approx(0.1, rel=0.01)


def test_published_sizes_are_the_defaults() -> None:
    characters = models.char_lstm(inputs=(80,), classes=80, vocabulary=80)
    assert [tuple(layer.input_gates.weight.shape) for layer in characters.layers] == [(400, 8), (400, 100)]
    text = models.text_lstm(inputs=(25,), classes=2, vocabulary=50)
    assert [tuple(layer.input_gates.weight.shape) for layer in text.layers] == [(1024, 300), (1024, 256)]


def test_given_vectors_start_the_embedding_and_may_stay_constant() -> None:
    vectors = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    options = {"inputs": (4,), "classes": 2, "vocabulary": 6, "embedding": 3, "vectors": vectors, "hidden": 4}
    learnt = models.text_lstm(**options)
    assert torch.equal(learnt.embedding.weight, vectors) and learnt.embedding.weight.requires_grad
    constant = models.text_lstm(**options, train_embedding=False)
    x = torch.tensor([[1, 2, 5, 0]])
    assert torch.equal(constant.embedding(x), vectors[x])
    assert not any(name.startswith("embedding") for name in constant.state_dict())
    assert len(list(learnt.parameters())) == len(list(constant.parameters())) + 1


def test_vectors_of_another_shape_are_refused() -> None:
    with pytest.raises(Invalid, match=r"vectors has shape \(5, 3\), not .* \(6, 3\)"):
        models.text_lstm(inputs=(4,), classes=2, vocabulary=6, embedding=3, vectors=torch.zeros(5, 3))
