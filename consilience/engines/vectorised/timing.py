"""The simulated time of an exchange, from rows to process and bytes each way."""

from __future__ import annotations

import numpy as np
import torch

from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.capabilities import PreTrainingPass, capability
from consilience.core.exchange import Broadcast
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import Context, Program
from consilience.environments import clock
from consilience.environments.environment import Environment


def seconds(
    environment: Environment,
    program: Program,
    broadcast: Broadcast,
    memory: Tree,
    ids: np.ndarray,
    sizes: np.ndarray,  # [m] rows of these clients
    steps: np.ndarray,  # [m] local steps they will do
    *,
    round: int,
    seed: int,
) -> np.ndarray:
    """[m] simulated seconds until each reply arrives."""
    rule = program.rule
    rows = clock.rows_met(rule.work, sizes, steps)
    if capability(rule, PreTrainingPass) is not None:
        rows = rows + sizes
    down = broadcast.nbytes(len(ids)) / len(ids)
    up = reply_bytes(program, broadcast, memory, round) if environment.upload is not None else 0
    return clock.seconds(environment, round, ids, seed, rows=rows, down=down, up=up)


def reply_bytes(program: Program, broadcast: Broadcast, memory: Tree, round: int) -> int:
    """The size of a reply."""
    return tree.nbytes(idle_reply(program, broadcast, memory, round))


def idle_reply(program: Program, broadcast: Broadcast, memory: Tree, round: int) -> Tree:
    """[1, ...] the first client's reply if it did not do a step: replies keep their structure."""
    first = slice(0, 1)
    shared = {**broadcast.shared, "round": torch.tensor(round, device=program.device)}
    context = Context(shared, tree.rows(broadcast.personal, first), tree.rows(memory, first))
    before_training = capability(program.rule, PreTrainingPass)
    if before_training is not None:
        look = Program(before_training.pre_training, Plain(), program.task, program.dtype, program.device, False)
        context = context._replace(personal={**context.personal, "seen": _at_once(look, context)})
    return _at_once(program, context)


def _at_once(program: Program, context: Context) -> Tree:
    keys = torch.zeros(1, dtype=torch.int64, device=program.device)
    reply, _ = program.end(program.begin(keys, context), keys, context)
    return reply
