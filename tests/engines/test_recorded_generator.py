"""FedGen's server on a GPU, where its training is recorded; graphs are simulated on a CPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import simulated_cuda
import tiny
import torch
from torch import Tensor

from consilience.algorithms.fedgen import fedgen
from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.tree import Tree
from consilience.server.averaging.ledgers import generator, recording
from consilience.server.averaging.ledgers.generator import Generator
from consilience.server.protocols import RoundOutcome

pytestmark = pytest.mark.usefixtures("untraced")
DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def outcome(clients: int, round: int = 0, counts: Tensor | None = None) -> RoundOutcome:
    """A round's replies, with three labels and four features."""
    weight, bias = random(clients, 3, 4, seed=round), random(clients, 3, seed=round + 50)
    shares = random(clients, 3, seed=round + 90).abs() if counts is None else counts
    ids = np.arange(clients)
    cohort = Cohort(
        reply={"model": {"params": {"weight": weight, "bias": bias}}, "labels": shares},
        ids=ids,
        examples=torch.full((clients,), 7.0, dtype=DOUBLE),
        steps=np.ones(clients, dtype=np.int64),
        round=round,
    )
    before = {"weight": weight[0], "bias": bias[0]}
    return RoundOutcome(cohort, torch.full((clients,), 1 / clients), before, before, clients)


def rule_of(**options: Any) -> Generator:
    return Generator(**{"noise_size": 3, "hidden": 4, "batch_size": 6, "steps": 5, **options})


def start_of(rule: Generator) -> Tree:
    return rule.initial({"params": {"weight": random(3, 4), "bias": random(3)}}, 5)


def test_without_labels_nothing_changes() -> None:
    rule = rule_of()
    ledger = start_of(rule)
    after, _ = rule.update(ledger, outcome(2, counts=torch.zeros(2, 3, dtype=DOUBLE)))
    assert tiny.same(after, ledger)
    trained_once, _ = rule.update(ledger, outcome(2))
    assert trained_once["ready"] == 1 and not tiny.same(trained_once["params"], ledger["params"])
    again, _ = rule.update(trained_once, outcome(2, 1, counts=torch.zeros(2, 3, dtype=DOUBLE)))
    assert tiny.same(again, trained_once)


def test_the_leaves_of_the_ledger_share_no_memory() -> None:
    rule = rule_of()
    after, _ = rule.update(start_of(rule), outcome(2))
    memory = [leaf.untyped_storage().data_ptr() for leaf in tree.leaves(after)]
    assert len(set(memory)) == len(memory)


def given_to(rule: Generator, ledger: Tree, round: RoundOutcome) -> Tree:
    """What `update` passes on."""
    found: list[Tree] = []
    keeps = type("Keeps", (Generator,), {"_learned": lambda self, given: found.append(given) or given["ledger"]})
    keeps(**{name: getattr(rule, name) for name in rule.__dataclass_fields__}).update(ledger, round)
    return found[0]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[simulated_cuda.Graph]:
    """The graphs that are recorded."""
    simulated_cuda.simulate(monkeypatch)
    made: list[simulated_cuda.Graph] = []

    def graph() -> simulated_cuda.Graph:
        made.append(simulated_cuda.Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return made


def test_a_recorded_round_gives_what_an_unrecorded_one_gives(recordings: list[simulated_cuda.Graph]) -> None:
    """Rounds with other classifiers, labels, keys and numbers of clients, by one recording for each power of two."""
    rule = rule_of()
    ledger = other = start_of(rule)
    for round, clients in enumerate((4, 3, 4, 5, 3, 8)):
        ledger = rule._recorded(given_to(rule, ledger, outcome(clients, round)))
        other, _ = rule.update(other, outcome(clients, round))
        assert list(ledger) == list(other) and tiny.gap(ledger, other) < 1e-13
    assert [graph.replays for graph in recordings] == [4, 2]
    kept = tree.clone(ledger)
    rule._recorded(given_to(rule, ledger, outcome(8, 9)))
    assert tiny.same(kept, ledger), "a result is written over by the next round"


def test_equal_rules_share_recordings_and_others_do_not(recordings: list[simulated_cuda.Graph]) -> None:
    rule = rule_of()
    for one in (rule, rule_of(), rule_of(lr=0.02)):
        given = given_to(one, start_of(one), outcome(3))
        assert tiny.gap(one._recorded(given), one._learned(given)) < 1e-13
    assert len(recordings) == 2


def test_two_rounds_at_the_same_time_do_not_share_memory(
    recordings: list[simulated_cuda.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rule_of()
    rounds = [given_to(rule, start_of(rule), outcome(3, round)) for round in range(2)]
    expected = [rule._learned(given) for given in rounds]
    rule._recorded(rounds[0])
    found: list[Tree] = []
    call = recording.Recording.__call__

    def interrupted(self: recording.Recording, given: Any) -> Any:
        if not found:
            found.append({})
            found[0] = rule._recorded(rounds[1])
        return call(self, given)

    monkeypatch.setattr(recording.Recording, "__call__", interrupted)
    outer = rule._recorded(rounds[0])
    assert tiny.gap(outer, expected[0]) < 1e-13 and tiny.gap(found[0], expected[1]) < 1e-13
    assert len(recordings) == 2


def test_recordings_go_with_their_rule(recordings: list[simulated_cuda.Graph]) -> None:
    gc.collect()
    before = len(generator._RECORDINGS)
    rule = rule_of(lr=0.03)
    rule._recorded(given_to(rule, start_of(rule), outcome(2)))
    assert len(generator._RECORDINGS) == before + 1
    del rule
    gc.collect()
    assert len(generator._RECORDINGS) == before


def test_a_whole_run_by_recordings(recordings: list[simulated_cuda.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_model(algorithm: Any) -> Tree:
        *_, last = run(algorithm, tiny.engine(), rounds=3, seed=1)
        return {"model": last.model, "ledger": last.snapshot.server["ledgers"]["generator"]}

    expected = trained_model(fedgen(batch_size=4, generator_steps=4, hidden=8))
    learned = Generator._learned

    def recorded(self: Generator, given: Tree) -> Tree:
        monkeypatch.setattr(Generator, "_learned", learned)
        try:
            return self._recorded(given)
        finally:
            monkeypatch.setattr(Generator, "_learned", recorded)

    monkeypatch.setattr(Generator, "_learned", recorded)
    assert tiny.gap(trained_model(fedgen(batch_size=4, generator_steps=4, hidden=8)), expected) < 1e-12
    assert [graph.replays for graph in recordings] == [3]
