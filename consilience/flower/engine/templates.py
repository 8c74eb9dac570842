"""Templates of valid replies of an algorithm, computed without any data."""

from __future__ import annotations

import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.protocols import Channel, ClientRule
from consilience.core.task import Task
from consilience.engines.vectorised.program import Program, memories
from consilience.engines.vectorised.timing import idle_reply
from consilience.wire.template import Template


@torch.no_grad()
def reply_template(
    client: ClientRule, channel: Channel, task: Task, broadcast: Broadcast, *, dtype: torch.dtype = torch.float32
) -> Template:
    """The template of clients' replies to this broadcast, as encoded by the channel.

    A server without data runs begin, end and encode for one new client that does no step: replies and memories keep
    structure, shapes and types, so those of all clients have the same form. `dtype` is the engine's.
    """
    cpu = torch.device("cpu")
    start = tree.cast_floating(task.start(), dtype)
    memory = tree.repeat(memories(client.init(start), channel.init(start)), 1)
    program = Program(client, channel, task.to(cpu, dtype), dtype, cpu, False)
    sent = Broadcast(shared=tree.to(broadcast.shared, cpu), personal=tree.to(broadcast.personal, cpu))
    return Template.of(tree.rows(idle_reply(program, sent, memory, 0), 0))
