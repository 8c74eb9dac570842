"""Which tokens are hidden from a masked language model in training."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import vmap

import consilience as cs
from consilience.core.federation import Federation
from consilience.core.plans import Batch
from consilience.core.rounds import run
from consilience.task.kinds import IGNORED
from consilience.task.task import Task
from tests import transformers_tiny as tiny

CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model() -> Any:
    return tiny.model("bert", "all", head="masked_lm", config={**tiny.CONFIGS["bert"], **CALM})


def batch_of(module: Any, texts: list[str], key: int) -> tuple[Batch, Any]:
    rows = module.tokenize(texts, pad_to=tiny.LENGTH)
    hidden, words = module.tokenization.masked_tokens(rows, seed=0)
    return Batch(x=hidden, y=words, mask=None, key=torch.tensor(key), first=torch.tensor(True), weight=None), rows


def test_every_key_hides_other_tokens_of_the_same_texts() -> None:
    module, texts = model(), tiny.texts(200)[0]
    batch, rows = batch_of(module, texts, 1)
    found = module.training_batch(batch)
    special = torch.tensor(module.tokenization.tokenizer().all_special_ids)
    chosen = found.y != IGNORED
    whole = torch.where(chosen, found.y, found.x["input_ids"])
    assert torch.equal(whole, rows["input_ids"]), "targets and what is shown are the text"
    free = ~torch.isin(rows["input_ids"], special) & (rows["attention_mask"] == 1)
    assert not (chosen & ~free).any()
    assert torch.equal(chosen.sum(1), (0.15 * free.sum(1)).round().clamp(min=1).long())
    masked = (found.x["input_ids"] == module.tokenization.tokenizer().mask_token_id)[chosen].float().mean()
    assert 0.7 < float(masked) < 0.9
    other = module.training_batch(batch._replace(key=torch.tensor(2)))
    assert not torch.equal(other.y, found.y) and not torch.equal(found.y, batch.y)
    part = module.training_batch(batch._replace(x={n: v[:7] for n, v in batch.x.items()}, y=batch.y[:7]))
    assert torch.equal(part.y, found.y[:7]), "rows are drawn by their places: padding changes nothing"
    keys = torch.tensor([1, 2])
    both = vmap(lambda key: module.training_batch(batch._replace(key=key)).y)(keys)
    assert torch.equal(both[0], found.y) and torch.equal(both[1], other.y)


def test_lanes_agree_and_rounds_differ() -> None:
    texts = tiny.texts(24)[0]
    first = model()
    rows = first.tokenize(texts, pad_to=tiny.LENGTH)
    hidden, words = first.tokenization.masked_tokens(rows, seed=0)
    parts = (slice(0, 9), slice(9, 24))
    clients = [({name: value[part] for name, value in hidden.items()}, words[part]) for part in parts]
    seen: list[Any] = []

    def trained(lane: str) -> Any:
        task = Task(model(), "tokens")
        vary = task.module.training_batch
        task.module.training_batch = lambda batch: seen.append(batch.key) or vary(batch)
        engine = cs.Vectorised(task, Federation.from_clients(clients), dtype="float64", device="cpu", lane=lane)
        *_, done = run(cs.fedavg(lr=0.1, batch_size=4, epochs=1), engine, rounds=2, seed=3)
        return done.model["params"]

    serial = trained("serial")
    keys = [int(key) for key in seen]
    assert len(set(keys)) == len(keys) == 2 * (3 + 4), "every step of every round has its own draw"
    for lane in ("batched", "streams"):
        for name, value in trained(lane).items():
            torch.testing.assert_close(value, serial[name], rtol=1e-9, atol=1e-11, msg=f"{lane} {name}")
