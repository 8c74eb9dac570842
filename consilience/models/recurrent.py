"""LSTMs for characters and text, in plain tensor operations so that a whole cohort trains at once (vmap)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from consilience.core.settings import Count, Decay, Invalid
from consilience.models.arguments import Shape, factory, require_sequence
from consilience.models.frozen import Constant
from consilience.models.layers import dropout as dropout_layer

PADDING = 0


class RecurrentLayer(nn.Module):
    """One LSTM layer: gates in torch's order (input, forget, cell, output), one bias as TensorFlow has it."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.input_gates = nn.Linear(size, 4 * hidden)
        self.state_gates = nn.Linear(hidden, 4 * hidden, bias=False)
        bound = 1 / math.sqrt(hidden)
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)
        with torch.no_grad():  # forget-gate bias of 1 (Jozefowicz et al. 2015), as in the published benchmarks
            self.input_gates.bias[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, length, size], live [n, length, 1] -> outputs [n, length, hidden] and the last [n, hidden].

        A padding position leaves the state as it was: the final output is that of the last live position.
        """
        from_input = self.input_gates(x)  # all positions in one product: [n, length, 4 * hidden]
        output = from_input.new_zeros(len(x), self.state_gates.in_features)
        cell = torch.zeros_like(output)
        outputs = []
        for gates, alive in zip(from_input.unbind(1), live.unbind(1)):
            enter, keep, fresh, show = (gates + self.state_gates(output)).chunk(4, -1)
            next_cell = keep.sigmoid() * cell + enter.sigmoid() * fresh.tanh()
            next_output = show.sigmoid() * next_cell.tanh()
            cell = torch.where(alive, next_cell, cell)
            output = torch.where(alive, next_output, output)
            outputs.append(output)
        return torch.stack(outputs, 1), output


class SequenceClassifier(nn.Module):
    """Token numbers -> embedding -> LSTM layers -> final output -> linear head; token 0 is padding."""

    def __init__(
        self, embedding: nn.Module, *, size: int, hidden: int, layers: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(RecurrentLayer(size if i == 0 else hidden, hidden) for i in range(layers))
        self.dropout = dropout_layer(dropout)
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        """[n, length] whole numbers -> [n, hidden]"""
        live = (x != PADDING).unsqueeze(-1)
        states = self.embedding(x.long()).to(self.head.weight.dtype)  # [n, length, size]
        final = states.new_zeros(0)
        for layer in self.layers:
            states, final = layer(states, live)
        return self.dropout(final)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def char_lstm(
    *,
    inputs: Shape,
    classes: Count,
    vocabulary: Count,
    embedding: Count = 8,
    hidden: Count = 100,
    layers: Count = 2,
    dropout: Decay = 0.0,
) -> nn.Module:
    """Next-character LSTM (Shakespeare: Li et al. 2020, 2 layers of 100; Reddi et al. 2021, hidden=256).

    `vocabulary` counts the tokens including 0, the padding.
    """
    require_sequence("char_lstm", inputs)
    table = nn.Embedding(vocabulary, embedding)
    return SequenceClassifier(table, size=embedding, hidden=hidden, layers=layers, classes=classes, dropout=dropout)


@factory
def text_lstm(
    *,
    inputs: Shape,
    classes: Count,
    vocabulary: Count,
    embedding: Count = 300,
    vectors: Tensor | None = None,
    train_embedding: bool = True,
    hidden: Count = 256,
    layers: Count = 2,
    dropout: Decay = 0.0,
) -> nn.Module:
    """Text LSTM (Sent140 in Li et al. 2020: 300-d word vectors, 2 x 256, a dense layer).

    `vectors` [vocabulary, embedding] start the embedding; with train_embedding=False it is constant: neither
    trained nor sent. `vocabulary` counts the tokens including 0, the padding.
    """
    require_sequence("text_lstm", inputs)
    if vectors is not None and tuple(vectors.shape) != (vocabulary, embedding):
        raise Invalid(
            f"text_lstm.vectors has shape {tuple(vectors.shape)}, not (vocabulary, embedding) = "
            f"{(vocabulary, embedding)}: give one row per token, row 0 for padding"
        )
    table = nn.Embedding(vocabulary, embedding)
    if vectors is not None:
        with torch.no_grad():
            table.weight.copy_(vectors)
    return SequenceClassifier(
        table if train_embedding else Constant(table),
        size=embedding,
        hidden=hidden,
        layers=layers,
        classes=classes,
        dropout=dropout,
    )
