"""Leaves that stay at home: FedBN, FedPer, FedRep."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedbn import fedbn
from consilience.algorithms.fedper import fedper
from consilience.algorithms.fedrep import fedrep
from consilience.algorithms.scaffold import scaffold
from consilience.client import LocalTraining, Proximal
from consilience.client.personal_layers import Head, Named, Normalisation
from consilience.core import plans, tree
from consilience.core.plans import Work
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.selection import Uniform
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
NORMS = {f"{layer}.{leaf}" for layer in "16" for leaf in ("weight", "bias")}
STATISTICS = {f"{layer}.{leaf}" for layer in "16" for leaf in ("running_mean", "running_var", "num_batches_tracked")}


def rounds_of(algorithm: Any, model: Any = tiny.convnet, rounds: int = 2, **options: Any) -> list[Round]:
    return list(run(algorithm, tiny.engine(model, **options), rounds=rounds, seed=1))


# --- FedBN -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_fedbn_keeps_normalisation_at_home(lane: str) -> None:
    start = tiny.engine(tiny.convnet).start()
    for one in rounds_of(fedbn(batch_size=4, lr=0.1), lane=lane):
        sent, personal = one.cohort.reply["model"], one.snapshot.memory["client"]["personal_layers"]
        assert set(personal["params"]) == NORMS and set(personal["buffers"]) == STATISTICS
        assert not set(sent["params"]) & NORMS and sent["buffers"] == {}
        for name in NORMS:  # the server's copies stay, the clients' differ from it and from each other
            assert torch.equal(one.model["params"][name], start["params"][name])
            assert len(personal["params"][name].unique(dim=0)) == len(tiny.SIZES)
        shared = [name for name in start["params"] if name.endswith("weight") and name not in NORMS]
        assert not any(torch.equal(one.model["params"][name], start["params"][name]) for name in shared)


def test_bytes_up_fall_by_what_stays_at_home() -> None:
    whole, part = (rounds_of(recipe(batch_size=4), rounds=1)[0] for recipe in (fedavg, fedbn))
    personal = tree.nbytes({k: tree.rows(v, 0) for k, v in part.snapshot.memory["client"]["personal_layers"].items()})
    assert whole.bytes_up - part.bytes_up == personal * len(tiny.SIZES) > 0


def test_without_normalisation_fedbn_is_fedavg() -> None:
    one, other = (rounds_of(recipe(batch_size=4), tiny.mlp)[-1].model for recipe in (fedbn, fedavg))
    assert tiny.same(one, other)


def test_a_fedbn_round_is_local_training_from_own_leaves() -> None:
    """In round 2 client 3 starts from the average with its own normalisation: the same steps, done by hand."""
    engine = tiny.engine(tiny.convnet)
    first, second = run(fedbn(batch_size=4, lr=0.1), engine, rounds=2, seed=1)
    personal = tree.rows(first.snapshot.memory["client"]["personal_layers"], 3)
    model = {kind: {**first.model[kind], **personal[kind]} for kind in ("params", "buffers")}
    client = LocalTraining(solver=fedavg(lr=0.1).client.solver, work=Work(batch_size=4))
    message = {"model": model, "round": torch.tensor(1)}
    carry = client.begin(engine.task, message, {})
    plan = plans.draw(client.work, engine.store("train"), np.array([3]), np.array([3]), seed=1, round=1)
    for step in range(3):
        carry = client.step(engine.task, carry, plan.single(step, 0, engine.store("train")), message, {})
    ended, kept = carry["model"], tree.rows(second.snapshot.memory["client"]["personal_layers"], 3)
    sent = tree.rows(second.cohort.reply["model"], 3)
    for kind in ("params", "buffers"):
        got = {**sent[kind], **kept[kind]}
        assert tiny.gap({name: got[name] for name in ended[kind]}, ended[kind]) <= 1e-12


class Mixed(nn.Module):
    """Every kind of normalisation, and layers that look a little like one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(1, 4)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm((2, 4))
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.rms = nn.RMSNorm(4)
        self.prelu = nn.PReLU()
        self.out = nn.Linear(4, 4, bias=False)


def test_normalisation_is_told_from_other_layers_by_shape() -> None:
    task = Task(Mixed())
    personal = Normalisation().personal_names(task.start())
    assert {name.partition(".")[0] for name in personal} == {"group", "layer", "plain", "instance", "rms"}
    Normalisation().check_against(task, task.start())


