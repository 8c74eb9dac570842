"""An engine's copy of a transformer computes less than the user's module, and the same logits and gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.layers.randomness import KeyedDraws
from tests import transformers_tiny as tiny

CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model(family: str = "bert", train: str = "lora", **options: Any) -> Any:
    config = {**tiny.CONFIGS["bert"], "model_type": family, **CALM}
    made = tiny.model("bert", train, config=config, **options).double()
    for name, value in made.named_parameters():  # B is 0 at the start, and so would be A's gradient
        if "lora_B" in name:
            nn.init.normal_(value)
    return made


def gradients(module: Any, x: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = module(x)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(logits.square().sum(), list(named.values()))
    return logits, dict(zip(named, found))


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_logits_and_gradients_are_those_of_the_users_module(family: str, train: str) -> None:
    plain = model(family, train, **({"alpha": 6.0} if train == "lora" else {}))  # of rank 2: scaling by 3
    texts, _ = tiny.texts(5)
    x = plain.tokenize(texts)
    lean = copy.deepcopy(plain)
    lean.compute_less()
    widths: list[int] = []
    last = [part for part in lean.modules() if hasattr(part, "intermediate")][-1]
    last.intermediate.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    logits, found = gradients(lean.train(), x)
    expected, wanted = gradients(plain.train(), x)
    assert widths == [1], "the last layer is computed at the first token alone"
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
    assert list(dict(lean.named_parameters())) == list(dict(plain.named_parameters()))


def test_a_layer_with_dropout_is_computed_for_all_tokens_in_training_only() -> None:
    lean = tiny.model("bert", "all")  # dropout 0.1, in attention too
    lean.compute_less()
    widths: list[int] = []
    last = [part for part in lean.modules() if hasattr(part, "intermediate")][-1]
    last.intermediate.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    x = lean.tokenize(tiny.texts(3)[0])
    with KeyedDraws(torch.tensor(1)):
        lean.train()(x)
    lean.eval()(x)
    assert widths[0] > 1 and widths[1:] == [1]


def test_copies_compute_with_their_own_weights() -> None:
    lean = model()
    lean.compute_less()
    x = lean.tokenize(tiny.texts(3)[0])
    before = lean.eval()(x)
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        with torch.no_grad():
            for value in other.parameters():
                value.zero_()
        assert (other(x) == 0).all()
    torch.testing.assert_close(lean(x), before, rtol=0, atol=0)


def test_a_task_leaves_the_users_module_as_it_is() -> None:
    plain = model()
    task = cs.Task(plain)
    assert not any("forward" in vars(part) for part in plain.modules())
    x = plain.tokenize(tiny.texts(3)[0])
    torch.testing.assert_close(task.apply(task.start(), x, train=False)[0], plain.eval()(x), rtol=1e-12, atol=1e-12)
    assert any("forward" in vars(part) for part in task._placed.modules())
    assert not any("forward" in vars(part) for part in task.trained(task.start()).modules())


def test_in_bf16_the_residual_stream_is_bf16() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.autocast("cpu", dtype=torch.bfloat16), KeyedDraws(None):
        found = layer(torch.ones(2, 4))
    assert found.dtype == torch.bfloat16
    with KeyedDraws(None):
        assert layer(torch.ones(2, 4)).dtype == torch.float32
