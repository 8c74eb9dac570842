"""Weights by agreement with the others, by hand and against attacks; `defence = "auto"` from a config."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from declared import build

from consilience.channel.attacks import InnerProduct, Mimic, Scaling
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.experiments.config import config
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.agreement import AgreementWeights, scores
from consilience.server.averaging.weighting.by_size import UniformWeights

pytestmark = pytest.mark.usefixtures("untraced")


def weights(updates: list[list[float]], f: int, examples: list[float] | None = None, **options: float) -> list[float]:
    """The weights of one round, from updates of a model that is zero."""
    stacked = torch.tensor(updates, dtype=torch.float64)
    cohort = Cohort(
        reply={"model": {"params": {"w": stacked}, "buffers": {}}},
        ids=np.arange(len(updates)),
        examples=torch.tensor(examples or [1.0] * len(updates), dtype=torch.float64),
        steps=np.ones(len(updates), dtype=np.int64),
        round=0,
    )
    start = {"params": {"w": torch.zeros(len(updates[0]), dtype=torch.float64)}, "buffers": {}}
    rule = AgreementWeights(untrusted=f, **options)
    return rule.weigh(cohort, start, rule.init(start, len(updates)))[0].tolist()


FAN = [[1.0, 0.0], [0.9, 0.5], [0.9, -0.5], [0.6, 0.9]]  # four honest directions


def test_scores_by_hand() -> None:
    cosine = np.array([[1.0, 0.5, -0.2], [0.5, 1.0, 0.1], [-0.2, 0.1, 1.0]])
    alone = np.arange(3)
    np.testing.assert_allclose(scores(cosine, np.ones(3), alone, 0), [0.15, 0.3, -0.05])
    np.testing.assert_allclose(scores(cosine, np.ones(3), alone, 1), [-0.2, 0.1, -0.2])
    np.testing.assert_allclose(
        scores(cosine, np.array([1.0, 0.5, 1.0]), alone, 0), [(0.25 - 0.2) / 1.5, 0.3, -0.15 / 1.5]
    )


def test_who_moves_against_the_others_is_left_out_at_any_length() -> None:
    for length in (0.01, 0.5, 2.0):
        assert weights([*FAN, [-length, 0.0]], f=1) == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0])


def test_a_long_update_is_left_out_and_uses_up_what_f_allows() -> None:
    assert weights([*FAN, [50.0, 0.0]], f=1) == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0])


def test_copies_count_as_one() -> None:
    found = weights([*FAN, [1.0, 0.0]], f=1)  # client 4 copies client 0
    assert found == pytest.approx([0.125, 0.25, 0.25, 0.25, 0.125])
    everyone = weights([[1.0, 0.0]] * 5, f=1)  # more than f + 1: the honest are alike
    assert everyone == pytest.approx([0.2] * 5)


def test_who_moves_with_the_others_is_not_left_out_though_f_allows_it() -> None:
    assert weights([*FAN, [0.5, 0.1]], f=2) == pytest.approx([0.2] * 5)


def test_who_was_left_out_has_no_vote() -> None:
    """Client 4 is unlike the honest ones, and the two hostile clients move against it: their votes must not count."""
    hostile = [[-1.0, -1.0], [0.0, -1.0]]
    odd = [-0.25, 1.0]
    updates = [*FAN, odd, *hostile]
    cosine = np.array(updates) / np.linalg.norm(updates, axis=1)[:, None]
    one_shot = scores(cosine @ cosine.T, np.ones(7), np.arange(7), 2)
    assert sorted(np.argsort(one_shot)[:2].tolist()) != [5, 6], "this was to be the case where one pass fails"
    found = weights(updates, f=2)
    assert found[5:] == [0.0, 0.0]


def test_accomplices_do_not_support_each_other() -> None:
    hostile = [[-1.0, 0.05], [-1.0, -0.25]]  # near each other, but no copies
    found = weights([*FAN, *hostile], f=2)
    assert found[4:] == [0.0, 0.0] and found[:4] == pytest.approx([0.25] * 4)


def test_claimed_examples_are_bounded_and_zero_untrusted_changes_nothing() -> None:
    claims = [1.0, 1.0, 1.0, 1e9, 1.0]
    assert weights([*FAN, [0.5, 0.1]], f=0, examples=claims)[3] > 0.999
    assert max(weights([*FAN, [-0.5, 0.1]], f=1, examples=claims)) <= 2 / 5 + 1e-9


def test_a_majority_cannot_be_untrusted() -> None:
    with pytest.raises(Invalid, match=r"needs n >= 2f \+ 1 = 5 replies, but n = 4"):
        weights(FAN, f=2)


@pytest.mark.parametrize("attack", [InnerProduct(clients=(1,)), Scaling(clients=(1,), factor=-10.0)])
def test_attackers_have_no_weight_in_a_run(attack: object) -> None:
    algorithm = build("fedavg", channel=attack, weighting=AgreementWeights(inner=UniformWeights(), untrusted=1))
    for one in run(algorithm, tiny.engine(dtype="float64"), rounds=3, seed=1):
        assert float(one.notes["weights"][1]) == 0.0


def test_a_mimic_shares_its_victims_weight_and_a_resumed_run_is_the_same() -> None:
    algorithm = build(
        "fedavg", channel=Mimic(clients=(1,)), weighting=AgreementWeights(inner=UniformWeights(), untrusted=1)
    )
    rounds = list(run(algorithm, tiny.engine(dtype="float64"), rounds=4, seed=1))
    assert rounds[0].notes["weights"].tolist() == pytest.approx([0.125, 0.125, 0.25, 0.25, 0.25])
    again = list(run(algorithm, tiny.engine(dtype="float64"), rounds=4, seed=1, resume=rounds[1].snapshot))
    assert tiny.same(again[-1].model, rounds[-1].model)


def test_the_setting_picks_weights_and_bounds_and_says_what_is_missing() -> None:
    chosen = config.load(None, ["algorithm=fedavg", "defence=auto", "untrusted=4", "partition.clients=14"])
    server = chosen.algorithm.built.server
    assert isinstance(server, Averaging) and server.weighting == AgreementWeights(untrusted=4)
    assert chosen.limits.max_growth == 4.0 and config.from_table(chosen.table()) == chosen
    assert config.load(None, ["algorithm=fedavg"]).limits.max_growth is None
    for given, why in (
        (["defence=auto"], "belong together"),
        (["untrusted=1"], "belong together"),
        (["defence=auto", "untrusted=1", "algorithm=krum"], "has none"),
        (["defence=auto", "untrusted=1", "algorithm=fedamp"], "has none"),
    ):
        with pytest.raises(Invalid, match=why):
            config.load(None, given)
