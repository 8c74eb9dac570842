"""The vectorised engine: environments, memories, broken clients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import rules_for_tests as parts
import tiny
import torch
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.placement import resolve_device
from consilience.engines.vectorised.arithmetic import resolve_precision
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import Uniform
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
each_lane = pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
CLIENTS = len(tiny.SIZES)
LOUD = (1.0, 0.0, 1.0, 0.0, 1.0)  # clients 1 and 3 are never heard


def weighted(cohort_model: tree.Tree, weights: Tensor) -> tree.Tree:
    """By hand: sum of weight times value."""
    return tree.map_leaves(lambda v: torch.einsum("m,m...->...", weights, v), cohort_model)


# --- environments ----------------------------------------------------------------------------------------------------


@each_lane
def test_step_budgets_are_honoured(lane: str) -> None:
    environment = Environment(steps=(3, 0, 7, 1, 2))
    (one,) = run(parts.remembering(), tiny.engine(lane=lane, environment=environment), rounds=1)
    assert one.cohort.steps.tolist() == [3, 0, 7, 1, 2]
    assert one.cohort.reply["steps"].tolist() == [3, 0, 7, 1, 2]


@each_lane
def test_own_epochs_and_stragglers_are_honoured(lane: str) -> None:
    environment = Environment(epochs=(1, 2, 3, 0.5, 0), stragglers=0.4)
    engine = tiny.engine(lane=lane, environment=environment)
    per_epoch = np.array([3, 1, 1, 3, 2])  # rows 9, 4, 1, 12, 6 in fours
    for one in run(parts.remembering(), engine, rounds=3, seed=4):
        asked = environment.work(one.number - 1, np.arange(5), 4, epochs=1, steps_per_epoch=per_epoch)
        assert one.cohort.steps.tolist() == asked.tolist() == one.cohort.reply["steps"].tolist()


def test_epochs_of_the_rule_are_honoured() -> None:
    (one,) = run(fedavg(batch_size=4, epochs=2.5), tiny.engine(), rounds=1)
    assert one.cohort.steps.tolist() == [8, 3, 3, 8, 5]  # ceil(2.5 x (3, 1, 1, 3, 2))


@each_lane
def test_silent_clients_are_left_out_when_renormalising(lane: str) -> None:
    engine = tiny.engine(lane=lane, environment=Environment(communication=LOUD))
    (one,) = run(fedavg(batch_size=4, lr=0.1), engine, rounds=1)
    assert one.cohort.ids.tolist() == [0, 2, 4] and one.cohort.counts == {"silent": 2}
    assert one.cohort.examples.tolist() == [9, 1, 6]
    assert one.notes["weights"].tolist() == [9 / 16, 1 / 16, 6 / 16]
    assert tiny.gap(one.model, weighted(one.cohort.reply["model"], one.notes["weights"])) <= 1e-12


@each_lane
def test_silent_clients_count_at_full_weight_with_the_broadcast_model(lane: str) -> None:
    engine = tiny.engine(lane=lane, environment=Environment(communication=LOUD, silent="broadcast_model"))
    start = engine.start()
    (one,) = run(fedavg(batch_size=4, lr=0.1), engine, rounds=1)
    assert one.cohort.ids.tolist() == [0, 1, 2, 3, 4] and one.cohort.counts == {"silent": 2}
    assert one.cohort.steps.tolist()[1] == one.cohort.steps.tolist()[3] == 0
    for silent in (1, 3):
        assert tiny.same(tree.rows(one.cohort.reply["model"], silent), start)
    weights = torch.tensor(tiny.SIZES, dtype=torch.float64) / sum(tiny.SIZES)
    torch.testing.assert_close(one.notes["weights"], weights, rtol=1e-15, atol=0)
    heard = tiny.engine(environment=Environment(communication=LOUD))
    (plain,) = run(fedavg(batch_size=4, lr=0.1), heard, rounds=1)  # the same clients alone
    expected = tree.map_leaves(
        lambda v, s: torch.einsum("m,m...->...", weights[[0, 2, 4]], v) + (weights[1] + weights[3]) * s,
        plain.cohort.reply["model"],
        start,
    )
    assert tiny.gap(one.model, expected) <= 1e-12


def test_availability_reaches_the_selection() -> None:
    engine = tiny.engine(environment=Environment(availability=(1.0, 0.0, 1.0, 0.0, 1.0)))
    for one in run(fedavg(batch_size=4, selection=Uniform(count=5)), engine, rounds=3):
        assert one.chosen.tolist() == [0, 2, 4] and one.cohort.counts == {}


def test_empty_clients_send_nothing_and_are_counted() -> None:
    engine = tiny.engine(data=tiny.federation((5, 0, 3)))
    server = fedavg().server
    broadcast = server.broadcast(server.init(engine.start(), 3), np.arange(3))
    cohort = engine.exchange(fedavg(batch_size=4).client, Plain(), broadcast, np.arange(3), round=0, seed=0)
    assert cohort.ids.tolist() == [0, 2] and cohort.counts == {"empty_client": 1}
    assert {len(leaf) for leaf in tree.leaves(cohort.reply)} == {2}


# --- data and dtypes -------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """Text and picture features in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(torch.cat([self.words(x["text"]).mean(1), x["image"]], 1))


