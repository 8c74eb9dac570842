"""An engine that keeps the autograd graph: federated runs differentiable with respect to their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from consilience.client.gradient_report import ReportedLoss, minibatch_loss, trained_model
from consilience.core import plans, tree
from consilience.core.client_flags import AllBut
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.federation import Rows
from consilience.core.plans import Batch, Split, Work
from consilience.core.protocols import Channel, ClientRule, Engine
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.schedule import shares


@runtime_checkable
class HoldsData(Protocol):
    """An engine whose clients' rows are in this process."""

    @property
    def task(self) -> Task:
        """The model and its loss."""
        ...

    @property
    def environment(self) -> Any:
        """Work and missing replies of clients."""
        ...

    def store(self, rows: Split) -> Rows:
        """The rows."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class LiveWeights:
    """A schedule that gradients flow through: Theta [rounds, clients] as a tensor."""

    table: Tensor
    needs_each_reply = False  # it reads only which clients replied

    def __repr__(self) -> str:
        """The size of the table, for errors of servers that refuse it."""
        return f"(learned weights of {' rounds and '.join(map(str, self.table.shape))} clients)"

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """This round's row."""
        return shares(self.table[cohort.round].to(cohort.examples.device), cohort), state, {}


@dataclass(frozen=True, kw_only=True)
class NoTraining:
    """A client that does not train: the terminal pass over the batches."""

    work: Work

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The received model."""
        return {"model": message["model"]}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Nothing."""
        return carry

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Nothing to say."""
        return {}, memory


class Unfolded:
    """The same clients, rows, batches and failures as in the engine it wraps, one by one, recorded by autograd.

    `losses` collects the minibatch losses of training, for clients without a reply at the model they received. With
    `detach`, a client's step is a constant added to its model (straight-through, as in the authors' code); else
    gradients flow through local training too.
    """

    def __init__(self, engine: Engine, *, detach: bool, loss: ReportedLoss = "task") -> None:
        assert isinstance(engine, HoldsData)
        self._engine, self._detach, self._loss = engine, detach, loss
        self._task, self._environment = engine.task, engine.environment
        self._memory: dict[int, Tree] = {}
        self.losses: list[Tensor] = []

    @property
    def task(self) -> Task:
        """The model and its loss."""
        return self._task

    @property
    def sizes(self) -> np.ndarray:
        """[K] rows of every client."""
        return self._engine.sizes

    def start(self) -> Tree:
        """The initial model."""
        return self._engine.start()

    def available(self, round: int, seed: int) -> np.ndarray | AllBut:
        """[K] which clients are available."""
        return self._engine.available(round, seed)

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] planned steps, 0 for clients whose reply will not arrive."""
        return np.where(self._environment.reachable(round, ids, seed), self._steps(client.work, ids, round, seed), 0)

    def recall(self) -> Tree:
        """Nothing is saved."""
        return {}

    def restore(self, memory: Tree) -> None:
        """Start a new run: clear all memories."""
        self._memory = {}

    def exchange(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> Cohort:
        """As the wrapped engine's, with the graph kept."""
        store = self._engine.store(client.work.rows)
        sizes = store.sizes.numpy()[ids]
        heard, steps = np.ones(len(ids), dtype=bool), client.work.steps_per_epoch(sizes)
        if client.work.trains:
            steps = self._steps(client.work, ids, round, seed)
            if not client.work.reliable:
                heard = self._environment.reachable(round, ids, seed)
            standing = NoTraining(work=client.work)
            for place in np.flatnonzero(~heard).tolist():  # as in the authors' code: see `Adjoint`
                message = self._message(broadcast, place, round)
                self._client(standing, message, int(ids[place]), int(steps[place]), store, seed)
            steps = np.where(heard, steps, 0)
        keep = (sizes > 0) & (heard | (client.work.trains and self._environment.silent == "broadcast_model"))
        replies = []
        for place in np.flatnonzero(keep).tolist():
            message, who = self._message(broadcast, place, round), int(ids[place])
            reply, kept = self._client(client, message, who, int(steps[place]), store, seed)
            replies.append(reply)
            if client.work.trains and heard[place]:
                self._memory[who] = tree.map_leaves(torch.Tensor.detach, kept) if self._detach else kept
        return Cohort(
            reply=tree.stack(replies) if replies else {},
            ids=ids[keep],
            examples=torch.from_numpy(sizes[keep]).to(store.y.device, torch.float64),
            steps=steps[keep],
            round=round,
            heard=heard[keep],
            counts={"silent": int((~heard & (sizes > 0)).sum())},
        )

    def _steps(self, work: Work, ids: np.ndarray, round: int, seed: int) -> np.ndarray:
        """[m] planned steps, also of clients whose reply will not arrive."""
        per_epoch = work.steps_per_epoch(self.sizes[ids])
        return np.asarray(self._environment.work(round, ids, seed, epochs=work.epochs, steps_per_epoch=per_epoch))

    def _message(self, broadcast: Broadcast, place: int, round: int) -> Tree:
        device = next(tree.leaves(broadcast.shared or broadcast.personal)).device
        sent = {**broadcast.shared, **tree.rows(broadcast.personal, place)}
        # running statistics do not affect a training loss, and batch norm accepts none that require gradients
        still = tree.map_leaves(torch.Tensor.detach, sent["model"]["buffers"])
        return {**sent, "model": {**sent["model"], "buffers": still}, "round": torch.tensor(round, device=device)}

    def _client(
        self, rule: ClientRule, message: Tree, who: int, steps: int, store: Rows, seed: int
    ) -> tuple[Tree, Tree]:
        memory = self._memory.get(who)
        if memory is None:
            memory = rule.init(self.start()) if rule.work.trains else {}
        carry = rule.begin(self._task, message, memory)
        number, count = np.array([who]), np.array([steps])
        plan = plans.draw(rule.work, store, number, count, seed=seed, round=int(message["round"]))
        for step in range(steps):
            batch = plan.single(step, 0, store)
            if rule.work.trains:
                self.losses.append(minibatch_loss(self._task, trained_model(carry), batch, self._loss))
            carry = self._step(rule, carry, batch, message, memory)
        reply, kept = rule.end(self._task, carry, message, memory)
        return {**reply, "loss": reply["loss"].detach()} if "loss" in reply else reply, kept

    def _step(self, rule: ClientRule, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        if not self._detach:
            return rule.step(self._task, carry, batch, message, memory)
        fixed, told, known = (tree.map_leaves(torch.Tensor.detach, part) for part in (carry, message, memory))
        after = tree.map_leaves(torch.Tensor.detach, rule.step(self._task, fixed, batch, told, known))
        if not rule.work.trains:  # a look at the rows: its carry holds no model that moves
            return after
        old, new = trained_model(carry)["params"], trained_model(after)["params"]
        # the value is the new one to the last bit, the gradient goes straight through to the old one
        trained_model(after)["params"] = tree.map_leaves(lambda w, v: v + (w - w.detach()), old, new)
        return after
