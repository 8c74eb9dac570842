"""A federation spread over several engines gives the replies and memories of one engine, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from declared import build, model_of

from consilience.core import tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.workload import Workload
from consilience.environments.environment import Environment
from consilience.task.task import Task

SHARES = (np.array([0, 3]), np.array([1, 2, 4]))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedsplit", "fedbn"])
def test_two_hosts_are_one_engine(name: str) -> None:
    federation, task = tiny.federation(), Task(model_of(name, "convnet")())
    environment = Environment(stragglers=0.4, communication=0.8, silent="broadcast_model")
    settings = {"environment": environment, "dtype": "float64", "lane": "serial", "device": "cpu"}
    whole = Vectorised(task, federation, **settings)
    hosts = [Vectorised(task, federation.among(ids), hosts=ids, **settings) for ids in SHARES]
    algorithm, everyone = build(name), np.arange(len(federation))
    broadcast = algorithm.server.broadcast(algorithm.server.init(whole.start(), len(federation)), everyone)
    for round in range(2):
        together = whole.exchange(algorithm.client, algorithm.channel, broadcast, everyone, round=round, seed=3)
        workload = Workload.of(environment, algorithm.client.work, everyone, whole.sizes, round=round, seed=3)
        for ids, host in zip(SHARES, hosts):
            mine = np.isin(workload.ids, ids)
            apart = host.run_clients(
                algorithm.client, algorithm.channel, broadcast, workload.only(mine), round=round, seed=3
            )
            _same(apart, tree.rows(together.reply, torch.from_numpy(np.flatnonzero(mine))))
            _same(host.recall(), tree.rows(whole.recall(), torch.from_numpy(ids)))


def test_a_share_of_a_federation_holds_its_own_rows_only() -> None:
    federation = tiny.federation()
    share = federation.among(np.array([1, 4]))
    assert share.names == (federation.names[1], federation.names[4])
    assert len(share.train.y) == int(federation.train.sizes[[1, 4]].sum())
    for place, client in enumerate((1, 4)):
        for mine, theirs in zip(share.train.of(place), federation.train.of(client)):
            assert torch.equal(mine, theirs)


def _same(one: tree.Tree, other: tree.Tree) -> None:
    flat, against = tree.flatten(one), tree.flatten(other)
    assert flat.keys() == against.keys()
    assert all(torch.equal(flat[path], against[path]) for path in flat)