def test_features_in_a_dict() -> None:
    draw = torch.Generator().manual_seed(0)

    def client(rows: int) -> tuple[dict[str, Tensor], Tensor]:
        text = torch.randint(0, 7, (rows, 4), generator=draw)
        image = torch.randn(rows, 2, generator=draw)
        return {"text": text, "image": image}, torch.randint(0, 3, (rows,), generator=draw)

    data = Federation.from_clients([client(5), client(1), client(8)])
    models = []
    for lane in ("serial", "batched", "streams"):
        engine = tiny.engine(lambda: tiny.seeded(TwoInputs), data, lane=lane)
        *_, last = run(fedavg(batch_size=4, lr=0.5), engine, rounds=2)
        models.append(last.model)
    assert tiny.gap(models[1], models[0]) <= 1e-12 and tiny.gap(models[2], models[0]) <= 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_dtype_of_models_and_data(dtype: Any, lane: str) -> None:
    engine = tiny.engine(tiny.convnet, dtype=dtype, lane=lane)
    (one,) = run(fedavg(batch_size=4), engine, rounds=1)
    wanted = getattr(torch, dtype)
    kinds = {leaf.dtype for leaf in tree.leaves(one.model)}
    assert kinds == {wanted, torch.int64}
    assert engine.store("train").x.dtype == wanted and engine.store("train").y.dtype == torch.int64
    assert one.notes["weights"].dtype == torch.float64


def test_float32_lanes_agree_to_single_precision() -> None:
    models = []
    for lane in ("serial", "batched", "streams"):
        *_, last = run(fedavg(batch_size=4), tiny.engine(tiny.convnet, dtype="float32", lane=lane), rounds=2)
        models.append(last.model)
    assert tiny.gap(models[1], models[0]) <= 1e-5 and tiny.gap(models[2], models[0]) <= 1e-5


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_bf16_is_opt_in_and_keeps_single_precision_models(lane: str) -> None:
    full, half = (
        next(run(fedavg(batch_size=4), tiny.engine(dtype="float32", precision=p, lane=lane), rounds=1))
        for p in ("full", "bf16")
    )
    assert tiny.structure(half.model) == tiny.structure(full.model)
    assert 0 < tiny.gap(half.model, full.model) < 0.02


def test_automatic_precision_is_full_on_a_cpu_and_recorded() -> None:
    full, auto = (tiny.engine(dtype="float32", precision=p) for p in ("full", "auto"))
    assert auto.resolved_settings["precision"] == full.resolved_settings["precision"] == "full"
    models = [next(run(fedavg(batch_size=4), engine, rounds=1)).model for engine in (full, auto)]
    assert tiny.same(*models)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [((7, 5), torch.float32, "full"), ((8, 0), torch.float32, "tf32"), ((9, 0), torch.float64, "full")],
)
def test_automatic_precision_follows_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    assert resolve_precision("auto", gpu, dtype) == expected
    assert resolve_precision("bf16", gpu, dtype) == "bf16"


def test_the_module_decides_nothing_about_the_dtype() -> None:
    (one,) = run(fedavg(batch_size=4), tiny.engine(lambda: tiny.mlp().half()), rounds=1)
    assert {leaf.dtype for leaf in tree.leaves(one.model)} == {torch.float64}


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(engine: Vectorised, model: tree.Tree | None = None) -> tree.Tree:
    shared = {"model": engine.start() if model is None else model}
    ids = np.arange(len(engine.federation))
    return engine.exchange(Evaluate(), Plain(), Broadcast(shared=shared), ids, round=0, seed=0).reply


@each_lane
def test_evaluation_of_every_clients_own_test_rows(lane: str) -> None:
    engine = tiny.engine(tiny.convnet, lane=lane, environment=Environment(communication=0.0, steps=(0,) * 5))
    reply = evaluate(engine)
    module = tiny.convnet().double().eval()
    test = engine.federation.test
    assert test is not None
    for client in range(CLIENTS):
        x, y = test.of(client)
        logits = module(x).detach()
        loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
        assert reply["loss"]["count"][client] == reply["accuracy"]["count"][client] == 3
        assert reply["accuracy"]["total"][client] == int((logits.argmax(1) == y).sum())
        assert float(reply["loss"]["total"][client]) == pytest.approx(float(loss), abs=1e-12)


def test_evaluation_without_test_rows_is_refused() -> None:
    data = tiny.federation()
    engine = tiny.engine(data=Federation(train=data.train, classes=3))
    with pytest.raises(Invalid, match="the federation has no test rows: pass test="):
        evaluate(engine)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantum", "cuda:77", "cpu:x"])
def test_devices_that_cannot_be_used_are_refused(name: str) -> None:
    with pytest.raises(Invalid, match=f"device = '{name}' cannot be used here.*try auto") as refusal:
        tiny.engine(device=name)
    assert str(refusal.value).endswith("cuda") == torch.cuda.is_available()


def test_auto_is_a_device_that_works() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float16"},
        {"dtype": "float46"},
        {"lane": "bached"},
        {"precision": "fp8"},
        {"clients_at_once": 0},
        {"clients_at_once": -2},
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(Invalid, match=f"{key} = {value!r}"):
        Vectorised(Task(tiny.mlp()), tiny.federation(), **{"device": "cpu", **wrong})


def test_an_environment_for_other_clients_is_refused() -> None:
    with pytest.raises(Invalid, match=r"Environment.steps has 2 values for 5 clients"):
        tiny.engine(environment=Environment(steps=(1, 2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(parts.Remembering):
    """A rule that breaks the rules: its carry changes structure."""

    def step(self, task: Task, carry: tree.Tree, batch: Any, message: tree.Tree, memory: tree.Tree) -> tree.Tree:
        return {**carry, "more": carry["steps"]}


@each_lane
def test_a_carry_that_changes_structure_is_named(lane: str) -> None:
    algorithm = dataclasses.replace(parts.remembering(), client=Growing())
    with pytest.raises(TypeError, match="changed the carry's structure"):
        list(run(algorithm, tiny.engine(lane=lane), rounds=1))
