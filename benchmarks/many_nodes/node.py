"""One node of many in this process: Flower's own connection to the SuperLink, and our own client code."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from consilience.flower.deploy.settings import DeployedConfig
from consilience.flower.deploy.sources import Source
from consilience.flower.engine.client import Site, SiteClient
from many_nodes.attacks import Attack, Sending, deflated

ONE_AT_A_TIME = threading.Lock()  # training, on a machine of few cores
AT_WORK = threading.BoundedSemaphore(8)  # nodes that fetch, train and send: with all of them, all would end late


class Node(threading.Thread):
    """Asks the SuperLink for messages and answers them, honestly or with an attack."""

    def __init__(
        self,
        client: int,
        *,
        config: DeployedConfig,
        source: Source,
        key: Path,
        attack: Attack | None,
        address: str,
        authority: Path,
        poll: float,
    ) -> None:
        super().__init__(name=f"node {client}", daemon=True)  # a request that hangs must not keep the driver
        self.client, self.attack, self.answered, self.failed = client, attack, 0, 0
        self.problem = ""
        self._config, self._address, self._poll = config, address, poll
        self._key, self._authority = key, authority.read_bytes()
        site = Site(
            algorithm=config.build_algorithm(),
            task=source.task,
            federation=source.held(np.array([client]), {}),
            hosts=np.array([client]),
            clients=config.deploy.clients,
            engine={"dtype": config.engine.get("dtype", "float32"), "device": "cpu", "lane": "serial"},
        )
        self._answers = SiteClient(open_site=lambda context, case: site)
        self._ended = threading.Event()
        self._contexts: dict[int, Any] = {}

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()

    def run(self) -> None:
        """Until the end: ask, answer, sleep."""
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supernode.fleet_http_connection import http_request_response

        private: Any = load_ssh_private_key(self._key.read_bytes(), None)
        time.sleep(self._poll * (self.client % 50) / 50)  # they do not all ask at once
        keys = (private, private.public_key())
        with http_request_response(self._address, False, self._authority, keys) as line:
            while not self._ended.wait(self._poll):
                try:
                    found = line[1]()
                    if found is not None:
                        self._answer(line, *found)
                except Exception as problem:  # one message; the next may be answered
                    self.failed, self.problem = self.failed + 1, f"{type(problem).__name__}: {problem}"[:200]

    def _answer(self, line: Any, header: Any, wanted: Any) -> None:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

        _, _, send, _, _, pull, push, confirm = line
        run, name = header.metadata.run_id, header.metadata.message_id
        with AT_WORK:
            names = [part.object_id for part in iterate_object_tree(wanted)]
            parts = pull_objects(names, lambda part: pull(run, part), max_concurrent_pulls=1)
            confirm(run, name)
            message: Any = inflate_object_from_contents(name, parts)
            message.metadata.__dict__["_message_id"] = name
            reply = self._reply(message, run, header.metadata.dst_node_id)
            made = deflated(reply) if self.attack is None else self.attack(reply, self._config.deploy.deadline)
            if made is not None and not made.wait and not made.each:
                self._send(reply, made, run, send, push)
                return
        if made is not None and not self._ended.wait(made.wait):  # a slow node keeps no other from its work
            self._send(reply, made, run, send, push)

    def _send(self, reply: Any, made: Sending, run: int, send: Any, push: Any) -> None:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        reply.metadata.__dict__["_message_id"] = made.root
        whole = tree_of(made, made.root)
        missing, session = send(reply, whole, 0.1)
        for part in iterate_object_tree(whole):
            if part.object_id in missing:
                missing.remove(part.object_id)
                if self._ended.wait(made.each):
                    return
                push(run, session, part.object_id, made.objects[part.object_id])
        self.answered += 1

    def _reply(self, message: Any, run: int, node: int) -> Any:
        from flwr.app import Context, RecordDict

        if run not in self._contexts:
            self._contexts = {run: Context(run_id=run, node_id=node, node_config={}, state=RecordDict(), run_config={})}
        answer = getattr(self._answers, message.metadata.message_type)
        with ONE_AT_A_TIME:
            return answer(message, self._contexts[run])


def tree_of(made: Sending, name: str) -> Any:
    """Flower's tree of objects below one."""
    from flwr.proto.message_pb2 import ObjectTree

    parts = made.objects[name].partition(b"\x00")[0].decode().split(" ")[1]
    children = [tree_of(made, part) for part in parts.split(",") if part]
    return ObjectTree(object_id=name, children=children)
