"""Rules for adapters on transformers with PEFT's layers, and what is shipped after products were merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason='PEFT is not installed: pip install "consilience[text]"')
pytest.importorskip("transformers", reason='transformers is not installed: pip install "consilience[text]"')

import tiny
import transformers_tiny

import consilience as cs
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.layers.adapters import has_merged, pairs_of
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
USUAL: dict[str, Any] = {"lr": 0.5, "batch_size": 4}


def trained(algorithm: Any, family: str, lane: Any = "serial") -> tuple[Task, list[Round]]:
    module = transformers_tiny.model(family)
    task = algorithm.prepared(Task(module))
    engine = Vectorised(task, transformers_tiny.federation(module), dtype="float64", device="cpu", lane=lane)
    return engine.task, list(run(algorithm, engine, rounds=2, seed=1))


@pytest.mark.parametrize("name", ["fedit", "ffa_lora", "flora", "flexlora", "hetlora"])
def test_a_transformer_learns_by_every_rule_the_same_in_two_lanes(name: str) -> None:
    algorithm = getattr(cs, name)(**USUAL, **({"ranks": (1, 2)} if name == "hetlora" else {}))
    task, rounds = trained(algorithm, "bert")
    assert tiny.gap(trained(algorithm, "bert", "batched")[1][-1].model, rounds[-1].model) <= 1e-9
    start, last = task.start()["params"], rounds[-1].model
    factors = [key for key in start if "lora_" in key]
    assert len(factors) == (4 if name == "ffa_lora" else 8)  # queries and values of two layers
    moved = last["buffers"] if name == "flora" else {key: last["params"][key] for key in factors if "lora_B" in key}
    assert all(bool(value.any()) for key, value in moved.items() if "lora_" in key)


@pytest.mark.parametrize("family", ["bert", "gpt2"])  # the second has weights [in, out]
def test_what_flora_ships_has_the_products_in_its_weights(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    module = transformers_tiny.model(family)
    federation = transformers_tiny.federation(module)
    engine = {"device": "cpu", "lane": "serial"}
    result = cs.train(module, federation, cs.flora(**USUAL), rounds=2, progress=False, **engine)
    x = {name: value[:4] for name, value in federation.test.x.items()}  # type: ignore[union-attr]
    expected = result.task.apply(result.values, x, train=False)[0]
    assert not has_merged(result.model) and has_merged(result.task.module)
    assert not torch.allclose(module.eval()(x), expected, atol=1e-3), "something must have been learned"
    torch.testing.assert_close(result.model(x), expected, rtol=0, atol=1e-5)
    folder = result.export(tmp_path / "model", "hugging_face")
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(**x).logits, expected, rtol=0, atol=1e-5)
    with pytest.raises(Invalid, match=r"adapters = 'separate' is not supported for FLoRA"):
        result.export(tmp_path / "other", "hugging_face", adapters="separate")


def test_pefts_layers_are_found_and_merged_with_their_scaling() -> None:
    task, rounds = trained(cs.flora(**USUAL), "bert")
    (pair, *_) = pairs_of(task.start()["params"])
    assert pair.layer.endswith("attention.self.query") and pair.a.endswith("lora_A.default.weight")
    layer: Any = task.trained(rounds[-1].model).get_submodule(pair.layer)
    x = torch.randn(3, 16, dtype=layer.base_layer.weight.dtype)
    dense = layer.base_layer.weight + layer.scaling["default"] * layer.lora_merged
    torch.testing.assert_close(layer(x), x @ dense.T + layer.base_layer.bias)
