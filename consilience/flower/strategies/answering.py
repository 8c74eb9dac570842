"""Answers one message: the client's engine, its memory, and the reply under the server's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import PostTrainingPass, PreTrainingPass, capability
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.protocols import Channel, ClientRule
from consilience.core.refusal import Refused
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.program import memories
from consilience.engines.workload import Workload, planned_steps
from consilience.environments.environment import Environment
from consilience.flower.strategies.records import StateDictLayout, to_record
from consilience.flower.strategies.replies import metric_name
from consilience.wire.template import Template


class Answering:
    """A client with its rows, the server's message, and its memory (None: nothing yet)."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        *,
        client: int,
        received: dict[str, Tensor],
        others: Mapping[str, dict[str, Tensor]],
        memory: dict[str, Tensor] | None,
        round: int,
        seed: int,
        device: str,
    ) -> None:
        self.algorithm, self.client, self.received, self.round, self.seed = algorithm, client, received, round, seed
        kinds = {value.dtype for value in received.values() if value.is_floating_point()}
        self.engine = Vectorised(
            task,
            federation,
            device=device,
            dtype="float64" if kinds == {torch.float64} else "float32",
            lane="serial",
            hosts=np.array([client]),
        )
        start = self.engine.start()
        self.engine.restore(self._remembered(start, memory) if memory else {})
        self.model: Tree = {kind: {name: received[name] for name in leaves} for kind, leaves in start.items()}
        trees = {name: {key: values[key] for key in start["params"]} for name, values in others.items()}
        self.broadcast = Broadcast(shared=tree.to({"model": self.model, **trees}, self.engine.device))

    @property
    def memory(self) -> dict[str, Tensor]:
        """The client's memory now."""
        return tree.flatten(tree.to(self.engine.recall(), "cpu"))

    def exchange(self, rule: ClientRule, channel: Channel, broadcast: Broadcast | None = None) -> Tree:
        """This client's reply."""
        sizes = self.engine.store(rule.work.rows).sizes.numpy()
        if not sizes[0]:
            raise Invalid(f"client {self.client} has no {rule.work.rows} rows: it cannot answer")
        workload = Workload.of(
            Environment(), rule.work, np.array([self.client]), sizes, round=self.round, seed=self.seed
        )
        sent = broadcast or self.broadcast
        found = self.engine.run_clients(rule, channel, sent, workload, round=self.round, seed=self.seed)
        return tree.to(tree.rows(found, 0), "cpu")

    def train(self) -> Tree:
        """The reply, with the passes of the rule before and after training."""
        rule, broadcast = self.algorithm.client, self.broadcast
        before, after = capability(rule, PreTrainingPass), capability(rule, PostTrainingPass)
        if before is not None:
            seen = tree.map_leaves(lambda leaf: leaf.unsqueeze(0), self.exchange(before.pre_training, Plain()))
            personal = {"seen": tree.to(seen, self.engine.device)}
            broadcast = Broadcast(shared=broadcast.shared, personal=personal)
        reply = self.exchange(rule, self.algorithm.channel, broadcast)
        if after is not None:
            own = {"received": self.broadcast.shared, "model": tree.to(reply["model"], self.engine.device)}
            reply = {**reply, **self.exchange(after.post_training, Plain(), Broadcast(shared=own))}
        return reply

    @property
    def steps(self) -> int:
        """The number of local training steps."""
        work, ids = self.algorithm.client.work, np.array([self.client])
        return int(planned_steps(Environment(), work, ids, self.engine.sizes, self.round, self.seed)[0])

    def packed(self, reply: Tree, module: nn.Module, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(ArrayRecords, numbers): the model under the server's names as `key`, further trees under their own."""
        model = {kind: {**leaves, **reply["model"].get(kind, {})} for kind, leaves in self.model.items()}
        whole = self.engine.task.trained(model).state_dict()
        records = {key: to_record({name: whole[name].to("cpu", old.dtype) for name, old in self.received.items()})}
        numbers: dict[str, Any] = {}
        for name, value in reply.items():
            if name == "loss":
                numbers["train-loss"] = float(value)
            elif isinstance(value, Tensor):
                numbers[metric_name(name)] = float(value)
            elif name != "model":
                records[name] = to_record(self._completed(value, module))
        return records, numbers

    def _remembered(self, start: Tree, memory: dict[str, Tensor]) -> Tree:
        """The memory as this algorithm has it, empty parts included; `Invalid` if it is another algorithm's."""
        usual = memories(self.algorithm.client.init(start), self.algorithm.channel.init(start))
        try:
            return Template.of(tree.repeat(usual, 1)).check(tree.unflatten(memory))
        except Refused as problem:
            raise Invalid(f"what client {self.client} remembers is not this algorithm's: {problem}") from problem

    def _completed(self, values: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
        """Values under all of the server's names: tied parameters as copies, frozen ones as zero."""
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        twins = {name: first[id(value)] for name, value in module.named_parameters(remove_duplicate=False)}
        params = StateDictLayout.of(self.received).tree(self.received)["params"]
        return {name: values.get(twins.get(name, name), torch.zeros_like(like)) for name, like in params.items()}
