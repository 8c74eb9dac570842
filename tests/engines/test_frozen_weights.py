"""Transformers on every lane and engine; frozen weights exist once, are never sent, and are known by their digest."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import tiny
import torch
import transformers_tiny
from torch import nn

import consilience as cs
from consilience.core import tree
from consilience.core.rounds import Round, run
from consilience.engines.ray.transfer import with_frozen, without_frozen
from consilience.task.task import Task

pytest.importorskip("transformers", reason="needs transformers: pip install 'consilience[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'consilience[text]'")
CASES = [("bert", "all"), ("bert", "head"), ("bert", "lora"), ("distilbert", "lora"), ("gpt2", "lora"), ("vit", "lora")]


@functools.cache
def made(family: str, train: str) -> nn.Module:
    return transformers_tiny.model(family, train)


def rounds_of(family: str, train: str, algorithm: Any = None, **options: Any) -> list[Round]:
    model = made(family, train)
    data = tiny.federation() if family == "vit" else transformers_tiny.federation(model)
    engine = tiny.engine(lambda: model, data, **options)
    return list(run(algorithm or cs.fedavg(lr=0.1, batch_size=4, epochs=2), engine, rounds=2, seed=3))


@pytest.mark.parametrize(("family", "train"), CASES)
def test_lanes_agree(family: str, train: str) -> None:
    serial, *others = (rounds_of(family, train, lane=lane) for lane in ("serial", "batched", "streams"))
    start = Task(made(family, train)).start()
    assert tiny.gap(serial[-1].model, tree.cast_floating(start, torch.float64)) > 1e-3  # it learned something
    for other in others:
        for mine, theirs in zip(serial, other, strict=True):
            assert tiny.gap(theirs.model, mine.model) < 1e-11
            assert tiny.gap(theirs.cohort.reply, mine.cohort.reply) < 1e-11


@pytest.mark.parametrize("name", ["simprox", "scaffold", "simfedswap", "moon"])
def test_algorithms_on_adapters(name: str) -> None:
    algorithm = getattr(cs, name)(lr=0.2, batch_size=4, epochs=1)
    serial, batched = (rounds_of("bert", "lora", algorithm, lane=lane)[-1] for lane in ("serial", "batched"))
    assert tiny.gap(batched.model, serial.model) < 1e-12


def addresses(module: nn.Module, trained: bool) -> set[int]:
    """Where the parameters lie that are trained, or those that are not; copies hold none that requires gradients."""
    names = [name for name, p in made("bert", "lora").named_parameters() if p.requires_grad == trained]
    found = dict(module.named_parameters())
    return {found[name].untyped_storage().data_ptr() for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frozen_weights_exist_once_whatever_the_threads(dtype: torch.dtype) -> None:
    module = made("bert", "lora")
    task = Task(module).to(torch.device("cpu"), dtype)
    seen: list[nn.Module] = []

    def work() -> None:
        for mine in (task.ready(), task.to(torch.device("cpu"), dtype, matmul=True), task.knowing(3)):
            seen.extend((mine._replicas.train, mine._replicas.eval))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(part) for part in seen}) >= 12
    own = addresses(module, trained=False)
    placed = set().union(*(addresses(part, trained=False) for part in seen))
    assert len(placed) == len(own)
    assert (placed == own) == (dtype == torch.float32)  # another type is one copy of it


def test_a_shared_encoder_is_copied_once_where_it_is_placed_anew() -> None:
    model = cs.build_model("linear_head", (1, 8, 8), 3, encoder="mlp")
    task = Task(model)
    same, other = task.to(torch.device("cpu"), torch.float32), task.to(torch.device("cpu"), torch.float64)
    held = [part._replicas.train.encoder.held[0] for part in (task, same, other)]
    assert held[0] is held[1] is model.encoder.held[0] and held[2] is other._replicas.eval.encoder.held[0]
    assert next(held[0].parameters()).dtype == torch.float32 and next(held[2].parameters()).dtype == torch.float64


def test_digest_names_the_frozen_values() -> None:
    model = copy.deepcopy(made("bert", "lora"))
    before = Task(model).frozen_digest
    with torch.no_grad():
        value = next(p for p in model.parameters() if p.requires_grad)
        value.add_(1.0)
    assert Task(model).frozen_digest == before == Task(made("bert", "lora")).frozen_digest
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad)[0, 0] += 1e-6
    assert Task(model).frozen_digest != before
    assert Task(made("bert", "all")).frozen_digest == ""


def test_bytes_are_those_of_adapters_and_heads() -> None:
    module = made("bert", "lora")
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.parameters())
    assert trained < total / 8
    for done in rounds_of("bert", "lora"):
        per_client = 8 * trained  # float64
        assert 0 <= done.bytes_down / 3 - per_client <= 64
        assert 0 <= done.bytes_up / 3 - per_client <= 64


def test_workers_of_a_machine_share_what_is_frozen() -> None:
    module = made("bert", "lora")
    bare, frozen = without_frozen(module)
    names = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert set(frozen) == names and all(dict(bare.named_parameters())[name].numel() == 0 for name in names)
    workers = [with_frozen(copy.deepcopy(bare), frozen) for _ in range(2)]
    for worker in workers:
        assert addresses(worker, trained=False) == addresses(module, trained=False)  # the arrays' own memory
        assert not addresses(worker, trained=True) & addresses(module, trained=True)
        x = worker.tokenize(["send money"])
        assert torch.equal(worker.eval()(x), copy.deepcopy(module).eval()(x))


@pytest.mark.slow  # starts processes that import transformers
def test_through_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")
    from consilience.engines.ray.cluster import RayCluster

    module = made("distilbert", "lora")
    data = transformers_tiny.federation(module)
    engine = RayCluster(Task(module), data, workers=2, dtype="float64", lane="serial", device="cpu")
    try:
        there = list(run(cs.fedavg(lr=0.1, batch_size=4, epochs=2), engine, rounds=2, seed=3))
    finally:
        engine.close()
    here = rounds_of("distilbert", "lora", lane="serial")
    assert tiny.gap(there[-1].model, here[-1].model) < 1e-12
    assert there[-1].bytes_up == here[-1].bytes_up


def test_through_flower() -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
    from flower_loopback import Loopback, apps

    from consilience.flower.engine.agreement import agreement, differences
    from consilience.flower.engine.engine import FlowerEngine

    module = made("bert", "lora")
    algorithm, data = cs.fedavg(lr=0.1, batch_size=4, epochs=2), transformers_tiny.federation(module)
    grid = Loopback(apps(algorithm, lambda: Task(copy.deepcopy(module)), data, ([0], [1, 2])))
    sizes: list[int] = []

    def measured(node: int, reply: Any) -> Any:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        sizes.append(sum(len(part.deflate()) for part in get_all_nested_objects(reply).values()))
        return reply

    grid.tamper = measured
    engine = FlowerEngine(grid, Task(module), algorithm, clients=3, run="a-run", dtype="float64")
    engine.meet()
    there = list(run(algorithm, engine, rounds=2, seed=3))
    here = rounds_of("bert", "lora", lane="serial")
    assert tiny.same(there[-1].model, here[-1].model)
    frozen = sum(8 * p.numel() for p in module.parameters() if not p.requires_grad)
    assert max(sizes) < frozen / 2

    other = copy.deepcopy(module)
    with torch.no_grad():
        next(p for p in other.parameters() if not p.requires_grad)[0, 0] += 1
    ours = agreement(algorithm, Task(module), "float64", 3)
    assert "frozen_weights" in differences(ours, agreement(algorithm, Task(other), "float64", 3))
