"""What some of the clients of a round received and sent is theirs, whoever else was there."""

from __future__ import annotations

import numpy as np
import torch

from consilience.core.exchange import Broadcast, Cohort

SENT_TO = np.array([2, 5, 7, 9])
PERSONAL = torch.tensor([[2.0], [5.0], [7.0], [9.0]])  # a row says whose it is


def test_a_personal_message_stays_with_its_client_when_others_are_missing() -> None:
    broadcast = Broadcast(shared={"round": torch.tensor(1)}, personal={"model": PERSONAL})
    some = broadcast.among(SENT_TO, np.array([5, 9]))
    assert some.personal["model"].flatten().tolist() == [5.0, 9.0]
    assert some.shared is broadcast.shared
    assert broadcast.among(SENT_TO, SENT_TO) is broadcast


def test_dropping_replies_keeps_every_column_together() -> None:
    cohort = Cohort(
        reply={"loss": PERSONAL.flatten()},
        ids=SENT_TO,
        examples=torch.tensor(SENT_TO * 10.0),
        steps=SENT_TO * 100,
        round=3,
        heard=np.array([True, False, True, True]),
        counts={"silent": 1},
        staleness=np.array([0, 1, 2, 3]),
        received=Broadcast(shared={}, personal={"model": PERSONAL}),
    )
    kept = cohort.only(np.array([False, True, False, True]), nonfinite=2)
    assert kept.ids.tolist() == kept.reply["loss"].tolist() == [5, 9]
    assert kept.examples.tolist() == [50, 90] and kept.steps.tolist() == [500, 900]
    assert kept.heard is not None and kept.heard.tolist() == [False, True]
    assert kept.staleness is not None and kept.staleness.tolist() == [1, 3]
    assert kept.received is not None and kept.received.personal["model"].flatten().tolist() == [5.0, 9.0]
    assert kept.counts == {"silent": 1, "nonfinite": 2}
    assert len(cohort) == 4 and cohort.counts == {"silent": 1}, "the whole cohort is as it was"