class Scales(nn.Module):
    """PReLU with a slope per channel has the one vector that RMSNorm has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.slopes = nn.PReLU(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.slopes(self.linear(x))


def test_what_shapes_cannot_tell_is_refused_with_the_fix() -> None:
    task = Task(Scales())
    with pytest.raises(
        Invalid, match=r"slopes.weight belong to a normalisation layer .* personal_layers = {name = 'named'"
    ):
        Normalisation().check_against(task, task.start())


# --- FedPer and FedRep -----------------------------------------------------------------------------------------------


def test_fedper_keeps_the_head_at_home() -> None:
    start = tiny.engine().start()
    one = rounds_of(fedper(batch_size=4, lr=0.1), tiny.mlp)[-1]
    assert set(one.snapshot.memory["client"]["personal_layers"]["params"]) == {"3.weight", "3.bias"}
    assert set(one.cohort.reply["model"]["params"]) == {"1.weight", "1.bias"}
    assert torch.equal(one.model["params"]["3.weight"], start["params"]["3.weight"])
    expected = torch.einsum(
        "m,m...->...", one.notes["weights"], one.cohort.reply["model"]["params"]["1.weight"]
    )  # only the body is averaged
    torch.testing.assert_close(one.model["params"]["1.weight"], expected, rtol=0, atol=1e-14)


def test_clients_that_sit_out_keep_their_heads() -> None:
    rounds = rounds_of(fedper(batch_size=4, lr=0.1, selection=Uniform(count=2)), tiny.mlp, rounds=3)
    for before, after in pairwise(rounds):
        heads = [one.snapshot.memory["client"]["personal_layers"]["params"]["3.weight"] for one in (before, after)]
        moved = [k for k in range(len(tiny.SIZES)) if not torch.equal(heads[0][k], heads[1][k])]
        assert moved == after.chosen.tolist()


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimiser": "adam"}], ids=str)
def test_fedrep_trains_the_head_first_then_the_body(lane: str, options: dict[str, Any]) -> None:
    """One head epoch, then two of the body, by PyTorch's own optimisers with the other part frozen."""
    algorithm = fedrep(batch_size=4, lr=0.1, head_epochs=1, epochs=2, **options)
    (one,) = rounds_of(algorithm, tiny.mlp, rounds=1, lane=lane)
    data = tiny.federation()
    plan = plans.draw(Work(epochs=3, batch_size=4), data.train, np.array([3]), np.array([9]), seed=1, round=0)
    module = tiny.mlp().double()
    settings = {key: value for key, value in options.items() if key != "optimiser"}
    kind = torch.optim.Adam if options.get("optimiser") == "adam" else torch.optim.SGD
    head, body = (kind(module[layer].parameters(), lr=0.1, **settings) for layer in (3, 1))
    for step in range(9):
        batch = plan.single(step, 0, data.train)
        module.zero_grad()
        nn.functional.cross_entropy(module(batch.x), batch.y).backward()
        (head if step < 3 else body).step()
    sent = tree.rows(one.cohort.reply["model"]["params"], 3)
    kept = tree.rows(one.snapshot.memory["client"]["personal_layers"]["params"], 3)
    assert tiny.gap({**sent, **kept}, {name: p.detach() for name, p in module.named_parameters()}) <= 1e-12


def test_a_proximal_term_pulls_own_leaves_to_where_they_started() -> None:
    """The proximal term's anchor is the model as the client has it, its own head included."""
    task = tiny.engine().task
    client = LocalTraining(personal_layers=Head(), terms=(Proximal(mu=1e9),))
    start = tiny.engine().start()
    memory = {
        "personal_layers": {
            "params": {name: start["params"][name] + 5 for name in ("3.weight", "3.bias")},
            "buffers": {},
        }
    }
    message = {"model": start, "round": torch.tensor(0)}
    carry = client.begin(task, message, memory)
    assert torch.equal(carry["model"]["params"]["3.bias"], start["params"]["3.bias"] + 5)
    plan = plans.draw(client.work, tiny.federation().train, np.array([0]), np.array([1]), seed=0, round=0)
    after = client.step(task, carry, plan.single(0, 0, tiny.federation().train), message, memory)
    # the first gradient is that of the loss alone: an anchor elsewhere would add 1e9 x 5 to it
    assert tiny.gap(after["model"]["params"], carry["model"]["params"]) < 1


def test_home_meets_any_other_part_or_says_why_not() -> None:
    rounds_of(fedavg(personal_layers=Head(), batch_size=4, terms=(Proximal(mu=0.1),)), tiny.mlp, rounds=1)
    with pytest.raises(
        Invalid,
        match=r"personal_layers = Head\(layers=1\) is incompatible with the term Linear: .* never sees the personal",
    ):
        scaffold(personal_layers=Head())
    with pytest.raises(Invalid, match="personal_epochs = 2 needs personal_layers"):
        LocalTraining(personal_epochs=2)


@pytest.mark.parametrize(
    ("personal_layers", "message"),
    [
        (Named(patterns=("hed.*",)), r"'hed\.\*' matches no leaf of the model, which has 1\.weight"),
        (Named(patterns=("*",)), "keeps every parameter with the client"),
        (Head(layers=2), "keeps every parameter with the client"),
    ],
)
def test_impossible_personal_layers_are_refused(personal_layers: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        rounds_of(fedavg(personal_layers=personal_layers), tiny.mlp, rounds=1)


def test_named_leaves_and_deeper_heads() -> None:
    start = tiny.engine(tiny.convnet).start()
    assert Named(patterns=("9.*", "0.bias")).personal_names(start) == {"9.weight", "9.bias", "0.bias"}
    layers = {name.partition(".")[0] for name in Head(layers=2).personal_names(start)}
    assert layers == {"6", "9"}  # the batch norm in front of the classifier, statistics included
    assert "6.running_mean" in Head(layers=2).personal_names(start)
