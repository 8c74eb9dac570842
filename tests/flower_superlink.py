"""A SuperLink without a network, behind Flower's own HttpGrid and HTTP client: every object really crosses as bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from flower_loopback import Loopback

Objects = dict[str, bytes]
"""name -> content"""


class Superlink:
    """Answers the requests of an HttpGrid; the clients are those of a Loopback.

    `forge` may change a node's reply once it is objects: (node, name of the message, objects) -> (name, objects).
    """

    def __init__(self, clients: Loopback | None = None) -> None:
        self.clients, self.store, self.replies = clients, Objects(), dict[str, tuple[Any, str]]()
        self.keys: dict[int, bytes] = {}  # node -> the public key it authenticated with
        self.forge: Callable[[int, str, Objects], tuple[str, Objects]] | None = None
        self.fetched: list[str] = []  # objects, whenever they were asked for
        self.read = 0  # bytes of responses that were read
        self.confirmed: list[str] = []
        self._asked: dict[str, Any] = {}

    def grid(self) -> Any:
        """Flower's grid, connected."""
        from flwr.supercore.run import Run
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.superlink.grid import HttpGrid

        grid = HttpGrid("superlink", insecure=True, token="a-token")
        grid.set_run(Run.create_empty(1))
        client = RuntimeHttpClient("http://superlink")
        client._client = httpx.Client(transport=httpx.MockTransport(self._answer))
        grid._client = client
        return grid

    def add(self, reply_to: str, header: Any, name: str, objects: Objects) -> None:
        """A reply that a node has sent; `header` is the message as the SuperLink knows it."""
        self.store |= objects
        self.replies[reply_to] = (header, name)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        from flwr.proto import message_pb2 as message
        from flwr.proto import node_pb2 as node
        from flwr.proto import runtime_pb2 as runtime

        what, body = request.url.path.rsplit("/", 1)[1], request.read()
        if what == "get-nodes":
            assert self.clients is not None
            known = [node.NodeInfo(node_id=n, public_key=self.keys.get(n, b"")) for n in self.clients.online]
            found = runtime.GetNodesResponse(nodes=known)
        elif what == "push-messages":
            found = self._sent(runtime.PushAppMessagesRequest.FromString(body))
        elif what == "push-object":
            one = message.PushObjectRequest.FromString(body)
            self.store[one.object_id] = one.object_content
            found = message.PushObjectResponse(stored=True)
        elif what == "pull-messages":
            (name,) = runtime.PullAppMessagesRequest.FromString(body).message_ids
            self._work(name)
            reply = self.replies.pop(name, None)
            found = runtime.PullAppMessagesResponse(
                messages_list=[reply[0]] if reply else [],
                message_object_trees=[message.ObjectTree(object_id=reply[1])] if reply else [],
            )
        elif what == "pull-object":
            name = message.PullObjectRequest.FromString(body).object_id
            self.fetched.append(name)
            known = name in self.store
            found = message.PullObjectResponse(
                object_found=known, object_available=known, object_content=self.store.get(name, b"")
            )
        else:
            self.confirmed.append(message.ConfirmMessageReceivedRequest.FromString(body).message_object_id)
            found = message.ConfirmMessageReceivedResponse()
        content = found.SerializeToString()
        return httpx.Response(200, headers={"content-length": str(len(content))}, stream=_Body(self, content))

    def _sent(self, request: Any) -> Any:
        from flwr.proto.runtime_pb2 import PushAppMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        names = [one.metadata.message_id for one in request.messages_list]
        self._asked |= dict.fromkeys(names)
        parts = {part.object_id for tree in request.message_object_trees for part in iterate_object_tree(tree)}
        return PushAppMessagesResponse(message_ids=names, objects_to_push=sorted(parts), session_id="s")

    def _work(self, name: str) -> None:
        """Let the node answer that this message was sent to."""
        if name not in self._asked:
            return
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        assert self.clients is not None
        asked: Any = inflate_object_from_contents(name, dict(self.store))
        asked.metadata.__dict__["_message_id"] = name
        if asked.metadata.dst_node_id in self.clients.deaf:
            return
        del self._asked[name]
        with self.clients._one:
            reply = self.clients.answer(asked)
        header, root, objects = deflated(reply)
        if self.forge is not None:
            root, objects = self.forge(asked.metadata.dst_node_id, root, objects)
            header.metadata.message_id = root
        self.add(name, header, root, objects)


class _Body(httpx.SyncByteStream):
    """A response's content, counted when it is read."""

    def __init__(self, link: Superlink, content: bytes) -> None:
        self._link, self._content = link, content

    def __iter__(self) -> Any:
        self._link.read += len(self._content)
        yield self._content


def deflated(message: Any) -> tuple[Any, str, Objects]:
    """(the header that a SuperLink keeps, the message's name, all of its objects)."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    header = message_to_proto(remove_content_from_message(message))
    header.metadata.message_id = message.object_id
    return header, message.object_id, objects


def made(kind: str, parts: Sequence[str], body: bytes) -> tuple[str, bytes]:
    """(name, content) of an object, whatever it says."""
    content = f"{kind} {','.join(parts)} {len(body)}".encode() + b"\x00" + body
    return hashlib.sha256(content).hexdigest(), content


def array(chunks: Sequence[str], numbers: Any, shape: Any = (2,), dtype: Any = "float32") -> tuple[str, bytes]:
    """(name, content) of an Array that names these chunks in this order."""
    said = {"dtype": dtype, "shape": shape, "stype": "numpy.ndarray", "arraychunk_ids": numbers}
    return made("Array", chunks, json.dumps(said).encode())


def message_of(
    root: str, objects: Objects, arrays: dict[str, bytes], more: Objects, record: str
) -> tuple[str, Objects]:
    """The message `root` with another record of arrays in place of `record`: {array: its content}, and their parts."""
    from flwr.app import Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_object_body

    inside = objects[root].partition(b"\x00")[0].split(b" ")[1].decode()
    named = json.loads(get_object_body(objects[inside], RecordDict))
    name, content = made(
        "ArrayRecord", list(arrays), json.dumps({f"a{k}": one for k, one in enumerate(arrays)}).encode()
    )
    named[record] = name
    records, records_content = made("RecordDict", list(dict.fromkeys(named.values())), json.dumps(named).encode())
    new_root, root_content = made("Message", [records], get_object_body(objects[root], Message))
    new = {name: content, records: records_content, new_root: root_content}
    return new_root, {**objects, **more, **arrays, **new}
