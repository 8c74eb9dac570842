"""What the gateway lets through: nodes' routes, byte by byte, and nothing that only looks like them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

import httpx

from consilience.flower.deploy import gateway
from consilience.flower.deploy.processes import free_port

NODES = b"/v1/fleet/pull-messages"


class Upstream:
    """A SuperLink that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, dict[str, str]]] = []
        self.broken = False

    async def post(self, url: str, *, content: bytes, headers: dict[str, str]) -> httpx.Response:
        self.asked.append((url, content, headers))
        if self.broken:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, content=b"answer", headers={"content-type": "application/protobuf", "x-other": "1"})


@contextlib.contextmanager
def listening(upstream: Upstream) -> Iterator[int]:
    """The real HTTP server, without TLS, in a thread; its port."""
    port = free_port()
    server = gateway.listener(gateway.Gateway(upstream, "https://127.0.0.1:1"), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join(10)


def said(port: int, request: bytes) -> bytes:
    """All that the server says to some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(request)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := line.recv(65536):
                answer += part
        return answer


def post(path: bytes, body: bytes = b"", headers: bytes = b"", method: bytes = b"POST") -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return method + b" " + path + b" HTTP/1.1\r\nhost: fl\r\n" + length + headers + b"connection: close\r\n\r\n" + body


def test_routes_of_nodes_are_those_of_flower_without_registration() -> None:
    """Every route is one of Flower's; what is left out lets a node without a registered key in, or one out."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    fleet = {path.encode() for method, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    assert fleet - set(gateway.ROUTES) == {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node"}
    assert set(gateway.ROUTES) < fleet


def test_a_node_is_passed_on_with_its_signature_and_nothing_else() -> None:
    upstream = Upstream()
    sent = b"content-type: application/protobuf\r\nflwr-signature: abc\r\nflwr-task-token: t\r\nx-forwarded-for: me\r\n"
    with listening(upstream) as port:
        answer = said(port, post(NODES, b"body", sent + b"authorization: Bearer x\r\ncookie: y\r\n"))
    ((url, body, headers),) = upstream.asked
    assert (url, body) == ("https://127.0.0.1:1/v1/fleet/pull-messages", b"body")
    assert headers == {"content-type": "application/protobuf", "flwr-signature": "abc"}
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"answer")
    assert b"date:" in answer.lower()  # `deploy check` compares clocks by it
    assert b"server:" not in answer.lower() and b"x-other" not in answer


HOSTILE = [
    *(b"/v1/control/list-nodes", b"/v1/control/start-run", b"/v1/control/register-node", b"/v1/runtime/acquire-task"),
    *(b"/v1/runtime/pull-messages", b"/v1/fleet/register-node", b"/v1/fleet/unregister-node", b"/responses", b"/"),
    *(b"/docs", b"/openapi.json", b"/health", b"/v1/fleet", b"/v1/fleet/", b"/v1/fleet/pull-messages/"),
    *(b"//v1/fleet/pull-messages", b"/v1//fleet/pull-messages", b"/v1/fleet//pull-messages", b"/./v1/fleet/get-run"),
    *(b"/v1/fleet/../control/start-run", b"/v1/fleet/..%2fcontrol%2fstart-run", b"/v1/fleet/%2e%2e/control/start-run"),
    *(
        b"/v1/fleet%2fpull-messages",
        b"/v1/fleet/pull%2dmessages",
        b"/v1/fleet/pull-messages%00",
        b"/v1/fleet/%67et-run",
    ),
    *(b"/v1/fleet/get-run%0d", b"/v1/fleet/pull-messages?a=/v1/control/start-run", b"/v1/fleet/pull-messages;a"),
    *(b"/V1/fleet/pull-messages", b"/v1/fleet/Pull-Messages", b"/v1/fleet/pull-messages#/../../control/start-run"),
    *(b"/v1/fleet/pull-messages/..", b"/v1/fleet/pull-messages/../../control/start-run", b"\\v1\\fleet\\get-run"),
    *(b"http://127.0.0.1:8001/v1/control/start-run", b"http://fl/v1/fleet/pull-messages", b"*", b"fl:443"),
    *(b"/v1/fleet/pull-messages\xc0\xaf", b"/v1/fleet/pull\xe2\x80\x90messages", b"/v1/fleet/pull-messages\t"),
]


