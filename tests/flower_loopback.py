"""A Flower Grid without a network: every message, reply and context really goes through Flower's serialisation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.task import Task
from consilience.flower import client_app
from consilience.flower.engine.client import Site, SiteClient


def through_bytes(message: Any) -> Any:
    """A message as it arrives at the other end."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


class Loopback:
    """Nodes with ClientApps and contexts; `online`, `deaf` and `tamper` are there to be changed by a test."""

    def __init__(self, apps: Sequence[Any], node_configs: Sequence[Any] = (), run_config: Any = None) -> None:
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # what Flower sets in its own processes
        self.apps = {7_000_000_000_000_000_001 + 31 * k: app for k, app in enumerate(apps)}
        told = dict(zip(self.apps, node_configs))
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config=told.get(node, {}),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node in self.apps
        }
        self.online = set(self.apps)
        self.deaf: set[int] = set()  # nodes that never answer
        self.late: set[int] = set()  # nodes that answer one question too late
        self.tamper: Callable[[int, Any], Any] | None = None  # (node, reply) -> reply
        self.kinds: list[str] = []  # of every message that was answered
        self._waiting: dict[str, Any] = {}
        self._count = 0
        self._one = threading.Lock()  # clients that share a process take turns

    def get_node_ids(self) -> list[int]:
        return sorted(self.online, reverse=True)  # not in the order of clients

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        names = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"m{self._count}"
            arrived = through_bytes(message)
            arrived.metadata.__dict__["_message_id"] = f"m{self._count}"
            self._waiting[f"m{self._count}"] = arrived
            names.append(f"m{self._count}")
        return names

    def pull_messages(self, names: Sequence[str]) -> list[Any]:
        replies = []
        for name in list(names)[::-1]:
            message = self._waiting.get(name)
            node = message.metadata.dst_node_id if message is not None else None
            if node is None or node in self.deaf or node not in self.online:
                continue
            if node in self.late:
                continue
            with self._one:
                replies.append(self.answer(self._waiting.pop(name)))
        return replies

    def answer(self, message: Any) -> Any:
        from flwr.app import Error, Message
        from flwr.common.serde import context_from_proto, context_to_proto

        node = message.metadata.dst_node_id
        self.kinds.append(message.metadata.message_type)
        context = context_from_proto(context_to_proto(self.contexts[node]))
        try:
            reply = self.apps[node](message, context)
            self.contexts[node] = context_from_proto(context_to_proto(context))
        except Exception as problem:
            reply = Message(Error(code=0, reason=f"{type(problem)}:<'{problem}'>"), reply_to=message)
        if self.tamper is not None and not reply.has_error():
            reply = self.tamper(node, reply)
        return through_bytes(reply)


def apps(
    algorithm: Algorithm,
    task: Callable[[], Task],
    federation: Federation,
    shares: Sequence[Sequence[int]],
    **settings: Any,
) -> list[Any]:
    """One ClientApp per share of the clients; each has its own task and only its own rows."""
    options: dict[str, Any] = settings.pop("engine", {"dtype": "float64", "lane": "serial", "device": "cpu"})
    made = []
    for share in shares:
        hosts = np.array(share, dtype=np.int64)
        site = Site(
            algorithm=algorithm,
            task=task(),
            federation=federation.among(hosts),
            hosts=hosts,
            clients=len(federation),
            engine=options,
            **settings,
        )
        made.append(
            client_app(
                SiteClient(
                    open_site=lambda context, case, site=site: site,
                    secure=lambda context, case, site=site: site.secure,
                )
            )
        )
    return made