def test_no_hostile_path_reaches_the_superlink() -> None:
    upstream = Upstream()
    with listening(upstream) as port:
        for path in HOSTILE:
            answer = said(port, post(path))
            assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), (path, answer[:80])
        assert upstream.asked == []
        assert said(port, post(NODES)).startswith(b"HTTP/1.1 200")  # it is the paths that were refused


@pytest.mark.parametrize("method", b"GET HEAD PUT DELETE PATCH OPTIONS TRACE CONNECT post".split())
def test_no_other_method_passes(method: bytes) -> None:
    upstream = Upstream()
    with listening(upstream) as port:
        override = b"x-http-method-override: POST\r\n"
        assert not said(port, post(NODES, headers=override, method=method)).startswith(b"HTTP/1.1 2")
    assert upstream.asked == []


SMUGGLED = b"POST /v1/control/start-run HTTP/1.1\r\nhost: fl\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post(NODES, headers=b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n") + SMUGGLED,
        post(
            NODES,
            method=b"GET",
            headers=b"upgrade: websocket\r\nsec-websocket-key: eA==\r\n",
        ),
        post(NODES, headers=b"transfer-encoding: chunked\r\n", body=b"0\r\n\r\n" + SMUGGLED),
        post(NODES, headers=b"content-length: 70\r\n") + SMUGGLED,
        post(NODES, headers=b"transfer-encoding : chunked\r\n") + b"0\r\n\r\n" + SMUGGLED,
        b"POST " + NODES + b" HTTP/1.1\r\nhost: fl\r\ncontent-length: +0\r\n\r\n" + SMUGGLED,
        post(NODES, headers=b"a: b\r\n c: d\r\n") + SMUGGLED,
        post(NODES).replace(b"\r\n\r\n", b"\r\nx: \x00\r\n\r\n") + SMUGGLED,
        SMUGGLED + post(NODES, b"flwr"),
    ],
)
def test_nothing_is_smuggled(request_: bytes) -> None:
    """Whatever two parsers could read differently: at most the first request goes on, as a request made anew."""
    upstream = Upstream()
    with listening(upstream) as port:
        said(port, request_)
    assert all(url == "https://127.0.0.1:1/v1/fleet/pull-messages" for url, _, _ in upstream.asked)
    assert not any(b"control" in body for _, body, _ in upstream.asked)


def test_of_two_signatures_neither_counts() -> None:
    upstream = Upstream()
    with listening(upstream) as port:
        twice = b"flwr-signature: a\r\nFLWR-Signature: b\r\n"
        assert said(port, post(NODES, headers=twice)).startswith(b"HTTP/1.1 400")
    assert upstream.asked == []


def test_requests_are_bounded_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream()
    large = b"/v1/fleet/push-object"
    monkeypatch.setitem(gateway.ROUTES, large, 3 << 16)
    with listening(upstream) as port:
        assert said(port, post(NODES, bytes(gateway.SMALL))).startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 413" in said(port, post(NODES, bytes(gateway.SMALL + 1)))
        assert said(port, post(large, bytes(3 << 16))).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(gateway, "TOGETHER", 2 << 16)
        assert b"HTTP/1.1 503" in said(port, post(large, bytes(3 << 16)))
        assert said(port, post(large, bytes(2 << 16))).startswith(b"HTTP/1.1 200")  # what was held is given back
    assert [len(body) for _, body, _ in upstream.asked] == [1 << 16, 3 << 16, 2 << 16]


def test_a_superlink_that_is_gone_is_a_reason_to_try_again() -> None:
    upstream = Upstream()
    upstream.broken = True
    with listening(upstream) as port:
        assert said(port, post(NODES)).startswith(b"HTTP/1.1 503")


def test_a_request_that_does_not_arrive_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ARRIVAL", 0.05)
    upstream = Upstream()
    answers: list[Any] = []

    async def never() -> Any:
        await asyncio.sleep(60)

    async def send(part: Any) -> None:
        answers.append(part)

    scope = {"type": "http", "method": "POST", "raw_path": NODES, "query_string": b"", "headers": []}
    asyncio.run(gateway.Gateway(upstream, "https://127.0.0.1:1")(scope, never, send))
    assert answers[0]["status"] == 408 and upstream.asked == []
